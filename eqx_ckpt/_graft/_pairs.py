"""The pairs of a graft: which node of the model takes which node of the checkpoint."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._load import _checkpoint
from .._tree import _nearest
from ..adapters import Adapter
from ._sides import Model, Node, said, Saved, Stored


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
    """The names that a rename makes of those of leaves. Its adapters are ignored."""
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
                f"{said(e).rstrip('.')}. The sides of `{label}` look swapped: the "
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
