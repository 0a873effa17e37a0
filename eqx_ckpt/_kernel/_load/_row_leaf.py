"""Reads leaves whose bytes lie row after row in files: rows are read in runs, verified
by the chunks that they are in, and what is wanted of them is picked in memory."""

import itertools as it
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._format import _digests, _grid, _template, _view
from .._format._template import Template
from .._format._view import IndexArray, Picks, Places, View
from .._storage._backend import Backend
from . import _reads
from ._large_leaf import LargeLeaf, PART
from ._reads import ReadState, StoredRead


# Runs that have fewer bytes between them are read as one: on a disk, and in a store,
# which is slow to begin.
_GAP, _FAR_GAP = 4096, 2**18
# What is picked from is read in shorter ones, which the processor still has at hand,
# and in so many runs at most.
_PICKED, _RUNS = 2 * 2**20, 1024
# Memory for more than this is asked for when the files are known to hold it.
_MUCH = 64 * 2**20
# Chunks of so many bytes are few.
_MAPPED = 2**20
# Digests of so many chunks of one file are looked up at once, wanted or not.
_LOOK = 2**14
_DIGEST = np.dtype((np.void, _digests.SIZE))
# Rows along several axes are numbered, if they are not more.
_NUMBERED = 2**20


class _FoundRows(NamedTuple):
    """Rows that are picked of a leaf, and what of each (`inner`). `view`: the number of
    the view that picks them; `index`: the part of its array that they go to."""

    view: int
    index: tuple[int, ...]
    rows: Picks
    inner: Sequence[Picks]


class _Wanted(NamedTuple):
    """The rows of a view, the part that it has of each, and the array of them, whose
    first axis is that of the rows."""

    rows: Picks
    inner: list[Places]
    array: np.ndarray
    is_whole: bool


class _RowPart(NamedTuple):
    """Runs that are read together, and the bytes of each (`spans`). `copies` are of
    `(wanted, to, fro)`: the rows `fro`, counted from the first that is read, go to the
    rows `to` of `wanted.array`, as in the example of `RowLeaf`. `into` is the memory
    that they are read into, if that is of an array."""

    runs: list[tuple[int, int]]
    spans: list[tuple[int, int]]
    copies: list[tuple[_Wanted, Places, Places]]
    into: np.ndarray | None
    is_last: bool

    @property
    def nbytes(self) -> int:
        return _size(self.spans)


