"""Large leaves: read in parts, runs of chunks, which threads verify as they arrive."""

import collections
import concurrent.futures as cf
import functools as ft
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import MissingError
from .._format import _digests, _grid, _template, _view
from .._format._grid import Grid
from .._format._leaves import Record
from .._format._template import Template
from .._format._view import View
from .._storage import _arrays, _codecs
from .._tree._restore import Conversion
from . import _ranges, _requests, _source
from ._ranges import Range
from ._requests import Fetched, Reading, Request, Results
from ._source import Source


# Parts have about this many bytes, so that some are verified while others arrive.
_PART = 16 * 2**20
# Unverified views up to this size are read to the byte, where their bytes are in a run.
_RANGES = 64 * 2**20


class _Plan(NamedTuple):
    """How a leaf is read: these chunks of it, of the `array` that TensorStore has, if
    that takes part. `is_exact`: of the one view and not more than its bytes, which are
    not verified; they are these `ranges` of files, if those follow each other."""

    request: Request
    chunks: Sequence[int] = ()
    is_exact: bool = False
    ranges: list[Range] | None = None
    array: Any = None


class _Started(NamedTuple):
    """A leaf on its way: its arrays are there once all parts of it are."""

    request: Request
    arrays: Callable[[], Fetched]
    parts: list[cf.Future[None]]


def read(reading: Reading, requests: list[Request]) -> Results:
    """Reads leaves, the first of them first, and gives those without problems."""
    plans = _plans(reading, requests)
    waiting: collections.deque[_Started] = collections.deque()
    # Chunks are decoded by threads of TensorStore, for which these wait.
    is_waiting = any(r.record.template.codec is not None for r in requests)
    threads = (os.cpu_count() or 1) * (2 if is_waiting else 1)
    with cf.ThreadPoolExecutor(min(8, threads)) as pool:
        reader = _PartReader(reading, pool)
        for plan in plans:
            waiting.append(reader.start(plan))
            while waiting and all(part.done() for part in waiting[0].parts):
                yield from _finish(reading, waiting.popleft())
        while waiting:
            yield from _finish(reading, waiting.popleft())


def _finish(reading: Reading, started: _Started) -> Results:
    for part in started.parts:
        part.result()
    if started.request.record.name not in reading.problems:
        yield started.request, started.arrays()


# ---- The plan.


def _plans(reading: Reading, requests: list[Request]) -> list[_Plan]:
    """How each leaf is read; the arrays that TensorStore reads are opened together.
    Their files are known to hold them then."""
    source = reading.source
    plans = []
    for request in requests:
        try:
            plans.append(_plan(reading, request))
        except Exception as e:
            reading.problems[request.record.name] = reading.explain(e)
    own = [i for i, plan in enumerate(plans) if _needs_array(source, plan)]
    arrays = source.open([(plans[i].request.record, plans[i].chunks) for i in own])
    for i, array in zip(own, arrays):
        plans[i] = plans[i]._replace(array=array)
    return plans


def _plan(reading: Reading, request: Request) -> _Plan:
    """**Raises:** `ValueError` unless the files hold what is read."""
    source, record = reading.source, request.record
    views, is_exact = request.views, False
    if reading.digests is None and views is not None and len(views) == 1:
        ranges = _exact_ranges(source, record, views[0])
        if ranges is not None:
            return _Plan(request, is_exact=True, ranges=ranges)
        in_store = source.root.is_far and source.has_digests
        is_exact = not source.is_run(record) and record.template.codec is None
        is_exact = is_exact and not in_store
    chunks = _touched(source.cut(record), views)
    source.check(record, chunks)
    return _Plan(request, chunks, is_exact)


def _needs_array(source: Source, plan: _Plan) -> bool:
    if plan.is_exact:
        return plan.ranges is None
    return not _is_direct(source, plan.request.record)


def _is_direct(source: Source, record: Record) -> bool:
    """Whether chunks are read here, as bytes of files. TensorStore reads those of other
    formats that it has to decode."""
    return not source.is_stored(record) and source.strides(record) is None


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


# ---- The parts.


