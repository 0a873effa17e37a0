"""What people look at of a checkpoint: all of it is in the index, and no array is read.
`_branches` makes a tree of its leaves, and `_tables` has tables. `_terminal` draws them
as text, `_html` for notebooks, and `_view` as a page.
"""

import collections
import datetime
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from .._kernel._format import _template, _text, _values
from .._kernel._format._leaves import Unreadable
from .._kernel._load._source import Source
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


def leaf_lines(source: Source) -> Iterator[TreeLine]:
    """A line for each leaf. A shared leaf has its bytes at its first name only."""
    leaves = source.index.leaves
    labels = _lines.labels(leaves)
    for number, record in enumerate(leaves.records()):
        line = _lines.of_record(record, labels.get(number))
        if number in leaves.aliases:
            line = TreeLine(line.name, f"{line.text}, shared", 0)
        yield line


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
        left = len(folded) - _NODES
        more = f" and {left:,} more" if left > 0 else ""
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
        for i, label in found.items()
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
    count = len(leaves.aliases)
    shared = f", and {count:,} more names of these" if count else ""
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
        "leaves": f"{len(leaves.names):,}: {kinds}{shared}",
        "numbers": "\n".join(numbers),
        "functions": ", ".join(index.functions),
        "base": base(source),
        "static": counted(found.static_fields, "field") if found.static_fields else "",
    }
    return {title: text for title, text in out.items() if text}