class RowLeaf(LargeLeaf[_RowPart]):
    """A leaf that is read in units: each is one row, or the `unit_rows` of a chunk,
    where chunks are verified. In (8, 6) of chunks of (2, 6) a row is 6 numbers, and a
    verified unit is 2 rows.

    To read rows 3 and 4 of it, verified, the run is (1, 3): units 1 and 2, which are
    rows 2 to 5. If a number has 4 bytes, its span is (48, 144). `copies` says that rows
    1 and 2 of these go to rows 0 and 1 of the array.

    A verified unit is a chunk, and has its number.
    """

    def __init__(self, state: ReadState, read: StoredRead, axis: int):
        """A row is all that is along the axes after this one.

        **Raises:** as `Source.check`, if the leaf is verified or large, or if each
        chunk is a file. Else the read finds what is missing.
        """
        super().__init__(state, read)
        self.template = t = read.record.template
        self.is_verified = state.digests is not None
        self.unit_rows = t.chunk[axis] if self.is_verified and t.chunk else 1
        self.row_shape = t.shape[axis + 1 :]
        self.row_bytes = math.prod(self.row_shape) * t.itemsize
        self.row_count = math.prod(t.shape[: axis + 1])
        self.found = [
            one
            for number, view in enumerate(self.views)
            for one in _found(number, view.ranges, t.shape, axis)
        ]
        gap = _FAR_GAP if state.source.root.is_remote else _GAP
        gap //= self.row_bytes * self.unit_rows
        rows = [one.rows for one in self.found if len(one.rows)]
        # Runs of units, each `[start, stop)`.
        self.runs = _joined([_runs(x, self.unit_rows, gap) for x in rows])
        # The chunks to verify, where the runs may have others too; else None.
        self.touched: np.ndarray | None = None
        if self.is_verified and gap:
            touched = [_grid.touched_along(self.unit_rows, x) for x in rows]
            if len(touched) > 1:
                self.touched = np.unique(np.concatenate(touched))
            elif isinstance(touched[0], np.ndarray):
                self.touched = touched[0]
        if self.is_verified or read.nbytes > _MUCH or not state.source.files:
            state.source.check(read.record, self._numbers())

    def _numbers(self) -> Sequence[int]:
        """The chunks that hold the runs, or those of them that are verified."""
        if self.touched is not None:
            return self.touched.tolist()
        size, full = self.row_bytes * self.unit_rows, self.template.full
        found = [(a * size // full, -(-b * size // full)) for a, b in self.runs]
        if len(found) == 1:
            return range(*found[0])
        return sorted({*it.chain.from_iterable(it.starmap(range, found))})

    def _bytes(self, run: tuple[int, int]) -> tuple[int, int]:
        """The bytes `[start, stop)` of a run."""
        size, stop = self.row_bytes * self.unit_rows, self.row_bytes * self.row_count
        return run[0] * size, min(run[1] * size, stop)

    def _parts(self) -> Iterator[_RowPart]:
        self.wanted = [
            _wanted(self.arrays[one.view][one.index], self.row_shape, one)
            for one in self.found
        ]
        is_direct = self.read.conversion is None and all(
            x.is_whole for x in self.wanted
        )
        size = PART if is_direct and len(self.runs) <= len(self.wanted) else _PICKED
        most = min(size, self.state.budget // 4) // (self.row_bytes * self.unit_rows)
        some: list[tuple[int, int]] = []
        room = most = max(1, most)
        for start, last in self.runs:
            while start < last:
                stop = min(last, start + room)
                some.append((start, stop))
                room -= stop - start
                start = stop
                if room == 0 or len(some) == _RUNS:
                    yield self._part(some, stop == self.runs[-1][1])
                    some, room = [], most
        if some:
            yield self._part(some, True)

    def _part(self, runs: list[tuple[int, int]], is_last: bool) -> _RowPart:
        first = runs[0][0] * self.unit_rows
        stop = min(runs[-1][1] * self.unit_rows, self.row_count)
        found = [(x, _view.overlap(x.rows, first, stop)) for x in self.wanted]
        copies = [(x, both.to, both.fro) for x, both in found if both is not None]
        spans, into = list(map(self._bytes, runs)), None
        if len(copies) == 1 and self.read.conversion is None:
            x, to, _ = copies[0]
            if x.is_whole and isinstance(x.rows, range) and x.rows.step > 0:
                # No more than what is wanted is read, in its order.
                if _size(spans) == x.array[to].nbytes:
                    copies, into = [], x.array[to]
        return _RowPart(runs, spans, copies, into, is_last)

    def _reading(self, part: _RowPart) -> Callable[[], np.ndarray]:
        source = self.state.source
        ranges = source.ranges(self.read.record, part.spans)
        fill = _reading_into(source.directory, ranges)

        def read() -> np.ndarray:
            if part.into is None:
                data = self.state.buffer(part.nbytes)
            else:
                data = part.into.reshape(-1).view(np.uint8)
            fill(data)
            return data

        return read

    def _saved_digests(self, part: _RowPart) -> bytes:
        source, record = self.state.source, self.read.record
        low, high = part.runs[0][0], part.runs[-1][1]
        is_one = high <= source.index.extents.segment(record, low).stop
        if not is_one or high - low > _LOOK or self.template.full > _grid.BLOCK:
            every = [source.digests_of(record, range(*run)) for run in part.runs]
            return b"".join(every)
        size, every = _digests.SIZE, source.digests_of(record, range(low, high))
        return b"".join(
            [every[size * (a - low) : size * (b - low)] for a, b in part.runs]
        )

    def _is_good(self, part: _RowPart, data: np.ndarray, digests: bytes) -> bool:
        full, whole = self.template.full, data.data
        # All chunks are as long, but for the last one of the leaf.
        starts: Iterable[int] = range(0, len(whole), full)
        if self.touched is not None:
            # Only those are verified: others were read as they lie between two of them.
            # Each chunk is so small that it has one digest.
            low, high = part.runs[0][0], part.runs[-1][1]
            numbers = self.touched[slice(*self.touched.searchsorted((low, high)))]
            numbers = _offsets_in_runs(part.runs, numbers)
            starts = (numbers * full).tolist()
            digests = np.frombuffer(digests, _DIGEST)[numbers].tobytes()
        # A list of many of them would let Python look for cycles of references.
        chunks = (whole[at : at + full] for at in starts)
        if full <= _grid.BLOCK:
            return b"".join(map(_digests.block_digest, chunks)) == digests
        found = it.chain.from_iterable(map(_digests.block_digests, chunks))
        return b"".join(found) == digests

    def _keep(self, part: _RowPart, data: np.ndarray) -> None:
        if not part.copies:
            return
        dtype = _template.dtype_of(self.template.stored)
        table = data.view(dtype).reshape(-1, *self.row_shape)
        runs = [(a * self.unit_rows, b * self.unit_rows) for a, b in part.runs]
        for x, to, fro in part.copies:
            if len(runs) > 1:
                fro = _offsets_in_runs(runs, _view.numbers(x.rows)[to])
            picked = table[_view.mesh([fro, *x.inner], table.shape)]
            _reads.put(picked, x.array, to, self.read.conversion, self.lost)


def row_leaf(state: ReadState, read: StoredRead) -> RowLeaf | None:
    """The leaf of a read as rows. None where its bytes do not lie row after row, or
    where TensorStore reads it with less work."""
    source, t = state.source, read.record.template
    if t.codec is not None or source.is_scattered(read.record):
        return None
    axis = _grid.cut_axis(t.shape, t.chunk)
    if axis is None:
        return None
    if state.digests is None:
        views = [x for x in read.all_views if 0 not in x.shape]
        axis = _row_axis(views, t, min(PART, state.budget // 4))
    leaf = RowLeaf(state, read, axis)
    return None if _is_mapped(leaf) else leaf


def _is_mapped(leaf: RowLeaf) -> bool:
    """Whether it is less work for TensorStore, which maps local files into memory:
    elements that do not follow each other, in one run of large chunks that are not
    verified."""
    source, (view, *more) = leaf.state.source, leaf.views
    return (
        leaf.template.full >= _MAPPED
        and not (leaf.is_verified or more or view.arrays or source.root.is_remote)
        and len(leaf.runs) == 1
        and _view.as_range(view.ranges, leaf.template.shape) is None
        and not source.is_contiguous(leaf.read.record)
        and source.directory.has_driver()
    )


def _row_axis(views: Sequence[View], t: Template, largest: int) -> int:
    """The axis after which rows of a leaf begin. Not much more is read of them than
    what views have, and none has more bytes than the `largest`."""
    last, shape = len(t.shape) - 1, t.shape
    picks = [view.ranges for view in views]
    if last < 0 or all(_view.as_range(x, shape) is not None for x in picks):
        return last
    for axis in range(last):
        size, below = (math.prod(shape[i:]) * t.itemsize for i in (axis + 1, axis + 2))
        count = max(math.prod(map(len, x[: axis + 2])) for x in picks)
        most = max(_bytes_along(x[axis + 1], below) for x in picks)
        is_good = size <= _GAP or 4 * most > size or count > _NUMBERED
        if is_good and size <= largest:
            return axis
    return last


def _bytes_along(pick: Picks, size: int) -> int:
    """About how many bytes are read for what is picked along an axis, each so large."""
    if isinstance(pick, range) and abs(pick.step) == 1:
        return len(pick) * size + _GAP
    return len(pick) * max(size, _GAP)


def _wanted(array: np.ndarray, row_shape: Sequence[int], found: _FoundRows) -> _Wanted:
    rows, inner = found.rows, found.inner
    table = array.reshape(len(rows), *map(len, inner)) if array.size else array
    is_whole = list(inner) == list(map(range, row_shape))
    return _Wanted(rows, list(map(_view.places, inner)), table, is_whole)


def _found(
    view: int, picks: Sequence[Picks], shape: Sequence[int], axis: int
) -> Iterator[_FoundRows]:
    """Rows that a view picks of a leaf."""
    outer, inner = picks[: axis + 1], picks[axis + 1 :]
    is_empty = not all(map(len, picks))
    rows = range(0) if is_empty else _rows_of(outer, shape[: axis + 1])
    if rows is not None:
        yield _FoundRows(view, (), rows, inner)
        return
    # Those along the last of these axes are many.
    for index in np.ndindex(*map(len, outer[:-1])):
        numbers = [_view.numbers(x)[i].item() for x, i in zip(outer, index)]
        one = [*(range(i, i + 1) for i in numbers), outer[-1]]
        rows = _rows_of(one, shape[: axis + 1])
        assert rows is not None
        yield _FoundRows(view, index, rows, inner)


def _rows_of(picks: Sequence[Picks], shape: Sequence[int]) -> Picks | None:
    """The numbers, in row-major order, of what is picked along the first axes. None for
    very many that are no range."""
    run = _view.as_range(picks, shape)
    if run is not None:
        return run
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = [pick for pick in picks if isinstance(pick, range)]
    many = [i for i, pick in enumerate(picks) if len(pick) > 1]
    if len(many) == 1 and len(ranges) == len(picks):
        pick, first = ranges[many[0]], sum(r[0] * n for r, n in zip(ranges, steps))
        step = pick.step * steps[many[0]]
        return range(first, first + len(pick) * step, step)
    if len(many) > 1 and math.prod(map(len, picks)) > _NUMBERED:
        return None
    numbers = np.zeros((), np.int64)
    for pick, step in zip(picks, steps):
        numbers = np.add.outer(numbers, step * _view.numbers(pick))
    return IndexArray(numbers)


def _runs(rows: Picks, step: int, gap: int) -> list[tuple[int, int]]:
    """Runs of units, of so many rows each, that hold some rows: between two there are
    more units than the `gap`."""
    if isinstance(rows, range):
        rows = rows if rows.step > 0 else rows[::-1]
        if rows.step <= step * (gap + 1):
            return [(rows[0] // step, rows[-1] // step + 1)]
        if rows.step >= step * (gap + 2):
            return [(row // step, row // step + 1) for row in rows]
    units = np.asarray(_grid.touched_along(step, rows))
    ends = np.flatnonzero(np.diff(units) > gap + 1)
    starts, stops = units[np.append(0, ends + 1)], units[np.append(ends, -1)] + 1
    return list(zip(starts.tolist(), stops.tolist()))


def _size(spans: list[tuple[int, int]]) -> int:
    """The bytes of some spans."""
    return sum([stop - start for start, stop in spans])


def _offsets_in_runs(runs: list[tuple[int, int]], numbers: np.ndarray) -> np.ndarray:
    """The places of numbers among those of all runs, which have them."""
    starts = np.asarray([start for start, _ in runs])
    lengths = [stop - start for start, stop in runs]
    moved = starts - [0, *it.accumulate(lengths[:-1])]
    return numbers - moved[starts.searchsorted(numbers, "right") - 1]


def _joined(found: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The units that were found, in runs of which none touches another, in order."""
    if len(found) == 1:
        return found[0]
    out: list[tuple[int, int]] = []
    for start, stop in sorted(it.chain.from_iterable(found)):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def _reading_into(
    root: Backend, ranges: Sequence[tuple[str, int, int]]
) -> Callable[[np.ndarray], None]:
    """A call that reads ranges of files into some memory, one after the other. Requests
    to a store are sent before: the call waits for the answers."""
    values = _reads.start_ranges(root, ranges) if root.is_remote else None

    def read(into: np.ndarray) -> None:
        at = 0
        if values is not None:
            for value in values():
                into[at : at + len(value)] = np.frombuffer(value, np.uint8)
                at += len(value)
            return
        for key, of_file in it.groupby(ranges, key=operator.itemgetter(0)):
            parts = []
            for _, start, stop in of_file:
                parts.append((start, into[at : at + stop - start]))
                at += stop - start
            root.read_parts(key, parts)

    return read
