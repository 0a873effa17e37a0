"""`verify`: reads every byte of a save, and says what is not as it was written."""

import collections
import concurrent.futures as cf
import functools as ft
import itertools as it
import math
import operator
import os
import queue
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from .._errors import ReplacedError
from .._format import _digests, _files, _grid, _index, _template, _text
from .._format._grid import Grid
from .._format._leaves import Record
from .._runtime import _progress, _threads
from .._storage import _arrays, _root, _store
from .._storage._root import Root
from . import _open
from ._checkpoint import Checkpoint
from ._source import Source


# What one thread reads at a time, and the least memory with which that makes sense.
_STEP, _LEAST = 16 * 2**20, 2**20
_ROOM = 256 * 2**20
_THREADS = min(8, os.cpu_count() or 1)
# What reads from an object store mostly waits.
_FAR_THREADS = 8

# Of a file other than the data: that of the largest index has some MiB.
_MOST = 128 * 2**20

# Enough of them for anyone.
_MANY = 1000

_CHANGED = "its bytes are not those that were saved"
# Seconds that files for other readers may take to follow the commit, where no lock says
# whether somebody is at it.
_LAG = 5
# Of those files.
_LAGS = (
    "; if a save was killed right after its commit, it is of the one before: save again"
)


class Problem(NamedTuple):
    """Something in a checkpoint that is not as it was saved; `str` is a line about it.

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


@_open.again(0, "path")
def verify(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    max_bytes: int | None = None,
    progress: bool = False,
) -> list[Problem]:
    """Reads every byte of a checkpoint, and returns what is not as it was saved.

    It needs no model, and initialises no JAX backend. All leaves are checked against
    their digests, and so are the files that only other readers use, such as Orbax. What
    is in the directory and no part of the save is ignored, and so are bytes after the
    end of a compressed chunk that has a file of its own (`layout="zarr"`).

    **Arguments:**

    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `max_bytes`: how much memory to use for what is read, 256 MiB by default, at least
        1 MiB. The index, the digests and the files for other readers, which are small,
        come on top; and compressed chunks are decoded whole.
    - `progress`: as in [`tree_deserialise_leaves`][].

    **Returns:** a list of [`Problem`][]s, which is empty if all is well. If the index
    is damaged, nothing else can be checked, and it is the only problem. After 1000
    of them it stops.

    **Raises:** `FileNotFoundError` if there is no checkpoint; `RuntimeError` if it was
    replaced or deleted meanwhile (a path is verified again then, for half a minute at
    most); `ValueError` for another format, as those have no digests: a list without
    problems would say what nobody knows; `OSError` where the system or the store does
    not let it read, which says nothing about the bytes.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, pathlib
        >>> ec.tree_serialise_leaves("run", {"w": jnp.ones(3)}, layout="zarr")
        >>> ec.verify("run")
        []
        >>> _ = pathlib.Path("run/w/c/0").write_bytes(bytes(12))
        >>> print(*ec.verify("run"))
        `w`, chunk [0]: its bytes are not those that were saved (in `w/c/0`)

        ```
    """
    max_bytes = _ROOM if max_bytes is None else max_bytes
    if max_bytes < _LEAST:
        raise ValueError(f"`max_bytes` must be at least 1 MiB, not {max_bytes}.")
    if isinstance(path, Checkpoint):
        pinned, root = path._source, path._source.root
    else:
        pinned, root = None, _root.resolve(path)
    if pinned and not pinned.has_digests:
        raise _unverifiable(pinned)
    try:
        source = _open.open_source(root)
        records = list(source.index.leaves.records())
        source.index.leaves.places
    except ValueError as e:
        is_file = root.entry() not in (None, "directory")
        file = root.url.rpartition("/")[2] if is_file else _files.INDEX
        return [Problem(None, None, file, str(e))]
    if not source.has_digests:
        raise _unverifiable(source)
    if pinned and source.index.save != pinned.index.save:
        raise pinned.lost("")
    problems: list[Problem] = []
    try:
        digests = source.digests
    except ReplacedError:
        raise
    except RuntimeError as e:
        # What else there is can still be looked at.
        digests = None
        problems.append(Problem(None, None, _digests_key(source), str(e)))
    if source.foreign is None:
        problems += [*_settled_files(source), *_zarr_json(source, records)]
    threads = _FAR_THREADS if root.is_far else _THREADS
    # A buffer for each thread, and as much again for what is padded in it.
    step = min(_STEP, max_bytes // (2 * threads))
    stored = [r for r in records if _has_bytes(source, r)]
    nbytes = sum(r.template.chunk_count * r.template.full for r in stored)
    with _progress.bar("verify", nbytes, len(stored), progress) as advance:
        problems += _data(source, stored, digests, step, threads, advance)
    if problems and not source.is_current():
        raise source.lost("")
    return problems


def _unverifiable(source: Source) -> ValueError:
    return ValueError(
        f"The checkpoint at `{source.root}` cannot be verified: {source.index.layout} "
        "has no digests, so that nothing says what bytes were saved. `open` has "
        "checked that it is whole. What `ec.tree_serialise_leaves` saves can be "
        "verified."
    )


# ---- Small files.


def _unreadable(root: Root, error: Exception) -> str:
    """What is wrong with what could not be read.

    **Raises:** the error, unless it says that bytes are missing or damaged.
    """
    found = _root.explain(root, error)
    if _store.is_missing(found):
        return "it is missing"
    if isinstance(found, EOFError):
        return "it is missing: the file ends before it does"
    if not isinstance(found, ValueError):
        raise found from error
    return f"it cannot be read ({str(found).splitlines()[0]})"


def _digests_key(source: Source) -> str:
    return f"{source.database}/digests" if source.database else "eqx_ckpt.digests"


def _settled_files(source: Source) -> list[Problem]:
    """What is wrong with the files for other readers, which follow the commit: once
    whoever has just saved there has put them in place.

    **Raises:** `ReplacedError` if another save was committed meanwhile.
    """
    problems = list(_check_files(source))
    end = time.monotonic() + _LAG
    while problems and time.monotonic() < end:
        if not source.is_current():
            raise source.lost("")
        with source.root.writers_lock() as held:
            problems = list(_check_files(source))
        if held:
            break  # Nobody is at it any more.
        time.sleep(_LAG / 50)
    return problems


def _check_files(source: Source) -> Iterator[Problem]:
    """The files that are there for other readers."""
    index, root = source.index, source.root
    for key, digest in index.others.items():
        try:
            value = _store.read_file(root, key, limit=_MOST)
            if value is None:
                yield Problem(None, None, key, "it is missing")
            elif _index.digest(value.data) != digest:
                yield Problem(None, None, key, _CHANGED + _LAGS)
        except (OSError, ValueError) as e:
            yield Problem(None, None, key, _unreadable(root, e))
    tops = {key.partition("/")[0] for key in [_digests_key(source), *index.others]}
    for top in sorted(_files.SIDE & (_store.list_top(root) or {}).keys() - tops):
        what = "it is of another save, and other readers may take it for one of this"
        yield Problem(None, None, top, what)


def _zarr_json(source: Source, records: Iterable[Record]) -> Iterator[Problem]:
    if source.database is not None:
        return  # They are in the file of the nodes, which has a digest.

    def check(record: Record) -> Problem | None:
        key = f"{source.key(record)}/zarr.json"
        good = _arrays.zarr_json(record.template)
        found = np.empty(len(good) + 1, np.uint8)
        try:
            count = _store.read_into(source.root, key, 0, found)
            if found[:count].tobytes() != good:
                return Problem(record.name, None, key, _CHANGED)
        except (OSError, ValueError) as e:
            return Problem(record.name, None, key, _unreadable(source.root, e))
        return None

    is_far = source.root.is_far
    jobs = [ft.partial(check, record) for record in records]
    threads = _FAR_THREADS if is_far else 1
    yield from filter(None, _threads.gather(jobs, threads, waiting=is_far))


# ---- The data.


class _Chunk(NamedTuple):
    """A chunk, at `[start, stop)` of a file; the bytes from `before` on are no other's.

    Of a compressed chunk that is a file nobody knows how long it was: `stop` is None.
    """

    record: Record
    number: int
    file: str
    before: int
    start: int
    stop: int | None

    @property
    def grid(self) -> Grid:
        return _grid_of(self.record)


def _grid_of(record: Record) -> Grid:
    t = record.template
    return _grid.lay(t.shape, t.chunk, t.itemsize)


def _has_bytes(source: Source, record: Record) -> bool:
    """Whether a leaf has chunks, of its own: in a database, aliases lead to others'."""
    if source.database is not None and record.place in source.index.leaves.aliases:
        return False
    return record.template.chunk_count > 0


def _plan(source: Source, records: list[Record]) -> Iterator[_Chunk]:
    """Every chunk there is, in the order of the files."""
    if source.files is None:
        for record in records:
            grid = _grid_of(record)
            stop = grid.full if record.template.codec is None else None
            for number, key in enumerate(grid.keys):
                file = f"{source.key(record)}/{key}"
                yield _Chunk(record, number, file, 0, 0, stop)
        return
    runs = [
        (run.file, run.offset, record, range(run.first, run.stop))
        for record in records
        for run in source.index.segments(record)
    ]
    runs.sort(key=operator.itemgetter(0, 1))
    for place, members in it.groupby(runs, key=operator.itemgetter(0)):
        file, before = source.files[place], 0
        for _, start, record, numbers in members:
            for number in numbers:
                stop = start + source.index.extent(record, number, number + 1)
                # In a zip there are other files between those of the data.
                at = start if source.foreign else min(before, start)
                yield _Chunk(record, number, file, at, start, stop)
                before = start = stop


def _jobs(chunks: Iterable[_Chunk], step: int) -> Iterator[list[_Chunk]]:
    """Chunks that are read together: of `step` bytes at most, or one larger one."""
    job: list[_Chunk] = []
    size = 0
    for chunk in chunks:
        need = chunk.start - chunk.before + chunk.grid.full
        if job and size + need > step:
            yield job
            job, size = [], 0
        job.append(chunk)
        size += need
    if job:
        yield job


def _data(
    source: Source,
    records: list[Record],
    digests: bytes | None,
    step: int,
    threads: int,
    advance: _progress.Advance,
) -> list[Problem]:
    buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    for _ in range(threads):
        buffers.put(np.empty(step, np.uint8))

    def check(job: list[_Chunk]) -> list[Problem]:
        buffer = buffers.get()
        try:
            return list(_check(source, job, digests, buffer))
        finally:
            buffers.put(buffer)

    problems: list[Problem] = []
    ends: dict[str, tuple[int | None, str | None]] = {}
    if source.files is not None:
        ends = dict.fromkeys(source.files, (0, None))
    pending: collections.deque[tuple[list[_Chunk], cf.Future[list[Problem]]]]
    pending = collections.deque()

    def finish() -> None:
        job, future = pending.popleft()
        problems.extend(future.result())
        last = sum(c.number + 1 == len(c.grid.keys) for c in job)
        advance(sum(c.grid.full for c in job), last)

    with cf.ThreadPoolExecutor(threads) as pool:
        for job in _jobs(_plan(source, records), step):
            pending.append((job, pool.submit(check, job)))
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
    more = np.empty(1, np.uint8)
    for file, (end, leaf) in ends.items():
        if end is None or source.foreign:
            continue
        try:
            if _store.read_into(source.directory, file, end, more):
                what = "it has more bytes than it had"
                problems.append(Problem(leaf, None, file, what))
        except (OSError, ValueError) as e:
            if end == 0:  # Else its chunks say so.
                what = _unreadable(source.directory, e)
                problems.append(Problem(leaf, None, file, what))
    return problems


def _check(
    source: Source, job: list[_Chunk], digests: bytes | None, buffer: np.ndarray
) -> Iterator[Problem]:
    """Reads the chunks of a job, and compares them with their digests."""
    for key, members in it.groupby(job, key=operator.attrgetter("file")):
        chunks = list(members)
        file = _File(source.directory, key, chunks[-1].stop or 0, buffer)
        for chunk in chunks:
            record, number, grid = chunk.record, chunk.number, chunk.grid
            try:
                if not _is_zero(chunk, file):
                    what = f"the bytes before `{record.name}` are not zeros"
                    yield Problem(None, None, key, what)
                if record.template.codec is None:
                    found, is_clean = _digest(chunk, file)
                else:
                    found, is_clean = _digest_decoded(source, chunk), True
                first = source.index.first_block(record.place)
                rows = slice(*(16 * (first + n) for n in grid.blocks[number:][:2]))
                if digests is not None and digests[rows] != found:
                    what = _CHANGED
                else:
                    what = None if is_clean else "its padding is not zeros"
            except Exception as e:
                what = _unreadable(source.directory, e)
            if what is not None:
                yield Problem(record.name, _index_of(chunk), key, what)


def _index_of(chunk: _Chunk) -> tuple[int, ...]:
    region = chunk.grid.regions[chunk.number]
    return tuple(s.start // n for s, n in zip(region, chunk.record.template.chunk))


class _File:
    """A file that is read from front to back, into one buffer.

    It is read ahead, up to `end`, where all of that fits in.
    """

    def __init__(self, root: Root, key: str, end: int, buffer: np.ndarray):
        self.root, self.key, self.end, self.buffer = root, key, end, buffer
        self._start = self._stop = 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes `[start, stop)`, until the next call.

        **Raises:** `EOFError` if the file ends before; `OSError`, `ValueError`.
        """
        if not self._start <= start <= stop <= self._stop:
            size = self.end - start
            if size > len(self.buffer):
                size = stop - start
            self._start = self._stop = start
            into = self.buffer[:size]
            self._stop += _store.read_into(self.root, self.key, start, into)
            if self._stop < stop:
                raise EOFError
        return self.buffer[start - self._start : stop - self._start]


def _is_zero(chunk: _Chunk, file: _File) -> bool:
    """Whether there are only zeros between a chunk and the one before."""
    step = len(file.buffer)
    return not any(
        file.read(at, min(at + step, chunk.start)).any()
        for at in range(chunk.before, chunk.start, step)
    )


def _digest(chunk: _Chunk, file: _File) -> tuple[bytes, bool]:
    """The digests of the blocks of a chunk, and whether its padding is zeros."""
    t, at = chunk.record.template, chunk.start
    kept = tuple(s.stop - s.start for s in chunk.grid.regions[chunk.number])
    found: list[bytes] = []
    hasher, room = xxhash.xxh3_128(), _grid.BLOCK
    is_clean = True
    for shape, inner in _slabs(t.chunk, kept, t.itemsize, len(file.buffer)):
        data = file.read(at, at + math.prod(shape) * t.itemsize)
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
                hasher, room = xxhash.xxh3_128(), _grid.BLOCK
    if room < _grid.BLOCK:
        found.append(hasher.digest())
    return b"".join(found), is_clean


def _digest_decoded(source: Source, chunk: _Chunk) -> bytes:
    """The digests of the blocks of a compressed chunk, which is decoded whole."""
    region, t = chunk.grid.regions[chunk.number], chunk.record.template
    source.check(chunk.record, [chunk.number])
    (array,) = source.open([(chunk.record, [chunk.number])])
    into = np.empty([s.stop - s.start for s in region], _template.dtype_of(t.stored))
    _arrays.start_read(array, into, region).result()
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
