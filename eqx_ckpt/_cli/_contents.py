"""`info` and `ls`: what is in the index of a checkpoint.

JAX takes longer to import than all of this takes. It is imported only where it has to
be: for what is no checkpoint of ours in a local directory, for `info` of stored
functions, and for `ls` of a name that no leaf has.
"""

import collections
import os
from collections.abc import Iterator, Mapping
from typing import Any

from .._kernel._format import _files, _text
from .._kernel._format._leaves import LeafRecord, Leaves, Unreadable
from .._kernel._load import _source, _wording
from .._kernel._load._source import Source
from .._kernel._storage import _root
from .._kernel._tree import _compare
from .._show import _facts, _lines, _tables, _terminal
from .._show._lines import TreeLine
from .._show._tables import Column, Span
from .._show._terminal import Line
from . import _commands, _info
from ._output import CommandResult


def _ours_at(path: str) -> Source | None:
    """The checkpoint of ours that is in a local directory itself."""
    if not os.path.isdir(path) or _files.is_beside(os.path.basename(path)):
        return None
    return _source.ours_at(_root.resolve(path))


def info(path: str) -> CommandResult:
    source = _ours_at(path)
    if source is None or source.index.functions:
        return _commands.with_jax("_inspect", "info")(path)
    return _info.of_checkpoint(source, {})


def ls(
    path: str,
    name: str,
    depth: int | None,
    pattern: str | None,
    sort: str,
    static: bool,
) -> CommandResult:
    source = _ours_at(path) or _commands.with_jax("_inspect", "source_at")(path)
    leaves = source.index.leaves
    if name and name not in leaves.leaf_indices:
        _commands.with_jax("_inspect", "check_node")(source, name)
    wanted = [x for x in (name, pattern) if x]
    is_wanted = lambda x: all(_compare.selects(one, x) for one in wanted)
    records = [r for r in leaves.records() if is_wanted(r.name)]
    if sort == "size":
        records.sort(key=lambda r: -r.template.nbytes)
        lines = _flat(records)
    else:
        rows = _rows(leaves, records, depth)
        if static and not pattern:
            nodes = [x for x in leaves.node_names if not name or is_wanted(x)]
            texts = [(x, leaves.fields_text(x)) for x in nodes]
            fields = _lines.of_fields(texts)
            rows += (x for x in fields if depth is None or x.name.count(".") < depth)
        lines = _terminal.tree(rows)
    base = source.index.base and source.index.base._asdict()
    data = lambda: {
        "path": source.root.url,
        "base": base,
        "leaves": list(map(_as_json, records)),
    }
    nbytes = sum(_added_bytes(records, leaves.aliases))
    head = [Span(source.root.url, "title")]
    if name:
        head.append(Span(f"  {name}", "name"))
    head.append(Span(f"  {_facts.leaf_count(len(records))}, {_text.size(nbytes)}"))
    if base is not None:
        head.append(Span(f"  on {_facts.base(source)}", "quiet"))
    return CommandResult(data, [head, *lines])


def _as_json(record: LeafRecord) -> dict[str, Any]:
    t, part = record.template, record.part
    if isinstance(part, Unreadable):
        return {"name": record.name, "kind": "unreadable", **part._asdict()}
    return {
        "name": record.name,
        "kind": t.kind,
        "dtype": t.dtype,
        "shape": t.logical_shape,
        "nbytes": t.nbytes,
    }


def _flat(records: list[LeafRecord]) -> Iterator[Line]:
    columns = [Column("size", True), Column("array"), Column("name")]
    rows = [(_text.size(r.template.nbytes), _wording.show(r), r.name) for r in records]
    return _terminal.table(_tables.table(columns, rows))


def _added_bytes(
    records: list[LeafRecord], aliases: Mapping[int, int]
) -> Iterator[int]:
    """The bytes that each leaf adds: 0 for one whose array an earlier leaf has."""
    seen: set[int] = set()
    for record in records:
        origin = aliases.get(record.leaf_index, record.leaf_index)
        yield 0 if origin in seen else record.template.nbytes
        seen.add(origin)


def _rows(
    leaves: Leaves, records: list[LeafRecord], depth: int | None
) -> list[TreeLine]:
    """The lines of leaves. Those deeper than `depth` are added up, node by node."""
    rows: dict[str, TreeLine] = {}
    labels = _lines.labels(leaves)
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for record, nbytes in zip(records, _added_bytes(records, leaves.aliases)):
        name = ".".join(record.name.split(".")[:depth])
        rows[name] = _lines.of_record(record, labels.get(record.leaf_index))
        if name != record.name:
            counts[name] += 1
            sizes[name] += nbytes
            what = _facts.leaf_count(counts[name])
            rows[name] = TreeLine(name, what, sizes[name])
    return list(rows.values())
