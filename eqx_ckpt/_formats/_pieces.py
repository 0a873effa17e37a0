"""Arrays of other formats that lie in pieces of files, and steps along their axes."""

import math
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._kernel._errors import MissingError
from .._kernel._format import _grid
from .._kernel._format._template import Template
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend


# Of a piece about so many bytes are read together.
_READ_BYTES = 2**22


class Piece(NamedTuple):
    """A run of bytes of a file that has a box of an array.

    - `key`, `offset`: the file, and the byte that it begins at.
    - `start`, `shape`: the box.
    - `strides`: how many elements apart its elements lie along each axis; None if row
      after row.
    """

    key: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class PiecedArray(NamedTuple):
    """An array that lies in pieces, each element in one of them. With `is_packed` two
    elements share a byte, the first in its lower four bits."""

    template: Template
    pieces: list[Piece]
    is_packed: bool = False

    def stop(self, piece: Piece) -> int:
        """The byte that a piece ends at."""
        count = span(piece.shape, piece.strides or strides_of(piece.shape))
        nbytes = count * self.template.itemsize
        return piece.offset + (-(-nbytes // 2) if self.is_packed else nbytes)


class OpenedPieces(NamedTuple):
    """An array that lies in pieces, and the directory that has the files of these."""

    array: PiecedArray
    root: Backend

    def start_read(self, into: np.ndarray, picks: tuple[slice | int, ...]) -> Any:
        """A future of the read of `self[picks]` into an array of its shape. It is
        always done, and only its `result` reads. Stores give that a timeout, which is
        not needed here."""
        read = lambda timeout=None: self.read(into, picks)
        return types.SimpleNamespace(done=lambda: True, result=read)

    def read(self, into: np.ndarray, picks: tuple[slice | int, ...]) -> None:
        """Reads `self[picks]` in runs of about `_READ_BYTES`, each with all that lies
        between its first picked element and its last."""
        axes = [
            range(n)[p] if isinstance(p, slice) else range(p, p + 1)
            for n, p in zip(self.array.template.shape, picks)
        ]
        into = into.reshape([len(axis) for axis in axes])
        for piece in self.array.pieces:
            there = list(map(_places_in, axes, piece.start, piece.shape))
            if not all(there):
                continue
            # Without `...` the index of an array without axes would give a copy.
            to = into[(*(slice(x[0], x[-1] + 1) for x in there), ...)]
            first = [axis[x[0]] - a for axis, x, a in zip(axes, there, piece.start)]
            self._read_piece(piece, first, [axis.step for axis in axes], to)

    def _read_piece(
        self, piece: Piece, first: Sequence[int], steps: Sequence[int], into: np.ndarray
    ) -> None:
        """Reads the elements of a piece from `first` on, in these steps along each
        axis."""
        strides = piece.strides or strides_of(piece.shape)
        # An axis with a negative step is read upwards, into memory that is flipped
        # along it.
        down = tuple(axis for axis, step in enumerate(steps) if step < 0)
        lowest = [
            a + min(0, (n - 1) * step) for a, n, step in zip(first, into.shape, steps)
        ]
        apart = [abs(step) * stride for step, stride in zip(steps, strides)]
        into = np.flip(into, down) if down else into
        block = choose_strided(into.shape, apart, into.itemsize, _READ_BYTES)
        for index in _grid.indices(into.shape, block):
            part = _grid.region(into.shape, block, index)
            begin = sum(
                (low + s.start * abs(step)) * stride
                for low, s, step, stride in zip(lowest, part, steps, strides)
            )
            self._read_run(piece, begin, apart, into[(*part, ...)])

    def _read_run(
        self, piece: Piece, begin: int, strides: Sequence[int], into: np.ndarray
    ) -> None:
        """Reads a run of a piece, from its element number `begin` on. Into `into` go
        the elements that lie `strides` apart along each axis. Of two that share a byte,
        the first is in its lower half."""
        root, key, start = self.root, piece.key, piece.offset
        count = span(into.shape, strides)
        if self.array.is_packed:
            stop = start + (begin + count + 1) // 2
            data = _store.read_bytes(root, key, start + begin // 2, stop)
            both = np.frombuffer(data, np.uint8)[:, None]
            both = both >> np.array([0, 4], np.uint8) & 15
            whole = both.reshape(-1)[begin % 2 :][:count].view(into.dtype)
        else:
            whole = np.empty(count, into.dtype)
            start += begin * into.itemsize
            if root.read_into(key, start, whole.view(np.uint8)) < whole.nbytes:
                raise MissingError(f"the end of `{key}` is missing")
        steps = [stride * into.itemsize for stride in strides]
        into[...] = np.ndarray(into.shape, into.dtype, whole, strides=steps)


def _places_in(axis: range, start: int, length: int) -> range:
    """The places, among the indices that are picked along an axis, of those that lie in
    a piece."""
    ends = start, start + length
    if axis.step < 0:
        ends = start + length - 1, start - 1
    # How many indices come before each end.
    before = [-((axis.start - end) // axis.step) for end in ends]
    begin, stop = (min(max(n, 0), len(axis)) for n in before)
    return range(begin, stop)


# ---- Steps along the axes of arrays.


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last one of an array that has
    them so many elements apart along each axis."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))


def choose_strided(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, target: int
) -> tuple[int, ...]:
    """The shape of the chunks in which an array is read whose elements lie `strides`
    apart. A chunk has at most about `target` bytes, and so has all that lies from its
    first element to its last. The axis with the longest steps is cut first."""
    chunk = [max(1, n) for n in shape]
    target //= itemsize
    for axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        if max(span(chunk, strides), math.prod(chunk)) <= target:
            break
        chunk[axis] = 1
        rest, size = span(chunk, strides), math.prod(chunk)
        most = min(1 + (target - rest) // max(1, strides[axis]), target // size)
        chunk[axis] = max(1, min(shape[axis], most))
    return tuple(chunk)


def strides_of(shape: Sequence[int]) -> list[int]:
    """The steps along each axis, in elements, of an array that lies row after row."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
