"""`verify`: reads every byte of a save, and says what is not as it was written."""

import collections
import concurrent.futures as cf
import itertools as it
import math
import operator
import os
import queue
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from . import _checkpoint, _chunks, _commit, _index, _layout, _progress, _show, _store
from ._checkpoint import Checkpoint
from ._index import Record
from ._read import Source
from ._store import Root


# What one thread reads at a time, and the least memory with which that makes sense.
_STEP, _LEAST = 16 * 2**20, 2**20
_THREADS = min(8, os.cpu_count() or 1)

_CHANGED = "its bytes are not those that were saved"


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
        file = f"`{_show.escape(self.file)}`"
        if self.leaf is None:
            return f"{file}: {self.what}"
        chunk = "" if self.chunk is None else f", chunk {list(self.chunk)}"
        return f"`{_show.escape(self.leaf)}`{chunk}: {self.what} (in {file})"


def verify(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    max_bytes: int = 2**28,
    progress: bool = False,
) -> list[Problem]:
    """Reads every byte of a checkpoint, and returns what is not as it was saved.

    It needs no model, and initialises no JAX backend. All leaves are checked against
    their digests, and so are the files that only other readers use, such as Orbax. What
    is in the directory and no part of the save is ignored.

    **Arguments:**

    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `max_bytes`: how much memory to use for what is read, at least 1 MiB. The index,
        the digests and the files for other readers, which are small, come on top.
    - `progress`: whether to show a progress bar. This needs `eqx_ckpt[progress]`.

    **Returns:** a list of [`Problem`][]s, which is empty if all is well. If the index
    is damaged, nothing else can be checked, and it is the only problem.

    **Raises:** `FileNotFoundError` if there is no checkpoint; `RuntimeError` if it was
    replaced or deleted meanwhile.

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
    if max_bytes < _LEAST:
        raise ValueError(f"`max_bytes` must be at least 1 MiB, not {max_bytes}.")
    if isinstance(path, Checkpoint):
        pinned, root = path._source, path._source.root
    else:
        pinned, root = None, _store.resolve(path)
    try:
        source = _checkpoint._open(root)
        records = list(source.index.records())
        source.index.places
    except ValueError as e:
        return [Problem(None, None, _store.INDEX, str(e))]
    if pinned and source.index.save != pinned.index.save:
        raise pinned.lost("")
    problems = [*_files(source), *_zarr_json(source, records)]
    try:
        digests = source.digests
    except RuntimeError:
        digests = None  # This is among the problems. The rest can still be looked at.
    # A buffer for each thread, and as much again for what is padded in it.
    step = min(_STEP, max_bytes // (2 * _THREADS))
    stored = [r for r in records if _has_bytes(source, r)]
    nbytes = sum(_count(r) * _full(r) for r in stored)
    with _progress.bar("verify", nbytes, len(stored), progress) as advance:
        problems += _data(source, stored, digests, step, advance)
    if problems and not source.is_current():
        raise source.lost("")
    return problems


# ---- Small files.


def _unreadable(error: Exception) -> str:
    """What is wrong with what could not be read."""
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    if isinstance(error, EOFError):
        return "it is missing: the file ends before it does"
    return f"it cannot be read ({str(error).splitlines()[0]})"


def _files(source: Source) -> Iterator[Problem]:
    """The file of digests, and the files that are there for other readers."""
    index, root = source.index, source.root
    digests = f"{source.database}/digests" if source.database else "eqx_ckpt.digests"
    known = {digests: index.digests, **index.others}
    for key, digest in known.items():
        try:
            value = _store.read_file(root, key)
            if value is None:
                yield Problem(None, None, key, "it is missing")
            elif _index.digest(value.data) != digest:
                yield Problem(None, None, key, _CHANGED)
        except (OSError, ValueError) as e:
            yield Problem(None, None, key, _unreadable(e))
    tops = {key.partition("/")[0] for key in known}
    for top in sorted(_commit.SIDE & (_store.list_top(root) or {}).keys() - tops):
        what = "it is of another save, and other readers may take it for one of this"
        yield Problem(None, None, top, what)


def _zarr_json(source: Source, records: Iterable[Record]) -> Iterator[Problem]:
    if source.database is not None:
        return  # They are in the file of the nodes, which has a digest.
    for record in records:
        key = f"{source.key(record)}/zarr.json"
        good = _store.zarr_json(record.template)
        found = np.empty(len(good) + 1, np.uint8)
        try:
            count = _store.read_into(source.root, key, 0, found)
            if found[:count].tobytes() != good:
                yield Problem(record.name, None, key, _CHANGED)
        except (OSError, ValueError) as e:
            yield Problem(record.name, None, key, _unreadable(e))


# ---- The data.


class _Chunk(NamedTuple):
    """A chunk, at `[start, stop)` of a file; the bytes from `before` on are no other's.

    `row` is the number of its first digest. `ends`: it is the last of its leaf.
    """

    record: Record
    index: tuple[int, ...]
    row: int
    file: str
    before: int
    start: int
    stop: int
    ends: bool


def _count(record: Record) -> int:
    return math.prod(_chunks.grid(record.template.shape, record.template.chunk))


def _full(record: Record) -> int:
    return math.prod(record.template.chunk) * record.template.itemsize


def _has_bytes(source: Source, record: Record) -> bool:
    """Whether a leaf has chunks, of its own: in a database, aliases lead to others'."""
    if source.database is not None and record.place in source.index.aliases:
        return False
    return _count(record) > 0


