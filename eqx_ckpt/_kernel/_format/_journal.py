"""The journal of a run: facts of the indices of its steps, in one file.

It is a cache, which anyone may lose, damage or write. A row counts only if the index of
its step still has the row's stamp, or if a listing of the run shows that the step is
still the row's save.
"""

from typing import Any, NamedTuple

from ._rows import RowFormat
from ._schema import COUNT, ID, optional


# The key of the file, at the root of a run.
KEY = "eqx_ckpt.journal"
# No step has this many data files. The bound protects readers of a forged journal: a
# summary of the run looks at each of these files.
_MAX_FILES = 10**6


class JournalRow(NamedTuple):
    """Facts in the index of a step: the id of its save, how many leaves it has, how
    many bytes these have, how many data `files` there are, and its metrics. `files` is
    None where each leaf has its own. `stamp` is that of the file of the index, which
    was written at `time`, if that is known.
    """

    step: int
    stamp: str
    save: str
    leaves: int
    nbytes: int
    files: int | None
    time: float | None
    metrics: dict[str, Any]


_KINDS = (
    COUNT,  # step
    str,  # stamp
    ID,  # save
    COUNT,  # leaves
    COUNT,  # nbytes
    optional(range(_MAX_FILES)),  # files
    optional(float),  # time
    dict,  # metrics
)
FORMAT = RowFormat("journal", JournalRow, _KINDS)
