"""Tables: of any rows, of the steps of a run, and of runs."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._kernel._format import _text
from .._kernel._run._step import Run
from .._kernel._storage._backend import Usage
from . import _facts


class Span(NamedTuple):
    """A part of a line, or of a row. `style` is one of "title", "quiet", "name",
    "good", "bad", "odd"."""

    text: str
    style: str = ""


class Column(NamedTuple):
    title: str
    is_right: bool = False
    style: str = ""


class Table(NamedTuple):
    """Rows below their titles. None of its columns is empty in all rows."""

    columns: list[Column]
    rows: list[list[Span]]


def table(columns: Sequence[Column], rows: Iterable[Sequence[str | Span]]) -> Table:
    cells = [
        [x if isinstance(x, Span) else Span(x, c.style) for x, c in zip(row, columns)]
        for row in rows
    ]
    kept = [i for i in range(len(columns)) if any(row[i].text for row in cells)]
    return Table([columns[i] for i in kept], [[row[i] for i in kept] for row in cells])


class Summary(NamedTuple):
    """A step of a run. `state` is "complete", "incomplete" (its save was killed, or
    goes on), "damaged", or "unread" if nobody can tell now or Orbax has it as several
    trees. `why` says more, such as that a step is of an earlier attempt.

    `nbytes` are those of its arrays in memory. `data` is what its data files take, if
    it is on a disk. `time` is when it was saved.
    """

    step: int
    state: str
    why: str = ""
    is_ours: bool = True
    is_pinned: bool = False
    time: float | None = None
    leaves: int | None = None
    nbytes: int | None = None
    metrics: dict[str, Any] | None = None
    data: Usage | None = None


def steps(
    found: Sequence[Summary], best: int | None = None, most_metrics: int | None = None
) -> Table:
    """Steps of a run: when each was saved, its sizes, its metrics, its marks."""
    shares = any(x.data and x.data.own < x.data.nbytes for x in found)
    names = list(dict.fromkeys(name for x in found for name in x.metrics or ()))
    names = names[:most_metrics]
    columns = [
        Column("step", True, "name"),
        Column("time", style="quiet"),
        Column("size", True),
        Column("own", True),
        *(Column(name, True) for name in names),
        Column(""),
    ]
    rows = []
    for x in found:
        values = x.metrics or {}
        row = [str(x.step), _facts.moment(x.time)[:19]]
        row.append("" if x.nbytes is None else _text.size(x.nbytes))
        row.append(_text.size(x.data.own) if x.data and shares else "")
        row += [_metric_text(values.get(name, "")) for name in names]
        rows.append([*row, _marks(x, x.step == best)])
    return table(columns, rows)


def runs(
    found: Sequence[Run], directory: str, most_metrics: int | None = None
) -> Table:
    """Runs: their newest and best steps, when they were saved, sizes, metrics."""
    names = list(dict.fromkeys(name for x in found for name in x.metrics))[
        :most_metrics
    ]
    columns = [
        Column("run", style="name"),
        Column("newest", True),
        Column("best", True),
        Column("steps", True),
        Column("time", style="quiet"),
        Column("size", True),
        *(Column(name, True) for name in names),
    ]
    number = lambda step: "" if step is None else str(step.number)
    rows = []
    for x in found:
        path = str(x.path)
        row = [path.removeprefix(directory.rstrip("/") + "/")]
        row += [
            number(x.latest),
            number(x.best),
            str(x.count),
            _facts.moment(x.time)[:19],
        ]
        row.append(_text.size(x.nbytes))
        rows.append([*row, *(_metric_text(x.metrics.get(name, "")) for name in names)])
    return table(columns, rows)


def _metric_text(value: int | float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _marks(x: Summary, is_best: bool) -> Span:
    marks = {"best": is_best, "pinned": x.is_pinned, "by Orbax": not x.is_ours}
    said = [mark for mark, is_so in marks.items() if is_so]
    if x.state == "complete":
        return Span(", ".join([*said, x.why] if x.why else said), "good")
    why = _text.bounded(" ".join(x.why.split()), 120)
    text = ", ".join([*said, f"{x.state}: {why}"])
    return Span(text, "odd" if x.state == "incomplete" else "bad")
