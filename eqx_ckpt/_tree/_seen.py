"""Structures of trees that were seen before, and what was made of them.

A training loop saves one tree again and again, with other arrays. What follows from its
structure, such as key paths, names and static fields, is made once, and kept for the
last few structures.

Two structures are one here if their nodes are of the same types, and the static fields
and keys in them are the same objects, none of which can be changed in place. To `==` 1
and True are one, and a list is the same as ever.
"""

import collections
import contextlib
import dataclasses
import enum
import functools as ft
import itertools as it
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from .._format import _names
from . import _identity, _leaf, _named, _register
from ._node import Node, Spec


T = TypeVar("T")
# Structures that are kept, results of each, and leaves of one.
_MOST, _MOST_MADE, _MOST_LEAVES = 4, 16, 2**16


class SeenStructure:
    """A structure, and what was made of trees that have it."""

    def __init__(self, structure: Any, values: list[Any], callables: dict[int, Any]):
        self.structure, self._values = structure, values
        self.types = node_types(structure)
        # A function is recorded by its name, as long as that leads to it.
        self._callables = list(callables.values())
        self._names = list(map(_named.name_of, self._callables))
        self._made: dict[Any, tuple[Any, Any]] = {}
        # The key paths of its leaves; and the layers of its trees, once a second one
        # was seen, unless it lacks fields.
        self.paths: list[tuple] = []
        self.layers: _Layers | None = None

    def is_of(self, structure: Any, values: list[Any]) -> bool:
        return (
            _are_same(values, self._values)
            and structure == self.structure
            and self._names == list(map(_named.name_of, self._callables))
        )

    def leaves_of(self, tree: Any) -> list[Any] | None:
        """The leaves of a tree, if it has this structure. Nodes of one kind are looked
        at together, which takes far less than JAX's walk from one to the next."""
        if self.layers is None:
            return None
        layers, order = self.layers
        nodes: list[Any] = [tree]
        leaves: list[Any] = []
        for own, groups in layers:
            leaves += own(nodes)
            below: list[Any] = []
            for cls, pick, counts, data in groups:
                some = pick(nodes)
                if {*map(type, some)} != {cls} or not _is_known_node(cls):
                    return None
                try:
                    children, own_counts, own_data = _open(cls, some)
                except KeyError:  # A Module lacks a field.
                    return None
                if own_counts != counts or not _are_same(own_data, data):
                    return None
                below += children
            nodes = below
        examples = dict(zip(map(type, leaves), leaves))
        is_known = self._names == list(map(_named.name_of, self._callables))
        if not (is_known and jax.tree_util.all_leaves(examples.values())):
            return None
        return list(order(leaves))

    def once(self, key: Any, keeps: Any, make: Callable[[], T]) -> T:
        """The result of `make` of a key, which nobody changes. `keeps`: objects by
        whose `id` the key goes."""
        found = self._made.get(key)
        if found is None:
            found = keeps, make()
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            self._made[key] = found
        return found[1]


# The last one first. Threads put another list into its place.
_last: list[SeenStructure] = []


def find(tree: Any) -> tuple[SeenStructure | None, list[Any]]:
    """The kept structure that a tree has, if that is seen at once, and its leaves."""
    for known in _last:
        leaves = known.leaves_of(tree)
        if leaves is not None:
            if _last[0] is not known:
                _move_up(known)
            return known, leaves
    return None, []


def _move_up(known: SeenStructure) -> None:
    global _last
    if not _last or _last[0] is not known:
        _last = [known, *(x for x in _last if x is not known)][:_MOST]


def seen(structure: Any) -> SeenStructure | None:
    """The kept one that a structure is; None where it may change unseen."""
    if structure.num_leaves > _MOST_LEAVES:
        return None
    values: list[Any] = []

    def note(_: Any, data: Any) -> None:
        # Keys of a dict, or the static fields of a Module.
        if type(data) is tuple or type(data) is list:
            values.extend(data)
        else:
            values.append(data)

    structure.walk(note, _same, (None,) * structure.num_leaves)
    for known in _last:
        if known.is_of(structure, values):
            if known.layers is None:
                with contextlib.suppress(KeyError):
                    known.layers = _layers(structure)
            break
    else:
        callables: dict[int, Any] = {}
        distinct = {id(x): x for x in values}.values()
        if not all(_is_fixed(x, callables) for x in distinct):
            return None
        known = SeenStructure(structure, values, callables)
        if not all(map(_is_known_node, known.types)):
            return None
    _move_up(known)
    return known


