"""A pytree as the rest sees it: leaves with key paths, Modules and States."""

import collections
import dataclasses
import functools as ft
import itertools as it
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _names, _template
from .._format._leaves import Leaves
from . import _leaf, _node, _register
from ._filters import IsLeaf
from ._node import Node


class NodeTypes(NamedTuple):
    """The types of the nodes of a tree, and those of nodes without children."""

    all: set[type]
    empty: set[type]


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A flattened tree. `paths[i]` leads to `leaves[i]`."""

    paths: list[tuple]
    leaves: list[Any]
    structure: Any

    @ft.cached_property
    def types(self) -> NodeTypes:
        return node_types(self.structure)


def flatten(tree: PyTree, is_leaf: IsLeaf) -> Flat:
    pairs, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return Flat([path for path, _ in pairs], [leaf for _, leaf in pairs], structure)


# ---- Modules, and the nodes of Modules that were saved.


class ModuleFields(NamedTuple):
    """The names of the fields of a class of Modules."""

    dynamic: tuple[str, ...]
    static: tuple[str, ...]


@ft.lru_cache(maxsize=4096)
def module_fields(cls: type) -> ModuleFields:
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    is_static = {x.name: x.metadata.get("static", False) for x in fields}
    return ModuleFields(
        tuple(name for name, static in is_static.items() if not static),
        tuple(name for name, static in is_static.items() if static),
    )


def field_values(module: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names that a Module has. Equinox looks at each attribute that
    it gives, and so is slow."""
    own = object.__getattribute__(module, "__dict__")
    out = {name: own[name] for name in names if name in own}
    if len(out) == len(names):  # pyright: ignore[reportArgumentType]
        return out
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


@ft.lru_cache(maxsize=4096)
def _is_module(cls: type) -> bool:
    return issubclass(cls, (eqx.Module, Node))


# What has no nodes in it, as most children.
_BARE = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, types.FunctionType, np.generic)
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


@ft.lru_cache(maxsize=4096)
def _is_bare(cls: type) -> bool:
    return cls in _SCALARS or issubclass(cls, _BARE)


def modules(
    tree: PyTree, is_leaf: IsLeaf, source: str = ""
) -> Iterable[tuple[str, Any]]:
    """The name and the Module of every Module in a tree, without those inside leaves.
    `source` is the name of the tree itself."""
    out: list[tuple[str, Any]] = []

    def add(x: Any, name: str, depth: int) -> None:
        if is_leaf is not None and is_leaf(x):
            return
        cls = type(x)
        pairs: Iterable[tuple[Any, Any]]
        if _is_module(cls):
            out.append((name, x))
        if cls is list or cls is tuple:
            pairs = ((jtu.SequenceKey(i), y) for i, y in enumerate(x))
        elif cls is not Node and _is_module(cls):
            fields = field_values(x, module_fields(cls).dynamic)
            pairs = ((jtu.GetAttrKey(key), y) for key, y in fields.items())
        else:
            stop = lambda y: y is not x
            keyed = jtu.tree_flatten_with_path(x, is_leaf=stop)[0]
            pairs = ((path[0], y) for path, y in keyed if path)
        for key, child in pairs:
            if not _is_bare(type(child)):
                add(child, _names.child_name(name, key, depth + 1), depth + 1)

    add(tree, source, 0)
    return out


def node_types(structure: Any) -> NodeTypes:
    out = NodeTypes(set(), set())
    nodes = [structure]
    while nodes:
        node = nodes.pop()
        # How many nodes it has that are no leaves. If it is itself the only one, all of
        # its children are leaves.
        inner = node.num_nodes - node.num_leaves
        if inner:
            out.all.add(node.node_data()[0])
        if inner > 1:
            nodes += node.children()
        elif inner and not node.num_leaves:
            out.empty.add(node.node_data()[0])
    return out


def module_name(path: tuple, source: str) -> str:
    return _names.name_of(path, source)[0] if path else source


# ---- eqx.nn.State, whose entries are flattened by position.


class Entry(NamedTuple):
    """One entry of a State: the name of the State, its position, and its label.

    Labels say which StateIndex an entry belongs to: `=` and its marker, without the
    name of the class, when `eqx.nn.make_with_state` made it; else `@` and the dotted
    names of the StateIndex, with commas between; None when neither is known.
    """

    state: str
    position: int
    label: str | None


