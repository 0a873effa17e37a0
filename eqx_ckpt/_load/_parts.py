"""Large leaves: read in parts, runs of chunks, which threads verify as they arrive."""

import collections
import concurrent.futures as cf
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import MissingError
from .._format import _digests, _grid, _template, _view
from .._format._grid import Grid
from .._format._leaves import Record
from .._format._template import Template
from .._format._view import View
from .._storage import _arrays, _codecs, _store
from .._storage._backend import Backend
from . import _reader, _source
from ._reader import Reader, ReadResult, Results, StoredRead
from ._source import Source


# Parts have about this many bytes, so that some are verified while others arrive.
_PART = 16 * 2**20
# Unverified views up to this size are read to the byte, where their bytes are in a run.
_RANGES = 64 * 2**20

# Instead of an array: what TensorStore has no driver for is read part by part, into
# memory from which it decodes.
_LATER = object()

# A range of the bytes of a file: its key, from, to (None: its end).
Range = tuple[str, int, int | None]


class _LeafPlan(NamedTuple):
    """The plan for a leaf: these chunks of it, of the `array` that TensorStore has, if
    that takes part. `is_exact`: of the one view and not more than its bytes, which are
    not verified; they are these `ranges` of files, if those follow each other."""

    read: StoredRead
    chunks: Sequence[int] = ()
    is_exact: bool = False
    ranges: list[Range] | None = None
    array: Any = None


class _PendingLeaf(NamedTuple):
    """A leaf under way: the arrays that it is read into, one for each view, and what
    each picks of it. They are there once all `parts` are. `lost` says which values the
    conversion could not keep."""

    read: StoredRead
    picks: list[tuple[range, ...]]
    arrays: list[np.ndarray]
    lost: list[str]
    parts: list[cf.Future[None]]

    def keep(self, to: np.ndarray, part: np.ndarray) -> None:
        conversion = self.read.conversion
        try:
            to[...] = part if conversion is None else conversion.convert(part)
        except ValueError as e:
            self.lost.append(str(e))


class _Part(NamedTuple):
    """A run of chunks, the region that they are, and the memory that it is read into.
    The `keeps` then take what is wanted, where that memory is not what was asked for.
    Until then `held` bytes are under way: what is compressed may be as long again.
    """

    chunks: range
    region: tuple[slice, ...]
    into: np.ndarray
    keeps: list[Callable[[], None]]
    held: int


def read_parts(reader: Reader, reads: list[StoredRead]) -> Results:
    """Reads leaves, the first of them first, and gives those without problems."""
    waiting: collections.deque[_PendingLeaf] = collections.deque()
    for plan in _plans(reader, reads):
        waiting.append(_start_leaf(reader, plan))
        while waiting and all(part.done() for part in waiting[0].parts):
            yield from _finish_leaf(reader, waiting.popleft())
    while waiting:
        yield from _finish_leaf(reader, waiting.popleft())


def _finish_leaf(reader: Reader, leaf: _PendingLeaf) -> Results:
    for part in leaf.parts:
        part.result()
    one, arrays = leaf.read, leaf.arrays
    if one.record.name in reader.problems:
        return
    if one.views is not None:
        arrays = [
            view.arrange(array.reshape(view.picked))
            for view, array in zip(one.views, arrays)
        ]
    yield one, ReadResult(arrays, True, "".join(leaf.lost[:1]))


# ---- The plan.


def _plans(reader: Reader, reads: list[StoredRead]) -> list[_LeafPlan]:
    """A plan for each leaf; the arrays that TensorStore reads are opened together.
    Their files are known to hold them then."""
    source, plans, own = reader.source, [], []
    for one in reads:
        try:
            plan = _plan(reader, one)
        except Exception as e:
            reader.problems[one.record.name] = reader.explain(e)
            continue
        # It decodes the chunks of other formats. All others are bytes of files.
        decodes = source.is_stored(one.record) or source.strides(one.record) is not None
        if plan.ranges is None and (plan.is_exact or decodes):
            own.append(len(plans))
        plans.append(plan)
    if source.directory.has_driver():
        arrays = source.open([(plans[i].read.record, plans[i].chunks) for i in own])
    else:
        arrays = [_LATER] * len(own)
    for i, array in zip(own, arrays):
        plans[i] = plans[i]._replace(array=array)
    return plans


