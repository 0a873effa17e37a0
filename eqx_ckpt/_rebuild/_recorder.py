"""The structure of a tree that is saved: the types of its nodes, and all else that a
tree needs to be made again besides the leaves that are stored."""

import collections
import dataclasses
import functools as ft
import json
import operator
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _names
from .._format._leaves import Structure
from .._tree import _flatten, _identity, _leaf, _named, _register, _seen
from .._tree._filters import IsLeaf
from .._tree._flatten import Flat
from .._tree._node import Node
from . import _structure, _value_codec


def record(
    tree: PyTree, is_leaf: IsLeaf, flat: Flat, numbers: Sequence[int]
) -> Structure | None:
    """The structure of a tree of which the leaves of these `numbers` are stored."""
    make = lambda: _record(tree, is_leaf, flat, numbers)
    return flat.once("structure", make, numbers)


def _record(
    tree: PyTree, is_leaf: IsLeaf, flat: Flat, numbers: Sequence[int]
) -> Structure | None:
    stored = [False] * len(flat.leaves)
    for number in numbers:
        stored[number] = True
    recorder = _Recorder(is_leaf, flat.leaves, stored)
    try:
        recorder.row_of(tree, 0)
    except Exception:  # Of the methods of a class that we do not know.
        return None
    made = Structure(recorder.types, recorder.nodes)
    if recorder.walked > _MANY:
        parts = sum(len(flat.paths[number]) for number in numbers)
        try:
            _structure.check(made, len(numbers), parts)
        except ValueError:  # Of more nodes than are made again.
            return None
    is_small = len(made.nodes) < _FEW or len(json.dumps(made)) < _MAX_LENGTH
    return made if recorder.at == len(flat.leaves) and is_small else None


# Of the JSON of a structure. It is looked at where there are more rows than a few.
_MAX_LENGTH, _FEW = 2**22, 1000
# So many nodes are made again, whatever they are.
_MANY = 2**14


_CONTAINERS: dict[type, str] = {
    type(None): "none",
    tuple: "tuple",
    list: "list",
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.defaultdict: "default",
    eqx.nn.State: "state",
    eqx.nn.StateIndex: "index",
    jtu.Partial: "partial",
}


def _kind(cls: type, is_leaf: bool) -> str:
    if cls in _CONTAINERS:
        return _CONTAINERS[cls]
    if is_leaf:
        return "plain" if _comes_back(cls) else "leaf"
    if cls is Node:
        return "other"
    if _seen.is_namedtuple(cls):
        return "namedtuple"
    if issubclass(cls, eqx.Module):
        return "module"
    return "dataclass" if dataclasses.is_dataclass(cls) else "other"


_PLAIN = tuple(_leaf.PLAIN.values())


def _comes_back(cls: type) -> bool:
    """Whether what is stored says by itself that a leaf was of this type."""
    if cls in _PLAIN:
        return True
    is_own = issubclass(cls, _PLAIN) and not issubclass(cls, np.generic)
    return not is_own and _register.codec_of(cls) is None


@ft.cache
def no_init() -> Any:
    """The value in a StateIndex whose initial state Equinox has taken out."""
    index = eqx.nn.StateIndex(0)
    return eqx.nn.delete_init_state(index).init


# Names of the fields of an object: those that are children, those that are not, and
# those that it lacks.
_Fields = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


