"""Columns as text: the numbers and the names of many leaves, which are not parsed one
by one. See FORMAT.md, "Columns".
"""

import base64
import binascii
import functools as ft
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np


# Checkpoints of more leaves, or of more chunks, have columns.
MOST_LEAVES, MOST_CHUNKS = 20_000, 200_000
# So many names are looked for in their order; for more of them a dict is made.
_FEW = 1000

_SPACE = ord(" ")
_TWINS = "the index has two leaves of one name"


def needed(leaves: int, chunks: int) -> bool:
    """Whether the index of a save has columns."""
    return leaves > MOST_LEAVES or chunks > MOST_CHUNKS


def encode(numbers: Sequence[int] | np.ndarray) -> str:
    """The text of numbers below 2^32."""
    return base64.b64encode(np.asarray(numbers, "<u4").tobytes()).decode()


def decode(text: str) -> np.ndarray:
    """The inverse of `encode`. **Raises:** `ValueError`."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise ValueError("the index has a malformed column") from None
    if len(data) % 4:
        raise ValueError("the index has a malformed column")
    return np.frombuffer(data, "<u4").astype(np.uint32, copy=False)


class Names(Sequence[str]):
    """Names in one text, with spaces between them. `order` has their places in the
    order of their bytes, so that one of them is found without a look at the others."""

    def __init__(self, text: str, order: np.ndarray):
        if not text.isascii():
            raise ValueError("the index has a malformed column")
        self._text, self._order = text, order
        self._count = text.count(" ") + 1 if text else 0
        if len(order) != self._count:
            raise ValueError("the columns of the index differ in length")
        if self._count and order.max() >= self._count:
            raise ValueError("the index has a malformed column")

    @ft.cached_property
    def _stops(self) -> np.ndarray:
        data = np.frombuffer(self._text.encode("ascii"), np.uint8)
        return np.append(np.flatnonzero(data == _SPACE), len(data))

    @ft.cached_property
    def _all(self) -> list[str]:
        return self._text.split(" ") if self._text else []

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
        start = int(self._stops[place - 1]) + 1 if place else 0
        return self._text[start : int(self._stops[place])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def find(self, name: str) -> int | None:
        """The place of a name, by halves of their order."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self[int(self._order[middle])] < name:
                low = middle + 1
            else:
                high = middle
        if low == self._count:
            return None
        place = int(self._order[low])
        if self[place] != name:
            return None
        if low + 1 < self._count and self[int(self._order[low + 1])] == name:
            raise ValueError(_TWINS)
        return place


class Places(Mapping[str, int]):
    """The places of names. Two of one name are an error once all of them are looked at.

    **Raises:** `ValueError`.
    """

    def __init__(self, names: Names):
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
