"""The planned read: small leaves in runs, large ones in slabs, all verified."""

import collections
import concurrent.futures as cf
import functools as ft
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import xxhash

from .._errors import DamagedError, MissingError, ReplacedError
from .._format import _digests, _grid, _template, _text, _view
from .._format._grid import Grid
from .._format._leaves import Record
from .._format._template import Template
from .._format._view import View
from .._storage import _arrays, _root, _store
from .._storage._root import Root
from .._tree._restore import Conversion
from . import _source
from ._source import Source


# Leaves of one chunk up to this many bytes are read in runs, where they lie together.
_SMALL = 1 << 16
_RUN, _GAP = 8 * 2**20, 4096
# Large leaves are read in parts of about this many bytes, so that some are verified
# while others arrive; together they are at most so many, unless the caller says so.
_PART, _BUDGET = 16 * 2**20, 256 * 2**20
# Unverified views up to this size are read to the byte, where their bytes are in a run.
_RANGES = 64 * 2**20


class Request(NamedTuple):
    """A stored array, or views of it, each of which becomes an array of its own.

    `conversion` is for what is read in parts; what is small comes as it is stored.
    """

    record: Record
    views: tuple[View, ...] | None = None
    conversion: Conversion | None = None


class Result(NamedTuple):
    """`owned`: the memory is the caller's alone, and may be written to."""

    arrays: list[np.ndarray]
    owned: bool
    converted: bool


def read(
    source: Source,
    requests: Sequence[Request],
    verify: bool,
    done: Callable[[int, Result], None],
    max_bytes: int | None = None,
) -> None:
    """Reads stored arrays, or views of them, each byte once, and calls `done` with the
    number of the request for each that has arrived, in the thread of the caller.

    **Raises:** `DamagedError` that names every leaf whose bytes are missing or are not
    those that were saved.
    """
    budget = _BUDGET if max_bytes is None else max_bytes
    verify = verify and source.has_digests
    small: list[int] = []
    large: list[int] = []
    # From an object store, what is one block is read in runs too.
    is_far = source.root.local is None
    for i, (record, views, _) in enumerate(requests):
        t = record.template
        most = _grid.BLOCK if is_far and (verify or views is None) else _SMALL
        is_small = t.chunk == t.shape and t.nbytes <= most and t.codec is None
        if is_small and not source.is_stored(record):
            small.append(i)
        elif 0 in t.shape or (views and all(0 in view.shape for view in views)):
            shapes = [t.shape] if views is None else [view.shape for view in views]
            dtype = _template.dtype_of(t.stored)
            done(i, Result([np.empty(s, dtype) for s in shapes], True, False))
        else:
            large.append(i)
    problems: dict[str, str] = {}
    digests = source.digests if verify and (small or large) else None
    if small:
        _read_small(source, requests, small, digests, budget, done, problems)
    if large:
        _Large(source, digests, budget, problems).read(requests, large, done)
    if problems:
        raise _damaged(source, problems)
    if not source.is_unchanged():
        raise source.lost("")


def _damaged(source: Source, problems: dict[str, str]) -> RuntimeError:
    error = source.lost("")
    if isinstance(error, ReplacedError):
        return error
    lines = [f"  {name}: {why}" for name, why in problems.items()]
    if len(lines) > 20:
        lines = [*lines[:20], f"  ... and {len(lines) - 20} more leaves"]
    return DamagedError(
        f"The checkpoint at `{source.root}` is damaged, and nothing of it was loaded:\n"
        + "\n".join(lines)
        + "\nLoad another checkpoint, or leave these leaves out with `where`."
    )


def _reason(root: Root, error: Exception) -> str:
    """What is wrong with bytes that could not be read.

    **Raises:** the error, unless it says that they are missing or damaged.
    """
    found = _root.explain(root, error)
    if _store.is_missing(found):
        return "a chunk of it is missing"
    if not isinstance(found, ValueError):
        raise found from error
    return f"it cannot be read ({_text.escape(str(found).splitlines()[0])})"


class _Run(NamedTuple):
    """Leaves that lie together in a file, as `(request, offset)`."""

    key: str
    start: int
    stop: int
    members: list[tuple[int, int]]


