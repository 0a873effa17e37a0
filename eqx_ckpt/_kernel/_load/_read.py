"""The planned read: small leaves in runs, large ones in parts, all verified.

`read` calls `_read_files`, once more if a store may have been wrong. That sends leaves
of one block to `_read_runs`, here, and all others to `_parts.read_parts`.
"""

import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._errors import DamagedError, ReplacedError
from .._format import _grid, _template
from .._storage import _arrays, _context, _store
from . import _kept, _parts, _reader, _wording
from ._reader import Reader, ReadResult, Results, StoredRead
from ._source import Source


# Leaves of one block up to this many bytes are read together into one piece of memory,
# and whole even where a part of them is wanted.
_SMALL_BYTES = 1 << 16
# Leaves that lie together are read as one run: so many bytes, between them at most so
# many that nobody wants, and, where each is a file of its own, so many.
_REMOTE_RUN_BYTES, _GAP_BYTES, _LOCAL_RUNS = 8 * 2**20, 4096, 128
# On a disk shorter runs, and few at a time, use memory that the processor still has at
# hand. A store is slow to begin.
_LOCAL_RUN_BYTES, _NEAR_JOBS = 2**20, 4
# Runs of so many leaves, on average, are read by one thread.
_LEAVES_PER_RUN = 8
# The memory for what is under way, unless the caller says so.
BUDGET = 256 * 2**20


def read(
    source: Source,
    reads: Sequence[StoredRead],
    verify: bool,
    max_bytes: int | None = None,
) -> Results:
    """Reads stored arrays, or views of them, each byte once. Gives each read with its
    arrays as they arrive.

    **Raises:** at the end, `DamagedError` that names every leaf whose bytes are missing
    or are not those that were saved.
    """
    _context.watch_forks()
    _context.check_fork()
    budget = BUDGET if max_bytes is None else max_bytes
    problems: dict[str, str] = {}
    is_verified = verify and source.has_digests and len(reads) > 0
    digests = source.digests if is_verified else None
    left = {id(one): one for one in reads}
    # A store may give one wrong answer: see `_store.look_twice`.
    for _ in range(1 + source.root.is_remote):
        problems.clear()
        reader = Reader(source, digests, budget, problems)
        if source.chunk_caches:
            results = _kept.read_kept(reader, [*left.values()], _read_files)
        else:
            results = _read_files(reader, [*left.values()])
        for one, result in results:
            del left[id(one)]
            yield one, result
        if not problems:
            break
    if problems:
        raise _damaged(source, problems)
    if not source.is_unchanged():
        raise source.error_for("")


def _read_files(reader: Reader, reads: Sequence[StoredRead]) -> Results:
    """Reads once, and leaves out reads that end up in the reader's `problems`."""
    source, is_verified = reader.source, reader.digests is not None
    small: list[StoredRead] = []
    large: list[StoredRead] = []
    # Leaves of one template are alike where each is one run of bytes of our own files.
    known: dict[tuple[int, bool], bool] = {}
    for one in reads:
        if one.record.part is not None:
            _wording.check_readable(one.record)
        key = id(one.record.template), one.views is None
        is_small = known.get(key)
        if is_small is None:
            is_small = _is_small(source, one, is_verified)
            if source.is_ours:
                known[key] = is_small
        if is_small and one.views != ():
            small.append(one)
        elif 0 in one.record.template.shape or all(0 in x for x in one.shapes):
            dtype = _template.dtype_of(one.record.template.stored)
            if one.conversion is not None:
                dtype = one.conversion.dtype
            empty = [np.empty(shape, dtype) for shape in one.shapes]
            yield one, ReadResult(empty, True)
        else:
            large.append(one)
    if reader.digests is not None and (small or large):
        reader.digests.prepare()
    if small:
        yield from _read_runs(reader, small)
    if large:
        yield from _parts.read_parts(reader, large)