def _plan(reader: Reader, one: StoredRead) -> _LeafPlan:
    """**Raises:** `ValueError` unless the files hold what is read."""
    source, record = reader.source, one.record
    views, is_exact = one.views, False
    if reader.digests is None and views is not None and len(views) == 1:
        ranges = _exact_ranges(source, record, views[0])
        if ranges is not None:
            return _LeafPlan(one, is_exact=True, ranges=ranges)
        in_store = source.root.is_far and source.has_digests
        is_exact = not source.is_run(record) and record.template.codec is None
        is_exact = is_exact and not in_store and source.directory.has_driver()
    chunks = _touched(source.cut(record), views)
    source.check(record, chunks)
    return _LeafPlan(one, chunks, is_exact)


def _touched(t: Template, views: tuple[View, ...] | None) -> Sequence[int]:
    """The numbers of the chunks that hold any of the views of a leaf, in order."""
    if views is None:
        return range(t.chunk_count)
    sets = [
        _grid.touched(t.shape, t.chunk, view.picks)
        for view in views
        if 0 not in view.shape
    ]
    return list(sets[0]) if len(sets) == 1 else sorted(set().union(*sets))


# ---- The parts.


def _start_leaf(reader: Reader, plan: _LeafPlan) -> _PendingLeaf:
    """Starts to read a leaf, whose parts are verified by threads."""
    one, source, pool = plan.read, reader.source, reader.pool
    record, views = one.record, one.views
    t = source.cut(record)
    dtype = _template.dtype_of(t.stored)
    if plan.is_exact:
        assert views is not None
        into = _arrays.aligned(views[0].picked, dtype)
        leaf = _PendingLeaf(one, [], [into], [], [])
        keeps = []
        if one.conversion is not None:
            leaf.arrays[0] = np.empty(into.shape, one.conversion.dtype)
            keeps = [ft.partial(leaf.keep, leaf.arrays[0], into)]
        part = _Part(range(0), (), into, keeps, into.nbytes)
        reader.take_memory(part.held)
        if plan.ranges is None:
            # As threads are free for it.
            start = lambda: _arrays.start_read(plan.array, into, views[0].slices())
            arrived = lambda: start().result()
        else:
            arrived = _start_into(source.directory, plan.ranges, into)
        leaf.parts.append(pool.submit(_finish_part, reader, record, part, arrived))
        return leaf
    if views is None:
        picks = [tuple(map(range, t.shape))]
    else:
        picks = [
            tuple(range(p, p + 1) if isinstance(p, int) else p for p in view.picks)
            for view in views
        ]
    dtype = dtype if one.conversion is None else one.conversion.dtype
    arrays = [_arrays.aligned(tuple(map(len, pick)), dtype) for pick in picks]
    leaf = _PendingLeaf(one, picks, arrays, [], [])
    grid = _source.grid_of(t)
    most = max(1, max(1, min(_PART, reader.budget // 4)) // grid.full)
    if source.strides(record) is not None:
        most = 1  # Chunks that follow each other may lie anywhere.
    for run in _grid.runs(plan.chunks, t.shape, t.chunk, most):
        if leaf.parts and leaf.parts[0].done():
            leaf.parts[0].result()  # A store that does not answer is not asked again.
        part = _part(t, grid, run, leaf)
        reader.take_memory(part.held)
        arrived = _start_part(reader, record, part, plan.array)
        leaf.parts.append(pool.submit(_finish_part, reader, record, part, arrived))
    return leaf


def _start_part(
    reader: Reader, record: Record, part: _Part, array: Any
) -> Callable[[], None]:
    """Starts to read a part: what then waits until it has arrived."""
    if array is _LATER:

        def decode() -> None:
            (opened,) = reader.source.open([(record, part.chunks)])
            _arrays.start_read(opened, part.into, part.region).result()

        return decode
    if array is not None:
        return _arrays.start_read(array, part.into, part.region).result
    source, t = reader.source, record.template
    ranges = _slabs(source, record, part)
    if ranges is not None:
        return _start_into(source.directory, ranges, part.into)
    grid = _source.grid_of(t)
    ranges = [source.where(record, number) for number in part.chunks]
    if source.root.is_far:
        values = _start_ranges(source.directory, ranges)
    else:
        values = ft.partial(
            _read_ranges, reader, ranges, _template.most_encoded(t.full)
        )

    def arrived() -> None:
        keep = _copier(t) if t.codec is None else _codecs.decoder(t)
        for number, data in zip(part.chunks, values(), strict=True):
            region = _grid.within(grid.regions[number], part.region)
            keep(data, part.into[(*region, ...)])

    return arrived


def _finish_part(
    reader: Reader, record: Record, part: _Part, arrived: Callable[[], None]
) -> None:
    problems, digests = reader.problems, None
    try:
        if reader.digests is not None:
            digests = reader.source.digests_of(record, part.chunks)
        try:
            arrived()
            if digests is None or _is_good(record, part, digests):
                for keep in part.keeps:
                    keep()
            else:
                problems.setdefault(record.name, _reader.CHANGED)
        except Exception as e:
            problems.setdefault(record.name, reader.explain(e))
    finally:
        reader.give_memory(part.held)


def _is_good(record: Record, part: _Part, digests: bytes) -> bool:
    grid = _source.grid_of(record.template)
    found = []
    for number in part.chunks:
        region = _grid.within(grid.regions[number], part.region)
        found += _digests.block_digests(_digests.as_bytes(part.into[region]))
    return b"".join(found) == digests


def _part(t: Template, grid: Grid, run: range, leaf: _PendingLeaf) -> _Part:
    region = _grid.box(grid.regions[run.start : run.stop])
    shape = tuple(s.stop - s.start for s in region)
    held = math.prod(shape) * t.itemsize * (1 if t.codec is None else 2)
    wanted = []
    for pick, array in zip(leaf.picks, leaf.arrays):
        overlap = _view.overlaps(pick, region)
        if overlap is not None:
            to, fro = overlap
            wanted.append((array[(*to, ...)], fro))
    if leaf.read.conversion is None and len(wanted) == 1:
        into, fro = wanted[0]
        if into.shape == shape and all(s.step in (None, 1) for s in fro):
            return _Part(run, region, into, [], held)
    into = _arrays.aligned(shape, _template.dtype_of(t.stored))
    keeps = [ft.partial(leaf.keep, to, into[(*fro, ...)]) for to, fro in wanted]
    return _Part(run, region, into, keeps, held)


def _copier(t: Template) -> Callable[[Any, np.ndarray], None]:
    """As `_codecs.decoder`, of chunks that are not compressed."""
    dtype = _template.dtype_of(t.stored)

    def copy(data: Any, into: np.ndarray) -> None:
        chunk = np.frombuffer(data, dtype).reshape(t.chunk)
        into[...] = chunk[tuple(map(slice, into.shape))]

    return copy


# ---- Ranges of files.


def _exact_ranges(source: Source, record: Record, view: View) -> list[Range] | None:
    """Where the bytes of a view lie, if its elements follow each other in chunks."""
    if source.is_stored(record) or source.strides(record) is not None:
        return None
    t = record.template
    run = _view.run(view.picks, t.shape)
    if t.codec is not None or run is None or len(run) * t.itemsize > _RANGES:
        return None
    spans = _grid.spans(t.shape, t.chunk, run.start, run.stop)
    if spans is None:
        return None
    out = []
    for number, first, count in spans:
        key, start, _ = source.where(record, number)
        start += first * t.itemsize
        out.append((key, start, start + count * t.itemsize))
    return out


def _slabs(source: Source, record: Record, part: _Part) -> list[Range] | None:
    """The ranges of files that are the bytes of a part, one after the other; None where
    its chunks have to be decoded or cut."""
    t, into = record.template, part.into
    if source.is_run(record):
        # Its parts are cut so: it has no chunks that could be read instead.
        assert into.flags.c_contiguous
        file, start, _ = source.index.extents.locate(record, 0)
        assert source.files is not None
        first = 0
        for s, n in zip(part.region, t.shape):
            first = first * n + s.start
        start += first * t.itemsize
        return [(source.files[file], start, start + into.nbytes)]
    if t.codec is not None or not into.flags.c_contiguous:
        return None
    if not t.shape or t.chunk[1:] != t.shape[1:]:
        return None
    # The last chunk may be longer than what is left of the leaf.
    row = into.nbytes // max(1, part.region[0].stop - part.region[0].start)
    grid = _source.grid_of(t)
    out = []
    for number in part.chunks:
        key, start, _ = source.where(record, number)
        rows = grid.regions[number][0]
        out.append((key, start, start + row * (rows.stop - rows.start)))
    return out


def _start_into(
    root: Backend, ranges: Sequence[Range], into: np.ndarray
) -> Callable[[], None]:
    """Starts to read ranges of files into an array, one after the other: requests to a
    store are sent now. What it returns waits until all is there."""
    data = into.reshape(-1).view(np.uint8)
    values = _start_ranges(root, ranges) if root.is_far else None

    def arrived() -> None:
        at = 0
        if values is not None:
            for value in values():
                data[at : at + len(value)] = np.frombuffer(value, np.uint8)
                at += len(value)
            return
        for key, first, stop in ranges:
            end = data.size if stop is None else at + stop - first
            if root.read_into(key, first, data[at:end]) < end - at:
                raise MissingError("a chunk is missing")
            at = end

    return arrived


def _start_ranges(
    root: Backend, ranges: Sequence[Range]
) -> Callable[[], Iterator[memoryview]]:
    """Starts to read ranges of files, those that follow each other as one. What it
    returns waits for them, and gives the bytes of each in order."""
    runs: list[list[Range]] = []
    for one in ranges:
        if runs and runs[-1][-1][0] == one[0] and runs[-1][-1][2] == one[1]:
            runs[-1].append(one)
        else:
            runs.append([one])
    futures = [root.start_read(*run[0][:2], run[-1][2]) for run in runs]

    def values() -> Iterator[memoryview]:
        for run, future in zip(runs, futures):
            got = _store.read_answer(root, run[0][0], future)
            if got.state == "missing":
                raise MissingError("a chunk is missing")
            value = memoryview(got.value)
            first = run[0][1]
            for _, at, stop in run:
                if stop is not None and len(value) < stop - first:
                    raise MissingError("a chunk is missing")
                yield value[at - first : None if stop is None else stop - first]

    return values


def _read_ranges(
    reader: Reader, ranges: Sequence[Range], most: int
) -> Iterator[np.ndarray]:
    """The bytes of ranges of local files, of about so many at most, in memory that the
    next ones take: that of each thread is not new to the system, which would fill it
    with zeros."""
    own = reader.own
    for key, start, stop in ranges:
        if stop is None:
            raise MissingError("a chunk is missing")
        size = stop - start
        buffer = getattr(own, "buffer", None)
        if buffer is None or buffer.size < size:
            # Chunks differ a little in length.
            buffer = own.buffer = np.empty(max(size, most), np.uint8)
        into = buffer[:size]
        if reader.source.directory.read_into(key, start, into) < size:
            raise MissingError("a chunk is missing")
        yield into