def state_entries(
    tree: PyTree, paths: Sequence[tuple], source: str
) -> dict[int, Entry]:
    """The entry of a State that each leaf belongs to, by the number of the leaf."""

    def stop(x: Any) -> bool:
        is_node = isinstance(x, Node) and bool(_node.body_of(x).spec().labels)
        return is_node or isinstance(x, (eqx.nn.State, eqx.nn.StateIndex))

    if jtu.FlattenedIndexKey not in {*map(type, it.chain.from_iterable(paths))}:
        return {}
    found = jtu.tree_flatten_with_path(tree, is_leaf=stop)[0]
    states = {path: x for path, x in found if isinstance(x, (eqx.nn.State, Node))}
    if not states:
        return {}
    indices: dict[Any, list[str]] = {}
    for path, x in found:
        if isinstance(x, eqx.nn.StateIndex):
            name = _names.name_of(path, source)[0]
            indices.setdefault(x.marker, []).append(name)
    labels = {path: _labels(x, indices) for path, x in states.items()}
    out = {}
    for number, path in enumerate(paths):
        for cut in range(len(path)):
            if path[:cut] in labels:
                position = path[cut].key
                name = module_name(path[:cut], source)
                out[number] = Entry(name, position, labels[path[:cut]][position])
                break
    return out


def _labels(
    state: eqx.nn.State | Node, indices: dict[Any, list[str]]
) -> dict[int, str | None]:
    """The label of each entry of a State, by its position."""
    if isinstance(state, Node):
        spec = _node.body_of(state).spec()
        return {int(key): label for (_, key), label in zip(spec.keys, spec.labels)}
    markers = state.tree_flatten()[1]
    return {i: _label(marker, indices) for i, marker in enumerate(markers)}


def index_names(tree: PyTree, source: str = "") -> dict[str, list[str]]:
    """The names, below `source`, of the StateIndex that each label is of."""

    def stop(x: Any) -> bool:
        return isinstance(x, eqx.nn.StateIndex)

    found = jtu.tree_flatten_with_path(tree, is_leaf=stop)[0]
    named = [
        (x.marker, _names.name_of(path, source)[0]) for path, x in found if stop(x)
    ]
    indices: dict[Any, list[str]] = {}
    for marker, name in named:
        indices.setdefault(marker, []).append(name)
    return {str(_label(marker, indices)): names for marker, names in indices.items()}


def _label(marker: Any, indices: dict[Any, list[str]]) -> str | None:
    if isinstance(marker, str):
        return "=" + re.sub(r"^\w+", "", marker)
    names = indices.get(marker)
    return "@" + ",".join(sorted(names)) if names else None


class StateEntries(NamedTuple):
    """The entries of one State: for each position its label, and what it looks like:
    entries that look alike can be exchanged unseen."""

    labels: dict[int, str | None]
    looks: dict[int, set[tuple]]


def stored_entries(leaves: Leaves, state: str, places: Iterable[int]) -> StateEntries:
    """The entries of the State of a name, of which these are leaves."""
    out = StateEntries({}, {})
    for place in places:
        position, _, rest = _names.below(leaves.names[place], state).partition(".")
        if position.isdecimal():
            t = leaves.templates[leaves.template[place]]
            out.labels[int(position)] = leaves.markers.get(place)
            kind = t.kind if t.kind in ("key", "str", "bytes") else _number(t.dtype)
            out.looks.setdefault(int(position), set()).add(
                (rest, t.logical_shape, kind)
            )
    return out


def _number(dtype: str) -> str:
    return "int" if dtype == "int" else _template.number_type(_template.dtype_of(dtype))


def check_order(entries: dict[int, Entry], flat: Flat, numbers: Iterable[int]) -> None:
    """**Raises:** `ValueError` if the order is all that tells what some entries are of,
    and it could change unseen. `numbers` are those of the leaves that are stored."""
    states: dict[str, StateEntries] = {}
    for number in numbers:
        entry = entries.get(number)
        if entry is not None and entry.label is None:
            found = states.setdefault(entry.state, StateEntries({}, {}))
            found.labels[entry.position] = None
            leaf = _register.to_leaf(flat.leaves[number])
            kind = type(leaf).__name__
            if hasattr(leaf, "dtype"):
                is_key = _leaf.is_key(leaf)
                kind = "key" if is_key else _template.number_type(np.dtype(leaf.dtype))
            rest = _names.name_of(flat.paths[number])[0]
            rest = _names.below(rest, entry.state).partition(".")[2]
            look = rest, tuple(np.shape(leaf)), kind
            found.looks.setdefault(entry.position, set()).add(look)
    for state, found in states.items():
        twins = _twins(found.looks)
        if twins:
            raise ValueError(
                f"{_shown(state)} has entries of which nothing says what they belong "
                f"to, and some look alike, as {_some(state, twins)}: in a model with "
                "its fields in another order they would be exchanged unseen. Save the "
                "State in one tree with its model, or make both with "
                "`eqx.nn.make_with_state`. Nothing was saved."
            )


