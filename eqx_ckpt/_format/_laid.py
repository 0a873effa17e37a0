"""The places that follow from a rule: sums of the sizes of what lies before. See
`_packed`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from . import _grid, _template
from ._leaves import Leaves


# Every run starts at a multiple of this in its file, which is what a memory-mapped read
# into aligned memory is fastest from.
ALIGN = 64


def aligned(at: np.ndarray) -> np.ndarray:
    return -(-at // ALIGN) * ALIGN


@dataclasses.dataclass(frozen=True, eq=False)
class Laid:
    """The runs of each leaf, one after the other: those of leaf `i` are the rows from
    `base[i]` to `base[i + 1]`. Each begins with the chunk `first`, at `offset` of a
    file. `row` is the number of its first digest, and `size` that of the first of its
    chunks among the sizes of compressed ones. `pages` are the numbers of the first
    digest of each file, and that of all.
    """

    base: np.ndarray
    first: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    row: np.ndarray
    size: np.ndarray
    pages: list[int]
    ends: np.ndarray

    def start(self, leaf: int) -> tuple[int, int]:
        """The file and the offset of the first chunk of a leaf."""
        row = self.base.item(leaf)
        return self.file.item(row), self.offset.item(row)

    def first_digest(self, leaf: int) -> int:
        return self.row.item(self.base.item(leaf))

    def runs(self, leaf: int) -> slice:
        return slice(self.base.item(leaf), self.base.item(leaf + 1))

    def find(self, leaf: int, chunk: int) -> int:
        """The row of the run that a chunk is in."""
        own = self.runs(leaf)
        return own.start + int(self.first[own].searchsorted(chunk, "right")) - 1

    def stop(self, leaf: int, row: int, count: int) -> int:
        """The chunk after the last one of a run of a leaf of so many chunks."""
        return self.first.item(row + 1) if row + 1 < self.base[leaf + 1] else count

    def extent(self, row: int, first: int, stop: int) -> int:
        """The bytes of compressed chunks that are in one run."""
        at = self.size.item(row) - self.first.item(row)
        return int(self.ends[at + stop] - self.ends[at + first])


def in_order(
    begins: np.ndarray, leaves: Leaves, files: Sequence[str], shift: Sequence[int]
) -> Laid | None:
    """The places of leaves of which each is one run, in one lane that goes through the
    files in their order: most saves of one process are so. An alias has a run without
    chunks. None unless all of that holds, as then `_packed.lay` says what is wrong.
    """
    count = len(leaves.names)
    begins = begins[np.argsort(begins[:, 1], kind="stable")]
    _, first, chunk, file, at = begins.T
    if not len(first) or first[0] != 0 or first[-1] >= count:
        return None
    if chunk.any() or (np.diff(first) <= 0).any() or (np.diff(file) < 0).any():
        return None
    aliases = list(leaves.aliases)
    if not leaves.aliases.keys().isdisjoint(first.tolist()):
        return None
    nbytes, blocks = _sizes(leaves)
    if max(nbytes) * count > _template.MAX_BYTES:
        return None
    template = np.asarray(leaves.template, np.intp)
    sums = _sums(aligned(np.asarray(nbytes, np.int64)), template, aliases)
    base = rows = np.arange(count + 1, dtype=np.uint32)
    if aliases or {*blocks} != {1}:
        rows = _sums(np.asarray(blocks, np.int64), template, aliases)
    bounds = np.append(first, count)
    starts, stops = sums[bounds[:-1]], sums[bounds[1:]]
    ends = at + stops - starts
    if ((file[1:] == file[:-1]) & (ends[:-1] > at[1:])).any():
        return None
    if len(shift):
        at = at + np.asarray(shift, np.int64)[file]
    sums[:-1] += _spread(at - starts, bounds)
    pages = rows[bounds[np.searchsorted(file, np.arange(len(files) + 1))]]
    return Laid(
        base=base,
        first=np.broadcast_to(np.uint32(0), count),
        file=_spread(file.astype(np.uint32), bounds),
        offset=sums[:-1],
        row=rows[:-1],
        size=rows[:0],
        pages=pages.tolist(),
        ends=np.zeros(1, np.int64),
    )


def _sizes(leaves: Leaves) -> tuple[list[int], list[int]]:
    """Of each template, how many bytes and how many digests its leaves have."""
    for template in leaves.templates:
        _template.check_template(template)
    nbytes = [t.chunk_count * t.full for t in leaves.templates]
    blocks = [
        _grid.block_counts(t.shape, t.chunk, t.itemsize) for t in leaves.templates
    ]
    return nbytes, blocks


def _sums(sizes: np.ndarray, template: np.ndarray, aliases: list[int]) -> np.ndarray:
    """The sums of what comes before each leaf, and of all: `sizes` has those of leaves
    of each template. Aliases count as nothing."""
    out = np.empty(len(template) + 1, np.int64)
    out[0] = 0
    own = out[1:]
    np.take(sizes, template, out=own, mode="clip")
    own[aliases] = 0
    np.cumsum(own, out=own)
    return out


def _spread(column: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The entry of each leaf: that of the last of the `bounds` before it."""
    if len(column) == 1:
        return np.broadcast_to(column, bounds[-1])
    return np.repeat(column, np.diff(bounds))