def _runs(source: Source, requests: Sequence[Request], which: list[int]) -> list[_Run]:
    if source.files is None:
        places = [
            (f"{source.key(r)}/{_grid.key((0,) * len(r.template.shape))}", 0, i)
            for i, r in ((i, requests[i].record) for i in which)
        ]
    else:
        places, at = [], source.index.placement
        for i in which:
            place = requests[i].record.place
            places.append((source.files[at.file[place]], at.offset[place], i))
        places.sort()
    runs: list[_Run] = []
    last, start, stop, members = "", 0, 0, []
    for key, offset, i in places:
        end = offset + requests[i].record.template.nbytes
        if key == last and offset - stop <= _GAP and end - start <= _RUN:
            members.append((i, offset))
            stop = max(stop, end)
            continue
        if members:
            runs.append(_Run(last, start, stop, members))
        last, start, stop, members = key, offset, end, [(i, offset)]
    return [*runs, _Run(last, start, stop, members)]


def _read_small(
    source: Source,
    requests: Sequence[Request],
    which: list[int],
    digests: bytes | None,
    budget: int,
    done: Callable[[int, Result], None],
    problems: dict[str, str],
) -> None:
    first_block = source.index.first_block
    digest = xxhash.xxh3_128_digest
    waiting: collections.deque[tuple[_Run, Any]] = collections.deque()
    size = 0
    runs = iter(_runs(source, requests, which))
    while True:
        # Some runs are on their way while the one before them is looked at.
        for run in runs:
            args = run.key, run.start, run.stop
            waiting.append((run, _store.start_read_range(source.directory, *args)))
            size += run.stop - run.start
            if size + _RUN > budget:
                break
        if not waiting:
            return
        (_, start, stop, members), future = waiting.popleft()
        size -= stop - start
        why = ""
        data = b""
        try:
            data = _root.wait(source.directory, future).value
            if len(data) != stop - start:
                why = "a chunk of it is missing"
        except Exception as e:
            why = _reason(source.root, e)
        memory = memoryview(data)
        for i, offset in members:
            record, views, _ = requests[i]
            t = record.template
            at = offset - start
            if why:
                problems[record.name] = why
                continue
            if digests is not None:
                # A small leaf is one block.
                row = 16 * first_block(record.place)
                if digests[row : row + 16] != digest(memory[at : at + t.nbytes]):
                    problems[record.name] = "its bytes are not those that were saved"
                    continue
            dtype = _template.dtype_of(t.stored)
            array = np.frombuffer(data, dtype, math.prod(t.shape), at).reshape(t.shape)
            arrays = [array] if views is None else [v.apply(array) for v in views]
            done(i, Result(arrays, False, False))


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


