"""Trees, tables and facts as lines of text, for terminals and `repr`."""

import itertools as it
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._kernel._format import _text
from . import _branches
from ._lines import TreeLine
from ._tables import Span, Table


Line = str | Sequence[Span]

_WIDTH = 100


def text(lines: Iterable[TreeLine], limit: int | None = None) -> list[str]:
    """The tree in columns: at most `limit` lines, the last of which then says how many
    more there are."""
    shown = []
    for name, text, nbytes in _branches.rows(_branches.branches(lines)):
        size = "" if nbytes is None else f"  {_text.size(nbytes)}"
        shown.append((name, text + size))
    width = _width((len(left) for left, right in shown if right), _WIDTH)
    out = [
        _text.escape(f"{a.ljust(width)}  {b}" if b else a).rstrip() for a, b in shown
    ]
    if limit is not None and len(out) > limit:
        more = len(out) - limit
        out = [*out[:limit], f"... and {more} more lines: see `.leaves`"]
    return out


def _width(lengths: Iterable[int], most: int) -> int:
    """Longer ones stand out: else each line would be as long as the longest."""
    return max((length for length in lengths if length <= most), default=0)


def tree(lines: Iterable[TreeLine]) -> Iterator[Line]:
    """The rows of the tree: name, array, size; and the static fields."""
    shown = [
        line._replace(name=_text.escape(line.name))
        for line in _branches.rows(_branches.branches(lines))
    ]
    width = _width((len(left) for left, _, size in shown if size is not None), 60)
    middle = _width((len(array) for _, array, size in shown if size is not None), 60)
    for (is_field, _), run in it.groupby(shown, _kind):
        if is_field:
            yield from _static_fields(list(run))
            continue
        for left, array, nbytes in run:
            if nbytes is None:
                yield [Span(f"  {left}", "name")]
                continue
            size = f"{_text.size(nbytes):>10}"
            yield f"  {left:{width}}  {array:{middle}}  {size}"


def _kind(row: TreeLine) -> tuple[bool, int]:
    """Whether a row of the tree is of a static field, and its indent."""
    left, text, nbytes = row
    return bool(text) and nbytes is None, len(left) - len(left.lstrip())


def _static_fields(rows: list[TreeLine]) -> Iterator[Line]:
    """The static fields of a node, as many in a line as fit."""
    indent = "  " + " " * _kind(rows[0])[1]
    line = ""
    for left, text, _ in rows:
        text = f"{left.strip()} {text}"
        if line and len(indent) + len(line) + len(text) > _WIDTH:
            yield [Span(f"{indent}{line},", "quiet")]
            line = ""
        line += f", {text}" if line else text
    yield [Span(indent + line, "quiet")]


def fields(facts: Mapping[str, str]) -> Iterator[Line]:
    """Titles and texts in two columns. A text may have several lines."""
    width = max(map(len, facts), default=0)
    for title, text in facts.items():
        for number, part in enumerate(text.split("\n")):
            head = title if number == 0 else ""
            yield [Span(f"  {head:{width}}  ", "quiet"), Span(part)]


def table(table: Table) -> Iterator[Line]:
    """In columns, below their titles; nothing where there are no rows."""
    # Escaped before they are measured.
    titles = [Span(column.title, "quiet") for column in table.columns]
    rows = [
        [Span(_text.escape(text), style) for text, style in row]
        for row in ([titles, *table.rows] if table.rows else [])
    ]
    widths = [max(len(cell.text) for cell in cells) for cells in zip(*rows)]
    for row in rows:
        yield [
            Span(f"  {text:>{n}}" if column.is_right else f"  {text:{n}}", style)
            for (text, style), n, column in zip(row, widths, table.columns)
        ]


def plain(line: Line) -> str:
    return (
        line if isinstance(line, str) else "".join(span.text for span in line).rstrip()
    )