def _same(x: T) -> T:
    return x


def node_types(structure: Any) -> set[type]:
    """The types of the nodes of a tree."""
    out: set[type] = set()
    nodes = [structure]
    while nodes:
        node = nodes.pop()
        # How many nodes it has that are no leaves: if one, that is itself.
        inner = node.num_nodes - node.num_leaves
        if inner:
            out.add(node.node_data()[0])
        if inner > 1:
            nodes += node.children()
    return out


# The types of what Equinox puts where a Module lacks a field, if it does.
ABSENT = {
    x.node_data()[0]
    for x in jax.tree.structure(object.__new__(eqx.nn.Dropout)).children()
}
_NODES = (
    type(None),
    tuple,
    list,
    dict,
    collections.OrderedDict,
    collections.defaultdict,
    eqx.nn.State,
    Node,
)


def _is_known_node(cls: type) -> bool:
    """Whether key paths and children of nodes of a type follow from the structure."""
    return (
        cls in _NODES
        or cls in ABSENT
        or issubclass(cls, eqx.Module)
        or is_namedtuple(cls)
        and not _has_own_way(cls)
    )


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _has_own_way(cls: Any) -> bool:
    """Whether somebody registered a type of named tuples, which JAX knows without: with
    keys and children of their own, which may follow from the content."""
    try:
        one = jax.tree.structure(tuple.__new__(cls, cls._fields))
    except Exception:
        return True
    return f"namedtuple[{cls.__name__}]" not in str(one)


# Some of the nodes of a layer.
_Pick = Callable[[list[Any]], Sequence[Any]]
# The nodes of one type in a layer: the type, which they are there, their numbers of
# children or fields, and what else a structure has of them.
_Group = tuple[type, _Pick, list[int], list[Any]]
# For each layer which of it are leaves, and its groups of nodes; and the leaves in the
# order of JAX, of those in the order of the layers.
_Layers = tuple[list[tuple[_Pick, list[_Group]]], _Pick]


def _layers(structure: Any) -> _Layers:
    """The layers of trees of a structure, from the root down. **Raises:** `KeyError`
    if a Module in it lacks fields, or has more."""
    count = structure.num_leaves
    nodes: list[Any] = [structure.unflatten(range(count))]
    numbers: list[int] = []
    layers: list[tuple[_Pick, list[_Group]]] = []
    while nodes:
        places: dict[type, list[int]] = {}
        for place, node in enumerate(nodes):
            places.setdefault(type(node), []).append(place)
        own = _picker(places.pop(int, []))
        numbers += own(nodes)
        groups: list[_Group] = []
        below: list[Any] = []
        for cls, some in places.items():
            pick = _picker(some)
            children, counts, data = _open(cls, pick(nodes))
            groups.append((cls, pick, counts, data))
            below += children
        layers.append((own, groups))
        nodes = below
    return layers, _picker(sorted(range(count), key=numbers.__getitem__))


def _picker(places: list[int]) -> _Pick:
    if len(places) > 1:
        return operator.itemgetter(*places)
    start = places[0] if places else 0
    return operator.itemgetter(slice(start, start + len(places)))


@ft.lru_cache(maxsize=4096)
def module_fields(cls: type) -> tuple[dict[str, str], dict[str, str]]:
    """The fields of a class of Modules that are children, and those that are static,
    each with its part of a dotted name."""
    both: tuple[dict[str, str], dict[str, str]] = {}, {}
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        of = both[bool(field.metadata.get("static", False))]
        of[field.name] = _names.quote(field.name)
    return both