class _Large:
    """Reads leaves in parts: runs of chunks, which threads verify as they arrive."""

    def __init__(
        self,
        source: Source,
        digests: bytes | None,
        budget: int,
        problems: dict[str, str],
    ):
        self._source = source
        self._digests = digests
        self._problems = problems
        self._room = _Room(budget)
        self._part = max(1, min(_PART, budget // 4))
        self._pool = cf.ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def read(
        self,
        requests: Sequence[Request],
        which: list[int],
        done: Callable[[int, Result], None],
    ) -> None:
        waiting: collections.deque[tuple[int, Any, list[cf.Future]]] = (
            collections.deque()
        )

        def finish() -> None:
            i, result, parts = waiting.popleft()
            for part in parts:
                part.result()
            if requests[i].record.name not in self._problems:
                done(i, result())

        numbers, arrays = self._open(requests, which)
        with self._pool:
            for i in numbers:
                start = self._start(requests[i], numbers[i], arrays.get(i))
                waiting.append((i, *start))
                while waiting and all(part.done() for part in waiting[0][2]):
                    finish()
            while waiting:
                finish()

    def _open(
        self, requests: Sequence[Request], which: list[int]
    ) -> tuple[dict[int, Sequence[int]], dict[int, Any]]:
        """The chunks that are wanted of each leaf, and the arrays that they are read
        from, all opened together. Their files are known to hold them then."""
        source = self._source
        numbers: dict[int, Sequence[int]] = {}
        wanted: dict[int, tuple[Record, Sequence[int]]] = {}
        for i in which:
            record, views, _ = requests[i]
            try:
                if self._is_exact(views, record):
                    if _spans(self._source, record, views[0]) is not None:
                        numbers[i] = ()
                        continue
                numbers[i] = _wanted(source.cut(record), views)
                source.check(record, numbers[i])
                if self._is_exact(views, record) or not self._is_direct(record):
                    wanted[i] = record, numbers[i]
            except Exception as e:
                numbers.pop(i, None)
                self._problems[record.name] = _reason(self._source.root, e)
        return numbers, dict(zip(wanted, source.open(list(wanted.values()))))

    def _is_exact(
        self, views: tuple[View, ...] | None, record: Record
    ) -> TypeGuard[tuple[View, ...]]:
        """Whether no more is read than a view, as nothing is verified."""
        if self._digests is not None or views is None or len(views) != 1:
            return False
        if not self._source.is_run(record):
            return True
        return _spans(self._source, record, views[0]) is not None

    def _start(
        self, request: Request, numbers: Sequence[int], array: Any
    ) -> tuple[Callable[[], Result], list[cf.Future[None]]]:
        """Starts to read a leaf: what gives its result, once the futures are done."""
        record, views, conversion = request
        t = self._source.cut(record)
        if self._is_exact(views, record):
            return self._start_exact(record, views[0], array)
        grid = _source.grid_of(t)
        dtype = _template.dtype_of(t.stored) if conversion is None else conversion.dtype
        if views is None:
            picks = [tuple(map(range, t.shape))]
        else:
            picks = [tuple(map(_as_range, view.picks)) for view in views]
        arrays = [_arrays.aligned(tuple(map(len, p)), dtype) for p in picks]
        futures = []
        most = max(1, self._part // grid.full)
        for run in _grid.runs(numbers, t.shape, t.chunk, most):
            if futures and futures[0].done():
                futures[0].result()  # A store that does not answer is not asked again.
            part = _part(t, grid, run, picks, arrays, conversion)
            self._room.take(part.into.nbytes)
            reading = self._start_part(record, part, array)
            futures.append(self._pool.submit(self._finish, record, part, reading))

        def result() -> Result:
            if views is None:
                return Result(arrays, True, conversion is not None)
            shaped = [
                view.arrange(array.reshape(view.picked))
                for view, array in zip(views, arrays)
            ]
            return Result(shaped, True, conversion is not None)

        return result, futures

    def _is_direct(self, record: Record) -> bool:
        """Whether chunks are read by us, each run of them in one request: to an object
        store, TensorStore would make one for each chunk."""
        is_far = self._source.root.local is None and self._source.database is not None
        return is_far and record.template.codec is None

    def _start_part(
        self, record: Record, part: "_Part", array: Any
    ) -> Callable[[], Any]:
        """Starts to read a part: what then waits until it has arrived."""
        if not self._is_direct(record):
            return _arrays.start_read(array, part.into, part.region).result
        index, t = self._source.index, record.template
        grid = _source.grid_of(t)
        files = self._source.files
        assert files is not None
        ranges = []
        for number in part.chunks:
            file, start, length = index.locate(record, number)
            ranges.append((files[file], start, start + length))
        values = _start_ranges(self._source.directory, ranges)

        def finish() -> None:
            numbers = iter(part.chunks)
            for value in values():
                for at in range(0, len(value), grid.full):
                    chunk = np.frombuffer(
                        value, part.into.dtype, math.prod(t.chunk), at
                    )
                    region = _within(grid.regions[next(numbers)], part.region)
                    kept = tuple(slice(s.stop - s.start) for s in region)
                    part.into[region] = chunk.reshape(t.chunk)[kept]

        return finish

    def _finish(
        self, record: Record, part: "_Part", reading: Callable[[], Any]
    ) -> None:
        try:
            reading()
            if self._digests is None or self._is_good(record, part):
                for keep in part.keeps:
                    keep()
            else:
                why = "its bytes are not those that were saved"
                self._problems.setdefault(record.name, why)
        except Exception as e:
            self._problems.setdefault(record.name, _reason(self._source.root, e))
        finally:
            self._room.give(part.into.nbytes)

    def _is_good(self, record: Record, part: "_Part") -> bool:
        grid = _source.grid_of(record.template)
        first = self._source.index.first_block(record.place)
        assert self._digests is not None
        for number in part.chunks:
            region = _within(grid.regions[number], part.region)
            row = first + grid.blocks[number]
            data = _digests.as_bytes(part.into[region])
            for digest in _digests.block_digests(data):
                if self._digests[16 * row : 16 * row + 16] != digest:
                    return False
                row += 1
        return True

    def _start_exact(
        self, record: Record, view: View, array: Any
    ) -> tuple[Callable[[], Result], list[cf.Future[None]]]:
        """Starts to read a view and not more than its bytes, which are not verified."""
        into = _arrays.aligned(view.picked, _template.dtype_of(record.template.stored))
        self._room.take(into.nbytes)
        spans = _spans(self._source, record, view)

        def work() -> None:
            try:
                if spans is None:
                    _arrays.start_read(array, into, view.slices()).result()
                else:
                    _read_spans(self._source, record, spans, into)
            except Exception as e:
                self._problems.setdefault(record.name, _reason(self._source.root, e))
            finally:
                self._room.give(into.nbytes)

        result = ft.partial(Result, [view.arrange(into)], True, False)
        return result, [self._pool.submit(work)]


class _Part(NamedTuple):
    """A run of chunks, the region that they are, and the memory that it is read into.
    The `keeps` then take what is wanted, where that memory is not what was asked for.
    """

    chunks: range
    region: tuple[slice, ...]
    into: np.ndarray
    keeps: list[Callable[[], None]]


def _within(region: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(s.start - o.start, s.stop - o.start) for s, o in zip(region, outer)
    )


def _part(
    t: Template,
    grid: Grid,
    run: range,
    picks: Sequence[tuple[range, ...]],
    arrays: Sequence[np.ndarray],
    conversion: Conversion | None,
) -> _Part:
    first, last = grid.regions[run[0]], grid.regions[run[-1]]
    region = tuple(slice(a.start, b.stop) for a, b in zip(first, last))
    shape = tuple(s.stop - s.start for s in region)
    wanted = []
    for pick, array in zip(picks, arrays):
        overlaps = [_view.overlap(p, s.start, s.stop) for p, s in zip(pick, region)]
        if None not in overlaps:
            to, fro = zip(*overlaps) if overlaps else ((), ())
            wanted.append((array[(*to, ...)], fro))
    if conversion is None and len(wanted) == 1:
        into, fro = wanted[0]
        if into.shape == shape and all(s.step in (None, 1) for s in fro):
            return _Part(run, region, into, [])
    into = _arrays.aligned(shape, _template.dtype_of(t.stored))

    def keep(to: np.ndarray, fro: tuple[slice, ...]) -> None:
        part = into[(*fro, ...)]
        to[...] = part if conversion is None else conversion.convert(part)

    return _Part(run, region, into, [ft.partial(keep, *w) for w in wanted])


def _wanted(t: Template, views: tuple[View, ...] | None) -> Sequence[int]:
    """The numbers of the chunks that hold any of the views of a leaf, in order."""
    if views is None:
        return range(t.chunk_count)
    sets = [
        _grid.touched(t.shape, t.chunk, view.picks)
        for view in views
        if 0 not in view.shape
    ]
    return list(sets[0]) if len(sets) == 1 else sorted(set().union(*sets))


def _as_range(pick: range | int) -> range:
    return range(pick, pick + 1) if isinstance(pick, int) else pick


def _spans(
    source: Source, record: Record, view: View
) -> list[tuple[int, int, int]] | None:
    """The parts of chunks that hold a view whose elements follow each other."""
    if source.is_stored(record):
        return None
    t = record.template
    run = _view.run(view.picks, t.shape)
    if t.codec is not None or run is None or len(run) * t.itemsize > _RANGES:
        return None
    spans = _grid.spans(t.shape, t.chunk, run.start, run.stop)
    return None if spans is None else list(spans)


def _read_spans(
    source: Source,
    record: Record,
    spans: list[tuple[int, int, int]],
    into: np.ndarray,
) -> None:
    t = record.template
    ranges = []
    for number, first, count in spans:
        if source.files is None:
            key, start = f"{source.key(record)}/{_source.grid_of(t).keys[number]}", 0
        else:
            file, start, _ = source.index.locate(record, number)
            key = source.files[file]
        start += first * t.itemsize
        ranges.append((key, start, start + count * t.itemsize))
    data = into.reshape(-1).view(np.uint8)
    at = 0
    for value in _start_ranges(source.directory, ranges)():
        data[at : at + len(value)] = np.frombuffer(value, np.uint8)
        at += len(value)


def _start_ranges(
    root: Root, ranges: Sequence[tuple[str, int, int]]
) -> Callable[[], Iterator[bytes]]:
    """Starts to read ranges of files, those that follow each other as one. What it
    returns waits for them, and gives their bytes in order."""
    runs: list[tuple[str, int, int]] = []
    for key, start, stop in ranges:
        if runs and runs[-1][0] == key and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((key, start, stop))
    futures = [_store.start_read_range(root, *run) for run in runs]

    def values() -> Iterator[bytes]:
        for (_, start, stop), future in zip(runs, futures):
            value = _root.wait(root, future).value
            if len(value) != stop - start:
                raise MissingError("a chunk is missing")
            yield value

    return values
