"""Where the chunks of very many leaves, or of very large ones, lie: by a rule rather
than one by one. See FORMAT.md, "Columns".

A lane is a sequence of runs of chunks, in the order of the leaves, that lie one after
the other. A pattern says how the chunks of a leaf are dealt out to lanes, and a `Begin`
where a lane goes on in another place. All else is sums.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _columns, _grid, _laid, _template
from ._laid import ALIGN, aligned, Laid
from ._leaves import Leaves
from ._schema import field, NUMBER
from ._template import Template


# More than 400 billion parameters have on 512 hosts.
MAX_RUNS = 2**23
# An array has fewer chunks.
_BITS = 17


class Begin(NamedTuple):
    """From this chunk of a leaf on, a lane lies at `offset` of a file."""

    lane: int
    leaf: int
    chunk: int
    file: int
    offset: int


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """The places of chunks. A row of `patterns` is a number of chunks and their lane;
    a pattern ends with a row of 0 chunks, which is all that are left. `pattern` has the
    number of that of each leaf; it is empty if there is but one. `sizes` has those of
    compressed chunks as they lie in the files. What is in a file is `shift` further on.
    """

    files: list[str]
    patterns: np.ndarray
    pattern: np.ndarray
    begins: list[Begin]
    sizes: np.ndarray
    shift: Sequence[int] = ()

    def shifted(self, by: Sequence[int]) -> "Packed":
        return dataclasses.replace(self, shift=by)


class Runs(NamedTuple):
    """Runs of chunks in the order of the files: columns of one row a run, but for
    `counts`, the runs of each file."""

    leaf: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    counts: np.ndarray


def pack(files: list[str], runs: Runs, count: int, sizes: np.ndarray) -> Packed:
    """The rule that the runs of `count` leaves lie by."""
    leaf, first, stop, offset, nbytes, counts = runs
    key = leaf.astype(np.int64) << _BITS | first
    is_lane = np.ones(len(key), bool)
    is_lane[1:] = key[1:] <= key[:-1]
    lane = np.cumsum(is_lane) - 1
    is_begin = is_lane.copy()
    starts = np.cumsum(counts) - counts
    is_begin[starts[counts > 0]] = True
    ends = aligned(offset + nbytes)
    is_begin[1:] |= (offset[1:] != ends[:-1]) & (nbytes[1:] > 0)
    file = np.repeat(np.arange(len(counts)), counts)
    columns = lane, leaf, first, file, np.where(nbytes > 0, offset, aligned(offset))
    begins = [Begin(*map(int, row)) for row in zip(*(c[is_begin] for c in columns))]
    order = np.argsort(key, kind="stable")
    leaf, first, stop, lane = leaf[order], first[order], stop[order], lane[order]
    # Where a lane only goes on in another place, its run goes on too.
    is_new = ~is_begin[order]
    is_new[1:] |= (leaf[1:] != leaf[:-1]) | (lane[1:] != lane[:-1])
    is_new[:1] = True
    is_last = np.append(is_new[1:], True)
    leaf, lane = leaf[is_new], lane[is_new]
    length = stop[is_last] - first[is_new]
    length[np.append(leaf[1:] != leaf[:-1], True)] = 0
    patterns, pattern = _interned(leaf, np.stack([length, lane], 1), count)
    return Packed(files, patterns, pattern, sorted(begins), sizes)


def _interned(
    leaf: np.ndarray, rows: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The patterns that there are, and the number of that of each leaf."""
    rows = rows.astype(np.uint32)
    starts = np.searchsorted(leaf, np.arange(count + 1))
    known: dict[bytes, int] = {}
    kept: list[np.ndarray] = []
    pattern = np.zeros(count, np.uint32)
    for place, (start, stop) in enumerate(zip(starts.tolist(), starts[1:].tolist())):
        if start == stop:
            continue  # An alias lies where its origin does.
        own = rows[start:stop]
        number = known.setdefault(own.tobytes(), len(known))
        if number == len(kept):
            kept.append(own)
        pattern[place] = number
    if len(kept) < 2:
        pattern = pattern[:0]
    return np.concatenate(kept) if kept else rows[:0], pattern


# ---- As JSON.

# The columns that are texts.
TEXTS = ("patterns", "pattern", "sizes")


def encode(packed: Packed) -> dict[str, Any]:
    return {
        "patterns": _columns.encode(packed.patterns.reshape(-1)),
        "pattern": _columns.encode(packed.pattern),
        "begins": packed.begins,
        "sizes": _columns.encode(packed.sizes),
    }


def parse(
    texts: Mapping[str, str | memoryview], columns: dict[str, Any], files: list[str]
) -> Packed:
    """The inverse of `encode`. Whether chunks can lie so is seen by `lay`.

    **Raises:** `ValueError` for columns of other types.
    """
    flat, pattern, sizes = (
        _columns.decode(texts[name]) for name in ("patterns", "pattern", "sizes")
    )
    if len(flat) % 2:
        raise ValueError("the index has a malformed column")
    begin = NUMBER, NUMBER, NUMBER, range(len(files)), range(0, NUMBER.stop, ALIGN)
    begins = [Begin(*row) for row in field(columns, "begins", [begin])]
    return Packed(files, flat.reshape(-1, 2), pattern, begins, sizes)


