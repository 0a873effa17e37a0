"""The things that people look at: trees, tables and facts. `_terminal` draws them as
text, `_html` for notebooks, and `_view` as a page.

All of it is in the index, or in the journal of a run: no array is read.
"""

import collections
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._kernel._format import _template, _text, _values
from .._kernel._format._leaves import Unreadable
from .._kernel._load._source import Source
from .._kernel._run._step import Run
from .._kernel._storage._backend import Usage
from .._kernel._tree import _folding
from . import _lines
from ._lines import TreeLine


def counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def leaf_count(count: int) -> str:
    return counted(count, "leaf", "leaves")


def moment(time: float | int | None) -> str:
    """Seconds since 1970, in the zone of the machine."""
    if time is None:
        return ""
    when = datetime.datetime.fromtimestamp(time).astimezone()
    return when.isoformat(" ", "seconds")


# ---- Trees.


class Branch(NamedTuple):
    """A node or a leaf, and what is below it. It stands for `times` siblings, which are
    numbered and alike: `nbytes` and `leaves` are those of all of them together. `leaf`
    is the number of a leaf, where lines are told apart."""

    part: str
    text: str
    nbytes: int | None
    leaves: int
    below: tuple["Branch", ...] = ()
    leaf: int | None = None
    times: int = 1

    @property
    def title(self) -> str:
        if self.times == 1:
            return self.part
        return f"{{{self.part}..{int(self.part) + self.times - 1}}}"

    @property
    def what(self) -> str:
        """The kind of a leaf, or the number of leaves of a node."""
        text = self.text
        if self.below:
            text = leaf_count(self.leaves // self.times)
        return text if self.times == 1 else f"{self.times:,} x {text}"


def branches(lines: Iterable[TreeLine], folds: bool = True) -> tuple[Branch, ...]:
    """The top of the tree that lines make by the parts of their names. If it `folds`,
    siblings that are alike become one; if not, each leaf has the number of its line."""
    top: dict[str, Any] = {}
    for number, line in enumerate(lines):
        node = top
        *parents, last = line.name.split(".")
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):  # A leaf and a node of one name.
                child = node.setdefault(part + ".", {})
            node = child
        leaves = int(line.nbytes is not None)
        leaf = Branch(
            last, line.text, line.nbytes, leaves, (), None if folds else number
        )
        node[last if last not in node else last + "."] = leaf
    return _folded(top)


def _folded(node: dict[str, Any]) -> tuple[Branch, ...]:
    out: list[Branch] = []
    for part, child in node.items():
        branch = child
        if isinstance(child, dict):
            below = _folded(child)
            leaves = sum(x.leaves for x in below)
            branch = Branch(part.removesuffix("."), "", total(below), leaves, below)
        if out and _continues(out[-1], branch):
            out[-1] = out[-1]._replace(times=out[-1].times + 1)
        else:
            out.append(branch)
    return tuple(map(_multiplied, out))


def total(some: Sequence[Branch]) -> int | None:
    """The bytes of some branches together; None if there are no leaves in them."""
    sizes = [x.nbytes for x in some if x.nbytes is not None]
    return sum(sizes) if sizes else None


def _continues(last: Branch, branch: Branch) -> bool:
    """Whether a branch is the next of some that are numbered and alike."""
    if not (_folding.is_number(last.part) and _folding.is_number(branch.part)):
        return False
    if int(branch.part) != int(last.part) + last.times:
        return False
    return last[1:6] == branch[1:6]


def _multiplied(branch: Branch) -> Branch:
    nbytes = None if branch.nbytes is None else branch.nbytes * branch.times
    return branch._replace(nbytes=nbytes, leaves=branch.leaves * branch.times)


def rows(some: Iterable[Branch], indent: str = "") -> Iterator[TreeLine]:
    """The lines of a tree: names are indented, and nodes have no text and no bytes."""
    for x in some:
        is_node = bool(x.below)
        nbytes = None if is_node or x.nbytes is None else x.nbytes // x.times
        yield TreeLine(indent + x.title, x.text, nbytes)
        yield from rows(x.below, indent + "  ")


def leaf_lines(source: Source) -> Iterator[TreeLine]:
    """A line for each leaf. A shared leaf has its bytes at its first name only."""
    leaves = source.index.leaves
    labels = _lines.labels(leaves)
    for number, record in enumerate(leaves.records()):
        line = _lines.of_record(record, labels.get(number))
        if number in leaves.aliases:
            line = TreeLine(line.name, f"{line.text}, shared", 0)
        yield line


# ---- Tables.


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

    `nbytes` are those of its arrays in memory; `data` is what its data files take, and
    `time` when it was saved, if it is on a disk.
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
        row = [str(x.step), moment(x.time)[:19]]
        row.append("" if x.nbytes is None else _text.size(x.nbytes))
        row.append(_text.size(x.data.own) if x.data and shares else "")
        row += [_metric_text(values.get(name, "")) for name in names]
        rows.append([*row, _marks(x, x.step == best)])
    return table(columns, rows)


