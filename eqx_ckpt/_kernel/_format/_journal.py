"""The journal of a run: facts of the indices of its steps, in one file.

It is a cache, which anyone may lose, damage or write. A row in it counts only if the
index of its step still has the stamp that it had when it was read.
"""

from typing import Any, NamedTuple

from ._rows import RowFormat
from ._schema import COUNT, ID, optional


KEY = "eqx_ckpt.journal"
# At most this many data files: a look at a step looks at each of them.
_MOST_FILES = 10**6


class StepRow(NamedTuple):
    """Facts in the index of a step. `stamp` is that of the file of the index, and
    `time` says when it was written, if that is known. `files`: see `IndexSummary`."""

    step: int
    stamp: str
    save: str
    leaves: int
    nbytes: int
    files: int | None
    time: float | None
    metrics: dict[str, Any]


_FACTS = COUNT, str, ID, COUNT, COUNT
_KINDS = *_FACTS, optional(range(_MOST_FILES)), optional(float), dict
FORMAT = RowFormat("journal", StepRow, _KINDS)
