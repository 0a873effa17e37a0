"""Leaves that have not changed since another save: its files get a second name.

A data file goes from one save into another, as a hard link, if each of the leaves in it
is the same in both. So every save is whole by itself: it may be copied, and the others
deleted. Leaves that have not changed, but lie in files with some that have, are written
once more, to files of their own.
"""

import os
from collections.abc import Sequence

from . import _checkpoint, _chunks, _layout, _leaf, _store
from ._layout import Kept, Leaf, Piece
from ._read import Source
from ._store import Root


# More files than this are not kept: what is in the smallest is written anew.
_MOST = 128


def keep(
    path: str | os.PathLike[str],
    leaves: Sequence[Leaf],
    work: Root,
    base: str,
    sync: bool,
) -> Kept:
    """Links the files of the checkpoint at `path` that go into a save of `leaves` as
    they are, in its directory `base`, and says what is in them."""
    root = _store.resolve(path)
    if root.local is None or work.local is None:
        # Object stores have no links.
        return _layout.NOTHING
    try:
        source = _checkpoint._open(root)
        if source.database is None:
            return _layout.NOTHING
        pieces, rows, same = _compare(source, leaves)
        sizes = {f: max(_end(leaves, p) for p in runs) for f, runs in pieces.items()}
        linked = _link(source, sizes, work, base, sync)
    except (OSError, ValueError, RuntimeError):
        # What cannot be read is no loss here: all is written, as ever.
        return _layout.NOTHING
    files = [pieces[number] for number in linked]
    digests = [(p.place, p.numbers, rows[p.place, p.numbers]) for f in files for p in f]
    return Kept(files, digests, frozenset(same))


def _end(leaves: Sequence[Leaf], piece: Piece) -> int:
    size = len(piece.numbers) * leaves[piece.place].template.full
    return piece.offset + (piece.ends[-1] if piece.ends else size)


_Rows = dict[tuple[int, range], bytes]


def _compare(
    source: Source, leaves: Sequence[Leaf]
) -> tuple[dict[int, list[Piece]], _Rows, set[int]]:
    """The files in which nothing has changed, with the runs in each; the digests of all
    runs that have not changed; and the leaves that have not."""
    index, digests = source.index, source.digests
    places = {leaf.name: i for i, leaf in enumerate(leaves) if leaf.alias is None}
    files: dict[int, list[Piece]] = {}
    changed: set[int] = set()
    same: set[int] = set()
    rows: _Rows = {}
    for record in index.records():
        if record.place in index.aliases:
            continue
        place = places.get(record.name)
        leaf = None if place is None else leaves[place]
        if leaf is not None and leaf.template != record.template:
            leaf = None
        t = record.template
        blocks = _chunks.lay(t.shape, t.chunk, t.itemsize).blocks
        first = index.first_block(record.place)
        is_same = leaf is not None
        for start, stop, file, offset in index.segments(record):
            own = slice(16 * (first + blocks[start]), 16 * (first + blocks[stop]))
            run = range(start, stop)
            if leaf is None or not _is_same(leaf, run, digests[own]):
                changed.add(file)
                is_same = False
                continue
            assert place is not None
            rows[place, run] = digests[own]
            ends = None
            if t.codec is not None:
                ends = [index.extent(record, start, n + 1) for n in run]
            files.setdefault(file, []).append(Piece(place, run, offset, ends))
        if is_same and place is not None:
            same.add(place)
    return {f: runs for f, runs in files.items() if f not in changed}, rows, same


def _is_same(leaf: Leaf, run: range, rows: bytes) -> bool:
    """Whether a run of chunks has these digests. It ends at the first that differs."""
    value, t = leaf.value, leaf.template
    if isinstance(value, _layout.Small):
        return value.digest == rows
    if t.chunk == t.shape:
        parts = iter([_leaf.to_host(value, t)])
    else:
        regions = _chunks.lay(t.shape, t.chunk, t.itemsize).regions
        parts = _leaf.to_host_by_regions(value, t, regions[run.start : run.stop])
    for part in parts:
        for digest in _layout.block_digests(_layout.as_bytes(part)):
            if digest != rows[:16]:
                return False
            rows = rows[16:]
    return not rows


def _link(
    source: Source, sizes: dict[int, int], work: Root, base: str, sync: bool
) -> list[int]:
    """Gives files of these sizes second names, from 0 on. Returns which have one."""
    linked: list[int] = []
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_MOST]
    for number in sorted(largest):
        key = f"{source.database}/{source.index.files[number]}"
        into = f"{base}/{len(linked)}"
        if _store.link_other(source.root, key, sizes[number], work, into, sync):
            linked.append(number)
    return linked