def _is_small(source: Source, one: StoredRead, is_verified: bool) -> bool:
    """Whether a leaf is read in a run: what is one block, and is wanted whole."""
    t = one.record.template
    most = _grid.BLOCK if is_verified or one.views is None else _SMALL_BYTES
    is_one = t.chunk == t.shape and t.nbytes <= most and t.codec is None
    return is_one and not source.is_scattered(one.record)


def _damaged(source: Source, problems: dict[str, str]) -> RuntimeError:
    error = source.error_for("")
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


# ---- Leaves that are one block.


class _Member(NamedTuple):
    """A leaf of a run: its `offset` in the file, and its bytes."""

    read: StoredRead
    offset: int
    nbytes: int


class _Run(NamedTuple):
    """Leaves that lie together in a file, from byte `start` to byte `stop`."""

    key: str
    start: int
    stop: int
    members: list[_Member]


def _runs(source: Source, reads: list[StoredRead], most: int) -> list[_Run]:
    """Runs of at most about so many bytes."""
    records = [one.record for one in reads]
    templates = {id(record.template): record.template for record in records}
    sizes = {x: template.nbytes for x, template in templates.items()}
    files, starts = source.starts(records)
    runs: list[_Run] = []
    last, start, stop = -1, 0, 0
    members: list[_Member] = []
    for i in sorted(range(len(reads)), key=starts.__getitem__):
        file, offset = starts[i]
        size = sizes[id(records[i].template)]
        end, member = offset + size, _Member(reads[i], offset, size)
        if file == last and stop <= offset <= stop + _GAP_BYTES and end - start <= most:
            members.append(member)
            stop = end
            continue
        if members:
            runs.append(_Run(files[last], start, stop, members))
        last, start, stop, members = file, offset, end, [member]
    return [*runs, _Run(files[last], start, stop, members)]


def _jobs(runs: list[_Run], most: int, count: int) -> Iterator[tuple[int, list[_Run]]]:
    """Jobs of one thread each: their bytes, and the runs that they read one after the
    other."""
    job, size = [], 0
    for run in runs:
        nbytes = run.stop - run.start
        if job and (size + nbytes > most or len(job) == count):
            yield size, job
            job, size = [], 0
        job.append(run)
        size += nbytes
    yield size, job


