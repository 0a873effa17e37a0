"""Files of leaves, whose bytes lie one after the other: those of layout `"ocdbt"`, and
`.safetensors`."""

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
    """Runs that follow each other in a file: those of small chunks, or one other."""

    runs: list[ChunkRun]
    small: SmallBatch | None = None


def batches(spec: TreeSpec, runs: Iterable[ChunkRun]) -> Iterator[Batch]:
    """The runs of a file, in batches. A caller that takes a compressed run fills its
    `ends` before it takes the next batch, which begins where they stop."""
    # Bytes of small chunks, by template.
    small = list(map(_payload.small_chunk, spec.templates))
    batch: list[ChunkRun] = []

    def small_batch() -> Batch:
        places, chunks, starts, _ = zip(*batch)
        numbers = [own.start for own in chunks]
        return Batch(batch, _payload.small_batch(places, numbers, starts, spec))

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


# The runs that begin with a part of a file, and its chunks, each in pieces.
_Part = tuple[list[ChunkRun], Iterable[Iterable[Any]]]


def _parts(
    data: LeafBytes, batches: Iterable[Batch], requests: int
) -> Iterator[Callable[[], _Part]]:
    """Calls that give the parts of a file in order: a batch each, or less where threads
    read ahead."""
    for batch in batches:
        leaf, chunks, *_ = batch.runs[0]
        size = len(chunks) or 1
        if requests > 1 and batch.small is None:
            size = max(1, _lazies.PART // max(1, data.grids[leaf].full))
        for first in range(chunks.start, max(chunks.stop, chunks.start + 1), size):
            own = range(first, min(first + size, chunks.stop))
            yield ft.partial(_part, data, batch, own, requests > 1)


def _part(data: LeafBytes, batch: Batch, numbers: range, is_ahead: bool) -> _Part:
    runs, small = batch
    if small is not None:
        return runs, [[data.together(small)]]
    chunks = data.chunks(runs[0].leaf, numbers)
    begins = runs if numbers.start == runs[0].chunks.start else []
    return begins, list(map(list, chunks)) if is_ahead else chunks


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
        parts = _parts(data, batches, requests)
        for runs, chunks in _lazies.in_order(parts, requests):
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
                if ends is not None:
                    ends.append(at - start)

    into.write(key, buffers())
    return written
