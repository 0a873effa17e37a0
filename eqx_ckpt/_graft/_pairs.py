"""The pairs of a graft: which node of the model takes which node of the checkpoint."""

import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._format import _names
from .._load import _checkpoint, _lazy, _nodes
from .._load._checkpoint import Checkpoint
from .._load._lazy import LazyArray
from .._tree import _filters, _flatten, _nearest, _select
from .._tree._node import Node as SavedNode
from ..adapters import Adapter


class Node(NamedTuple):
    """A node of either side: its name, and its leaves by their names below it.

    The leaves are numbers in the model, and `Saved` in the checkpoint.
    """

    name: str
    leaves: dict[str, Any]


class Saved(NamedTuple):
    """A leaf of the checkpoint, and what a rename says is to be done to it."""

    lazy: LazyArray
    adapters: tuple[Adapter, ...] = ()

    @property
    def place(self) -> int:
        return self.lazy._record.place


class Group(NamedTuple):
    """Nodes whose leaves stand for each other, name by name. Only an adapter takes
    several nodes on one side."""

    left: list[Node]
    right: list[Node]


class Pair(NamedTuple):
    label: str
    groups: list[Group]
    adapter: Adapter | None
    problems: list[tuple[str, str]]
    renamed: bool


# ---- The two sides.


class Model:
    """The tree to be grafted into, by number, by name and by node."""

    def __init__(self, tree: PyTree):
        self.tree = tree
        self.flat = _flatten.flatten(tree, None)
        self.names = [_names.name_of(path)[0] for path in self.flat.paths]
        self.storable = [_filters.by_default(x) for x in self.flat.leaves]
        self.below = by_prefix(self.names)
        self.tagged = _select.Tagged(self.flat, self.storable, None)

    def is_array(self, number: int) -> bool:
        leaf = self.flat.leaves[number]
        arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        is_array = isinstance(leaf, arrays) or _filters.is_other_array(leaf)
        return self.storable[number] and is_array

    def nodes(self, where: Any, called: str) -> list[Node]:
        """The nodes that a `where` picks, in the order that it gives."""
        try:
            wholes = self.tagged.select(where, called).wholes
        except (AttributeError, LookupError) as e:
            raise ValueError(f"`{called}` fails on the model: {_said(e)}") from e
        return [self.node(_flatten.module_name(path, "")) for path in wholes]

    def node(self, name: str) -> Node:
        numbers = [n for n in self.below.get(name, []) if self.storable[n]]
        return Node(name, {_names.below(self.names[n], name): n for n in numbers})


class Stored:
    """An open checkpoint, by name and by node."""

    def __init__(self, ckpt: Checkpoint):
        self.ckpt = ckpt
        self.source = ckpt._source
        self.index = ckpt._source.index
        self.below = by_prefix(self.index.leaves.names)

    def nodes(self, where: Any, called: str) -> list[Node]:
        if isinstance(where, str):
            if where not in self.below:
                near = _nearest.Names(self.below).nearest(where, 3)
                names = ", ".join(f"`{x}`" for x in near or self.index.leaves.names[:3])
                raise ValueError(
                    f"`{called}` is {where!r}, which the checkpoint at "
                    f"`{self.ckpt.path}` does not have. The nearest there: {names}."
                )
            return [self.node(where)]
        if not callable(where):
            raise TypeError(
                f"`{called}` must be a dotted name or a function of the checkpoint's "
                f"tree, such as `lambda c: c.model`, not a `{type(where).__name__}`."
            )
        try:
            picked = where(self.ckpt.tree)
        except (AttributeError, LookupError, TypeError) as e:
            raise ValueError(f"`{called}` fails on the checkpoint: {_said(e)}") from e
        nodes = list(self._collect(picked, called))
        if not nodes:
            raise ValueError(f"`{called}` selects nothing of the checkpoint.")
        return nodes

    def _collect(self, picked: Any, called: str) -> list[Node]:
        if isinstance(picked, (SavedNode, LazyArray)):
            found = _nodes.origin(picked)
            if found is None:
                raise ValueError(
                    f"`{called}` returned a node that was edited: save it, and open "
                    "what was saved."
                )
            source, name = found
            if source is not self.source:
                raise ValueError(
                    f"`{called}` returned a node of another checkpoint, that at "
                    f"`{source.root}`."
                )
            if isinstance(picked, SavedNode):
                return [self.node(name)]
            return [Node(name, {"": Saved(picked)})]
        if isinstance(picked, dict):
            picked = list(picked.values())
        if isinstance(picked, (list, tuple)):
            some = [x for x in picked if x is not None]  # In a slice: not stored.
            return [node for x in some for node in self._collect(x, called)]
        advice = (
            " Make a list of it." if isinstance(picked, types.GeneratorType) else ""
        )
        raise TypeError(
            f"`{called}` must return nodes of the checkpoint's tree, as "
            f"`lambda c: c.model` does, and not a `{type(picked).__name__}`.{advice}"
        )

    def node(self, name: str) -> Node:
        return Node(
            name,
            {
                _names.below(self.index.leaves.names[place], name): Saved(
                    _lazy.lazy_of(
                        self.source, self.index.leaves.record(place, known=True)
                    )
                )
                for place in self.below.get(name, [])
            },
        )