def runs(
    found: Sequence[Run], directory: str = "", most_metrics: int | None = None
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
        row += [number(x.latest), number(x.best), str(x.count), moment(x.time)[:19]]
        row.append(_text.size(x.nbytes))
        rows.append([*row, *(_metric_text(x.metrics.get(name, "")) for name in names)])
    return table(columns, rows)


def _metric_text(value: int | float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _marks(x: Summary, is_best: bool) -> Span:
    said = ["best"] * is_best + ["pinned"] * x.is_pinned
    said += ["by Orbax"] * (not x.is_ours)
    if x.state == "complete":
        return Span(", ".join([*said, *[x.why] * bool(x.why)]), "good")
    why = _text.bounded(" ".join(x.why.split()), 120)
    text = ", ".join([*said, f"{x.state}: {why}"])
    return Span(text, "odd" if x.state == "incomplete" else "bad")


# ---- Facts.


class Contents(NamedTuple):
    """A checkpoint, counted: its leaves by kind, the elements of its arrays by dtype,
    leaves and bytes by the first part of their names. What is shared counts once."""

    kinds: dict[str, int]
    numbers: dict[str, int]
    tops: dict[str, tuple[int, int]]
    static_fields: int


def contents(source: Source) -> Contents:
    kinds: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    leaves = source.index.leaves
    templates, unread = leaves.templates, 0
    counts = leaves.counts()
    for leaf_index, part in leaves.parts.items():
        if isinstance(part, Unreadable) and leaf_index not in leaves.aliases:
            counts[leaves.template_of[leaf_index]] -= 1
            unread += 1
    for t, count in zip(templates, counts):
        if count and t.kind in _template.ARRAY_KINDS:
            numbers[t.dtype] += count * math.prod(t.logical_shape)
        kinds[t.kind] += count
    kinds["unreadable"] = unread
    # In the order of the leaves.
    tops: dict[str, tuple[int, int]] = {}
    sizes = [t.nbytes for t in templates]
    for leaf_index, (name, number) in enumerate(zip(leaves.names, leaves.template_of)):
        if leaf_index not in leaves.aliases:
            top = name.partition(".")[0]
            count, nbytes = tops.get(top, (0, 0))
            tops[top] = count + 1, nbytes + sizes[number]
    of_row = {row: name for name, row in leaves.node_names.items()}
    texts = {row: leaves.fields_text(name) for row, name in of_row.items()}
    rows = collections.Counter(leaves.node_names.values())
    plain = _values.plain_fields
    fields = sum(n * len(plain(texts[row])) for row, n in rows.items())
    return Contents(dict(+kinds), dict(numbers.most_common()), tops, fields)


def metadata(source: Source, most: int = 20_000) -> str:
    given = source.index.metadata
    if given is None:
        return ""
    text = json.dumps(given, indent=1, ensure_ascii=False, default=repr)
    return _text.cut(text, most)


def headline(source: Source) -> str:
    leaves = source.index.leaves
    count, size = leaf_count(len(leaves.names)), _text.size(leaves.nbytes)
    return f"{count}, {size}, {source.index.layout}"


# Of nodes with the same static fields, so many names; of other static fields, so many.
_NODES, _STATIC = 3, 200


def static(source: Source) -> list[list[str]]:
    """Nodes that have the same static fields, and these."""
    leaves = source.index.leaves
    nodes: dict[str, list[str]] = {}
    for name in leaves.node_names:
        nodes.setdefault(leaves.fields_text(name), []).append(name or "the tree")
    out: list[list[str]] = []
    for text, names in nodes.items():
        folded = _folding.fold(names)
        more = f" and {len(folded) - _NODES:,} more" * (len(folded) > _NODES)
        fields = [f"{x.name} {x.text}" for x in _lines.of_fields([("", text)])]
        if fields:
            out.append([", ".join(folded[:_NODES]) + more, ", ".join(fields)])
    return out[:_STATIC]


def labels(source: Source) -> dict[str, str]:
    """The shortest name of the StateIndex of each entry of an eqx.nn.State."""
    tree = source.index.leaves.tree
    try:
        states = {} if tree is None else tree.states()
    except ValueError:
        states = {}  # As in `_lines.labels`.
    return {
        f"{state}.{i}".removeprefix("."): min(label.names, key=lambda x: (len(x), x))
        for state, found in states.items()
        for i, label in enumerate(found)
        if label.names
    }


_KINDS = {"jax": "jax.Array", "numpy": "np.ndarray", "generic": "np.generic"}


def base(source: Source) -> str:
    """The base of an adapter, in a line."""
    given = source.index.base
    if given is None:
        return ""
    return f"{_text.bounded(given.path, 200)}, save {given.save_id}"


def facts(source: Source) -> dict[str, str]:
    """Titles, and texts that may have several lines."""
    found, index = contents(source), source.index
    saved, leaves, is_ours = index.saved, index.leaves, source.has_digests
    kinds = ", ".join(f"{n:,} {_KINDS.get(x, x)}" for x, n in found.kinds.items())
    shared = f", and {len(leaves.aliases):,} more names of these"
    numbers = [f"{_folding.short_dtype(x)}  {n:,}" for x, n in found.numbers.items()]
    out = {
        "format": f"eqx_ckpt, layout {index.layout}" if is_ours else index.layout,
        "save": index.save if is_ours else "",
        "time": moment(saved.time if saved else None),
        "written by": ", ".join(f"{k} {v}" for k, v in index.writer.items()),
        "saved by": counted(saved.processes, "process", "processes") if saved else "",
        "shardings": "\n".join(f"{x}: {n:,}" for x, n in saved.shardings.items())
        if saved
        else "",
        "in memory": _text.size(leaves.nbytes),
        "leaves": f"{len(leaves.names):,}: {kinds}{shared * bool(leaves.aliases)}",
        "numbers": "\n".join(numbers),
        "functions": ", ".join(index.functions),
        "base": base(source),
        "static": counted(found.static_fields, "field") if found.static_fields else "",
    }
    return {title: text for title, text in out.items() if text}
