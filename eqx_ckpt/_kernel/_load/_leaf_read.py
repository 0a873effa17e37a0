"""One leaf that a load reads: what is stored, and what it becomes."""

from typing import Any, NamedTuple

from .._format._leaves import LeafRecord
from .._format._view import View
from .._tree._target import Target


class LeafRead(NamedTuple):
    """One leaf to read. `move` is an `ArrayMove` of `_reshard`, or None. The leaf is
    then read in the regions `move.regions()`, and `move.begin(parts)` sends them on."""

    record: LeafRecord
    view: View | None
    target: Target
    move: Any = None