# ---- What follows from the rule.


class _Rows(NamedTuple):
    """Runs of chunks in the order of the leaves."""

    leaf: np.ndarray
    first: np.ndarray
    lane: np.ndarray


class _Forms(NamedTuple):
    """Of each leaf: its template, and how many chunks of how many bytes it has."""

    templates: list[Template]
    template: np.ndarray
    chunks: np.ndarray
    full: np.ndarray
    is_coded: np.ndarray


def lay(packed: Packed, leaves: Leaves) -> Laid:
    """**Raises:** `ValueError` unless every chunk has a place of its own."""
    begins = np.asarray(packed.begins, np.int64).reshape(-1, 5)
    if _is_plain(packed, leaves):
        laid = _laid.in_order(begins, leaves, packed.files, packed.shift)
        if laid is not None:
            return laid
    forms = _forms(leaves)
    begins = begins[np.lexsort((begins[:, 2], begins[:, 1], begins[:, 0]))]
    rows = _split(_expand(packed, forms, leaves.aliases), begins, forms)
    order, group, begins = _in_files(rows, begins)
    leaf, first = rows.leaf[order], rows.first[order]
    count = _counts(rows, forms)[order]
    sizes, ends = _sizes(packed, forms, leaf, count)
    nbytes = count * forms.full[leaf]
    own = np.flatnonzero(forms.is_coded[leaf])
    nbytes[own] = ends[sizes[own] + count[own]] - ends[sizes[own]]
    offset = _offsets(nbytes, group, begins)
    file = begins[group, 3]
    sums = np.append(0, np.cumsum(_blocks(forms, leaf, first, count)))
    pages = sums[np.searchsorted(file, np.arange(len(packed.files) + 1))]
    if len(packed.shift):
        offset += np.asarray(packed.shift, np.int64)[file]

    runs = np.bincount(rows.leaf, minlength=len(leaves.names))

    def back(column: np.ndarray, dtype: type) -> np.ndarray:
        out = np.empty(len(column), dtype)
        out[order] = column
        return out

    return Laid(
        base=np.append(0, np.cumsum(runs)),
        first=rows.first.astype(np.uint32),
        file=back(file, np.uint32),
        offset=back(offset, np.int64),
        row=back(sums[:-1], np.int64),
        size=back(sizes, np.int64) if len(own) else sizes[:0],
        pages=pages.tolist(),
        ends=ends,
    )


def _is_plain(packed: Packed, leaves: Leaves) -> bool:
    """Whether all leaves are in one lane, each in one run of chunks of one size."""
    if len(packed.pattern) or len(packed.sizes) or len(packed.patterns) != 1:
        return False
    if len(leaves.names) > MAX_RUNS:
        return False
    if any(t.codec is not None for t in leaves.templates):
        return False
    length, lane = packed.patterns[0].tolist()
    is_one = length == 0 and lane < 2**31
    return is_one and all(b.lane == lane for b in packed.begins)


def _forms(leaves: Leaves) -> _Forms:
    templates = leaves.templates
    for template in templates:
        _template.check_template(template)
    template = np.asarray(leaves.template, np.int64)
    chunks = np.asarray([t.chunk_count for t in templates], np.int64)[template]
    full = np.asarray([t.full for t in templates], np.int64)[template]
    is_coded = np.asarray([t.codec is not None for t in templates], bool)[template]
    own = np.ones(len(template), bool)
    own[list(leaves.aliases)] = False
    if (own * chunks.astype(float) * full).sum() > _template.MAX_BYTES:
        raise ValueError("the leaves are of an impossible size")
    return _Forms(templates, template, chunks, full, is_coded)


def _expand(packed: Packed, forms: _Forms, aliases: Iterable[int]) -> _Rows:
    """The runs that the patterns say, but for those of aliases."""
    length, lane = packed.patterns.astype(np.int64).T
    lasts = np.flatnonzero(length == 0)
    starts = np.append(0, lasts[:-1] + 1)
    count, pattern = len(forms.template), packed.pattern.astype(np.int64)
    if not len(pattern):
        pattern = np.zeros(count, np.int64)
    is_whole = len(lasts) > 0 and lasts[-1] + 1 == len(length)
    is_whole = is_whole and lane.max() < 2**31
    if len(pattern) != count or not is_whole or pattern.max() >= len(lasts):
        raise ValueError("the index has a malformed pattern")
    own = (lasts - starts + 1)[pattern]
    own[list(aliases)] = 0
    total = int(own.sum())
    if total > MAX_RUNS:
        raise ValueError(f"the index has more than {MAX_RUNS} runs of chunks")
    leaf = np.repeat(np.arange(count), own)
    row = np.arange(total) - np.repeat(np.cumsum(own) - own - starts[pattern], own)
    sums = np.cumsum(length) - length
    first = (sums - np.repeat(sums[starts], lasts - starts + 1))[row]
    # An array without elements has one run of no chunks.
    if ((first > 0) & (first >= forms.chunks[leaf])).any():
        raise ValueError("the index has a malformed pattern")
    return _Rows(*(x.astype(np.int32) for x in (leaf, first, lane[row])))


