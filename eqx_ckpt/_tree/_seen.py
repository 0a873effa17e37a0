"""Structures of trees that were seen before, and what was made of them.

A training loop saves one tree again and again, with other arrays. What follows from its
structure, such as key paths, names and static fields, is made once, and kept for the
last few structures.

Two structures are one here if their nodes are of the same types, and the static fields
and keys in them are the same objects, none of which can be changed in place. To `==` 1
and True are one, and a list is the same as ever.
"""

import collections
import enum
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from . import _leaf, _named, _register, _value_codec


T = TypeVar("T")
# Structures that are kept, results of each, and leaves of one.
_MOST, _MOST_MADE, _MOST_LEAVES = 4, 16, 2**16


class SeenStructure:
    """A structure, and what was made of trees that have it."""

    def __init__(self, structure: Any, values: list[Any], callables: dict[int, Any]):
        self.structure, self._values = structure, values
        # A function is recorded by its name, as long as that leads to it.
        self._callables = list(callables.values())
        self._names = list(map(_named.name_of, self._callables))
        self._made: dict[Any, tuple[Any, Any]] = {}

    def is_of(self, structure: Any, values: list[Any]) -> bool:
        if len(values) != len(self._values):
            return False
        same = all(map(operator.is_, values, self._values))
        if not (same or all(map(_is_same, values, self._values))):
            return False
        if structure != self.structure:
            return False
        return self._names == list(map(_named.name_of, self._callables))

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


def seen(structure: Any) -> SeenStructure | None:
    """The kept one that a structure is; None where it may change unseen."""
    global _last
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
            break
    else:
        callables: dict[int, Any] = {}
        distinct = {id(x): x for x in values}.values()
        if not all(_is_fixed(x, callables) for x in distinct):
            return None
        if not all(map(_is_known_node, node_types(structure))):
            return None
        known = SeenStructure(structure, values, callables)
    if not _last or _last[0] is not known:
        _last = [known, *(x for x in _last if x is not known)][:_MOST]
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
_ABSENT = {
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
)


def _is_known_node(cls: type) -> bool:
    """Whether key paths and children of nodes of a type follow from the structure."""
    return (
        cls in _NODES
        or cls in _ABSENT
        or issubclass(cls, eqx.Module)
        or _value_codec.is_namedtuple(cls)
        and not _has_own_way(cls)
    )


def _has_own_way(cls: Any) -> bool:
    """Whether somebody registered a type of named tuples, which JAX knows without: with
    keys and children of their own, which may follow from the content."""
    try:
        one = jax.tree.structure(tuple.__new__(cls, cls._fields))
    except Exception:
        return True
    return f"namedtuple[{cls.__name__}]" not in str(one)


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
    return cls is tuple and len(a) == len(b) and all(map(_is_same, a, b))


def _is_fixed(x: Any, callables: dict[int, Any]) -> bool:
    """Whether a value stays what it is, and holds no arrays. Adds what is recorded by
    its name to the `callables`."""
    cls = type(x)
    if cls in _ATOMS or cls is object:
        return True
    if cls is tuple:
        return all(_is_fixed(y, callables) for y in x)
    if cls in _ABSENT or isinstance(x, np.dtype) and x.names is None:
        return True
    if isinstance(x, enum.Enum):
        return type(x.value) in _ATOMS
    if isinstance(x, (type, types.BuiltinFunctionType)):
        callables[id(x)] = x
        return isinstance(x, type) or isinstance(x.__self__, types.ModuleType | None)
    if isinstance(x, types.FunctionType) or _is_of_jax(cls):
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


def _is_of_jax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("jax", "jaxlib")


def _is_plain(cls: type) -> bool:
    return _leaf.is_own_type(cls) or cls in (str, bytes)


def key_of(leaves: Sequence[Any], numbers: Iterable[int]) -> tuple[Any, Any] | None:
    """A key of leaves, and the objects by whose `id` it goes. Of the leaves of these
    `numbers` only types are looked at, of the others also the values. None where one
    may change unseen, or is stored as somebody registered."""
    kinds = tuple(map(type, leaves))
    if any(_register.codec_of(cls) is not None for cls in {*kinds}):
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
