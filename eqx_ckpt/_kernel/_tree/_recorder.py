"""The record of a tree, made of its walk and of which leaves are stored.

A record has a row for each kind of leaf and node, after the rows of its children. What
is alike has one row. So rows are made from below: first those of the leaves, and then
those of the nodes, a layer after the other. The tree itself is the last row.
"""

import functools as ft
import itertools as it
import json
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format._record import Kind, Row, TreeRecord
from . import _codec, _filters, _leaf, _named, _register
from ._opening import BAD
from ._statics import Values
from ._walk import Group, Walk


# The first row of a record that is made: a leaf that is stored, and comes back as what
# it was stored as.
_LEAF = 0
# Stands for the value of an array that is not stored.
_ARRAY = {"unknown": ["", "array"]}
_PLAIN = tuple(_leaf.PLAIN.values())


class _LeftOut(NamedTuple):
    """The encoded value of a leaf that is not stored, and its JSON. `is_left`: it was
    left out on purpose, as a save stores it by default."""

    text: str
    encoded: Any
    is_left: bool


def record(walk: Walk, leaves: Sequence[Any], chosen: Sequence[bool]) -> TreeRecord:
    """The record of a tree of which the `chosen` leaves are stored. That of a walk that
    is kept is made once for all trees like it."""
    named_types = _named_types(leaves, chosen)
    left_out = _left_out(walk, leaves, chosen)
    make = lambda: _Recorder(walk).record(len(leaves), named_types, left_out)
    if not walk.is_kept:
        return make()
    # Of a stored leaf the key has only that it is stored, and its type if the record
    # names that: a skeleton has the record of its tree.
    others = tuple((out.text, out.is_left) for out in left_out.values())
    key = "record", bytes(chosen), tuple(named_types.items()), others
    return walk.kept_result(key, None, make)


def _named_types(leaves: Sequence[Any], chosen: Sequence[bool]) -> dict[int, type]:
    """The types of those `chosen` leaves that the record has to name, by the numbers of
    the leaves."""
    types = list(map(type, leaves))
    own = {cls for cls in {*types} if not _comes_back(cls) or _register.codec_of(cls)}
    numbers = it.compress(range(len(types)), chosen) if own else ()
    return {number: types[number] for number in numbers if types[number] in own}


def _left_out(
    walk: Walk, leaves: Sequence[Any], chosen: Sequence[bool]
) -> dict[int, _LeftOut]:
    """The leaves that are not stored, by their numbers."""
    known: dict[Any, _LeftOut] = {}
    out = {}
    for number in it.compress(range(len(leaves)), map(operator.not_, chosen)):
        x = leaves[number]
        owner = walk.owner(number) if callable(x) else None
        if (id(x), owner) not in known:
            is_array = isinstance(x, (jax.Array, np.ndarray))
            made = _ARRAY if is_array else _codec.encode(x, owner)
            is_left = not callable(x) and _filters.by_default(x)
            known[id(x), owner] = _LeftOut(json.dumps(made), made, is_left)
        out[number] = known[id(x), owner]
    return out


class _Recorder:
    """The kinds, values and rows of a record that is being made, each with its number:
    what is alike has one."""

    def __init__(self, walk: Walk):
        self._walk, self._values = walk, Values(walk.values)
        self._kinds: dict[Kind, int] = {}
        self._rows: dict[Row, int] = {}
        # How many leaves are stored at and below each row.
        self._counts: list[int] = []
        self._row(Kind("leaf"))  # `_LEAF`

    def record(
        self, count: int, named_types: dict[int, type], left_out: dict[int, _LeftOut]
    ) -> TreeRecord:
        """The record of a tree of so many leaves."""
        of_leaves = self._rows_of_leaves(count, named_types, left_out)
        # From JAX's order into that of the layers.
        in_layers = [_LEAF] * len(of_leaves)
        for index, row in zip(self._walk.order, of_leaves):
            in_layers[index] = row
        top = self._walk.fold(in_layers, self._rows_of_group)
        rows = list(self._rows)
        if top != len(rows) - 1:
            rows.append(rows[top])
        return TreeRecord(list(self._kinds), self._values.encoded, rows)

    def _rows_of_leaves(
        self, count: int, named_types: dict[int, type], left_out: dict[int, _LeftOut]
    ) -> list[int]:
        out = [_LEAF] * count
        for number, cls in named_types.items():
            out[number] = self._row(Kind("leaf", _named.class_name(cls)))
        for number, (text, encoded, is_left) in left_out.items():
            kind = Kind("left" if is_left else "value", data=("",))
            out[number] = self._row(kind, values=[self._values.add(text, encoded)])
        return out

    def _rows_of_group(self, group: Group, below: list[int]) -> list[int]:
        """The row of each node of a group, by the rows `below` of the next layer."""
        kind, children = group.kind, map(tuple, group.rows(below))
        values = zip(*group.value_numbers) if group.value_numbers else it.repeat(())
        nodes = list(zip(children, values))
        make = self._row if _are_parts_good(kind) else self._row_of_named_children
        rows = {node: make(kind, *node) for node in dict.fromkeys(nodes)}
        return list(map(rows.__getitem__, nodes))

    def _row_of_named_children(
        self, kind: Kind, children: Sequence[int], values: Sequence[int]
    ) -> int:
        """The row of a node without the children that have no name of their own. Of
        several of one name that one is kept in which leaves are stored."""
        kept: dict[str, int] = {}
        for place, part in enumerate(kind.parts):
            if BAD not in part and (part not in kept or self._counts[children[place]]):
                kept[part] = place
        some = [kind.attributes[place] for place in kept.values() if kind.attributes]
        # A "custom" node has a class, which Python's own containers are kept without.
        cls = kind.cls if kind.cls[1] else ("builtins", "dict")
        kind = kind._replace(how="custom", cls=cls, parts=tuple(kept), keys="")
        kind = kind._replace(attributes=tuple(some))
        return self._row(kind, [children[place] for place in kept.values()], values)

    def _row(
        self, kind: Kind, children: Sequence[int] = (), values: Sequence[int] = ()
    ) -> int:
        number = self._kinds.setdefault(kind, len(self._kinds))
        made = Row(number, tuple(children), tuple(values))
        row = self._rows.setdefault(made, len(self._rows))
        if row == len(self._counts):  # It is new.
            below = sum(map(self._counts.__getitem__, children))
            self._counts.append(below + (kind.how == "leaf"))
        return row


@ft.lru_cache(maxsize=4096)
def _are_parts_good(kind: Kind) -> bool:
    """Whether each child of a node has a name of its own."""
    return len({*kind.parts}) == len(kind.parts) and not any(
        BAD in part for part in kind.parts
    )


@ft.cache
def _comes_back(cls: type) -> bool:
    """Whether a load gives a leaf of this type back without being told: all but
    the caller's subclasses of plain values."""
    is_plain = cls in _PLAIN or issubclass(cls, np.generic)
    return is_plain or not issubclass(cls, _PLAIN)
