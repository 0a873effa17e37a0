"""What a graft has done: a table to look at, and data."""

import collections
import dataclasses
from typing import NamedTuple

from .._format import _text
from .._tree import _html, _show
from .._tree._show import TreeLine


STATUSES = ("loaded", "adapted", "cast", "fresh", "dropped")


class Row(NamedTuple):
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


class Difference(NamedTuple):
    """A Python scalar or a static field of which the model has kept its own value,
    although another one was saved. Both are given as their `repr`."""

    name: str
    saved: str
    kept: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What [`graft`][] has done. It prints as a table.

    **Attributes:**

    - `path`: of the checkpoint.
    - `rows`: one for every array of the model, and for every leaf of the checkpoint
        that was dropped, with `status`, `name`, `sources`, `how` and `nbytes`.
    - `differences`: `(name, saved, kept)` of the Python scalars and static fields for
        which the model has kept its own value, although another one was saved.
    - `bytes_read`: the bytes that were read from files, index and digests included, as
        TensorStore counts them for the process; None if the checkpoint is not in files.
    - `nbytes`: the bytes of the whole checkpoint.
    """

    path: str
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    bytes_read: int | None
    nbytes: int

    def names(self, status: str) -> list[str]:
        """The names of the leaves with a status, such as `"fresh"`."""
        if status not in STATUSES:
            raise ValueError(f"`status` is one of {', '.join(STATUSES)}: {status!r}.")
        return [row.name for row in self._of(status)]

    def __repr__(self) -> str:
        lines = [f"Graft of {self.path}", f"  {'':8}{'leaves':>8}{'bytes':>12}"]
        for status in STATUSES:
            rows = self._of(status)
            size = _text.size(sum(row.nbytes for row in rows))
            lines.append(f"  {status:8}{len(rows):8}{size:>12}")
        if self.bytes_read is not None:
            read, whole = _text.size(self.bytes_read), _text.size(self.nbytes)
            lines.append(f"  {'read':8}{'':8}{read:>12}  of {whole}")
        for status in ("adapted", "cast"):
            self._list(lines, status, [(x.name, x.how) for x in self._of(status)])
        for status in ("fresh", "dropped"):
            counts = collections.Counter(x.how for x in self._of(status))
            self._list(
                lines,
                status,
                [
                    (name or "all", f"{n} {'leaf' if n == 1 else 'leaves'}")
                    for name, n in counts.items()
                ],
            )
        if self.differences:
            self._list(
                lines,
                "kept, though another value was saved",
                [
                    (name, f"{kept}, saved {old}")
                    for name, old, kept in self.differences
                ],
            )
        return "\n".join(map(_text.escape, lines))

    def _repr_html_(self) -> str:
        lines = []
        for status in STATUSES:
            rows = self._of(status)
            if not rows:
                continue
            count = f"{len(rows):,} {'leaf' if len(rows) == 1 else 'leaves'}"
            lines.append(TreeLine(status, count, sum(row.nbytes for row in rows)))
        quiet = _text.size(self.nbytes)
        if self.bytes_read is not None:
            quiet = f"{_text.size(self.bytes_read)} read of {quiet}"
        kept = [(name, f"{kept}, saved {old}") for name, old, kept in self.differences]
        parts = [
            _html.section(status, [(x.name, x.how) for x in self._of(status)])
            for status in STATUSES[1:]
        ]
        parts.append(_html.section("kept, though another value was saved", kept))
        whole = max((line.nbytes or 0 for line in lines), default=0)
        table = _html.table(lines, whole, copy=False)
        return _html.card(f"Graft of {self.path}", quiet, table, *parts)

    def _of(self, status: str) -> list[Row]:
        return [row for row in self.rows if row.status == status]

    def _list(self, lines: list[str], title: str, rows: list[tuple[str, str]]) -> None:
        shown = _show.fold_rows(rows)
        if shown:
            lines.append(f"  {title}:")
        lines += [f"    {a}  {b}".rstrip() for a, b in shown[:40]]
        if len(shown) > 40:
            lines.append(f"    ... and {len(shown) - 40} more: see `.rows`")