def _read_runs(reader: Reader, reads: list[StoredRead]) -> Results:
    """Reads leaves of one block, those that lie together in one piece."""
    is_remote = reader.source.root.is_remote
    most = min(
        _REMOTE_RUN_BYTES if is_remote else _LOCAL_RUN_BYTES,
        max(_SMALL_BYTES, reader.budget // 4),
    )
    runs = _runs(reader.source, reads, most)
    jobs = list(_jobs(runs, most, 1 if is_remote else _LOCAL_RUNS))
    if len(jobs) == 1 or not is_remote and len(runs) * _LEAVES_PER_RUN <= len(reads):
        # For so little no thread is started; and of small leaves most of the work is
        # that of Python, which threads would only take from each other.
        for _, job in jobs:
            yield from _start_job(reader, job)()
        return
    starts = ((size, ft.partial(_start_job, reader, job)) for size, job in jobs)
    count = len(jobs) if is_remote else _NEAR_JOBS
    for some in _reader.in_order(starts, reader.budget, count):
        yield from some


def _start_job(
    reader: Reader, job: list[_Run]
) -> Callable[[], list[tuple[StoredRead, ReadResult]]]:
    """Sends the request of a job to a store, or gets memory for it from the system.
    What it returns waits for the bytes, or reads them into that memory, and gives the
    leaves."""
    if reader.source.root.is_remote:
        key, start, stop, _ = job[0]
        coming = [reader.source.directory.start_read(key, start, stop)]
    else:
        # Memory that other threads ask for is new to the system at each load, which
        # fills it with zeros.
        coming = list(map(_memory, job))
    return ft.partial(_read_job, reader, job, coming)


def _read_job(
    reader: Reader, job: list[_Run], coming: list[Any]
) -> list[tuple[StoredRead, ReadResult]]:
    """The leaves of some runs that are as they were saved. `coming` has for each run
    the answer of a store that is on its way, or the memory to read it into."""
    out = []
    for run, its in zip(job, coming):
        try:
            pieces, stop = _read_run(reader.source, run, its)
        except Exception as e:
            why = reader.explain(e)
            reader.problems.update((x.read.record.name, why) for x in run.members)
            continue
        _unpack(reader, run, pieces, stop, out)
    return out


class _Piece(NamedTuple):
    """The bytes of a leaf, in memory of a run or, if it `is_owned`, in its own. If it
    `is_aligned`, JAX would take them as they are, and keep all of the run."""

    data: np.ndarray
    is_owned: bool
    is_aligned: bool


def _read_run(source: Source, run: _Run, coming: Any) -> tuple[list[_Piece], int]:
    """The bytes of each leaf of a run, and where the file has ended. `coming`: the
    bytes, if they are in a store, else the memory for them."""
    root, start = source.directory, run.start
    if source.root.is_remote:
        data = _store.read_answer(root, run.key, coming).value
        whole = np.frombuffer(data, np.uint8)
        return _parts_of(whole, start, run.members), start + whole.size
    pieces, into = coming
    return pieces, start + root.read_into(run.key, start, *into)


def _memory(run: _Run) -> tuple[list[_Piece], list[np.ndarray]]:
    """Memory for each leaf of a run, and all of it in the order of the file."""
    start, members = run.start, run.members
    # Larger ones get memory of their own, which becomes that of the leaf.
    pieces: list[_Piece] = []
    into: list[np.ndarray] = []
    at, first = start, 0
    for i, (_, offset, size) in enumerate(members):
        if size >= _SMALL_BYTES:
            if at < offset:
                into.append(np.empty(offset - at, np.uint8))
                pieces += _parts_of(into[-1], at, members[first:i])
            into.append(_arrays.aligned_bytes(size))
            pieces.append(_Piece(into[-1], True, True))
            at, first = offset + size, i + 1
    if at < run.stop:
        into.append(np.empty(run.stop - at, np.uint8))
        pieces += _parts_of(into[-1], at, members[first:])
    return pieces, into


def _parts_of(whole: np.ndarray, start: int, members: list[_Member]) -> list[_Piece]:
    base = _arrays.address(whole) - start
    return [
        _Piece(
            whole[offset - start : offset - start + size],
            False,
            (base + offset) % _arrays.ALIGNED == 0,
        )
        for _, offset, size in members
    ]


def _unpack(
    reader: Reader,
    run: _Run,
    pieces: list[_Piece],
    stop: int,
    out: list[tuple[StoredRead, ReadResult]],
) -> None:
    """Adds the leaves of a run that are there and as they were saved."""
    digest, digests = xxhash.xxh3_128_digest, reader.digests
    last, dtype = None, np.dtype(np.uint8)
    saved: list[bytes] = [b""] * len(pieces)
    if digests is not None:
        leaves = [x.read.record.leaf_index for x in run.members]
        saved = digests.each(reader.source.index.extents.first_digests(leaves))
    for (one, offset, size), whole, own in zip(run.members, pieces, saved):
        piece, is_owned, is_aligned = whole
        record, views, conversion, _, _ = one
        t = record.template
        if offset + size > stop:
            reader.problems[record.name] = _reader.MISSING
            continue
        if digests is not None:
            # It is one block.
            if own != digest(piece.data):
                reader.problems[record.name] = _reader.CHANGED
                continue
        if t is not last:
            last, dtype = t, _template.dtype_of(t.stored)
        if is_aligned and not is_owned:
            piece, is_owned = piece.copy(), True
        arrays, owned, lost = [np.ndarray(t.shape, dtype, piece)], is_owned, ""
        if views is not None:
            arrays, owned = [v.apply(arrays[0]) for v in views], False
        if conversion is not None:
            arrays, owned, lost = _reader.converted(conversion, arrays)
        out.append((one, ReadResult(arrays, owned, lost)))