def _key(leaf: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    return leaf.astype(np.int64) << _BITS | chunk


def _split(rows: _Rows, begins: np.ndarray, forms: _Forms) -> _Rows:
    """The runs as they are cut where a lane goes on elsewhere."""
    lanes, leaves, chunks = begins[:, 0], begins[:, 1], begins[:, 2]
    malformed = ValueError("the index has a malformed row")
    if (leaves >= len(forms.chunks)).any():
        raise malformed
    if ((chunks > 0) & (chunks >= forms.chunks[leaves])).any():
        raise malformed
    wanted = _key(leaves, chunks)
    at = np.searchsorted(_key(rows.leaf, rows.first), wanted, "right") - 1
    good = (at >= 0) & (rows.leaf[at] == leaves) & (rows.lane[at] == lanes)
    if not good.all() or len(np.unique(wanted)) < len(wanted):
        raise malformed
    cut = np.flatnonzero(rows.first[at] < chunks)
    cut = cut[np.argsort(wanted[cut])]
    new = leaves[cut], chunks[cut], lanes[cut]
    return _Rows(*(np.insert(old, at[cut] + 1, x) for old, x in zip(rows, new)))


def _counts(rows: _Rows, forms: _Forms) -> np.ndarray:
    """How many chunks each run has."""
    stop = np.append(rows.first[1:], 0)
    is_last = np.append(rows.leaf[1:] != rows.leaf[:-1], True)
    stop[is_last] = forms.chunks[rows.leaf[is_last]]
    return stop - rows.first


def _in_files(
    rows: _Rows, begins: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order of the runs in the files, the `begins` in theirs, and for each run the
    number of the one that it follows."""
    order = np.argsort(rows.lane, kind="stable")
    lane = rows.lane[order]
    is_first = np.append(True, lane[1:] != lane[:-1])[: len(lane)]
    is_begin = np.zeros(len(lane), bool)
    wanted = _key(begins[:, 1], begins[:, 2])
    is_begin[np.searchsorted(_key(rows.leaf, rows.first), wanted)] = True
    is_begin = is_begin[order]
    if (is_first & ~is_begin).any():
        raise ValueError("the index has chunks without a place")
    group = np.cumsum(is_begin) - 1
    files = np.lexsort((begins[:, 4], begins[:, 3]))
    rank = np.empty_like(files)
    rank[files] = np.arange(len(files))
    group = rank[group]
    if (group[1:] < group[:-1]).any():
        again = np.argsort(group, kind="stable")
        order, group = order[again], group[again]
    return order, group, begins[files]


def _sizes(
    packed: Packed, forms: _Forms, leaf: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each run, in the order of the files, the number of its first chunk among the
    compressed ones; and the ends of these, if all of them followed each other."""
    coded = np.where(forms.is_coded[leaf], count, 0)
    first = np.cumsum(coded) - coded
    ends = np.append(0, np.cumsum(packed.sizes, dtype=np.int64))
    if len(packed.sizes) != coded.sum():
        raise ValueError("the index lacks the sizes of compressed chunks")
    if len(packed.sizes):
        some = coded > 0
        own, starts = leaf[some], first[some]
        least = np.minimum.reduceat(packed.sizes, starts).tolist()
        most = np.maximum.reduceat(packed.sizes, starts).tolist()
        full = forms.full[own].tolist()
        if any(
            a < max(1, _template.least_encoded(f)) or b > _template.most_encoded(f)
            for a, b, f in zip(least, most, full)
        ):
            raise ValueError("the index has impossible sizes of chunks")
    return first, ends


def _offsets(nbytes: np.ndarray, group: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Where each run lies in its file.

    **Raises:** `ValueError` for two at one place.
    """
    taken = aligned(nbytes)
    sums = np.append(0, np.cumsum(taken))
    bounds = np.searchsorted(group, np.arange(len(begins) + 1))
    start, stop = sums[bounds[:-1]], sums[bounds[1:]]
    file, at = begins[:, 3], begins[:, 4]
    end = at + stop - start
    if ((file[1:] == file[:-1]) & (end[:-1] > at[1:])).any():
        raise ValueError("the index has two chunks at one place in the files")
    return sums[:-1] + (at - start)[group]


def _blocks(
    forms: _Forms, leaf: np.ndarray, first: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """How many digests each run has: one for each chunk, unless these are large."""
    out = count.copy()
    large = np.flatnonzero(forms.full[leaf] > _grid.BLOCK)
    if not len(large):
        return out
    numbers = forms.template[leaf[large]]
    order = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    for own in np.split(large[order], cuts):
        t = forms.templates[forms.template[leaf[own[0]]]]
        starts = _grid.block_starts(t.shape, t.chunk, t.itemsize)
        out[own] = starts[first[own] + count[own]] - starts[first[own]]
    return out