def by_prefix(names: Sequence[str]) -> dict[str, list[int]]:
    """The leaves below each node, by its dotted name."""
    out: dict[str, list[int]] = {"": list(range(len(names)))}
    for number, name in enumerate(names):
        if name == _names.ROOT:
            continue
        at = name.find(".")
        while at != -1:
            out.setdefault(name[:at], []).append(number)
            at = name.find(".", at + 1)
        out.setdefault(name, []).append(number)
    return out


def _said(error: Exception) -> str:
    # Of a KeyError, `str` is the `repr` of what was said, which may be the key alone.
    said = str(error.args[0]) if error.args else type(error).__name__
    return (
        f"there is no {said!r}" if type(error) is KeyError and " " not in said else said
    )


# ---- Renames.


class Rename(NamedTuple):
    """How a pair's names in the checkpoint become those in the model: [`rename`][]."""

    rules: Any

    def inverse(self, source: Any) -> "Rename":
        """The way back: from the names in the model to those in the checkpoint.

        **Arguments:**

        - `source`: the checkpoint that the names come from, or its path.

        **Returns:** a rename that knows the names which this one gives to the leaves of
        that checkpoint, and no others. Adapters are not inverted.

        **Raises:** `ValueError` where two leaves get one name.

        !!! example

            ```python
            >>> import eqx_ckpt as ec, jax.numpy as jnp
            >>> ec.tree_serialise_leaves("memory://inverse", {"gamma": jnp.ones(2)})
            >>> there = ec.rename([(r"gamma$", "scale")])
            >>> there.inverse("memory://inverse").rules("scale")
            'gamma'

            ```
        """
        names = _checkpoint.open(source)._source.index.leaves.names
        back: dict[str, str] = {}
        for old, new in zip(names, renamed_names(self, names)):
            if back.setdefault(new, old) != old:
                raise ValueError(
                    f"The rename gives the name `{new}` to both `{back[new]}` and "
                    f"`{old}`, and has no inverse."
                )

        def known(name: str) -> str:
            if name not in back:
                near = _nearest.Names(back).nearest(name)
                hint = f" The nearest that it gives is `{near[0]}`." if near else ""
                raise ValueError(
                    f"`{name}` is none of the names that the rename gives.{hint} "
                    "Leave the leaf out with `filter_spec`."
                )
            return back[name]

        return Rename(known)