def _open(cls: type, nodes: Sequence[Any]) -> tuple[list[Any], list[int], list[Any]]:
    """The children of nodes of one type, field by field; their numbers of children; and
    their static fields, keys or the like.

    **Raises:** `KeyError` for a Module that lacks a field, or has more.
    """
    if issubclass(cls, eqx.Module):
        # Equinox looks at each attribute that it gives.
        own = list(map(object.__getattribute__, nodes, it.repeat("__dict__")))
        fields, rest = module_fields(cls)
        counts = list(map(len, own))
        if {*counts} != {len(fields) + len(rest)}:
            raise KeyError
        children: list[Any] = []
        data: list[Any] = []
        for names, into in ((fields, children), (rest, data)):
            for name in names:
                into += map(operator.itemgetter(name), own)
        return children, counts, data
    if cls is type(None):
        return [], [0] * len(nodes), []
    one_level = jax.tree_util.default_registry.flatten_one_level
    pairs = list(map(one_level, nodes))
    some = [tuple(children) for children, _ in pairs]
    data = [tuple(x) if type(x) is list else x for _, x in pairs]
    return list(it.chain.from_iterable(some)), list(map(len, some)), data


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether values are the same objects, or cannot be told from them."""
    if len(values) != len(others):
        return False
    same = all(map(operator.is_, values, others))
    return same or all(map(_is_same, values, others))


_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_EQUAL = frozenset((bool, int, str, bytes))


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    cls = type(a)
    if cls is not type(b):
        return False
    if cls in _EQUAL:
        return a == b
    if cls is Spec:
        return (a.keys, a.fields, a.labels) == (b.keys, b.fields, b.labels)
    return cls is tuple and _are_same(a, b)


def _is_fixed(x: Any, callables: dict[int, Any]) -> bool:
    """Whether a value stays what it is, and holds no arrays. Adds what is recorded by
    its name to the `callables`."""
    cls = type(x)
    if cls in _ATOMS or cls is object or cls is Spec:
        return True
    if cls is tuple:
        return all(_is_fixed(y, callables) for y in x)
    if cls in ABSENT or isinstance(x, np.dtype) and x.names is None:
        return True
    if isinstance(x, enum.Enum):
        return type(x.value) in _ATOMS
    if isinstance(x, (type, types.BuiltinFunctionType)):
        callables[id(x)] = x
        return isinstance(x, type) or isinstance(x.__self__, types.ModuleType | None)
    if isinstance(x, types.FunctionType) or _identity.is_of_jax(cls):
        callables[id(x)] = x
        inner: Any = x
        while not isinstance(inner, types.FunctionType):
            inner = getattr(inner, "__wrapped__", None)
            if inner is None:
                return isinstance(
                    x, (jax.sharding.Sharding, jax.sharding.PartitionSpec)
                )
        if inner.__closure__ or vars(inner):
            return False
        held = *(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()
        return all(_is_fixed(y, callables) for y in held)
    return False


@ft.cache
def _is_plain(cls: type) -> bool:
    return _leaf.is_own_type(cls) or cls in (str, bytes)


def key_of(leaves: Sequence[Any], numbers: Iterable[int]) -> tuple[Any, Any] | None:
    """A key of leaves, and the objects by whose `id` it goes. Of the leaves of these
    `numbers` only types are looked at, of the others also the values. None where one
    may change unseen, or is stored as somebody registered."""
    kinds = tuple(map(type, leaves))
    if any(map(_register.codec_of, {*kinds})):
        return None
    own = set(filter(_is_plain, {*kinds}))
    numbers = tuple(numbers)
    if len(numbers) == len(leaves) and own.issuperset(kinds):
        return kinds, ()
    stored = {*numbers}
    rest = [
        x
        for number, (x, cls) in enumerate(zip(leaves, kinds))
        if number not in stored or cls not in own
    ]
    callables: dict[int, Any] = {}
    if not all(_is_fixed(x, callables) for x in {id(x): x for x in rest}.values()):
        return None
    names = tuple(map(_named.name_of, callables.values()))
    return (kinds, numbers, tuple(map(id, rest)), names), rest
