"""Where the chunks of leaves lie, by a rule rather than one by one: so a save of
millions of chunks has a short index. See FORMAT.md, "Places".

A lane is a sequence of runs of chunks, in the order of the leaves, that lie one after
the other. A pattern says how the chunks of a leaf are dealt out to lanes, and a *begin*
where a lane goes on in another place: it is a row `(lane, leaf, chunk, file, offset)`,
of the first chunk that lies there. All else is sums.

Say two processes save two leaves of four chunks of 64 bytes. Process 0 writes the first
two chunks of each leaf to file 0, and process 1 the last two to file 1:

    file 0, lane 0:  leaf 0, chunks 0-1 | leaf 1, chunks 0-1
    file 1, lane 1:  leaf 0, chunks 2-3 | leaf 1, chunks 2-3

There are four runs. Both leaves have one pattern, two chunks to lane 0 and all that
are left to lane 1: `patterns` is `[[2, 0], [0, 1]]`. Each lane has one begin, its first
run: `begins` is `[[0, 0, 0, 0, 0], [1, 0, 2, 1, 0]]`.
"""

import itertools as it
import operator
from typing import Any, NamedTuple

import numpy as np

from . import _extents, _template
from ._extents import Extents
from ._leaves import Leaves
from ._schema import fields, NUMBER


# A model of 400 billion parameters on 512 hosts has fewer runs.
MAX_RUNS = 2**23
# Every run starts at a multiple of this in its file, which is what a memory-mapped read
# into aligned memory is fastest from.
ALIGN = 64
# An array has fewer than `2**_BITS` chunks, so one integer holds a leaf and a chunk.
_BITS = 17


class Placement(NamedTuple):
    """The places of chunks. `patterns` has all patterns, one after the other. A row is
    a number of chunks and their lane; the last row of a pattern has 0 chunks, which are
    all that are left. `pattern` has for each leaf the number of its pattern; it is
    empty if all leaves have the first. `sizes` are the bytes of compressed chunks, in
    the order of the files.
    """

    patterns: np.ndarray
    pattern: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray


_none = np.zeros(0, np.int64)
NOWHERE = Placement(_none.reshape(0, 2), _none, _none.reshape(0, 5), _none)


def place(
    runs: np.ndarray, counts: np.ndarray, leaves: int, sizes: np.ndarray
) -> Placement:
    """Makes the placement of a save out of its runs: what `lay` undoes.

    **Arguments:**

    - `runs`: a row `(leaf, first, stop, offset, nbytes)` for each, in the order of the
        files.
    - `counts`: how many of them each file has.
    - `leaves`: how many there are.
    - `sizes`: those of compressed chunks, in the same order.
    """
    # There may be millions: what is not needed any more is let go.
    leaf, first, stop = (runs[:, i].astype(np.int32) for i in range(3))
    offset, nbytes = runs[:, 3], runs[:, 4]
    key = _key(leaf, first)
    # A lane begins where the leaves do not ascend any more.
    is_lane_start = np.ones(len(key), bool)
    is_lane_start[1:] = key[1:] <= key[:-1]
    lane = np.cumsum(is_lane_start, dtype=np.int32) - np.int32(1)
    # A begin is the first run of a lane or a file, or does not follow the run before.
    is_begin = is_lane_start.copy()
    starts = np.cumsum(counts) - counts
    is_begin[starts[counts > 0]] = True
    goes_on = offset[1:] == aligned(offset[:-1] + nbytes[:-1])
    is_begin[1:] |= ~goes_on & (nbytes[1:] > 0)
    file = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    # Runs of no bytes need not be aligned, and begins are.
    offset = np.where(nbytes > 0, offset, aligned(offset))
    columns = lane, leaf, first, file, offset
    begins = np.stack([column[is_begin].astype(np.int64) for column in columns], 1)
    begins = begins[np.lexsort(begins.T[::-1])]
    del runs, offset, nbytes, goes_on, file, columns
    order = np.argsort(key, kind="stable")
    del key
    leaf, first, stop, lane = leaf[order], first[order], stop[order], lane[order]
    # Each run is a row of its pattern, but for a begin that goes on with the leaf and
    # the lane of the run before: its row gets longer, and `_split` cuts that there.
    is_new = ~is_begin[order]
    is_new[1:] |= (leaf[1:] != leaf[:-1]) | (lane[1:] != lane[:-1])
    is_new[:1] = True
    is_last = np.append(is_new[1:], True)
    del order
    leaf, lane = leaf[is_new], lane[is_new]
    length = stop[is_last] - first[is_new]
    length[np.append(leaf[1:] != leaf[:-1], True)] = 0
    del first, stop
    patterns, pattern = _interned(
        leaf, np.stack([length, lane], 1, dtype=np.uint32, casting="unsafe"), leaves
    )
    return Placement(patterns, pattern, begins, sizes)


