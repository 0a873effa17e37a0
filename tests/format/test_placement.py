"""Places: where chunks are written is where they are read."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.helpers import examples

from eqx_ckpt._kernel._format import _placement
from eqx_ckpt._kernel._format._leaves import LeafRecord, Leaves
from eqx_ckpt._kernel._format._placement import Placement
from eqx_ckpt._kernel._format._template import Template


def template(length, chunk, codec=None):
    return Template(
        "k", "numpy", "uint8", (length,), "uint8", (chunk,), False, None, codec
    )


_M = 2**20


@st.composite
def saves(draw):
    """Leaves, and files of runs: each chunk in one of some lanes, as a process would
    write it, cut into files anywhere, with files of other saves among them."""
    # Without calls of the package, as checking their types draws lots.
    forms = st.tuples(
        st.sampled_from(
            [(0, 1), (1, 1), (64, 64), (300, 50), (300, 64), (5 * _M, _M + 1)]
            + [(5 * _M, 5 * _M), (14 * _M, 5 * _M)]
        ),
        st.sampled_from([None, "blosc-lz4"]),
    )
    table = draw(st.lists(forms, min_size=1, max_size=3, unique=True))
    counts = [-(-length // chunk) for (length, chunk), _ in table]
    number = draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=5))
    aliases = {
        i: number.index(n)
        for i, n in enumerate(number)
        if number.index(n) < i and draw(st.booleans())
    }
    lanes = {}
    for leaf, n in enumerate(number):
        count, at = counts[n], 0
        while leaf not in aliases and (at < count or (at == count == 0)):
            stop = draw(st.integers(min(at + 1, count), count))
            lanes.setdefault(draw(st.integers(0, 3)), []).append((leaf, at, stop))
            at = max(stop, at + 1)
    files = []
    for lane in draw(st.permutations(sorted(lanes))):
        files.append([])
        for leaf, at, stop in lanes[lane]:
            while draw(st.booleans()) and stop - at > 1:
                cut = draw(st.integers(at + 1, stop - 1))
                files[-1].append((leaf, at, cut))
                files.append([])
                at = cut
            files[-1].append((leaf, at, stop))
        if draw(st.booleans()) and len(files[-1]) > 1:
            files[-1].reverse()  # A file of a tree in another order.
    return table, number, aliases, files


@given(saves(), st.randoms(use_true_random=False))
@examples(300)
def test_where_chunks_lie(save, random):
    forms, number, aliases, files = save
    table = [template(*shape, codec) for shape, codec in forms]
    rows, sizes, expected, digest, pages = [], [], {}, 0, [0]
    for file, runs in enumerate(files):
        end = 0
        for leaf, first, stop in runs:
            t = table[number[leaf]]
            own = [t.full] * (stop - first)
            if t.codec:
                own = [random.randint(1 + t.full // 2**15, t.full) for _ in own]
                sizes += own
            at = -(-end // 64) * 64 if own else end
            rows.append((leaf, first, stop, at, sum(own)))
            end = at
            for chunk, size in zip(range(first, stop), own):
                expected[leaf, chunk] = file, end, size, digest
                digest += t.block_of(chunk + 1) - t.block_of(chunk)
                end += size
        pages.append(digest)
    counts = np.asarray(list(map(len, files)), np.int64)
    placement = _placement.place(
        np.asarray(rows, np.int64).reshape(-1, 5),
        counts,
        len(number),
        np.asarray(sizes, np.int64),
    )
    made = json.loads(json.dumps(_placement.encode(placement)))
    placement = _placement.parse(made, len(files))
    leaves = Leaves([f"{i}" for i in range(len(number))], table, number, aliases)
    laid = _placement.lay(placement, len(files), leaves)
    assert laid.pages == pages
    by = [1000 * i for i in range(len(files))]
    moved = laid.shifted(by)
    for (leaf, chunk), (file, at, size, row) in expected.items():
        record = LeafRecord(str(leaf), leaf, table[number[leaf]])
        first, stop, *_ = laid.segment(record, chunk)
        assert first <= chunk < stop <= record.template.chunk_count
        assert laid.locate(record, chunk) == (file, at, size)
        assert moved.locate(record, chunk) == (file, at + by[file], size)
        assert laid.digest_of(record, chunk) == row


@given(st.data())
@examples(60)
def test_leaves_that_lie_in_order(data):
    """Their places are those that the rule for any leaves gives."""
    shapes = [(0, 1), (1, 1), (300, 64), (5 * _M, _M + 1)]
    number = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    aliases = {
        i: number.index(n)
        for i, n in enumerate(number)
        if number.index(n) < i and data.draw(st.booleans())
    }
    begins, file, at = [], 0, 0
    for leaf in range(len(number)):
        if leaf == 0 or (leaf not in aliases and data.draw(st.booleans())):
            file += data.draw(st.integers(0, 1))
            at = data.draw(st.sampled_from([0, at + 64 * 10**6, at]))
            begins.append((7, leaf, 0, file, at))
    patterns, none = np.asarray([[0, 7]], np.uint32), np.zeros(0, np.uint32)
    placement = Placement(patterns, none, np.asarray(begins), none)
    table = [template(*shape) for shape in shapes]
    leaves = Leaves([f"{i}" for i in range(len(number))], table, number, aliases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_placement, "_is_plain", lambda *_: False)
        try:
            slow = _placement.lay(placement, file + 2, leaves)
        except ValueError:
            slow = None
    if slow is None:
        with pytest.raises(ValueError, match="at one place"):
            _placement.lay(placement, file + 2, leaves)
        return
    assert _placement._is_plain(placement, leaves)
    laid = _placement.lay(placement, file + 2, leaves)
    assert laid.pages == slow.pages
    own = sorted({*range(len(number))} - aliases.keys())
    assert laid.starts(own) == slow.starts(own)
    assert laid.first_digests(own) == slow.first_digests(own)
    for leaf in own:
        record = LeafRecord(str(leaf), leaf, table[number[leaf]])
        assert laid.segments(record) == slow.segments(record)


def good():
    """Two leaves of four and of two chunks, in two files."""
    leaves = Leaves(["a", "b"], [template(4, 1), template(2, 1)], [0, 1])
    patterns = np.asarray([[2, 0], [0, 1], [0, 1]], np.uint32)
    begins = np.asarray([(0, 0, 0, 0, 0), (1, 0, 2, 1, 0)])
    numbers = np.asarray([0, 1], np.uint32)
    return Placement(patterns, numbers, begins, numbers[:0]), 2, leaves


bad = {
    "no patterns": ("pattern", dict(patterns=np.zeros((0, 2), np.uint32))),
    "a pattern without an end": (
        "pattern",
        dict(patterns=np.asarray([[2, 0], [0, 1], [2, 1]], np.uint32)),
    ),
    "a pattern of more chunks": (
        "pattern",
        dict(patterns=np.asarray([[4, 0], [0, 1], [0, 1]], np.uint32)),
    ),
    "a pattern of far more": (
        "pattern",
        dict(patterns=np.asarray([[2**32 - 1, 0], [0, 1], [0, 1]], np.uint32)),
    ),
    "no such pattern": ("pattern", dict(pattern=np.asarray([0, 2], np.uint32))),
    "a leaf too few": ("pattern", dict(pattern=np.asarray([0], np.uint32))),
    "no begin": ("without a place", dict(begins=np.zeros((0, 5), np.int64))),
    "a lane without one": (
        "without a place",
        dict(begins=np.asarray([(0, 0, 0, 0, 0)])),
    ),
    "no such leaf": ("row", dict(begins=np.asarray([(0, 2, 0, 0, 0)]))),
    "a leaf far beyond": ("row", dict(begins=np.asarray([(0, 2**60, 0, 0, 0)]))),
    "no such chunk": ("row", dict(begins=np.asarray([(1, 0, 4, 0, 0)]))),
    "a chunk far beyond": ("row", dict(begins=np.asarray([(1, 0, 2**60, 0, 0)]))),
    "another lane": ("row", dict(begins=np.asarray([(1, 0, 0, 0, 0)]))),
    "one twice": (
        "row",
        dict(begins=np.asarray([*good()[0].begins, (1, 0, 2, 0, 64)])),
    ),
    "one place": (
        "at one place",
        dict(begins=np.asarray([(0, 0, 0, 0, 0), (1, 0, 2, 0, 0)])),
    ),
    "sizes of nothing": ("sizes", dict(sizes=np.asarray([1], np.uint32))),
}


@pytest.mark.parametrize("what", bad)
def test_places_that_cannot_be(what):
    placement, files, leaves = good()
    match, changes = bad[what]
    with pytest.raises(ValueError, match=match):
        _placement.lay(placement._replace(**changes), files, leaves)


def test_sizes_that_cannot_be():
    t = template(4, 2, "blosc-lz4")
    leaves = Leaves(["a"], [t], [0])
    patterns, none = np.asarray([[0, 0]], np.uint32), np.asarray([], np.uint32)
    begins = np.asarray([(0, 0, 0, 0, 0)])
    for sizes, is_good in (([9, 1], True), ([9], False), ([9, 0], False)):
        placement = Placement(patterns, none, begins, np.asarray(sizes, np.uint32))
        if is_good:
            assert _placement.lay(placement, 1, leaves).ends.tolist() == [0, 9, 10]
            continue
        with pytest.raises(ValueError, match="sizes"):
            _placement.lay(placement, 1, leaves)
    placement = Placement(patterns, none, begins, np.asarray([9, 2**31], np.uint32))
    with pytest.raises(ValueError, match="impossible sizes"):
        _placement.lay(placement, 1, leaves)


def test_more_runs_than_are_laid_out(monkeypatch):
    monkeypatch.setattr(_placement, "MAX_RUNS", 2)
    with pytest.raises(ValueError, match="more than 2 runs"):
        _placement.lay(*good())


def test_leaves_that_are_larger_than_any():
    big = template(2**59, 2**44)
    leaves = Leaves(["a", "b"], [big], [0, 0])
    placement = good()[0]._replace(pattern=np.asarray([1, 1], np.uint32))
    assert math.prod(big.shape) < 2**60
    with pytest.raises(ValueError, match="impossible size"):
        leaves = dataclasses.replace(leaves, template_of=[0, 0, 0], names="abc")
        _placement.lay(placement, 2, leaves)
