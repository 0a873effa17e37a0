"""The planned read of stored arrays: each byte once, and verified if that is asked for.

`read_arrays` has leaves of one block (`_grid.BLOCK`; each has one digest) read in runs
(`_small_leaves`), and all others in parts (`_large_leaf`); once more if a store may
have been wrong.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._errors import DamagedError, ReplacedError
from .._storage import _context
from . import _kept, _row_leaf, _small_leaves, _wording
from ._chunk_leaf import ChunkLeaf, LATER
from ._large_leaf import LargeLeaf
from ._reads import in_order, ReadResult, ReadState, Results, StoredRead
from ._source import Source


# The memory for what is under way, unless the caller says so.
BUDGET = 256 * 2**20


def read_arrays(
    source: Source,
    reads: Sequence[StoredRead],
    verify: bool,
    max_bytes: int | None = None,
) -> Results:
    """Reads stored arrays, or views of them. Gives each read with its arrays as they
    arrive.

    **Raises:** at the end, `DamagedError` that names the leaves, 20 at most, whose
    bytes are missing or are not those that were saved, or `ReplacedError`; at once,
    `ValueError` for a leaf that cannot be read.
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
        state = ReadState(source, digests, budget, problems)
        todo = [*left.values()]
        if source.chunk_caches:
            results = _kept.read_kept(state, todo, _read_once)
        else:
            results = _read_once(state, todo)
        for one, result in results:
            del left[id(one)]
            yield one, result
        if not problems:
            break
    if problems:
        raise _damaged(source, problems)
    if not source.is_unchanged():
        raise source.error_for("")


def _read_once(state: ReadState, reads: Sequence[StoredRead]) -> Results:
    """Reads them, but those that end up in the `problems` of the state."""
    source, is_verified = state.source, state.digests is not None
    small: list[StoredRead] = []
    large: list[StoredRead] = []
    # The leaves of one template that are wanted whole are all small or all not, as are
    # those that are wanted in part; unless a file of another format scatters some.
    known: dict[tuple[int, bool], bool] = {}
    for one in reads:
        if one.record.part is not None:
            _wording.check_readable(one.record)
        key = id(one.record.template), one.views is None
        is_small = known.get(key)
        if is_small is None:
            is_small = _small_leaves.is_small(source, one, is_verified)
            if source.is_ours:
                known[key] = is_small
        # Without any view, this process has no part of it.
        if is_small and one.views != ():
            small.append(one)
        elif one.nbytes == 0:
            empty = [np.empty(shape, one.dtype) for shape in one.shapes]
            yield one, ReadResult(empty, True)
        else:
            large.append(one)
    if state.digests is not None and (small or large):
        state.digests.prepare()
    if small:
        yield from _small_leaves.read_small(state, small)
    if large:
        yield from _read_large(state, large)


def _read_large(state: ReadState, reads: list[StoredRead]) -> Results:
    """Reads leaves in their order, in parts, and gives those without problems."""
    jobs = (job for leaf in _large_leaves(state, reads) for job in leaf.jobs())
    # Chunks are decoded by threads of TensorStore, for which these wait.
    is_waiting = any(one.record.template.codec is not None for one in reads)
    for leaf in in_order(jobs, state.budget, per_core=2 if is_waiting else 1):
        if leaf is not None and leaf.read.record.name not in state.problems:
            yield leaf.read, leaf.result()


def _large_leaves(state: ReadState, reads: list[StoredRead]) -> list[LargeLeaf[Any]]:
    """The leaves that can be read, as far as their files are looked at. Those that
    TensorStore reads are opened together, after that look."""
    source = state.source
    leaves: list[LargeLeaf[Any]] = []
    by_tensorstore: list[ChunkLeaf] = []
    for one in reads:
        try:
            leaf = _row_leaf.row_leaf(state, one)
            if leaf is None:
                leaf = ChunkLeaf(state, one)
                if leaf.is_read_by_tensorstore:
                    by_tensorstore.append(leaf)
            leaves.append(leaf)
        except Exception as e:
            state.problems[one.record.name] = state.explain(e)
    arrays: list[Any] = [LATER] * len(by_tensorstore)
    if by_tensorstore and source.directory.has_driver():
        arrays = source.open([(x.read.record, x.chunks) for x in by_tensorstore])
    for leaf, array in zip(by_tensorstore, arrays):
        leaf.read_from(array)
    return leaves


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