class _Room:
    """Memory that a number of reads share: one waits until there is enough for it."""

    def __init__(self, size: int):
        self._size = size
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._used == 0 or self._used + size <= self._size
            )
            self._used += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify()


class _Output(NamedTuple):
    """The arrays that a leaf is read into, one for each view, and what each picks of
    the leaf. `lost` says which values the conversion could not keep."""

    picks: list[tuple[range, ...]]
    arrays: list[np.ndarray]
    conversion: Conversion | None
    lost: list[str]

    def keep(self, to: np.ndarray, part: np.ndarray) -> None:
        try:
            to[...] = part if self.conversion is None else self.conversion.convert(part)
        except ValueError as e:
            self.lost.append(str(e))

    def result(self, views: tuple[View, ...] | None) -> Fetched:
        arrays = self.arrays
        if views is not None:
            arrays = [
                view.arrange(array.reshape(view.picked))
                for view, array in zip(views, arrays)
            ]
        return Fetched(
            arrays, True, self.conversion is not None, "".join(self.lost[:1])
        )


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


class _PartReader:
    """Starts to read leaves, and verifies their parts in a pool of threads."""

    def __init__(self, reading: Reading, pool: cf.ThreadPoolExecutor):
        self._reading = reading
        self._source = reading.source
        self._room = _Room(reading.budget)
        self._part = max(1, min(_PART, reading.budget // 4))
        self._pool = pool
        self._own = threading.local()

    def start(self, plan: _Plan) -> _Started:
        request = plan.request
        if plan.is_exact:
            return self._start_exact(plan)
        t = self._source.cut(request.record)
        grid = _source.grid_of(t)
        output = _output(request, t)
        futures = []
        most = max(1, self._part // grid.full)
        if self._source.strides(request.record) is not None:
            most = 1  # Chunks that follow each other may lie anywhere.
        for run in _grid.runs(plan.chunks, t.shape, t.chunk, most):
            if futures and futures[0].done():
                futures[0].result()  # A store that does not answer is not asked again.
            part = _part(t, grid, run, output)
            self._room.take(part.held)
            arrived = self._start_part(request.record, part, plan.array)
            futures.append(
                self._pool.submit(self._finish, request.record, part, arrived)
            )
        return _Started(request, ft.partial(output.result, request.views), futures)

    def _start_exact(self, plan: _Plan) -> _Started:
        record, views = plan.request.record, plan.request.views
        assert views is not None
        view = views[0]
        into = _arrays.aligned(view.picked, _template.dtype_of(record.template.stored))
        self._room.take(into.nbytes)

        if plan.ranges is None:
            read = lambda: _arrays.start_read(plan.array, into, view.slices())
            arrived = lambda: read().result()
        else:
            directory = self._source.directory
            arrived = _ranges.start_into(directory, plan.ranges, into)
        part = _Part(range(0), (), into, [], into.nbytes)
        future = self._pool.submit(self._finish, record, part, arrived)
        return _Started(
            plan.request, lambda: Fetched([view.arrange(into)], True), [future]
        )

    def _start_part(
        self, record: Record, part: _Part, array: Any
    ) -> Callable[[], None]:
        """Starts to read a part: what then waits until it has arrived."""
        if array is not None:
            return _arrays.start_read(array, part.into, part.region).result
        source, t = self._source, record.template
        ranges = _slabs(source, record, part)
        if ranges is not None:
            return _ranges.start_into(source.directory, ranges, part.into)
        grid = _source.grid_of(t)
        ranges = [source.where(record, number) for number in part.chunks]
        if source.root.is_far:
            values = _ranges.start(source.directory, ranges)
        else:
            values = ft.partial(self._read, ranges, _template.most_encoded(t.full))

        def arrived() -> None:
            keep = _copier(t) if t.codec is None else _codecs.decoder(t)
            for number, data in zip(part.chunks, values(), strict=True):
                region = _grid.within(grid.regions[number], part.region)
                keep(data, part.into[(*region, ...)])

        return arrived

    def _read(self, ranges: Sequence[Range], most: int) -> Iterator[np.ndarray]:
        """The bytes of ranges of local files, of about so many at most, in memory that
        the next ones take: that of each thread is not new to the system, which would
        fill it with zeros."""
        for key, start, stop in ranges:
            if stop is None:
                raise MissingError("a chunk is missing")
            size = stop - start
            buffer = getattr(self._own, "buffer", None)
            if buffer is None or buffer.size < size:
                # Chunks differ a little in length.
                new = np.empty(max(size, most), np.uint8)
                buffer = self._own.buffer = new
            into = buffer[:size]
            if self._source.directory.read_into(key, start, into) < size:
                raise MissingError("a chunk is missing")
            yield into

    def _finish(self, record: Record, part: _Part, arrived: Callable[[], None]) -> None:
        problems, digests = self._reading.problems, None
        try:
            if self._reading.digests is not None:
                digests = self._source.digests_of(record, part.chunks)
            try:
                arrived()
                if digests is None or self._is_good(record, part, digests):
                    for keep in part.keeps:
                        keep()
                else:
                    problems.setdefault(record.name, _requests.CHANGED)
            except Exception as e:
                problems.setdefault(record.name, self._reading.explain(e))
        finally:
            self._room.give(part.held)

    def _is_good(self, record: Record, part: _Part, digests: bytes) -> bool:
        grid = _source.grid_of(record.template)
        found = []
        for number in part.chunks:
            region = _grid.within(grid.regions[number], part.region)
            found += _digests.block_digests(_digests.as_bytes(part.into[region]))
        return b"".join(found) == digests


def _slabs(source: Source, record: Record, part: _Part) -> list[Range] | None:
    """The ranges of files that are the bytes of a part, one after the other; None where
    its chunks have to be decoded or cut."""
    t, into = record.template, part.into
    if source.is_run(record):
        # Its parts are cut so: it has no chunks that could be read instead.
        assert into.flags.c_contiguous
        file, start = source.index.start(record.place)
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


def _output(request: Request, t: Template) -> _Output:
    conversion = request.conversion
    dtype = _template.dtype_of(t.stored) if conversion is None else conversion.dtype
    if request.views is None:
        picks = [tuple(map(range, t.shape))]
    else:
        picks = [tuple(map(_as_range, view.picks)) for view in request.views]
    arrays = [_arrays.aligned(tuple(map(len, p)), dtype) for p in picks]
    return _Output(picks, arrays, conversion, [])


def _part(t: Template, grid: Grid, run: range, output: _Output) -> _Part:
    first, last = grid.regions[run[0]], grid.regions[run[-1]]
    region = tuple(slice(a.start, b.stop) for a, b in zip(first, last))
    shape = tuple(s.stop - s.start for s in region)
    held = math.prod(shape) * t.itemsize * (1 if t.codec is None else 2)
    wanted = []
    for pick, array in zip(output.picks, output.arrays):
        overlaps = [_view.overlap(p, s.start, s.stop) for p, s in zip(pick, region)]
        if None not in overlaps:
            to, fro = zip(*overlaps) if overlaps else ((), ())
            wanted.append((array[(*to, ...)], fro))
    if output.conversion is None and len(wanted) == 1:
        into, fro = wanted[0]
        if into.shape == shape and all(s.step in (None, 1) for s in fro):
            return _Part(run, region, into, [], held)
    into = _arrays.aligned(shape, _template.dtype_of(t.stored))
    keeps = [ft.partial(output.keep, to, into[(*fro, ...)]) for to, fro in wanted]
    return _Part(run, region, into, keeps, held)


def _as_range(pick: range | int) -> range:
    return range(pick, pick + 1) if isinstance(pick, int) else pick


def _copier(t: Template) -> Callable[[Any, np.ndarray], None]:
    """As `_codecs.decoder`, of chunks that are not compressed."""
    dtype = _template.dtype_of(t.stored)

    def copy(data: Any, into: np.ndarray) -> None:
        chunk = np.frombuffer(data, dtype).reshape(t.chunk)
        into[...] = chunk[tuple(map(slice, into.shape))]

    return copy