def _twins(looks: dict[int, set[tuple]]) -> list[int]:
    """The first positions whose entries look alike; none if there are none."""
    groups: dict[frozenset, list[int]] = {}
    for position, look in looks.items():
        groups.setdefault(frozenset(look), []).append(position)
    return next((group for group in groups.values() if len(group) > 1), [])


def _shown(state: str) -> str:
    return f"The State at `{state}`" if state else "The State"


def _some(state: str, positions: list[int]) -> str:
    below = state + "." if state else ""
    return " and ".join(f"`{below}{position}`" for position in positions[:2])


def match_entries(
    state: str, wanted: dict[int, str | None], saved: StateEntries
) -> dict[int, int | None]:
    """For each position in one State that in another, by their labels; or None.

    Where one of the two has no labels at all, as a State without its model and with
    markers that are objects, all that is left is the order.

    **Raises:** `RuntimeError` if that could have changed unseen.
    """
    known = {label: at for at, label in saved.labels.items() if label is not None}
    words = {label: _words(label) for label in known}
    # Labels are data from a file, and comparing all of them takes this many steps.
    few = len(wanted) * len(known) <= _MAX_PAIRS
    if not known or not any(wanted.values()):
        _check_positions(state, set(wanted), saved.looks, bool(known))
        return {position: position for position in wanted}
    rest = {at: saved.looks[at] for at, x in saved.labels.items() if x is None}
    alone = {position for position, label in wanted.items() if label is None}
    if alone and rest:
        _check_positions(state, alone, rest, False)
    out = {}
    for position, label in wanted.items():
        if label is None:
            out[position] = position if position in rest else None
        elif label in known:
            out[position] = known[label]
        else:
            own = _words(label)
            near = [
                (_extra(own, words[x], label[0] != x[0]), known[x])
                for x in known
                if few
            ]
            near = sorted((n, place) for n, place in near if n is not None)
            is_one = near and [n for n, _ in near].count(near[0][0]) == 1
            out[position] = near[0][1] if is_one else None
    count = collections.Counter(out.values())
    return {key: None if count[place] > 1 else place for key, place in out.items()}


def _check_positions(
    state: str, wanted: set[int], looks: dict[int, set[tuple]], labelled: bool
) -> None:
    """**Raises:** `RuntimeError` if entries that go by their positions could be others:
    because two look alike, or because there are not as many on both sides."""
    twins = _twins(looks)
    if not twins and (not looks or wanted == looks.keys()):
        return
    if twins:
        why = f"{_some(state, twins)} look alike"
    else:
        why = f"{len(looks)} were saved, and `like` has {len(wanted)}"
    if labelled:
        advice = "Pass a `like` that has the model of the State as well."
    else:
        advice = (
            "They were saved without what says it. Put them in place by hand: "
            "`ec.open(path)` has them in the order of the save, and "
            "`state.set(index, value)` sets one."
        )
    raise RuntimeError(
        f"{_shown(state)} has entries of which nothing says what they belong to but "
        f"their order, which may have changed: {why}. Nothing was loaded. {advice}"
    )


_MAX_PAIRS = 2**20


def _extra(
    one: list[list[str]], two: list[list[str]], of_two_kinds: bool
) -> int | None:
    """None if two labels are of two indices; else by how many words they differ.

    An index may have several names, one of which is enough; and its marker, a path
    from the model, is the end of a name, a path from the top of a tree.
    """
    for a in one:
        for b in two:
            short, long = sorted((a, b), key=len)
            if a == b or (of_two_kinds and long[-len(short) :] == short):
                return len(long) - len(short)
    return None


def _words(label: str) -> list[list[str]]:
    if label[0] == "=":
        return [re.findall(r"\w+", label)]
    return [name.split(".") for name in label[1:].split(",")]
