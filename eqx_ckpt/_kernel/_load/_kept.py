"""Chunks that several views share: which these are, and those that are kept while the
views are read one after the other, as a save reads them, and what computes of them.

In one read, views that share chunks are joined (`_share_chunks` in `_read_leaves`). Of
a lazy leaf that can only be read whole, a save keeps all (`LazySource` in
`_save/_lazies`).
"""

import collections
import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._format import _grid, _view
from .._format._leaves import LeafRecord
from .._format._template import Template
from .._format._view import View
from .._runtime import _cleanup, _threads
from . import _reads, _source
from ._leaf_body import StoredLeaf
from ._reads import ReadResult, ReadState, Results, StoredRead
from ._source import Source


# Bytes of chunks that are kept for a checkpoint; or two chunks, if they are larger.
_BYTES = 64 * 2**20


def is_by_chunks(source: Source, record: LeafRecord, verify: bool) -> bool:
    """Whether the chunks of a leaf are read whole, however little of them is wanted."""
    is_decoded = record.template.codec is not None or source.is_scattered(record)
    return (
        verify and source.has_digests or is_decoded and not source.is_contiguous(record)
    )


def touched(t: Template, views: tuple[View, ...] | None) -> Sequence[int]:
    """The numbers of the chunks that hold any of the views of a leaf, in order."""
    if views is None:
        return range(t.chunk_count)
    sets = [
        _grid.touched(t.shape, t.chunk, view.picks)
        for view in views
        if 0 not in view.shape
    ]
    return list(sets[0]) if len(sets) == 1 else sorted(set().union(*sets))


def span(source: Source, read: StoredRead) -> tuple[int, int]:
    """The first and the last number of the chunks of a read; (-1, -1) if it has
    none."""
    chunks = touched(source.template_as_read(read.record), read.views)
    return (chunks[0], chunks[-1]) if chunks else (-1, -1)


@dataclasses.dataclass(eq=False)
class KeptChunks:
    """The chunks that were last read of leaves of these `leaf_indices`, as saved."""

    leaf_indices: frozenset[int]
    lock: Any = dataclasses.field(default_factory=_threads.Lock)
    _chunks: dict[tuple[int, int], np.ndarray] = dataclasses.field(default_factory=dict)

    def get(self, leaf_index: int, numbers: Iterable[int]) -> dict[int, np.ndarray]:
        found = {n: self._chunks.get((leaf_index, n)) for n in numbers}
        return {n: chunk for n, chunk in found.items() if chunk is not None}

    def put(self, leaf_index: int, chunks: dict[int, np.ndarray]) -> None:
        """Keeps these as well, and lets go of those that came first."""
        self._chunks.update({(leaf_index, n): chunk for n, chunk in chunks.items()})
        size = sum(chunk.nbytes for chunk in self._chunks.values())
        for key in list(self._chunks)[:-2]:
            if size <= _BYTES:
                break
            size -= self._chunks.pop(key).nbytes


@contextlib.contextmanager
def keeping(leaves: Iterable[StoredLeaf]) -> Iterator[None]:
    """Lets reads of single leaves in the block share chunks: each is read once, as far
    as it is kept until then."""
    found = collections.defaultdict[Source, Any](collections.Counter[int])
    viewed: set[tuple[Source, int]] = set()
    for leaf in leaves:
        source, leaf_index = leaf.source, leaf.array_index
        found[source][leaf_index] += 1
        if leaf.view is not None:
            viewed.add((source, leaf_index))
    with contextlib.ExitStack() as stack:
        for source, counts in found.items():
            leaf_indices = {
                x for x, n in counts.items() if n > 1 and (source, x) in viewed
            }
            if leaf_indices:
                kept = KeptChunks(frozenset(leaf_indices))
                undo = ft.partial(source.chunk_caches.pop, kept, None)
                stack.enter_context(_cleanup.surely(undo))
                source.chunk_caches[kept] = None
        yield


def _find(state: ReadState, read: StoredRead) -> KeptChunks | None:
    """The chunks that a read shares with others, unless they take too much memory."""
    source, record = state.source, read.record
    leaf_index = source.array_index(record)
    kept = next(
        (x for x in list(source.chunk_caches) if leaf_index in x.leaf_indices), None
    )
    if kept is None or read.views is None or record.part is not None:
        return None
    t = source.template_as_read(record)
    is_shared = is_by_chunks(source, record, state.digests is not None)
    count = len(touched(t, read.views)) if is_shared else 0
    most = max(2 * t.full, min(_BYTES, state.budget))
    return kept if 0 < count * t.full <= most else None


def _assembled(
    t: Template, read: StoredRead, chunks: Mapping[int, np.ndarray]
) -> ReadResult:
    """Assembles the views of a read from the chunks that hold them."""
    errors: list[ValueError] = []
    regions, arrays = _source.grid_of(t).regions, read.memory()
    for view, array in zip(read.all_views, arrays):
        for number, chunk in chunks.items():
            overlap = _view.overlaps(view.ranges, regions[number])
            if overlap is not None:
                some = chunk[_view.mesh(overlap.fro, chunk.shape)]
                place = _view.mesh(overlap.to, array.shape)
                _reads.put(some, array, place, read.conversion, errors)
    return _reads.arranged(read.all_views, arrays, errors)


# Reads from files, and gives what has no problems.
ReadFiles = Callable[[ReadState, Sequence[StoredRead]], Results]


def read_kept(
    state: ReadState, reads: Sequence[StoredRead], read_files: ReadFiles
) -> Results:
    """Reads as `read_files` does, but takes the chunks that are kept from memory."""
    others = []
    for one in reads:
        if (kept := _find(state, one)) is None:
            others.append(one)
        else:
            yield from _read_shared(state, one, kept, read_files)
    yield from read_files(state, others)


def _read_shared(
    state: ReadState, read: StoredRead, kept: KeptChunks, read_files: ReadFiles
) -> Results:
    """Gives a read with its arrays, of chunks that are kept and of those that are read
    now, unless these have problems."""
    source, record, t = (
        state.source,
        read.record,
        state.source.template_as_read(read.record),
    )
    leaf_index, numbers = source.array_index(record), touched(t, read.views)

    def read_missing() -> dict[int, np.ndarray]:
        chunks = kept.get(leaf_index, numbers)
        missing = [n for n in numbers if n not in chunks]
        if missing:
            whole, regions = _view.whole(t.shape), _source.grid_of(t).regions
            views = tuple(whole.take((*regions[n], ...)) for n in missing)
            for _, result in read_files(state, [StoredRead(record, views)]):
                new = dict(zip(missing, result.arrays))
                chunks.update(new)
                kept.put(leaf_index, new)
        return chunks

    # Of threads that need the same chunk, one reads it.
    chunks = kept.lock.run(read_missing)
    if len(chunks) == len(numbers):
        yield read, _assembled(t, read, chunks)