def aligned(at: Any) -> Any:
    """The next place, or places, at which a run may start."""
    return -(-at // ALIGN) * ALIGN


def _interned(
    leaf: np.ndarray, rows: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `patterns` and the `pattern` of a `Placement`, from rows of all leaves."""
    if (rows == rows[:1]).all() and (leaf[1:] > leaf[:-1]).all():
        return rows[:1], np.zeros(0, np.uint32)  # As where one process writes all.
    starts = np.searchsorted(leaf, np.arange(count + 1))
    known: dict[bytes, int] = {}
    kept: list[np.ndarray] = []
    pattern = np.zeros(count, np.uint32)
    bounds = zip(starts.tolist(), starts[1:].tolist())
    for leaf_index, (start, stop) in enumerate(bounds):
        if start == stop:
            continue  # An alias lies where its origin does.
        own = rows[start:stop]
        number = known.setdefault(own.tobytes(), len(known))
        if number == len(kept):
            kept.append(own)
        pattern[leaf_index] = number
    if len(kept) < 2:
        pattern = pattern[:0]
    return np.concatenate(kept) if kept else rows[:0], pattern


# ---- As JSON.


def encode(placement: Placement) -> dict[str, Any]:
    columns = placement._asdict().items()
    return {name: column.tolist() for name, column in columns}


# The range of counts of chunks, bytes, patterns and lanes.
_COUNTS = range(2**31)


def parse(value: dict[str, Any], files: int) -> Placement:
    """The inverse of `encode`. Whether chunks can lie so is seen by `lay`.

    **Raises:** `ValueError` for columns of other types.
    """
    begin = _COUNTS, NUMBER, NUMBER, range(files), NUMBER
    kinds = {
        "patterns": [(_COUNTS, _COUNTS)],
        "pattern": [_COUNTS],
        "begins": [begin],
        "sizes": [_COUNTS],
    }
    columns = map(np.asarray, fields(value, kinds), it.repeat(np.int64))
    patterns, pattern, begins, sizes = columns
    begins = begins.reshape(-1, 5)
    if (begins[:, 4] % ALIGN).any():
        raise ValueError("the index has a malformed row")
    return Placement(patterns.reshape(-1, 2), pattern, begins, sizes)


# ---- As a table.


class _Runs(NamedTuple):
    """Runs of chunks in the order of the leaves: per run its leaf, the number of its
    first chunk, and its lane."""

    leaf: np.ndarray
    first: np.ndarray
    lane: np.ndarray


def lay(placement: Placement, files: int, leaves: Leaves) -> Extents:
    """The table of where each run of chunks lies: its file and its offset there.

    **Raises:** `ValueError` unless every chunk has a place of its own."""
    leaves.check_templates()
    if not leaves.names:
        return _extents.in_one_run(leaves, files, [], [])
    if _is_plain(placement, leaves):
        return _lay_plain(placement, files, leaves)
    chunks, full = _extents.sizes_of(leaves)
    _extents.check_total((chunks.astype(float) * full).sum())
    begins = placement.begins
    begins = begins[np.lexsort((begins[:, 2], begins[:, 1], begins[:, 0]))]
    leaf, first, lane = _split(_expand(placement, leaves, chunks), begins, chunks)
    order, begin_of, begins = _in_files(leaf, first, lane, begins)
    stop = _extents.stops_of(leaf, first, chunks)
    nbytes = (stop - first) * full[leaf]
    coded = ends = np.zeros(0, np.int64)
    is_compressed = _extents.is_compressed(leaves)[leaf] & (stop > first)
    if len(placement.sizes) or is_compressed.any():
        own = order[is_compressed[order]]
        # In a compressed run chunk `n` of the leaf has the size `sizes[coded + n]`.
        coded = np.full(len(leaf), -1, np.int64)
        coded[own] = _first_sizes(placement.sizes, (stop - first)[own], full[leaf[own]])
        coded[own] -= first[own]
        ends = np.append(0, np.cumsum(placement.sizes, dtype=np.int64))
        nbytes[own] = ends[coded[own] + stop[own]] - ends[coded[own] + first[own]]
    offset = np.empty(len(leaf), np.int64)
    bounds = np.searchsorted(begin_of, np.arange(len(begins) + 1))
    offset[order] = _offsets(aligned(nbytes)[order], bounds, begins)
    file = np.empty(len(leaf), np.uint32)
    file[order] = begins[begin_of, 3]
    base = np.append(0, np.cumsum(np.bincount(leaf, minlength=len(chunks))))
    first = first.astype(np.uint32)
    return Extents(leaves, files, base, first, file, offset, coded, ends)


def _is_plain(placement: Placement, leaves: Leaves) -> bool:
    """Whether each leaf is one run of chunks of one size, in one lane that goes through
    the files in their order: most saves of one process are so."""
    if len(placement.pattern) or len(placement.sizes) or len(placement.patterns) != 1:
        return False
    count = len(leaves.names)
    if count > MAX_RUNS or any(t.codec for t in leaves.templates):
        return False
    most = max(map(operator.mul, *leaves.template_sizes))
    if most * count > _template.MAX_BYTES:
        return False
    length, lane = placement.patterns[0].tolist()
    lanes, leaf, chunk, file, offset = placement.begins.T
    if length or chunk.any() or (lanes != lane).any():
        return False
    if not len(leaf) or leaf[0] != 0 or leaf[-1] >= count:
        return False
    if (np.diff(leaf) <= 0).any() or (np.diff(file) < 0).any():
        return False
    return leaves.aliases.keys().isdisjoint(leaf.tolist())


def _lay_plain(placement: Placement, files: int, leaves: Leaves) -> Extents:
    """Does what `lay` does, for a plain placement, without the rows of its patterns."""
    count, begins = len(leaves.names), placement.begins
    sizes = aligned(np.multiply(*map(np.asarray, leaves.template_sizes)))
    taken = sizes.take(leaves.template_of, mode="clip")
    taken[list(leaves.aliases)] = 0
    bounds = np.append(begins[:, 1], count)
    offset = _offsets(taken, bounds, begins)
    file = np.repeat(begins[:, 3].astype(np.uint32), np.diff(bounds))
    base = np.arange(count + 1, dtype=np.uint32)
    first, none = np.broadcast_to(np.uint32(0), count), np.zeros(0, np.int64)
    return Extents(leaves, files, base, first, file, offset, none, none)


def _expand(placement: Placement, leaves: Leaves, chunks: np.ndarray) -> _Runs:
    """The runs that the patterns say, but for those of aliases."""
    length, lane = placement.patterns.astype(np.int64).T
    lasts = np.flatnonzero(length == 0)
    starts = np.append(0, lasts[:-1] + 1)
    count, pattern = len(chunks), placement.pattern.astype(np.int64)
    if not len(pattern):
        pattern = np.zeros(count, np.int64)
    is_whole = len(lasts) > 0 and lasts[-1] + 1 == len(length)
    if len(pattern) != count or not is_whole or pattern.max() >= len(lasts):
        raise ValueError("the index has a malformed pattern")
    # Of each leaf how many rows it has, and which chunk the last of these begins with.
    before = np.cumsum(length) - length  # The chunks of all rows before each.
    row_counts = (lasts - starts + 1)[pattern]
    last = (before[lasts] - before[starts])[pattern]
    row_counts[list(leaves.aliases)] = last[list(leaves.aliases)] = 0
    total = int(row_counts.sum())
    if total > MAX_RUNS:
        raise ValueError(f"the index has more than {MAX_RUNS} runs of chunks")
    # An array without elements has one run of no chunks.
    if ((last > 0) & (last >= chunks)).any():
        raise ValueError("the index has a malformed pattern")
    leaf = np.repeat(np.arange(count), row_counts)
    skipped = np.cumsum(row_counts) - row_counts - starts[pattern]
    row = np.arange(total) - np.repeat(skipped, row_counts)
    first = (before - np.repeat(before[starts], lasts - starts + 1))[row]
    return _Runs(*(x.astype(np.int32) for x in (leaf, first, lane[row])))


def _key(leaf: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Integers that sort as pairs of a leaf and a chunk do."""
    return leaf.astype(np.int64) << _BITS | chunk


def _split(runs: _Runs, begins: np.ndarray, chunks: np.ndarray) -> _Runs:
    """The runs, cut in two where a begin says that the lane goes on elsewhere."""
    leaf, first, lane = runs
    lanes, leaves, cuts = begins[:, 0], begins[:, 1], begins[:, 2]
    malformed = ValueError("the index has a malformed row")
    if (leaves >= len(chunks)).any() or ((cuts > 0) & (cuts >= chunks[leaves])).any():
        raise malformed
    wanted = _key(leaves, cuts)
    at = np.searchsorted(_key(leaf, first), wanted, "right") - 1
    good = (at >= 0) & (leaf[at] == leaves) & (lane[at] == lanes)
    if not good.all() or len(np.unique(wanted)) < len(wanted):
        raise malformed
    cut = np.flatnonzero(first[at] < cuts)
    cut = cut[np.argsort(wanted[cut])]
    new = leaves[cut], cuts[cut], lanes[cut]
    return _Runs(*(np.insert(old, at[cut] + 1, x) for old, x in zip(runs, new)))


def _in_files(
    leaf: np.ndarray, first: np.ndarray, lane: np.ndarray, begins: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order in which the runs lie in the files; for each run in that order, the
    number of its begin; and the begins in the order of the files."""
    is_begin = np.zeros(len(lane), bool)
    wanted = _key(begins[:, 1], begins[:, 2])
    is_begin[np.searchsorted(_key(leaf, first), wanted)] = True
    order = np.argsort(lane, kind="stable")
    lane, is_begin = lane[order], is_begin[order]
    is_first = np.append(True, lane[1:] != lane[:-1])[: len(lane)]
    if (is_first & ~is_begin).any():
        raise ValueError("the index has chunks without a place")
    # Begins come in the order of the lanes, and get numbers in that of the files.
    in_files = np.lexsort((begins[:, 4], begins[:, 3]))
    number = np.empty_like(in_files)
    number[in_files] = np.arange(len(in_files))
    begin_of = number[np.cumsum(is_begin) - 1]
    again = np.argsort(begin_of, kind="stable")
    return order[again], begin_of[again], begins[in_files]


def _first_sizes(sizes: np.ndarray, count: np.ndarray, full: np.ndarray) -> np.ndarray:
    """Where in `sizes` those of each compressed run begin, in the order of the files.
    `count` has the number of its chunks, and `full` the decoded bytes of one."""
    first = np.cumsum(count) - count
    if len(sizes) != count.sum():
        raise ValueError("the index lacks the sizes of compressed chunks")
    least = np.minimum.reduceat(sizes, first)
    most = np.maximum.reduceat(sizes, first)
    is_less = least < np.maximum(1, _template.least_encoded(full))
    if (is_less | (most > _template.most_encoded(full))).any():
        raise ValueError("the index has impossible sizes of chunks")
    return first


def _offsets(taken: np.ndarray, bounds: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Where runs lie in their files, by the bytes that they take. Those from each of
    the `bounds` to the next follow a begin. **Raises:** as `_extents.check_apart`."""
    sums = np.append(0, np.cumsum(taken))
    start, stop = sums[bounds[:-1]], sums[bounds[1:]]
    file, at = begins[:, 3], begins[:, 4]
    _extents.check_apart(file, at, at + stop - start)
    return sums[:-1] + np.repeat(at - start, np.diff(bounds))
