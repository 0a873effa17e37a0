"""The pairs of a graft: which node of the model takes which node of the checkpoint."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._kernel._format import _names
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import _select
from .._rename import _rename
from .._rename._rename import Rename
from ..adapters import Adapter
from . import _nested, _text_order
from ._nested import Nested
from ._sides import Model, said, SideNode, StoredSide


class NestedPair(NamedTuple):
    """Nodes whose leaves stand for each other, name by name: one and one, or lists of
    nodes where adapters make the one side of the other."""

    left: Nested
    right: Nested

    @property
    def lefts(self) -> list[SideNode]:
        return _nested.flat(self.left)

    @property
    def rights(self) -> list[SideNode]:
        return _nested.flat(self.right)


# What is done to the leaves of a pair, in this order. At the place of a rename the
# adapters of its rules come, which are those that each `SideNode` has.
PairStep = Adapter | Rename


class NodePair(NamedTuple):
    label: str
    groups: list[NestedPair]
    steps: tuple[PairStep, ...]
    unused: list[str]  # Rules of the rename that find nothing.
    renamed: bool

    @property
    def lefts(self) -> list[SideNode]:
        return [node for group in self.groups for node in group.lefts]

    @property
    def rights(self) -> list[SideNode]:
        return [node for group in self.groups for node in group.rights]


# ---- Renames.


def renamed(
    how: Rename, nodes: list[SideNode], label: str
) -> tuple[list[SideNode], list[str]]:
    """The nodes with their leaves renamed; and the rules that found nothing."""
    used: set[int] = set()
    wrapped: dict[int, Adapter] = {}
    out = []
    for node in nodes:
        leaves: dict[str, LazyArray] = {}
        adapters: dict[str, tuple[Adapter, ...]] = {}
        for old, saved in node.leaves.items():
            new, given = _rename.apply(how, old, used, label)
            if new in leaves:
                raise ValueError(
                    f"The rename of `{label}` gives the name `{new}` to both "
                    f"`{leaves[new].name}` and `{saved.name}`."
                )
            # One that two leaves have is one, which can make one array of both.
            some = tuple(wrapped.setdefault(id(x), adapter_of(x)) for x in given)
            leaves[new], adapters[new] = saved, some
        out.append(SideNode(node.name, leaves, adapters))
    return out, [f"{label}: {pattern}" for pattern in _rename.unused(how, used)]


# ---- Pairs.


def adapter_of(how: Callable[..., Any]) -> Adapter:
    if isinstance(how, Adapter):
        return how

    def apply(saved: object, like: PyTree) -> Any:
        out = how(saved, like)
        return list(out) if isinstance(out, tuple) else out

    return Adapter(getattr(how, "__name__", type(how).__name__), apply, own=True)


def parse(given: object, label: str, model: Model, stored: StoredSide) -> NodePair:
    """One pair as the user wrote it. **Raises:** naming it by `label`."""
    if not isinstance(given, (tuple, list)) or len(given) < 2:
        raise TypeError(
            f"`{label}` must be `(where in the model, where in the checkpoint)`, and "
            f"then a rename, adapters, or a list of them; not {_select.shown(given)}."
        )
    where, source, *rest = given
    if any(isinstance(side, PairStep) for side in (where, source)):
        raise TypeError(
            f"`{label}` has a rename or an adapter in the place of a side: it comes "
            "after the two sides."
        )
    steps = steps_of(rest, label)
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
    groups = _groups(label, left, right, steps)
    _text_order.check_nodes(label, groups, model.code)
    unused: list[str] = []
    how = next((x for x in steps if isinstance(x, Rename)), None)
    if how is not None:
        nodes = [node for group in groups for node in group.rights]
        nodes, unused = renamed(how, nodes, label)
        rest = iter(nodes)
        groups = [NestedPair(g.left, _nested.filled(g.right, rest)) for g in groups]
    return NodePair(label, groups, steps, unused, how is not None)


def steps_of(given: Sequence[Any], label: str) -> tuple[PairStep, ...]:
    """The steps after the two sides of a pair: a rename, adapters, or lists of such.

    **Raises:** `TypeError` for anything else, and for two renames.
    """
    steps: list[PairStep] = []
    for x in _unpacked(given):
        second = isinstance(x, Rename) and any(isinstance(y, Rename) for y in steps)
        if second or not (isinstance(x, Rename) or callable(x)):
            raise TypeError(
                f"`{label}` has {_select.shown(x)} after its two sides, where a "
                "pair takes one `ec.rename(...)`, and adapters, `(saved, like) -> "
                "array`."
            )
        if inspect.isfunction(x) and x.__module__ == Adapter.__module__:
            name = f"ec.adapters.{x.__name__}"
            raise TypeError(
                f"`{label}` has `{name}`, which makes an adapter: call it, as "
                f"`{name}()`."
            )
        steps.append(x if isinstance(x, Rename) else adapter_of(x))
    return tuple(steps)


def _unpacked(given: Sequence[Any]) -> Iterator[Any]:
    for x in given:
        yield from _unpacked(x) if isinstance(x, (list, tuple)) else [x]


def _fits_swapped(
    where: object, source: object, model: Model, stored: StoredSide
) -> bool:
    try:
        model.nodes(source, "")
        stored.nodes(where, "")
    except Exception:
        return False
    return True


def _groups(
    label: str, left: Nested, right: Nested, steps: tuple[PairStep, ...]
) -> list[NestedPair]:
    adapters = [x for x in steps if isinstance(x, Adapter)]
    listed = [x for x in adapters if x.many is not None]
    if listed:
        return _listed_groups(label, left, right, listed)
    nested = NestedPair(left, right)
    lefts, rights = nested.lefts, nested.rights
    if len(lefts) != len(rights):
        # A list on one side, and some of a list on the other, as a slice gives them.
        a, b = _spread(lefts) or lefts, _spread(rights) or rights
        if len(a) == len(b):
            lefts, rights = a, b
    if len(lefts) == len(rights):
        return [NestedPair(a, b) for a, b in zip(lefts, rights)]
    if adapters and 1 in (len(lefts), len(rights)):
        return [nested]
    raise ValueError(
        f"`{label}` pairs {_count(lefts)} of the model ({some(lefts)}) with "
        f"{_count(rights)} of the checkpoint ({some(rights)}). Give as many on both "
        "sides, or an adapter that makes the one of the other, as "
        "`ec.adapters.stack()` does."
    )


def _listed_groups(
    label: str, left: Nested, right: Nested, adapters: list[Adapter]
) -> list[NestedPair]:
    """Each of the adapters makes one of the lists of the checkpoint's side, or one of
    the model's: of the innermost of the first, and the outermost of the second."""
    of_saved = sum(x.many == "saved" for x in adapters)
    of_model = len(adapters) - of_saved
    try:
        return _zipped(left, right, of_model, of_saved)
    except ValueError:
        # Several nodes of the model, each of which is a list, as in the way there.
        with contextlib.suppress(ValueError):
            several = deepened(left, _nested.depth(right) - of_saved + of_model)
            return _zipped(several, right, of_model, of_saved)
        first = adapters[0]
        sides = ("model", "checkpoint")
        side, other = sides if first.many == "saved" else sides[::-1]
        several = left if first.many == "saved" else right
        count = len(_nested.flat(several))
        raise ValueError(
            f"`{label}`: `{first}` takes one node of the {side}, and several of the "
            f"{other}; its side gives {count}. Of several adapters of this kind each "
            "takes a list of its own: `[[x.q, x.k, x.v] for x in c.layers]`."
        ) from None


