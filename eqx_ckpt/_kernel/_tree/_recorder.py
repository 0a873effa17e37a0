"""The record of a tree, made of its walk and of which leaves are stored."""

import functools as ft
import itertools as it
import json
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._format._record import Kind, LEAF, Row, TreeRecord
from . import _codec, _filters, _leaf, _named, _register
from ._opening import BAD
from ._statics import Values
from ._walk import columns, Group, Walk


def record(walk: Walk, leaves: Sequence[Any], chosen: Sequence[bool]) -> TreeRecord:
    """The record of a tree of which the `chosen` leaves are stored. That of a walk that
    is kept is made once for all trees like it."""
    own_types, left_out = _own_types(leaves, chosen), _left_out(walk, leaves, chosen)
    make = lambda: _Recorder(walk, leaves, own_types, left_out).record
    if not walk.is_kept:
        return make()
    # A skeleton has the record of what it is one of.
    others = tuple((text, type(leaves[i])) for i, (text, _) in left_out.items())
    key = "record", bytes(chosen), tuple(own_types.items()), others
    return walk.once(key, None, make)


def _own_types(leaves: Sequence[Any], chosen: Sequence[bool]) -> dict[int, type]:
    """The types of those of the `chosen` leaves that do not come back by themselves, by
    their numbers."""
    types = list(map(type, leaves))
    own = {cls for cls in {*types} if not _comes_back(cls) or _register.codec_of(cls)}
    numbers = it.compress(range(len(types)), chosen) if own else ()
    return {number: types[number] for number in numbers if types[number] in own}


def _left_out(
    walk: Walk, leaves: Sequence[Any], chosen: Sequence[bool]
) -> dict[int, tuple[str, Any]]:
    """The values of the leaves that are not stored, by their numbers: of each its JSON,
    and what that is of."""
    known: dict[Any, tuple[str, Any]] = {}
    out = {}
    for number in it.compress(range(len(leaves)), map(operator.not_, chosen)):
        x = leaves[number]
        own = id(x), walk.owner(number) if callable(x) else None
        if own not in known:
            is_array = isinstance(x, (jax.Array, np.ndarray))
            made = _ARRAY if is_array else _codec.encode(x, own[1])
            known[own] = json.dumps(made), made
        out[number] = known[own]
    return out


_ARRAY = {"unknown": ["", "array"]}


class _Recorder:
    def __init__(
        self,
        walk: Walk,
        leaves: Sequence[Any],
        own_types: dict[int, type],
        left_out: dict[int, tuple[str, Any]],
    ):
        self._values = Values(walk.values)
        self._kinds: dict[Kind, int] = {Kind("leaf"): 0}
        self._leaf_kinds = {0}
        self._rows: dict[tuple[int, ...], int] = {(0,): LEAF}
        self._made = [Row(0, (), ())]
        # How many leaves are stored at and below each row.
        self._counts = [1]
        of_leaves = iter(self._rows_of_leaves(leaves, own_types, left_out))
        # In the order of the layers, and from below.
        own_of = {place: row for place, row in zip(walk.order, of_leaves)}
        at = len(walk.order)
        below: list[int] = []
        for layer in reversed(walk.layers):
            rows = [LEAF] * layer.size
            at -= len(layer.leaves)
            for place, number in zip(layer.leaves, it.count(at)):
                rows[place] = own_of[number]
            for group in layer.groups:
                for place, row in zip(group.places, self._rows_of_group(group, below)):
                    rows[place] = row
            below = rows
        self._end(below[0])

    def _end(self, top: int) -> None:
        if top != len(self._made) - 1:  # The tree is the last row.
            self._made.append(self._made[top])
        self.record = TreeRecord(list(self._kinds), self._values.encoded, self._made)

    def _kind(self, kind: Kind) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def _row(self, kind: int, children: Sequence[int], values: Sequence[int]) -> int:
        key = kind, *children, *values
        row = self._rows.setdefault(key, len(self._made))
        if row == len(self._made):
            self._made.append(Row(kind, tuple(children), tuple(values)))
            below = sum(map(self._counts.__getitem__, children))
            self._counts.append(below + (kind in self._leaf_kinds))
        return row

    def _rows_of_group(self, group: Group, below: list[int]) -> list[int]:
        kind, own = group.kind, columns(group, below)
        if not _are_parts_good(kind):
            rows = zip(*own, *group.numbers, strict=True)
            return [self._row_of_named_children(kind, row) for row in rows]
        number, width = self._kind(kind), len(own)
        if not (own or group.numbers):
            return [self._row(number, (), ())] * len(group.places)
        keys = list(zip(*own, *group.numbers))
        rows = {k: self._row(number, k[:width], k[width:]) for k in dict.fromkeys(keys)}
        return list(map(rows.__getitem__, keys))

    def _row_of_named_children(self, kind: Kind, row: Sequence[int]) -> int:
        """The row of a node without the children that have no name of their own. Of
        several of one name that one is kept in which leaves are stored."""
        width = len(kind.parts)
        kept: dict[str, int] = {}
        for place, part in enumerate(kind.parts):
            if BAD not in part and (part not in kept or self._counts[row[place]]):
                kept[part] = place
        labels = [kind.labels[place] for place in kept.values() if kind.labels]
        cls = kind.cls if kind.cls[1] else ("builtins", "dict")
        kind = kind._replace(how="custom", cls=cls, parts=tuple(kept), keys="")
        number = self._kind(kind._replace(labels=tuple(labels)))
        return self._row(number, [row[place] for place in kept.values()], row[width:])

    def _rows_of_leaves(
        self,
        leaves: Sequence[Any],
        own_types: dict[int, type],
        left_out: dict[int, tuple[str, Any]],
    ) -> list[int]:
        out = [LEAF] * len(leaves)
        for number, cls in own_types.items():
            kind = self._kind(Kind("leaf", _named.class_name(cls)))
            self._leaf_kinds.add(kind)
            out[number] = self._row(kind, (), ())
        for number, made in left_out.items():
            x = leaves[number]
            # One that a save stores by default was left out on purpose.
            is_left = not callable(x) and _filters.by_default(x)
            kind = Kind("left" if is_left else "value", data=("",))
            out[number] = self._row(self._kind(kind), (), (self._values.add(*made),))
        return out


@ft.lru_cache(maxsize=4096)
def _are_parts_good(kind: Kind) -> bool:
    """Whether each child of a node has a name of its own."""
    return len({*kind.parts}) == len(kind.parts) and not any(
        BAD in part for part in kind.parts
    )


_PLAIN = tuple(_leaf.PLAIN.values())


@ft.cache
def _comes_back(cls: type) -> bool:
    """Whether what is stored says by itself that a leaf was of this type."""
    is_own = issubclass(cls, _PLAIN) and not issubclass(cls, np.generic)
    return cls in _PLAIN or not is_own