def rename(
    rules: Callable[[str], str] | Sequence[tuple],
) -> Rename:
    """For a pair of [`graft`][] whose sides have other names below their nodes.

    **Arguments:**

    - `rules`: a function from the name of a leaf in the checkpoint, from the pair's
        node on, to its name in the model: `layer.3.query.weight` to
        `layers.3.q.weight`. Or a list of rules, which are applied one after the other:
        `(pattern, replacement)`, as `re.sub` takes them, `(pattern, adapter)` for the
        leaves that the pattern is found in, or `(pattern, replacement, adapter)`. A
        rule that changes nothing is an error.

    **Returns:** what a pair takes after its two sides.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> saved = {"layer": [{"gamma": jnp.ones(2)}]}
        >>> ec.tree_serialise_leaves("memory://rename", saved)
        >>> rules = [(r"^layer[.]", "layers."), (r"gamma$", "scale")]
        >>> pair = (lambda m: m, lambda c: c, ec.rename(rules))
        >>> model = {"layers": [{"scale": jnp.zeros(2)}]}
        >>> ec.graft(model, "memory://rename", [pair])[0]
        {'layers': [{'scale': Array([1., 1.], dtype=float32)}]}

        ```
    """
    if callable(rules):
        return Rename(rules)
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Sequence):
        raise TypeError(
            "`rename` takes a function or a list of rules, such as "
            f'`[(r"^layer[.]", "layers.")]`, not a `{type(rules).__name__}`.'
        )
    out = []
    for rule in rules:
        pattern, replacement, adapter = _rule(rule)
        try:
            out.append((re.compile(pattern), replacement, adapter))
        except re.error as e:
            raise ValueError(f"The pattern {pattern!r} is no regex: {e}.") from None
    return Rename(tuple(out))


def renamed_names(how: Rename, names: Sequence[str]) -> list[str]:
    """What a rename makes of the names of leaves, and not of the leaves."""
    return [_apply(how, name, set(), "rename")[0] for name in names]


def _rule(rule: Any) -> tuple[str, str | None, Adapter | None]:
    if isinstance(rule, (tuple, list)) and len(rule) in (2, 3):
        pattern, *rest = rule
        replacement = rest.pop(0) if isinstance(rest[0], str) else None
        adapter = rest.pop(0) if rest and callable(rest[0]) else None
        if isinstance(pattern, str) and not rest:
            return pattern, replacement, adapter and _adapter(adapter)
    raise TypeError(
        "A rule is `(pattern, replacement)`, `(pattern, adapter)` or "
        f"`(pattern, replacement, adapter)`, and {rule!r} is none of them."
    )


def _renamed(
    how: Rename, right: list[Node], label: str
) -> tuple[list[Node], list[tuple[str, str]]]:
    """The nodes with their leaves renamed; and the rules that found nothing."""
    used: set[int] = set()
    out = []
    for node in right:
        leaves: dict[str, Saved] = {}
        for old, saved in node.leaves.items():
            new, adapters = _apply(how, old, used, label)
            if new in leaves:
                raise ValueError(
                    f"The rename of `{label}` gives the name `{new}` to both "
                    f"`{leaves[new].lazy.name}` and `{saved.lazy.name}`."
                )
            leaves[new] = saved._replace(adapters=adapters)
        out.append(Node(node.name, leaves))
    rules = () if callable(how.rules) else how.rules
    unused = [
        (f"{label}: {rule[0].pattern!r}", "")
        for number, rule in enumerate(rules)
        if number not in used
    ]
    return out, unused


def _apply(
    how: Rename, name: str, used: set[int], label: str
) -> tuple[str, tuple[Adapter, ...]]:
    if callable(how.rules):
        try:
            new = how.rules(name)
        except Exception as e:
            raise ValueError(
                f"The rename of `{label}` failed at the name `{name}` with "
                f"{type(e).__name__}: {e}"
            ) from e
        if not isinstance(new, str):
            raise TypeError(
                f"The rename of `{label}` gave a `{type(new).__name__}` for the name "
                f"`{name}`, and must give a name. What is not wanted goes into `drop`."
            )
        return new, ()
    adapters = []
    for number, (pattern, replacement, adapter) in enumerate(how.rules):
        if not pattern.search(name):
            continue
        new = name if replacement is None else pattern.sub(replacement, name)
        if new != name or adapter is not None:
            used.add(number)
        if adapter is not None:
            adapters.append(adapter)
        name = new
    return name, tuple(adapters)


# ---- Pairs.


