"""Writes files in which the bytes of leaves lie one after the other: those of layout
`"ocdbt"`, and `.safetensors`.

A file is a sequence of runs of chunks. `batches` joins runs of small chunks.
`_segments` gives a call for each batch, or, where lazy leaves are read ahead, for a
piece of a long run.
`write_file` makes these calls in order, and hands the bytes to the file as they come.

Of a compressed run nobody knows the end before it is written. So all of this is lazy:
`write_file` draws a run through `_segments` and `batches` from `lay_runs` of
`_to_ocdbt`. It fills the `ends` of that run as it writes it, and only then draws the
next one, which begins where they stop.
"""

import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import _lazies, _payload
from ._payload import LeafBytes, SmallBatch
from ._tree_spec import TreeSpec
from ._writing import ChunkRun, Destination, Sink


# Small chunks that follow each other are written together, up to so many bytes.
_BATCH_BYTES = 2**18


class Batch(NamedTuple):
    """Runs that follow each other in a file: several of `small` chunks, or a single run
    of any others (`small` is None)."""

    runs: list[ChunkRun]
    small: SmallBatch | None = None


def batches(spec: TreeSpec, runs: Iterable[ChunkRun]) -> Iterator[Batch]:
    """The runs of a file, in batches. A caller that takes a compressed run fills its
    `ends` before it takes the next batch, which begins where they stop."""
    # Bytes of small chunks, by template.
    small = list(map(_payload.small_chunk, spec.templates))
    batch: list[ChunkRun] = []

    def small_batch() -> Batch:
        leaf_indices, chunks, starts, _ = zip(*batch)
        numbers = [own.start for own in chunks]
        return Batch(batch, _payload.small_batch(leaf_indices, numbers, starts, spec))

    for run in runs:
        size = small[spec.template_of[run.leaf]] if len(run.chunks) == 1 else 0
        is_full = batch and run.offset + size - batch[0].offset > _BATCH_BYTES
        if batch and (is_full or not size):
            yield small_batch()
            batch = []
        if size:
            batch.append(run)
        else:
            yield Batch([run])
    if batch:
        yield small_batch()


class _FileSegment(NamedTuple):
    """A segment of a file: the runs whose first chunk is in it, and the bytes of its
    chunks, each in pieces."""

    begun: list[ChunkRun]
    chunks: Iterable[Iterable[Any]]


def _segments(
    data: LeafBytes, batches: Iterable[Batch], requests: int
) -> Iterator[Callable[[], _FileSegment]]:
    """Calls that give the segments of a file in order: a batch each, or less where
    threads read ahead."""
    for batch in batches:
        # A batch of small chunks is one segment: each of its runs has one chunk.
        leaf, chunks, *_ = batch.runs[0]
        # A run without chunks has a segment too: it is to be among those written.
        count = len(chunks) or 1
        if requests > 1 and batch.small is None:
            count = max(1, _lazies.PART // max(1, data.grids[leaf].full))
        for first in range(chunks.start, max(chunks.stop, chunks.start + 1), count):
            own = range(first, min(first + count, chunks.stop))
            yield ft.partial(_segment, data, batch, own, requests > 1)


def _segment(
    data: LeafBytes, batch: Batch, numbers: range, is_ahead: bool
) -> _FileSegment:
    """The segment with chunks of these numbers of a batch. All bytes are there when it
    returns if it `is_ahead`, else they are made as they are drawn."""
    runs, small = batch
    if small is not None:
        return _FileSegment(runs, [[data.join_batch(small)]])
    chunks = data.chunks(runs[0].leaf, numbers)
    begun = runs if numbers.start == runs[0].chunks.start else []
    return _FileSegment(begun, list(map(list, chunks)) if is_ahead else chunks)


def write_file(
    data: LeafBytes,
    into: Destination[Sink],
    key: str,
    batches: Iterable[Batch],
    requests: int,
    head: bytes = b"",
) -> list[ChunkRun]:
    """Writes the leaves of a file after its `head`, and returns their runs. So many
    `requests` read parts of lazy leaves at a time."""
    written: list[ChunkRun] = []

    def buffers() -> Iterator[Any]:
        if head:
            yield head
        at = len(head)
        segments = _segments(data, batches, requests)
        # One after the other, unless `requests` for lazy leaves are made ahead.
        for runs, chunks in _lazies.results(segments, requests):
            if runs and runs[0].offset != at:
                yield bytes(runs[0].offset - at)
                at = runs[0].offset
            written.extend(runs)
            start, ends = at, runs[0].ends if runs else None
            for pieces in chunks:
                for piece in pieces:
                    at += len(piece)
                    yield piece
                    del piece  # Before the next chunk takes as much.
                if ends is not None:  # `lay_runs` waits for these to go on.
                    ends.append(at - start)

    into.write(key, buffers())
    return written
