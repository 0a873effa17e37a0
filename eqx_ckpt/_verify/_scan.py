"""Compares every byte of the data of a save with its digests.

A load skips padding, and bytes that nobody asked for. A scan reads files from front to
back, and so sees padding, gaps and ends too.
"""

import collections
import functools as ft
import itertools as it
import math
import operator
import queue
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .._kernel._format import _digests, _grid, _template, _text
from .._kernel._format._grid import Grid
from .._kernel._format._leaves import LeafRecord
from .._kernel._load import _source
from .._kernel._load._reads import CHANGED, unreadable
from .._kernel._load._source import Source
from .._kernel._runtime import _batching, _machine, _progress
from .._kernel._runtime._threads import Crew, Outcome
from .._kernel._storage import _codecs, _store
from .._zips._window import Window


# Bytes that one thread reads at a time.
_STEP = 16 * 2**20
# At most as many as cores; for an object store, where threads mostly wait, all of them.
_THREADS = 8

# Enough problems for anyone.
_MANY = 1000


class Problem(NamedTuple):
    """Something in a checkpoint that is not as it was saved. `str` gives a line on it.

    **Attributes:**

    - `leaf`: the dotted name of the leaf; None for a file that belongs to no leaf.
    - `chunk`: the index of the chunk in the chunk grid of the leaf; None if the problem
        is not in its data.
    - `file`: the file it is in, relative to the checkpoint.
    - `what`: what is wrong.
    """

    leaf: str | None
    chunk: tuple[int, ...] | None
    file: str
    what: str

    def __str__(self) -> str:
        file, what = f"`{_text.escape(self.file)}`", _text.escape(self.what)
        if self.leaf is None:
            return f"{file}: {what}"
        chunk = "" if self.chunk is None else f", chunk {list(self.chunk)}"
        return f"`{_text.escape(self.leaf)}`{chunk}: {what} (in {file})"


class _Chunk(NamedTuple):
    """A chunk, at `[start, stop)` of a file. The bytes from `before` to its start are
    in no chunk.

    If a compressed chunk is a whole file, nobody knows how long it was, and `stop` is
    None.
    """

    record: LeafRecord
    number: int
    file: str
    before: int
    start: int
    stop: int | None

    @property
    def grid(self) -> Grid:
        return _source.grid_of(self.record.template)


def _plan(source: Source, records: list[LeafRecord]) -> Iterator[_Chunk]:
    """Every chunk there is, in the order of the files."""
    if not source.files:
        for record in records:
            t = record.template
            for number in range(t.chunk_count):
                whole = number * t.full, (number + 1) * t.full
                ((file, start, stop),) = source.ranges(record, [whole])
                end = stop if t.codec is None else None
                yield _Chunk(record, number, file, start, start, end)
        return
    runs = [
        (file, offset, record, range(first, stop))
        for record in records
        for first, stop, file, offset in source.index.extents.segments(record)
    ]
    runs.sort(key=operator.itemgetter(0, 1))
    for place, members in it.groupby(runs, key=operator.itemgetter(0)):
        file, before = source.files[place], 0
        for _, start, record, numbers in members:
            for number in numbers:
                stop = start + source.index.extents.nbytes(record, number, number + 1)
                # In a zip there are other files between those of the data.
                at = min(before, start) if source.is_ours else start
                yield _Chunk(record, number, file, at, start, stop)
                before = start = stop


def _nbytes(chunk: _Chunk) -> int:
    """The bytes that a chunk takes in a buffer, with those before it."""
    return chunk.start - chunk.before + chunk.grid.full


