"""The files of the history of a run: rows, each of a save of a step, or of metrics that
were added to one.

The rows are a set: in whatever files they are, and however often, they say the same.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._rows import RowFormat
from ._schema import COUNT, ID, optional


PLACE = "eqx_ckpt.history"
_name = re.compile(r"(saved|added)-([1-9][0-9]{0,8})-[0-9a-f]{16}")


class HistoryRow(NamedTuple):
    """A save of a step, which is told by its number and the id of the save: "" for one
    of Orbax. `time` is in seconds since 1970, `nbytes` counts the leaves. Of metrics
    that were added, `time` says when, and `attempt` and `nbytes` are None."""

    step: int
    save: str
    attempt: int | None
    time: float
    nbytes: int | None
    metrics: dict[str, Any]


_SAVE = re.compile(f"{ID.pattern}|")
_NUMBER = lambda x: type(x) in (int, float)
_KINDS = COUNT, _SAVE, optional(COUNT), _NUMBER, optional(COUNT), dict
FORMAT = RowFormat("history", HistoryRow, _KINDS)


def name(rows: Sequence[HistoryRow], word: str) -> str:
    """The name of a file of rows, which are all of saves or all of added metrics."""
    kind = "added" if rows[0].attempt is None else "saved"
    return f"{kind}-{len(rows)}-{word}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Whether the rows of a file are "saved" or "added", and how many they are; None
    for other files."""
    found = _name.fullmatch(name)
    return (found[1], int(found[2])) if found else None
