"""A leaf that is read in pieces, from several parts of a near step.

A *region* is a box in a leaf. A part *holds* those of its shards, or that of the whole
leaf; this process *wants* those of its devices. A *piece* is what one held region has
of a wanted one.
"""

import dataclasses
import functools as ft
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._kernel._format import _template, _view
from .._kernel._format._leaves import LeafRecord, Leaves, LocalShards, Region
from .._kernel._format._view import View
from .._kernel._load._partial import Apart
from .._kernel._load._reads import LeafRead, ReadResult, StoredRead
from .._kernel._tree import _from_host, _sharding


class _PartPiece(NamedTuple):
    """A piece: where it is in what the part has `stored`, and its `place` in the
    `wanted` region of that number."""

    part: int
    stored: Region
    wanted: int
    place: Region


class _PartRead(NamedTuple):
    """The read of one part, and the pieces that it gives, in their order."""

    read: StoredRead
    pieces: list[_PartPiece]


@dataclasses.dataclass(eq=False)
class PartedLeaf:
    """A leaf whose regions arrive, part by part, in `arrays`.

    - `read`: describes all of its regions.
    - `to_come`: the reads of the parts that have not come yet.
    - `owned`: whether the memory of all arrays is the caller's alone, as in a
        `ReadResult`.
    """

    read: StoredRead
    to_come: dict[int, _PartRead]
    arrays: list[Any]
    owned: bool = True

    @property
    def is_complete(self) -> bool:
        return not self.to_come

    def take(self, part: int, result: ReadResult) -> None:
        """Takes the pieces of one part."""
        shapes = self.read.shapes
        for piece, array in zip(self.to_come.pop(part).pieces, result.arrays):
            shape = shapes[piece.wanted]
            if array.shape == shape:  # The piece is the region.
                self.arrays[piece.wanted] = array
                self.owned &= result.owned
                continue
            if self.arrays[piece.wanted] is None:
                self.arrays[piece.wanted] = np.zeros(shape, array.dtype)
            self.arrays[piece.wanted][piece.place] = array

    def result(self) -> ReadResult:
        """Gives away the regions, which have all come."""
        arrays, self.arrays = self.arrays, []
        return ReadResult(arrays, self.owned)


def plan_leaf(
    number: int, wanted: LeafRead, leaves_of: Mapping[int, Leaves]
) -> PartedLeaf:
    """Plans which pieces of a leaf are read from which parts. `number`: its place among
    the leaves of the load; `leaves_of`: the leaves of each part.

    **Raises:** `Apart` for a leaf of which this process needs more than is there."""
    template = wanted.record.template
    needed = _from_host.regions(wanted.target)
    if needed is None:  # All of it.
        needed = [()]
    # With the axes that the target lacks, such as the words of a key.
    regions = [(*x, *_sharding.whole(template.shape[len(x) :])) for x in needed]
    found = {part: _record(leaves, wanted.record) for part, leaves in leaves_of.items()}
    records = {part: record for part, record in found.items() if record is not None}
    pieces: dict[int, list[_PartPiece]] = {}
    try:
        for piece in _pieces(regions, _held(records)):
            pieces.setdefault(piece.part, []).append(piece)
    except ValueError:
        raise Apart(
            f"parts {', '.join(map(str, leaves_of))} do not have all of the leaf "
            f"`{wanted.record.name}` that the devices of this process need"
        ) from None
    to_come = {
        part: _PartRead(_read_of(number, records[part], (x.stored for x in some)), some)
        for part, some in pieces.items()
    }
    read = _read_of(number, wanted.record, regions)
    dtype = _template.dtype_of(template.stored)
    # Regions without elements have no pieces.
    arrays = [np.zeros(s, dtype) if 0 in s else None for s in read.shapes]
    return PartedLeaf(read, to_come, arrays)


def _record(leaves: Leaves, wanted: LeafRecord) -> LeafRecord | None:
    """The record of a leaf in one part, if it is of the same array, however stored."""
    leaf_index = leaves.leaf_indices.get(wanted.name)
    if leaf_index is None:
        return None
    found = leaves.record(leaf_index, is_name_checked=True)
    array_of = lambda record: record.whole._replace(chunk=(), codec=None)
    return found if array_of(found) == array_of(wanted) else None


class _HeldRegion(NamedTuple):
    """A region that a part holds. In what the part stores, it begins at this row."""

    part: int
    row: int
    region: Region


def _held(records: Mapping[int, LeafRecord]) -> list[_HeldRegion]:
    """The regions of a leaf that parts hold, each once, by the records there."""
    # If the leaf is whole in a part, that part is enough.
    whole = [part for part, record in records.items() if record.part is None]
    # Of several parts that hold a region, the first is read.
    firsts: dict[Any, _HeldRegion] = {}
    for part in whole[:1] or records:
        shape, shards = records[part].template.shape, records[part].part
        is_cut = isinstance(shards, LocalShards)
        rows = shards.regions(shape) if is_cut else [(0, _sharding.whole(shape))]
        for row, region in rows:
            firsts.setdefault(_ends(region), _HeldRegion(part, row, region))
    return [*firsts.values()]


def _pieces(
    wanted: Iterable[Region], held: Sequence[_HeldRegion]
) -> Iterator[_PartPiece]:
    """The pieces of wanted regions. **Raises:** `ValueError` if some of a wanted
    region is in no part."""
    for number, region in enumerate(wanted):
        found = _sharding.pieces([x.region for x in held], region)
        for held_in, inside, to in found:
            part, row, _ = held[held_in]
            # A scalar has no rows.
            rows = (slice(s.start + row, s.stop + row) for s in inside[:1])
            yield _PartPiece(part, (*rows, *inside[1:]), number, to)


def _read_of(number: int, record: LeafRecord, regions: Iterable[Region]) -> StoredRead:
    """The read of some regions of a stored array, for the leaf of this number."""
    shape = record.template.shape
    views = tuple([_view_of(shape, _ends(region)) for region in regions])
    return StoredRead(record, views, None, [number])


def _ends(region: Region) -> tuple[tuple[int, int], ...]:
    """A region that can be a key."""
    return tuple([(s.start, s.stop) for s in region])


# Most leaves are alike. This saves 0.17 of the 1.05 s of a restore of 10,000 leaves.
@ft.lru_cache(maxsize=4096)
def _view_of(shape: tuple[int, ...], ends: tuple[tuple[int, int], ...]) -> View:
    return _view.whole(shape).take((*(slice(*x) for x in ends), ...))