def _zipped(
    left: Nested, right: Nested, of_model: int, of_saved: int
) -> list[NestedPair]:
    left = deepened(left, of_model)
    around = _nested.depth(left) - of_model
    right = deepened(right, around + of_saved)
    if _nested.depth(right) != around + of_saved:
        raise ValueError(f"the checkpoint's side has {_nested.depth(right)} lists")
    return [NestedPair(*x) for x in _nested.zipped(left, right, around)]


def deepened(nodes: Nested, depth: int) -> Nested:
    """The nodes in so many lists. A node that is a sequence is a list of its items."""
    while isinstance(nodes, list) and len(nodes) == 1 and _nested.depth(nodes) > depth:
        nodes = nodes[0]
    while _nested.depth(nodes) < depth:
        flat = _nested.flat(nodes)
        items = [_spread([node]) for node in flat]
        lists = items if None not in items else [[node] for node in flat]
        nodes = _nested.filled(nodes, iter(lists))
    return nodes


def _count(nodes: list[SideNode]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"


def some(nodes: list[SideNode]) -> str:
    shown = ", ".join(f"`{node.name or '.'}`" for node in nodes[:3])
    return shown + (", ..." if len(nodes) > 3 else "")


def _spread(nodes: list[SideNode]) -> list[SideNode] | None:
    """The elements of the one node, if it is a sequence."""
    if len(nodes) != 1:
        return None
    name, leaves, _ = nodes[0]
    out: dict[str, SideNode] = {}
    for below, leaf in leaves.items():
        first, _, rest = below.partition(".")
        if _names.number_of(first) is None:
            return None
        full = f"{name}.{first}" if name else first
        out.setdefault(first, SideNode(full, {})).leaves[rest] = leaf
    return [out[key] for key in sorted(out, key=int)]
