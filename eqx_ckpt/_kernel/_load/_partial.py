"""Leaves that are not all there: of which one process has saved its own part, alone, or
which are of another format and cannot be read."""

from collections.abc import Sequence

from .._format._leaves import LeafRecord, LocalShards, Region
from .._format._view import View
from .._tree import _from_host, _sharding
from .._tree._target import Target
from . import _wording


class Apart(RuntimeError):
    """Another part is wanted than what is stored, and nothing else is wrong."""


def lacks(record: LeafRecord, target: Target) -> bool:
    """Whether the devices of this process need more of a leaf than the part of it that
    is stored."""
    return _found(record, _from_host.regions(target)) is None


def stored_regions(
    record: LeafRecord, view: View | None, regions: Sequence[Region] | None
) -> list[Region]:
    """Where the regions of a leaf of which a part is stored lie in what is stored.

    **Raises:** `ValueError` for what is not there.
    """
    found = _found(record, regions) if view is None else None
    if found is None:
        raise _wording.error(record)
    return found


def _found(record: LeafRecord, regions: Sequence[Region] | None) -> list[Region] | None:
    part, stored = record.part, record.template.shape
    if not isinstance(part, LocalShards):
        return None
    if regions is None:  # It is all of the array.
        regions = [_sharding.whole(part.shape)]
    found = [part.find(stored, region) for region in regions]
    there = [region for region in found if region is not None]
    return there if len(there) == len(found) else None
