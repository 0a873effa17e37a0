"""The static values of a walk: each encoded once, and whether another tree has them."""

import json
import operator
from collections.abc import Sequence
from typing import Any

from . import _codec, _identity
from ._opening import Default, Encoded, MISSING


# In the place of a value that may change unseen, hold arrays, or lose its name. It is
# encoded again whenever another tree is compared with the walk.
_UNKEPT = object()
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, object))


def _is_atom(x: Any) -> bool:
    """Whether a value stays what it is, and holds nothing."""
    cls = type(x)
    if cls is tuple:
        return all(map(_is_atom, x))
    return cls in _ATOMS or cls is Encoded or x is MISSING


class Values:
    """Encoded values, each of which has one number."""

    def __init__(self, other: "Values | None" = None):
        self.encoded: list[Any] = [] if other is None else list(other.encoded)
        self.numbers: dict[str, int] = {} if other is None else dict(other.numbers)

    def add(self, text: str, made: object) -> int:
        """The number of an encoded value, whose JSON is this text."""
        number = self.numbers.setdefault(text, len(self.encoded))
        if number == len(self.encoded):
            self.encoded.append(made)
        return number


class Statics:
    """The static values of a tree, while it is walked."""

    def __init__(self, values: Values):
        self._values = values
        # By kind and class of the nodes: a default of one class is none of another.
        self._known: dict[tuple[str, type], dict[int, tuple[int, bool]]] = {}
        self._alive: list[Any] = []  # While an `id` stands for each value.
        self._markers: dict[int, int] = {}

    def column(
        self, values: list[Any], how: str, owner: type
    ) -> tuple[list[int], list[Any]]:
        """The numbers of values, and what is kept of each."""
        known = self._known.setdefault((how, owner), {})
        ids = list(map(id, values))
        if not known.keys() >= {*ids}:
            self._alive.append(values)
            for i, x in zip(ids, values):
                if i not in known:
                    made = encode(x, how, owner, self._markers)
                    known[i] = self._values.add(json.dumps(made), made), _is_atom(x)
        rows = list(map(known.__getitem__, ids))
        numbers = [number for number, _ in rows]
        if all(map(operator.itemgetter(1), {*rows})):
            return numbers, values
        return numbers, [x if good else _UNKEPT for x, (_, good) in zip(values, rows)]


def encode(x: Any, how: str, owner: type, markers: dict[int, int]) -> Any:
    """A static value of a node of some kind and class. `markers` numbers objects that
    are the markers of StateIndices."""
    if how == "state":
        return {"markers": [_marker(y, markers) for y in x]}
    if how == "index":
        return {"markers": [_marker(x, markers)]}
    if x is MISSING:
        return {"absent": []}
    if type(x) is Encoded:
        return x.value
    if type(x) is Default:
        return {"absent": [_codec.encode(x.value, owner)]}
    return _codec.encode(x, owner)


def _marker(marker: object, markers: dict[int, int]) -> str | int:
    if type(marker) is Encoded:
        return marker.value
    if isinstance(marker, str):
        return "=" + marker
    return markers.setdefault(id(marker), len(markers))


class Likeness:
    """Compares the static values of another tree with those of a walk."""

    def __init__(self, values: Values):
        self._numbers = values.numbers
        self._known: dict[tuple[str, type], dict[int, tuple[int, Any]]] = {}
        self._markers: dict[int, int] = {}

    def is_same(
        self,
        column: Sequence[Any],
        kept: Sequence[Any],
        numbers: Sequence[int],
        how: str,
        cls: type,
    ) -> bool:
        if all(map(operator.is_, column, kept)):
            return True
        known = self._known.setdefault((how, cls), {})
        for x, old, number in zip(column, kept, numbers):
            if x is old:
                continue
            if old is not _UNKEPT:
                if not _identity.is_same(x, old):
                    return False
                continue
            if id(x) not in known:
                text = json.dumps(encode(x, how, cls, self._markers))
                known[id(x)] = self._numbers.get(text, -1), x
            if known[id(x)][0] != number:
                return False
        return True