def _adapter(how: Callable[..., Any]) -> Adapter:
    if isinstance(how, Adapter):
        return how
    name = getattr(how, "__name__", type(how).__name__)
    return Adapter(name, how, own=True)


def parse(given: Any, label: str, model: Model, stored: Stored) -> Pair:
    """One pair as the user wrote it. **Raises:** naming it by `label`."""
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 4:
        raise TypeError(
            f"`{label}` must be `(where in the model, where in the checkpoint)`, and "
            f"then a rename or an adapter or both; not {_shown(given)}."
        )
    where, source, *rest = given
    how: dict[str, Any] = {}
    for x in rest:
        kind = "rename" if isinstance(x, Rename) else "adapter"
        if kind in how or not (isinstance(x, Rename) or callable(x)):
            raise TypeError(
                f"`{label}` has {_shown(x)} after its two sides, where a pair takes "
                "one `ec.rename(...)` and one adapter, `(saved, like) -> array`."
            )
        how[kind] = x
    adapter = _adapter(how["adapter"]) if "adapter" in how else None
    try:
        left = model.nodes(where, f"{label}[0]")
        right = stored.nodes(source, f"{label}[1]")
    except Exception as e:
        if _fits_swapped(where, source, model, stored):
            raise ValueError(
                f"{_said(e).rstrip('.')}. The sides of `{label}` look swapped: the "
                "model's is the first, and the checkpoint's the second."
            ) from e
        raise
    groups = _groups(label, left, right, adapter)
    problems = []
    if "rename" in how:
        flat = [node for group in groups for node in group.right]
        flat, problems = _renamed(how["rename"], flat, label)
        rest = iter(flat)
        groups = [Group(g.left, [next(rest) for _ in g.right]) for g in groups]
    return Pair(label, groups, adapter, problems, "rename" in how)


def _fits_swapped(where: Any, source: Any, model: Model, stored: Stored) -> bool:
    try:
        model.nodes(source, "")
        stored.nodes(where, "")
    except Exception:
        return False
    return True


def _groups(
    label: str, left: list[Node], right: list[Node], adapter: Adapter | None
) -> list[Group]:
    many = None if adapter is None else adapter.many
    if many is not None:
        one, several = (left, right) if many == "saved" else (right, left)
        sides = ("model", "checkpoint")
        side, other = sides if many == "saved" else sides[::-1]
        if len(one) == 1:
            several = _spread(several) or several
            nodes = (one, several) if many == "saved" else (several, one)
            return [Group(*nodes)]
        raise ValueError(
            f"`{label}`: `{adapter}` takes one node of the {side}, and several of the "
            f"{other}; its side gives {len(one)}."
        )
    if len(left) != len(right):
        # A list on one side, and some of a list on the other, as a slice gives them.
        a, b = _spread(left) or left, _spread(right) or right
        if len(a) == len(b):
            left, right = a, b
    if len(left) == len(right):
        return [Group([a], [b]) for a, b in zip(left, right)]
    if adapter is not None and 1 in (len(left), len(right)):
        return [Group(left, right)]
    raise ValueError(
        f"`{label}` pairs {_count(left)} of the model ({some(left)}) with "
        f"{_count(right)} of the checkpoint ({some(right)}). Give as many on both "
        "sides, or an adapter that makes the one of the other, as "
        "`ec.adapters.stack()` does."
    )


def _count(nodes: list[Node]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"


def some(nodes: list[Node]) -> str:
    shown = ", ".join(f"`{node.name or '.'}`" for node in nodes[:3])
    return shown + (", ..." if len(nodes) > 3 else "")


def _spread(nodes: list[Node]) -> list[Node] | None:
    """The elements of the one node, if it is a sequence."""
    if len(nodes) != 1:
        return None
    name, leaves = nodes[0]
    out: dict[str, Node] = {}
    for below, leaf in leaves.items():
        first, _, rest = below.partition(".")
        if not first.isdecimal():
            return None
        full = f"{name}.{first}" if name else first
        out.setdefault(first, Node(full, {})).leaves[rest] = leaf
    return [out[key] for key in sorted(out, key=int)]


def _shown(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 60 else f"a `{type(x).__name__}`"