def scan(
    source: Source,
    records: list[LeafRecord],
    is_verified: bool,
    max_bytes: int,
    advance: _progress.Advance,
) -> list[Problem]:
    """Reads all data files, and gives the problems in them. `is_verified`: digests are
    compared."""
    threads = _THREADS
    if not source.root.is_remote:
        threads = min(threads, _machine.cores())
    # A buffer for each thread, and as much again for what is padded in it.
    step = min(_STEP, max_bytes // (2 * threads))
    buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    for _ in range(threads):
        buffers.put(np.empty(step, np.uint8))

    def check_job(job: list[_Chunk]) -> list[Problem]:
        buffer = buffers.get()
        try:
            return list(_check_chunks(source, job, is_verified, buffer))
        finally:
            buffers.put(buffer)

    problems: list[Problem] = []
    ends: dict[str, tuple[int | None, str | None]]
    ends = dict.fromkeys(source.files, (0, None))
    pending: collections.deque[tuple[list[_Chunk], Outcome[list[Problem]]]]
    pending = collections.deque()

    def finish() -> None:
        job, future = pending.popleft()
        problems.extend(crew.result(future))
        last = sum(c.number + 1 == len(c.grid.keys) for c in job)
        advance(sum(c.grid.full for c in job), last)

    with Crew(threads) as crew:
        for job in _batching.batched(_plan(source, records), _nbytes, step):
            pending.append((job, crew.submit(ft.partial(check_job, job))))
            for chunk in job:
                leaf = chunk.record.name if source.database is None else None
                ends[chunk.file] = chunk.stop, leaf
            if len(pending) > 2 * threads:
                finish()
            if len(problems) > _MANY:
                what = f"there are {_MANY} problems before it, and it was not looked at"
                return [*problems, Problem(None, None, job[-1].file, what)]
        while pending:
            finish()
    return [*problems, *_check_ends(source, ends)]


def _check_ends(
    source: Source, ends: dict[str, tuple[int | None, str | None]]
) -> list[Problem]:
    """Looks for bytes after those of the chunks. `ends`: where each file ends, and the
    leaf that it is of, if it is of one."""

    def check_end(file: str, end: int, leaf: str | None) -> Problem | None:
        more = np.empty(1, np.uint8)
        read = ft.partial(source.directory.read_into, file, end, more)
        try:
            if _store.look_twice(source.root, read, lambda count: not count):
                return Problem(leaf, None, file, "it has more bytes than it had")
        except (OSError, ValueError) as e:
            if end == 0:  # Else its chunks say so.
                return Problem(leaf, None, file, unreadable(source.directory, e))
        return None

    jobs = [
        ft.partial(check_end, file, end, leaf)
        for file, (end, leaf) in ends.items()
        if end is not None and source.is_ours
    ]
    return list(filter(None, _store.gather(source.root, jobs)))


def _check_chunks(
    source: Source, job: list[_Chunk], is_verified: bool, buffer: np.ndarray
) -> Iterator[Problem]:
    """Reads the chunks of a job, and compares them with their digests."""
    step = len(buffer)
    for key, members in it.groupby(job, key=operator.attrgetter("file")):
        chunks = list(members)
        window = Window(source.directory, key, buffer, chunks[-1].stop or 0)
        for chunk in chunks:
            found = list(_check_chunk(source, chunk, window, is_verified, step))
            if found and source.root.is_remote:
                # A problem counts if a second read finds it, too.
                window.forget()
                found = list(_check_chunk(source, chunk, window, is_verified, step))
            yield from found


def _check_chunk(
    source: Source, chunk: _Chunk, window: Window, is_verified: bool, step: int
) -> Iterator[Problem]:
    record, number = chunk.record, chunk.number
    try:
        if not _is_zero(chunk, window, step):
            what = f"the bytes before `{record.name}` are not zeros"
            yield Problem(None, None, chunk.file, what)
        if record.template.codec is None:
            found, is_clean = _digest(chunk, window, step)
        else:
            found, is_clean = _digest_decoded(source, chunk), True
        good = None
        if is_verified:
            good = source.digests_of(record, range(number, number + 1))
        if good is not None and good != found:
            what = CHANGED
        else:
            what = None if is_clean else "its padding is not zeros"
    except EOFError:
        what = "it is missing: the file ends before it does"
    except Exception as e:
        what = unreadable(source.directory, e)
    if what is not None:
        yield Problem(record.name, _index_of(chunk), chunk.file, what)


def _index_of(chunk: _Chunk) -> tuple[int, ...]:
    region = chunk.grid.regions[chunk.number]
    return tuple(s.start // n for s, n in zip(region, chunk.record.template.chunk))


def _exactly(window: Window, start: int, stop: int) -> np.ndarray:
    """The bytes `[start, stop)`. **Raises:** `EOFError` if the file ends before."""
    out = window.read_range(start, stop)
    if out.size < stop - start:
        raise EOFError
    return out


def _is_zero(chunk: _Chunk, window: Window, step: int) -> bool:
    """Whether there are only zeros between a chunk and the one before."""
    return not any(
        _exactly(window, at, min(at + step, chunk.start)).any()
        for at in range(chunk.before, chunk.start, step)
    )


def _digest(chunk: _Chunk, window: Window, step: int) -> tuple[bytes, bool]:
    """The digests of the blocks of a chunk, and whether its padding is zeros."""
    t, at = chunk.record.template, chunk.start
    kept = tuple(s.stop - s.start for s in chunk.grid.regions[chunk.number])
    found: list[bytes] = []
    hasher, room = _digests.Stream(), _grid.BLOCK
    is_clean = True
    for shape, inner in _slabs(t.chunk, kept, t.itemsize, step):
        data = _exactly(window, at, at + math.prod(shape) * t.itemsize)
        at += data.size
        if inner != shape:
            array = data.reshape(*shape, t.itemsize)
            part = _digests.as_bytes(array[tuple(map(slice, inner))])
            if np.count_nonzero(data) != np.count_nonzero(part):
                is_clean = False
            data = part
        while data.size:
            block, data = data[:room], data[room:]
            hasher.update(block.data)
            room -= block.size
            if room == 0:
                found.append(hasher.digest())
                hasher, room = _digests.Stream(), _grid.BLOCK
    if room < _grid.BLOCK:
        found.append(hasher.digest())
    return b"".join(found), is_clean


def _digest_decoded(source: Source, chunk: _Chunk) -> bytes:
    """The digests of the blocks of a compressed chunk, which is decoded whole."""
    region, t = chunk.grid.regions[chunk.number], chunk.record.template
    source.check(chunk.record, [chunk.number])
    where = source.chunk_range(chunk.record, chunk.number)
    reading = source.directory.start_read(*where)
    data = _store.read_answer(source.directory, where.key, reading).value
    into = np.empty([s.stop - s.start for s in region], _template.dtype_of(t.stored))
    _codecs.decoder(t)(data, into)
    return b"".join(_digests.block_digests(_digests.as_bytes(into)))


def _slabs(
    chunk: tuple[int, ...], kept: tuple[int, ...], itemsize: int, step: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a chunk into slabs of at most `step` bytes, which follow each other. Gives
    the shape of each, and of its part that is no padding."""
    row = math.prod(chunk[1:]) * itemsize
    if math.prod(chunk) * itemsize <= step:
        yield chunk, kept
    elif row <= step:
        rows = step // row
        for first in range(0, chunk[0], rows):
            count = min(rows, chunk[0] - first)
            left = max(0, min(count, kept[0] - first))
            yield (count, *chunk[1:]), (left, *kept[1:])
    else:
        nothing = (0,) * len(kept[1:])
        for number in range(chunk[0]):
            inner = kept[1:] if number < kept[0] else nothing
            yield from _slabs(chunk[1:], inner, itemsize, step)
