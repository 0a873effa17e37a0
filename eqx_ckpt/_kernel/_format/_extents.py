"""Where the chunks of leaves lie, as a table. An index says it by a rule: see
`_placement`.
"""

import dataclasses
import functools as ft
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from . import _grid, _template
from ._leaves import LeafRecord, Leaves


class Segment(NamedTuple):
    """The chunks `[first, stop)` of a leaf, which lie side by side in a file from the
    byte `offset` on."""

    first: int
    stop: int
    file: int
    offset: int


class ChunkExtent(NamedTuple):
    """The bytes of one chunk in a file."""

    file: int
    offset: int
    length: int


class ChunkSizes(NamedTuple):
    """Per leaf its number of chunks, and the bytes of one. An alias has no chunks."""

    counts: np.ndarray
    full: np.ndarray


class _DigestRows(NamedTuple):
    """The number of the first digest of each row, and of each page; and how many there
    are, as the last of the `pages`."""

    first: np.ndarray
    pages: list[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Extents:
    """Runs of chunks that lie side by side, in the order of the leaves: those of leaf
    `i` are the rows from `base[i]` to `base[i + 1]`. Each begins with the chunk
    `first`, at `offset` of a file.

    `ends` are those of the compressed chunks, if all of them followed each other: that
    of chunk `n` of a leaf, by the row that has it, is `ends[coded + n + 1]`. An alias
    lies where its origin does, whatever is in rows of its own. Digests are in the order
    of the files, in a page for each.
    """

    leaves: Leaves
    files: int
    base: np.ndarray
    first: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    coded: np.ndarray
    ends: np.ndarray

    def shifted(self, by: Sequence[int]) -> "Extents":
        """A copy with the offsets in each file shifted."""
        offset = self.offset + np.asarray(by, np.int64)[self.file]
        return dataclasses.replace(self, offset=offset)

    def _rows(self, leaf: int) -> slice:
        leaf = self.leaves.aliases.get(leaf, leaf)
        return slice(self.base.item(leaf), self.base.item(leaf + 1))

    def _row(self, rows: slice, chunk: int) -> int:
        """The row of a chunk among those of its leaf."""
        if rows.stop - rows.start == 1:
            return rows.start
        return rows.start + int(self.first[rows].searchsorted(chunk, "right")) - 1

    def starts(self, leaves: Iterable[int]) -> list[tuple[int, int]]:
        """The file and the offset of the first chunk of each of some leaves."""
        rows = self._first_rows(leaves)
        return list(zip(self.file[rows].tolist(), self.offset[rows].tolist()))

    def _first_rows(self, leaves: Iterable[int]) -> np.ndarray:
        aliases = self.leaves.aliases
        if aliases:
            leaves = [aliases.get(leaf, leaf) for leaf in leaves]
        return self.base[np.fromiter(leaves, np.intp)]

    def segments(self, record: LeafRecord) -> list[Segment]:
        """All of a leaf, in the order of its chunks."""
        rows = self._rows(record.leaf_index)
        first = self.first[rows].tolist()
        stops = [*first[1:], record.template.chunk_count]
        file, offset = self.file[rows].tolist(), self.offset[rows].tolist()
        return list(map(Segment, first, stops, file, offset))

    def segment(self, record: LeafRecord, chunk: int) -> Segment:
        """The one that a chunk is in."""
        rows = self._rows(record.leaf_index)
        row = self._row(rows, chunk)
        is_last = row + 1 == rows.stop
        stop = record.template.chunk_count if is_last else self.first.item(row + 1)
        file, offset = self.file.item(row), self.offset.item(row)
        return Segment(self.first.item(row), stop, file, offset)

    def nbytes(self, record: LeafRecord, first: int, stop: int) -> int:
        """The bytes of chunks `[first, stop)` of a leaf, which are in one run."""
        if record.template.codec is None:
            return (stop - first) * record.template.full
        at = self.coded.item(self._row(self._rows(record.leaf_index), first))
        return self.ends.item(at + stop) - self.ends.item(at + first)

    def locate(self, record: LeafRecord, chunk: int) -> ChunkExtent:
        first, _, file, offset = self.segment(record, chunk)
        start = offset + self.nbytes(record, first, chunk)
        return ChunkExtent(file, start, self.nbytes(record, chunk, chunk + 1))

    # ---- The file of digests.

    @ft.cached_property
    def _digests(self) -> _DigestRows:
        file, offset = self.file, self.offset
        self.leaves.check_templates()
        blocks = self._blocks()
        check_total(blocks.sum(dtype=float))
        # What has no chunks has no digests, wherever it lies.
        order = np.lexsort((offset, file))
        sums = np.append(0, np.cumsum(blocks[order]))
        pages = np.searchsorted(file[order], np.arange(self.files + 1))
        numbers = np.empty_like(blocks)
        numbers[order] = sums[:-1]
        return _DigestRows(numbers, sums[pages].tolist())

    def _blocks(self) -> np.ndarray:
        """Per-row number of digests: one for each chunk, unless these are large. A row
        of an alias has none."""
        leaves, first = self.leaves, self.first
        chunks, full = sizes_of(leaves)
        leaf, count = np.arange(len(chunks)), chunks
        rows = np.diff(self.base)
        if (rows != 1).any():
            leaf = np.repeat(leaf, rows)
            count = stops_of(leaf, first, chunks) - first
        is_large = full > _grid.BLOCK
        if not is_large.any():
            return count
        blocks = count.copy()
        number = np.asarray(leaves.template_of, np.intp)[leaf]
        for large in np.unique(number[is_large[leaf] & (count > 0)]).tolist():
            t = leaves.templates[large]
            rows = np.flatnonzero((number == large) & (count > 0))
            if (count[rows] == t.chunk_count).all():
                blocks[rows] = _grid.block_counts(t.shape, t.chunk, t.itemsize)
                continue
            starts = _grid.block_starts(t.shape, t.chunk, t.itemsize)
            blocks[rows] = starts[first[rows] + count[rows]] - starts[first[rows]]
        return blocks

    @property
    def pages(self) -> list[int]:
        """The number of the first digest of each page of the file of digests, and how
        many there are."""
        return self._digests.pages

    def first_digests(self, leaves: Iterable[int]) -> list[int]:
        """The number of the first digest of each of some leaves."""
        return self._digests.first[self._first_rows(leaves)].tolist()

    def digest_of(self, record: LeafRecord, chunk: int) -> int:
        """The number of the first digest of a chunk."""
        row = self._row(self._rows(record.leaf_index), chunk)
        block_of = record.template.block_of
        before = block_of(self.first.item(row))
        return self._digests.first.item(row) + block_of(chunk) - before


def check_total(size: float) -> None:
    if size > _template.MAX_BYTES:
        raise ValueError("the leaves are of an impossible size")


def sizes_of(leaves: Leaves) -> ChunkSizes:
    number = np.asarray(leaves.template_of, np.intp)
    sizes = np.asarray(leaves.template_sizes, np.int64)
    chunks, full = sizes.take(number, axis=1, mode="clip")
    chunks[list(leaves.aliases)] = 0
    return ChunkSizes(chunks, full)


def is_compressed(leaves: Leaves) -> np.ndarray:
    """Per-leaf whether it is compressed."""
    codecs = np.asarray([t.codec is not None for t in leaves.templates], bool)
    return codecs[np.asarray(leaves.template_of, np.intp)]


def stops_of(leaf: np.ndarray, first: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Per-row number of the chunk after the last one."""
    stop = np.append(first[1:], 0).astype(np.int64)[: len(leaf)]
    is_last = np.append(leaf[1:] != leaf[:-1], True)[: len(leaf)]
    stop[is_last] = chunks[leaf[is_last]]
    return stop


def check_apart(file: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
    """**Raises:** `ValueError` for two that are at one place in the files."""
    order = np.lexsort((start, file))
    file, start, stop = file[order], start[order], stop[order]
    if ((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).any():
        raise ValueError("the index has two chunks at one place in the files")


def in_one_run(
    leaves: Leaves, files: int, file: Sequence[int], offset: Sequence[int]
) -> Extents:
    """The table of leaves of one run each, from a place in a file on."""
    base, none = np.arange(len(file) + 1), np.zeros(0, np.int64)
    first = np.broadcast_to(np.uint32(0), len(file))
    places = np.asarray(file, np.int64), np.asarray(offset, np.int64)
    return Extents(leaves, files, base, first, *places, none, none)
