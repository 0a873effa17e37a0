"""Columns as text: the numbers and the names of many leaves, which are not parsed one
by one. See FORMAT.md, "Columns".
"""

import base64
import binascii
import bisect
import functools as ft
import itertools as it
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from .._errors import DamagedError
from . import _json
from ._json import BLOCK, blocks


# Checkpoints of more leaves, or of more chunks, have columns.
MOST_LEAVES, MOST_CHUNKS = 20_000, 200_000
# So many names are looked for in their order; for more of them a dict is made.
_FEW = 1000

_SPACE = ord(" ")
_TWINS = "the index has two leaves of one name"


def encode(numbers: Sequence[int] | np.ndarray) -> str:
    """The text of numbers below 2^32."""
    return base64.b64encode(np.asarray(numbers, "<u4").tobytes()).decode()


def decode(text: str | memoryview) -> np.ndarray:
    """The inverse of `encode`. **Raises:** `ValueError`."""
    try:
        numbers = np.frombuffer(binascii.a2b_base64(text, strict_mode=True), "<u4")
    except ValueError:
        raise ValueError("the index has a malformed column") from None
    return numbers.astype(np.uint32, copy=False)


# Where columns begin in an index, and one that is a text.
_START, _FIELD = b'"columns":{', re.compile(rb'"[a-z]+":"')
# Shorter texts are soon parsed; and there are fewer long ones.
_LONG, _MOST = 4096, 8


def parse(data: bytes) -> dict[str, Any]:
    """The JSON of an index, in which long columns stay bytes of `data`.

    **Raises:** `ValueError` if it is not JSON.
    """
    cuts = _cuts(data)
    if cuts:
        value = _json.parse_cut(data, cuts)
        columns = value.get("columns")
        texts = columns.values() if type(columns) is dict else ()
        # Else it is in the metadata that there are such columns.
        if sum(type(text) is memoryview for text in texts) == len(cuts):
            return value
    return _json.parse(data, encoding="ascii")


def _cuts(data: bytes) -> list[slice]:
    """Where long columns are whose letters stand for themselves."""
    at = data.find(_START) + len(_START)
    cuts: list[slice] = []
    while at >= len(_START) and len(cuts) < _MOST:
        field = _FIELD.match(data, at)
        stop = -1 if field is None else data.find(b'"', field.end())
        if field is None or stop < 0:
            break
        cut = slice(field.end(), stop)
        if stop - field.end() >= _LONG:
            text = np.frombuffer(data, np.uint8)[cut]
            has_escape = data.find(b"\\", cut.start, cut.stop) >= 0
            if has_escape or text.min() < _SPACE or text.max() > 126:
                break
            cuts.append(cut)
        at = stop + 2
    return cuts


class NameTable(Sequence[str]):
    """Names in one text, with spaces between them. `order` has their places in the
    order of their bytes, so that one of them is found without a look at the others."""

    def __init__(self, text: bytes | memoryview, order: np.ndarray):
        self._text, self._order = np.frombuffer(text, np.uint8), order
        if self._text.size and self._text.max() > 127:
            raise ValueError("the index has a malformed column")
        counts = [int(np.count_nonzero(x == _SPACE)) for x in blocks(self._text)]
        # The spaces before each block of the text.
        self._before = [0, *it.accumulate(counts)]
        self._spaces: dict[int, np.ndarray] = {}
        self._count = self._before[-1] + 1 if self._text.size else 0
        if len(order) != self._count:
            raise ValueError("the columns of the index differ in length")
        is_there = np.zeros(self._count, bool)
        is_there[order[order < self._count]] = True
        if not is_there.all():
            raise ValueError("the index has a malformed column")

    def _stop(self, place: int) -> int:
        """Where a name ends in the text."""
        if place == self._count - 1:
            return self._text.size
        number = bisect.bisect_right(self._before, place) - 1
        spaces = self._spaces.get(number)
        if spaces is None:
            start = number * BLOCK
            block = self._text[start : start + BLOCK]
            spaces = start + np.flatnonzero(block == _SPACE)
            self._spaces[number] = spaces
        return spaces.item(place - self._before[number])

    @ft.cached_property
    def _all(self) -> list[str]:
        text = self._text.tobytes().decode("ascii")
        names = text.split(" ") if text else []
        ordered = [names[place] for place in self._order.tolist()]
        if not all(map(operator.le, ordered, ordered[1:])):
            raise DamagedError("The index has names that are not in their order.")
        return names

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice) or "_all" in self.__dict__:
            return self._all[index]
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError("there are fewer names")
        start = self._stop(place - 1) + 1 if place else 0
        return self._text[start : self._stop(place)].tobytes().decode("ascii")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def find(self, name: str) -> int | None:
        """The place of a name, by halves of their order."""
        nth = lambda number: self[int(self._order[number])]
        number = bisect.bisect_left(range(self._count), name, key=nth)
        if number == self._count or nth(number) != name:
            return None
        if number + 1 < self._count and nth(number + 1) == name:
            raise ValueError(_TWINS)
        return int(self._order[number])


class Places(Mapping[str, int]):
    """The places of names. Two of one name are an error once all of them are looked at.

    **Raises:** `ValueError`.
    """

    def __init__(self, names: NameTable):
        self._names = names
        self._asked = 0

    @ft.cached_property
    def _all(self) -> dict[str, int]:
        return numbered(self._names)

    def __getitem__(self, name: object) -> int:
        if not isinstance(name, str):
            raise KeyError(name)
        if self._asked >= _FEW:
            return self._all[name]
        self._asked += 1
        place = self._names.find(name)
        if place is None:
            raise KeyError(name)
        return place

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._names)

    def items(self):
        return self._all.items()


def numbered(names: Sequence[str]) -> dict[str, int]:
    """The places of names. **Raises:** `ValueError` for two of one name."""
    out = dict(zip(names, range(len(names))))
    if len(out) != len(names):
        raise ValueError(_TWINS)
    return out
