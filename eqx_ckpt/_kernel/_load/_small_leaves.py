"""Leaves of one block: those that lie together in a file are read as one run, which
becomes their memory, and each is verified as it comes.

`read_small` deals the runs out to jobs. `_start_job` gets memory for a job, or sends
its request to a store, and `_finish_job` makes the leaves of the bytes.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .._format import _digests, _grid, _template
from .._storage import _arrays, _store
from . import _reads
from ._reads import ReadJob, ReadResult, ReadState, Results, StoredRead
from ._source import Source


# Leaves of one block of fewer bytes are read together into one piece of memory. If
# nothing is verified, one of up to so many bytes is still read whole, even where only a
# part of it is wanted.
_JOINT_BYTES = 1 << 16
# Leaves that lie together are read as one run, with at most so many bytes between two
# that nobody wants.
_GAP_BYTES = 4096
# The bytes of a run: a store is slow to begin. On a disk shorter runs, and so few jobs
# at a time, use memory that the processor still has at hand.
_REMOTE_RUN_BYTES, _LOCAL_RUN_BYTES, _LOCAL_JOBS = 8 * 2**20, 2**20, 4
# Runs that one job reads on a disk, where each leaf may be a file of its own.
_LOCAL_RUNS = 128
# Runs of so many leaves, on average, are read by one thread.
_LEAVES_PER_RUN = 8


def is_small(source: Source, one: StoredRead, is_verified: bool) -> bool:
    """Whether a leaf is read whole, in a run: it is one block that is not compressed.
    If only a part of it is wanted, it also has to be verified, as its digest is of all
    of it, or to have at most `_JOINT_BYTES`."""
    t = one.record.template
    most = _grid.BLOCK if is_verified or one.views is None else _JOINT_BYTES
    is_one = t.chunk == t.shape and t.nbytes <= most and t.codec is None
    return is_one and not source.is_scattered(one.record)


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


def read_small(state: ReadState, reads: list[StoredRead]) -> Results:
    """Reads leaves that are each one block, and gives those without problems."""
    is_remote = state.source.root.is_remote
    most = min(
        _REMOTE_RUN_BYTES if is_remote else _LOCAL_RUN_BYTES,
        max(_JOINT_BYTES, state.budget // 4),
    )
    runs = _runs(state.source, reads, most)
    jobs = list(_jobs(runs, most, 1 if is_remote else _LOCAL_RUNS))
    if len(jobs) == 1 or not is_remote and len(runs) * _LEAVES_PER_RUN <= len(reads):
        # For so little no thread is started; and of small leaves most of the work is
        # that of Python, which threads would only take from each other.
        for _, job in jobs:
            finish = _start_job(state, job)
            yield from finish()
        return
    starts = (ReadJob(size, ft.partial(_start_job, state, job)) for size, job in jobs)
    count = len(jobs) if is_remote else _LOCAL_JOBS
    for some in _reads.in_order(starts, state.budget, count):
        yield from some


def _start_job(
    state: ReadState, job: list[_Run]
) -> Callable[[], list[tuple[StoredRead, ReadResult]]]:
    """Sends the request of a job to a store, or gets memory for it from the system.
    Returns `_finish_job` of it, which waits for the bytes, or reads them into that
    memory."""
    if state.source.root.is_remote:
        key, start, stop, _ = job[0]
        answers_or_memory = [state.source.directory.start_read(key, start, stop)]
    else:
        # Here, in the thread of the caller: memory that other threads ask for is new to
        # the system at each load, which fills it with zeros.
        answers_or_memory = list(map(_memory, job))
    return ft.partial(_finish_job, state, job, answers_or_memory)


def _finish_job(
    state: ReadState, job: list[_Run], answers_or_memory: list[Any]
) -> list[tuple[StoredRead, ReadResult]]:
    """The leaves of some runs that are as they were saved. For each run there is the
    answer of a store that is on its way, or the memory to read it into."""
    out: list[tuple[StoredRead, ReadResult]] = []
    directory = state.source.directory
    for run, answer_or_memory in zip(job, answers_or_memory):
        key, start, _, members = run
        try:
            if state.source.root.is_remote:
                data = _store.read_answer(directory, key, answer_or_memory).value
                whole = np.frombuffer(data, np.uint8)
                pieces, size = _pieces(whole, start, members), whole.size
            else:
                pieces, into = answer_or_memory
                size = directory.read_into(key, start, *into)
        except Exception as e:
            why = state.explain(e)
            state.problems.update((x.read.record.name, why) for x in members)
        else:
            _add_leaves(state, run, pieces, start + size, out)
    return out


class _Piece(NamedTuple):
    """The bytes of a leaf, in memory of a run or, if it `is_owned`, in its own. If it
    `is_aligned`, JAX would take them as they are, and keep all of the run."""

    data: np.ndarray
    is_owned: bool
    is_aligned: bool


def _memory(run: _Run) -> tuple[list[_Piece], list[np.ndarray]]:
    """Memory for each leaf of a run, and all of it in the order of the file."""
    start, members = run.start, run.members
    # Larger ones get memory of their own, which becomes that of the leaf.
    pieces: list[_Piece] = []
    into: list[np.ndarray] = []
    at, first = start, 0
    for i, (_, offset, size) in enumerate(members):
        if size >= _JOINT_BYTES:
            if at < offset:
                into.append(np.empty(offset - at, np.uint8))
                pieces += _pieces(into[-1], at, members[first:i])
            into.append(_arrays.aligned_bytes(size))
            pieces.append(_Piece(into[-1], True, True))
            at, first = offset + size, i + 1
    if at < run.stop:
        into.append(np.empty(run.stop - at, np.uint8))
        pieces += _pieces(into[-1], at, members[first:])
    return pieces, into


def _pieces(whole: np.ndarray, start: int, members: list[_Member]) -> list[_Piece]:
    """The bytes of leaves in memory that has those of a file from `start` on."""
    base = _arrays.address(whole) - start
    return [
        _Piece(
            whole[offset - start : offset - start + size],
            False,
            (base + offset) % _arrays.ALIGNED == 0,
        )
        for _, offset, size in members
    ]


def _add_leaves(
    state: ReadState,
    run: _Run,
    pieces: list[_Piece],
    stop: int,
    out: list[tuple[StoredRead, ReadResult]],
) -> None:
    """Adds the leaves of a run that are there and as they were saved, of which the
    bytes up to `stop` have come."""
    digest, digests = _digests.block_digest, state.digests
    saved: list[bytes] = [b""] * len(pieces)
    if digests is not None:
        leaves = [x.read.record.leaf_index for x in run.members]
        saved = digests.each(state.source.index.extents.first_digests(leaves))
    for (one, offset, size), piece, expected in zip(run.members, pieces, saved):
        data, is_owned, is_aligned = piece
        record, views, conversion, _, _ = one
        t = record.template
        if offset + size > stop:
            state.problems[record.name] = _reads.MISSING
            continue
        # It is one block.
        if digests is not None and expected != digest(data.data):
            state.problems[record.name] = _reads.CHANGED
            continue
        if is_aligned and not is_owned:
            data, is_owned = data.copy(), True
        dtype = _template.dtype_of(t.stored)
        arrays, owned, lost = [np.ndarray(t.shape, dtype, data)], is_owned, ""
        if views is not None:
            arrays, owned = [v.apply(arrays[0]) for v in views], False
        if conversion is not None:
            arrays, owned, lost = _reads.converted(conversion, arrays)
        out.append((one, ReadResult(arrays, owned, lost)))
