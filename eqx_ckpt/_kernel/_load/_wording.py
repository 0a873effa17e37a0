"""A stored leaf in words: what it is, how much of it is there, why it cannot be read.
No JAX is needed for it."""

from .._format._leaves import LeafRecord, Unreadable
from .._tree import _folding


def show(record: LeafRecord) -> str:
    """The dtype and shape of a leaf, and which part of it is stored."""
    if record.part is None:
        return _folding.show(record.template)
    if isinstance(record.part, Unreadable):
        return f"{record.part.what} (unreadable)"
    count, stored = len(record.part.starts), record.template
    region = (stored.shape[0] // count, *stored.shape[1:])
    one = _folding.show(stored._replace(shape=region))
    parts = f"{count} regions of {one}" if count > 1 else f"a region of {one}"
    return f"part of {_folding.show(record.whole)}: {parts}"


def error(record: LeafRecord) -> ValueError:
    """The error for a leaf that cannot be read here, or is stored in part."""
    if isinstance(record.part, Unreadable):
        return ValueError(
            f"The leaf `{record.name}` cannot be read: {record.part.why}."
        )
    return ValueError(
        f"The leaf `{record.name}` is {show(record)}, saved by one process alone "
        '(`processes="own"`). Only a process whose devices need no more than that can '
        "load it, with the sharding that it was saved with."
    )


def check_readable(record: LeafRecord) -> None:
    """**Raises:** `ValueError` for a leaf that cannot be read."""
    if isinstance(record.part, Unreadable):
        raise error(record)
