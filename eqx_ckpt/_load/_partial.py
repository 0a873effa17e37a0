"""Leaves that are not all there: of which one process has saved its own part, alone, or
which are of another format and cannot be read."""

from collections.abc import Sequence

from .._format._leaves import Part, Record, Region, Unreadable
from .._format._view import View
from .._tree import _from_host, _leaf, _sharding
from .._tree._target import Target


class Apart(RuntimeError):
    """Another part is wanted than what is stored, and nothing else is wrong."""


def show(record: Record) -> str:
    """A leaf in a word: what the whole is, and how much of it is there."""
    if record.part is None:
        return _leaf.show(record.template)
    if isinstance(record.part, Unreadable):
        return f"{record.part.what} (unreadable)"
    count, stored = len(record.part.starts), record.template
    region = (stored.shape[0] // count, *stored.shape[1:])
    one = _leaf.show(stored._replace(shape=region))
    parts = f"{count} regions of {one}" if count > 1 else f"a region of {one}"
    return f"part of {_leaf.show(record.whole)}: {parts}"


def error(record: Record) -> ValueError:
    if isinstance(record.part, Unreadable):
        return ValueError(
            f"The leaf `{record.name}` cannot be read: {record.part.why}."
        )
    return ValueError(
        f"The leaf `{record.name}` is {show(record)}, saved by one process alone "
        '(`processes="own"`). Only a process whose devices need no more than that can '
        "load it, with the sharding that it was saved with."
    )


def check_readable(record: Record) -> None:
    """**Raises:** `ValueError` for a leaf that cannot be read."""
    if isinstance(record.part, Unreadable):
        raise error(record)


def lacks(record: Record, target: Target) -> bool:
    """Whether the devices of this process need more of a leaf than the part of it that
    is stored."""
    return _found(record, _from_host.regions(target)) is None


def stored_regions(
    record: Record, view: View | None, regions: Sequence[Region] | None
) -> list[Region]:
    """Where the regions of a leaf of which a part is stored lie in what is stored.

    **Raises:** `ValueError` for what is not there.
    """
    found = _found(record, regions) if view is None else None
    if found is None:
        raise error(record)
    return found


def _found(record: Record, regions: Sequence[Region] | None) -> list[Region] | None:
    part, stored = record.part, record.template.shape
    if not isinstance(part, Part):
        return None
    if regions is None:  # It is all of the array.
        regions = [_sharding.whole(part.shape)]
    found = [part.find(stored, region) for region in regions]
    there = [region for region in found if region is not None]
    return there if len(there) == len(found) else None
