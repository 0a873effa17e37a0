"""The report of a graft: a table to look at, and data."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from .._kernel._format import _text
from .._kernel._tree import _folding
from .._show import _facts, _html, _tables, _terminal
from .._show._tables import Column, Table


STATUSES = ("loaded", "adapted", "cast", "fresh", "dropped")
_ADAPTED, _KEPT = ("adapted", "cast"), "kept, though another value was saved"


class ReportRow(NamedTuple):
    """One leaf of a graft.

    `status` is `"loaded"`, `"adapted"`, `"cast"`, `"fresh"` or `"dropped"`; `name` its
    name in the model, or in the checkpoint if it was dropped; `sources` the names of
    the leaves of the checkpoint that it is made of; `how` says what was done to it, or
    which node was said to be fresh or dropped.
    """

    status: str
    name: str
    sources: tuple[str, ...]
    how: str
    nbytes: int


class StaticDifference(NamedTuple):
    """A Python scalar or a static field of which the model has kept its own value,
    although another one was saved. Both are given as their `repr`."""

    name: str
    saved: str
    kept: str


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of what [`graft`][] has done. It prints as a table.

    **Attributes:**

    - `path`: of the checkpoint.
    - `rows`: one for every array of the model, and for every leaf of the checkpoint
        that was dropped, with `status`, `name`, `sources`, `how` and `nbytes`.
    - `differences`: `(name, saved, kept)` of the Python scalars and static fields for
        which the model has kept its own value, although another one was saved.
    - `bytes_read`: the bytes that were read from files, index and digests included, as
        TensorStore counts them for the process; None if the checkpoint is not in files.
    - `nbytes`: the bytes of all leaves of the checkpoint.
    """

    path: str
    rows: tuple[ReportRow, ...]
    differences: tuple[StaticDifference, ...]
    bytes_read: int | None
    nbytes: int

    def names(self, status: str) -> list[str]:
        """The names of the leaves with a status, such as `"fresh"`."""
        if status not in STATUSES:
            raise ValueError(f"`status` is one of {', '.join(STATUSES)}: {status!r}.")
        return [row.name for row in self._of(status)]

    def __repr__(self) -> str:
        table = _terminal.table(self._table(STATUSES, "read"))
        lines = [f"Graft of {self.path}", *map(_terminal.plain, table)]
        sections = {x: [(row.name, row.how) for row in self._of(x)] for x in _ADAPTED}
        for status in ("fresh", "dropped"):
            counts = collections.Counter(x.how for x in self._of(status))
            sections[status] = [
                (name or "all", _facts.leaf_count(n)) for name, n in counts.items()
            ]
        sections[_KEPT] = self._kept()
        lines += _folding.sections(sections, {title: title for title in sections})
        return "\n".join(map(_text.escape, lines))

    def _repr_html_(self) -> str:
        quiet = _text.size(self.nbytes)
        if self.bytes_read is not None:
            quiet = f"{_text.size(self.bytes_read)} read {self._whole()}"
        parts = [
            _html.section(status, [(x.name, x.how) for x in self._of(status)])
            for status in STATUSES[1:]
        ]
        parts.append(_html.section(_KEPT, self._kept()))
        table = _html.table(self._table([x for x in STATUSES if self._of(x)]))
        return _html.card(f"Graft of {self.path}", quiet, table, *parts)

    def _table(self, statuses: Iterable[str], read: str = "") -> Table:
        """Leaves and bytes of some statuses, and what was read if `read` names it."""
        columns = [
            Column(""),
            Column("leaves", True),
            Column("bytes", True),
            Column(""),
        ]
        rows = []
        for status in statuses:
            found = self._of(status)
            nbytes = sum(row.nbytes for row in found)
            rows.append((status, str(len(found)), _text.size(nbytes), ""))
        if read and self.bytes_read is not None:
            rows.append((read, "", _text.size(self.bytes_read), self._whole()))
        return _tables.table(columns, rows)

    def _whole(self) -> str:
        """Names the whole of which bytes were read. These can be more than all leaves
        have: the index of a small checkpoint is longer."""
        size = _text.size(self.nbytes)
        is_part = (self.bytes_read or 0) <= self.nbytes
        return f"of {size}" if is_part else f"with the index; leaves have {size}"

    def _of(self, status: str) -> list[ReportRow]:
        return [row for row in self.rows if row.status == status]

    def _kept(self) -> list[tuple[str, str]]:
        return [(name, f"{kept}, saved {old}") for name, old, kept in self.differences]