def _kept(record: Record, index: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a chunk without its padding."""
    t = record.template
    return tuple(s.stop - s.start for s in _chunks.region(t.shape, t.chunk, index))


def _numbered(source: Source, record: Record) -> Iterator[tuple[tuple[int, ...], int]]:
    """The index and the first digest of every chunk of a leaf."""
    t = record.template
    row = source.index.first_block(record.place)
    for index in _chunks.indices(t.shape, t.chunk):
        yield index, row
        size = math.prod(_kept(record, index)) * t.itemsize
        row += -(-size // _chunks.BLOCK)


def _plan(source: Source, records: list[Record]) -> Iterator[_Chunk]:
    """Every chunk there is, in the order of the files."""
    if source.database is None:
        for record in records:
            last, full = _count(record) - 1, _full(record)
            for number, (index, row) in enumerate(_numbered(source, record)):
                file = f"{source.key(record)}/{_chunks.key(index)}"
                yield _Chunk(record, index, row, file, 0, 0, full, number == last)
        return
    firsts: dict[int, set[int]] = {record.place: {0} for record in records}
    for place, number, _, _ in source.index.splits:
        if place in firsts:
            firsts[place].add(number)
    runs: list[tuple[str, int, Record, int, int]] = []
    for record in records:
        for first, end in it.pairwise([*sorted(firsts[record.place]), _count(record)]):
            place = source.index.place_of_chunk(record, first)
            runs.append((*place, record, first, end))
    runs.sort(key=operator.itemgetter(0, 1))
    for name, members in it.groupby(runs, key=operator.itemgetter(0)):
        file, before = f"{source.database}/{name}", 0
        for _, start, record, first, end in members:
            last, full = _count(record) - 1, _full(record)
            chunks = it.islice(enumerate(_numbered(source, record)), first, end)
            for number, (index, row) in chunks:
                stop = start + full
                before = min(before, start)
                yield _Chunk(
                    record, index, row, file, before, start, stop, number == last
                )
                before = start = stop


def _jobs(chunks: Iterable[_Chunk], step: int) -> Iterator[list[_Chunk]]:
    """Chunks that are read together: of `step` bytes at most, or one larger one."""
    job: list[_Chunk] = []
    size = 0
    for chunk in chunks:
        need = chunk.stop - chunk.before
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
    advance: _progress.Advance,
) -> list[Problem]:
    buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    for _ in range(_THREADS):
        buffers.put(np.empty(step, np.uint8))

    def check(job: list[_Chunk]) -> list[Problem]:
        buffer = buffers.get()
        try:
            return list(_check(source.root, job, digests, buffer))
        finally:
            buffers.put(buffer)

    problems: list[Problem] = []
    ends: dict[str, tuple[int, str | None]] = {}
    if source.database is not None:
        ends = {f"{source.database}/{name}": (0, None) for name in source.index.files}
    pending: collections.deque[tuple[list[_Chunk], cf.Future[list[Problem]]]]
    pending = collections.deque()

    def finish() -> None:
        job, future = pending.popleft()
        problems.extend(future.result())
        advance(sum(c.stop - c.start for c in job), sum(c.ends for c in job))

    with cf.ThreadPoolExecutor(_THREADS) as pool:
        for job in _jobs(_plan(source, records), step):
            pending.append((job, pool.submit(check, job)))
            for chunk in job:
                leaf = chunk.record.name if source.database is None else None
                ends[chunk.file] = chunk.stop, leaf
            if len(pending) > 2 * _THREADS:
                finish()
        while pending:
            finish()
    more = np.empty(1, np.uint8)
    for file, (end, leaf) in ends.items():
        try:
            if _store.read_into(source.root, file, end, more):
                what = "it has more bytes than it had"
                problems.append(Problem(leaf, None, file, what))
        except (OSError, ValueError) as e:
            if end == 0:  # Else its chunks say so.
                problems.append(Problem(leaf, None, file, _unreadable(e)))
    return problems


def _check(
    root: Root, job: list[_Chunk], digests: bytes | None, buffer: np.ndarray
) -> Iterator[Problem]:
    """Reads the chunks of a job, and compares them with their digests."""
    for key, members in it.groupby(job, key=operator.attrgetter("file")):
        chunks = list(members)
        file = _File(root, key, chunks[-1].stop, buffer)
        for chunk in chunks:
            name = chunk.record.name
            try:
                if not _is_zero(chunk, file):
                    what = f"the bytes before `{name}` are not zeros"
                    yield Problem(None, None, key, what)
                what = _wrong(chunk, file, digests)
            except (OSError, EOFError, ValueError) as e:
                what = _unreadable(e)
            if what is not None:
                yield Problem(name, chunk.index, key, what)


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


def _wrong(chunk: _Chunk, file: _File, digests: bytes | None) -> str | None:
    """What is wrong with a chunk, if anything is."""
    t, at = chunk.record.template, chunk.start
    found: list[bytes] = []
    hasher, room = xxhash.xxh3_128(), _chunks.BLOCK
    is_padded_with_zeros = True
    kept = _kept(chunk.record, chunk.index)
    for shape, inner in _slabs(t.chunk, kept, t.itemsize, len(file.buffer)):
        data = file.read(at, at + math.prod(shape) * t.itemsize)
        at += data.size
        if inner != shape:
            array = data.reshape(*shape, t.itemsize)
            part = _layout.chunk_bytes(array, tuple(map(slice, inner)))
            if np.count_nonzero(data) != np.count_nonzero(part):
                is_padded_with_zeros = False
            data = part
        while data.size:
            block, data = data[:room], data[room:]
            hasher.update(block.data)
            room -= block.size
            if room == 0:
                found.append(hasher.digest())
                hasher, room = xxhash.xxh3_128(), _chunks.BLOCK
    if room < _chunks.BLOCK:
        found.append(hasher.digest())
    first, last = 16 * chunk.row, 16 * (chunk.row + len(found))
    if digests is not None and digests[first:last] != b"".join(found):
        return _CHANGED
    return None if is_padded_with_zeros else "its padding is not zeros"


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