@ft.lru_cache(maxsize=4096)
def _module_fields(cls: type, here: tuple[str, ...]) -> _Fields | None:
    """The fields of a Module with these attributes; None if some are no fields."""
    dynamic, static = _seen.module_fields(cls)
    if not {*here} <= dynamic.keys() | static.keys():
        return None
    names = [x.name for x in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    there = tuple(name for name in names if name not in here)
    own = lambda some: tuple(name for name in some if name in here)
    return own(dynamic), own(static), there


# The methods of kinds that are recorded alike; that of another kind has its name.
_WAYS: dict[str, str] = dict.fromkeys(("none", "tuple", "list"), "_sequence")
_WAYS |= dict.fromkeys(("dict", "ordered", "default"), "_mapping")


class _Recorder:
    """Walks a tree in the order of its leaves, of which it has seen `at`. It has
    `walked` over so many nodes."""

    def __init__(self, is_leaf: IsLeaf, leaves: list[Any], stored: list[bool]):
        self.types: list[list[Any]] = []
        self.nodes: list[list[Any]] = []
        self.at = self.walked = 0
        self._is_leaf = is_leaf
        self._leaves, self._stored = leaves, stored
        self._kinds: dict[type, str] = {}
        self._rows: dict[Any, int] = {}
        # Those of Modules by their static fields, before these are encoded.
        self._same: dict[Any, int] = {}
        self._type_of: dict[Any, int] = {}
        self._markers: dict[Any, str] = {}
        # Of each row, whether there are stored leaves in it.
        self._has_leaf: list[bool] = []
        self._row("leaf", [])

    def _row(self, kind: str, children: Sequence[int], *rest: Any) -> int:
        key = (kind, tuple(children), json.dumps(rest) if rest else "")
        return self._row_for(key, rest)

    def _row_for(self, key: tuple[Any, ...], rest: Sequence[Any]) -> int:
        """The row of a kind, children and whatever tells it from others."""
        number = self._rows.setdefault(key, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append([key[0], _structure.packed(key[1]), *rest])
            has_leaf = any(map(self._has_leaf.__getitem__, key[1]))
            self._has_leaf.append(has_leaf or key[0] in ("leaf", "leaf of"))
        return number

    def row_of(self, x: Any, depth: int, owner: type | None = None) -> int:
        """The row of a node or a leaf. `owner`: the Module that it is a field of."""
        if depth > _names.MAX_DEPTH:
            raise ValueError  # It is not made again.
        self.walked += 1
        if self._is_leaf is not None and self._is_leaf(x):
            return self._leaf(x, owner)
        kind = self._kind_of(x)
        if kind in ("plain", "leaf"):
            return self._leaf(x, owner)
        return getattr(self, _WAYS.get(kind, f"_{kind}"))(kind, x, depth + 1)

    def _kind_of(self, x: Any) -> str:
        """The way in which nodes or leaves of a type are recorded."""
        cls = type(x)
        if cls not in self._kinds:
            self._kinds[cls] = _kind(cls, jtu.all_leaves([x]))
        return self._kinds[cls]

    def _below(
        self, children: Sequence[Any], depth: int, owner: type | None = None
    ) -> list[int]:
        if self._is_leaf is None and self._are_plain(children):
            self.at += len(children)
            return [_structure.LEAF] * len(children)
        return [self.row_of(child, depth, owner) for child in children]

    def _are_plain(self, children: Sequence[Any]) -> bool:
        """Whether all are leaves that are stored and come back: most are, and there may
        be many, so that nothing is looked at one by one."""
        examples = dict(zip(map(type, children), children)).values()
        if any(self._kind_of(x) != "plain" for x in examples):
            return False
        here = slice(self.at, self.at + len(children))
        leaves = self._leaves[here]
        same = len(leaves) == len(children) and all(map(operator.is_, leaves, children))
        return same and all(self._stored[here])

    def _leaf(self, x: Any, owner: type | None) -> int:
        at = self.at
        if at >= len(self._leaves) or self._leaves[at] is not x:
            raise ValueError  # The tree does not give the same leaves twice.
        self.at += 1
        if not self._stored[at]:
            if isinstance(x, (jax.Array, np.ndarray)):
                return self._row("value", [], {"unknown": "an array, not saved"})
            return self._row("value", [], _value_codec.encode(x, owner))
        if _comes_back(type(x)):
            return _structure.LEAF
        return self._row("leaf of", [], list(_named.own(type(x)) or ("", "")))

    def _sequence(self, kind: str, x: Sequence[Any] | None, depth: int) -> int:
        return self._row(kind, self._below(x or (), depth))

    def _mapping(self, kind: str, x: Any, depth: int) -> int:
        keys = list(x) if kind == "ordered" else sorted(x)
        rest = [_value_codec.encode(x.default_factory)] if kind == "default" else []
        start = self.at
        children = self._below([x[key] for key in keys], depth)
        named: Any = None  # The names of leaves have the keys.
        has_leaves = all(self._has_leaf[child] for child in {*children})
        if not has_leaves or not {*map(type, keys)} <= {str, int}:
            named = list(map(_value_codec.encode, keys))
            if "unknown" in json.dumps(named):
                return self._unknown(x, start)
        if named is None and not rest:
            return self._row_for((kind, tuple(children)), (None,))
        return self._row(kind, children, named, *rest)

    def _namedtuple(self, kind: str, x: Any, depth: int) -> int:
        children = self._below(x, depth)
        return self._row(kind, children, self._type(type(x), (x._fields, (), ())))

    def _module(self, kind: str, x: Any, depth: int) -> int:
        own = object.__getattribute__(x, "__dict__")
        fields = _module_fields(type(x), tuple(own))
        if fields is None:
            # Equinox itself adds attributes that stand for nothing.
            some = tuple(n for n in own if type(own[n]) not in _seen.ABSENT)
            fields = _module_fields(type(x), some)
        if fields is None:
            return self._other("other", x, depth)  # Such as what wraps a function.
        return self._fields(kind, x, fields, depth)

    def _dataclass(self, kind: str, x: Any, depth: int) -> int:
        keyed = jtu.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
        names = [f.name for f in dataclasses.fields(x) if hasattr(x, f.name)]
        unset = [f.name for f in dataclasses.fields(x) if not hasattr(x, f.name)]
        dynamic = []
        for path, child in keyed:
            key: Any = path[0] if len(path) == 1 else None
            name = key.name if isinstance(key, jtu.GetAttrKey) else ""
            if name not in names or getattr(x, name) is not child:
                return self._other("other", x, depth)
            dynamic.append(name)
        static = [name for name in names if name not in dynamic]
        fields = tuple(dynamic), tuple(static), tuple(unset)
        return self._fields(kind, x, fields, depth)

    def _fields(self, kind: str, x: Any, fields: _Fields, depth: int) -> int:
        cls = type(x)
        dynamic, static, _ = fields
        inside = _flatten.field_values(x, dynamic)
        children = self._below(inside, depth, cls)
        number = self._type(cls, fields)
        values = _flatten.field_values(x, static)
        # Most are those of another Module.
        same = _identity.plain_key(values)
        key = kind, tuple(children), number, same
        row = None if same is None else self._same.get(key)
        if row is None:
            exact = [_value_codec.encode(value, cls) for value in values]
            row = self._same[key] = self._row(kind, children, number, exact)
        return row

    def _type(self, cls: type, fields: _Fields) -> int:
        number = self._type_of.setdefault((cls, fields), len(self.types))
        if number == len(self.types):
            name = _named.own(cls) or ("", cls.__name__)
            self.types.append([*name, *map(list, fields)])
        return number

    def _partial(self, kind: str, x: jtu.Partial, depth: int) -> int:
        children = self._below((x.args, x.keywords), depth)
        return self._row(kind, children, _value_codec.encode(x.func))

    def _state(self, kind: str, x: eqx.nn.State, depth: int) -> int:
        children, markers = x.tree_flatten()
        rows = self._below(children, depth)
        return self._row(kind, rows, list(map(self._marker, markers)))

    def _index(self, kind: str, x: eqx.nn.StateIndex, depth: int) -> int:
        has_init = type(x.init) is not type(no_init())
        children = self._below([x.init], depth) if has_init else []
        return self._row(kind, children, self._marker(x.marker))

    def _marker(self, marker: Any) -> str:
        if isinstance(marker, str):
            return "=" + marker
        return self._markers.setdefault(marker, f"#{len(self._markers)}")

    def _other(self, kind: str, x: Any, depth: int) -> int:
        start = self.at
        inner = lambda y: self._is_leaf is not None and y is not x and self._is_leaf(y)
        self.at += len(jtu.tree_leaves(x, is_leaf=inner))
        return self._unknown(x, start)

    def _unknown(self, x: Any, start: int) -> int:
        """A row of a node of which only the leaves since `start` are known."""
        name = _named.own(type(x))
        text = type(x).__name__ if name is None else name.shown
        text = "node of a checkpoint" if type(x) is Node else text
        count = sum(self._stored[start : self.at])
        number = self._row("other", [], count, text)
        self._has_leaf[number] = count > 0
        return number
