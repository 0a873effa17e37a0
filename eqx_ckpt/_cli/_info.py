"""Report of `info` on a checkpoint: it needs no JAX."""

import json
from collections.abc import Iterator
from typing import Any

from .._kernel._format import _index, _text
from .._kernel._load._source import Source
from .._kernel._storage._backend import Usage
from .._show import _facts, _tables, _terminal
from .._show._facts import Contents
from .._show._tables import Column, Span
from .._show._terminal import Line
from ._output import CommandResult


def of_checkpoint(
    source: Source, functions: dict[str, dict[str, Any]]
) -> CommandResult:
    """A checkpoint, by its index and the sizes of its files, and what is said of its
    functions."""
    index, is_ours = source.index, source.has_digests
    saved, leaves = index.saved, index.leaves
    usage = source.root.usage()
    found = _facts.contents(source)
    tops = {x: {"leaves": n, "nbytes": size} for x, (n, size) in found.tops.items()}
    data = {
        "path": source.root.url,
        "format": _index.FORMAT if is_ours else index.layout,
        "layout": index.layout,
        "save_id": index.save if is_ours else None,
        "time": _facts.moment(saved.time if saved else usage and usage.time),
        "writer": index.writer,
        "processes": saved and saved.processes,
        "shardings": saved.shardings if saved else {},
        "leaves": len(leaves.names),
        "kinds": found.kinds,
        "shared": len(leaves.aliases),
        "nbytes": leaves.nbytes,
        "base": index.base and index.base._asdict(),
        "files": as_json(usage),
        "numbers": found.numbers,
        "tops": tops,
        "static_fields": found.static_fields,
        "functions": functions,
        "metadata": index.metadata,
    }
    rows = _facts.facts(source)
    rows["time"] = data["time"]
    if usage is not None:
        files = _facts.counted(usage.files, "file")
        rows["on disk"] = f"{_text.size(usage.nbytes)} in {files}"
        if usage.own != usage.nbytes:
            rows["on disk"] += f", {_text.size(usage.own)} of them its own"
    if found.static_fields:
        rows["static"] += ": see `ls`"
    texts = [
        f"{name}: {f['takes']} -> {f['gives']}, on {', '.join(f['platforms'])}"
        for name, f in functions.items()
    ]
    rows["functions"] = "\n".join(_text.cut(text, 200) for text in texts)
    if index.metadata is not None:
        rows["metadata"] = _metadata(index.metadata)
    shown = {x: rows[x] for x in sorted(rows, key=_TITLES.index) if rows[x]}
    lines = [[Span(source.root.url, "title")], *_terminal.fields(shown)]
    if len(found.tops) > 1:
        lines += ["", *_tops(found)]
    return CommandResult(data, lines)


# Every row has its title here, which says where it is shown.
_TITLES = (
    *("format", "save", "time", "written by", "saved by", "shardings", "in memory"),
    *("on disk", "base", "leaves", "numbers", "static", "functions", "metadata"),
)


def _tops(found: Contents) -> Iterator[Line]:
    numbers = [Column(title, True) for title in ("leaves", "size")]
    columns = [Column("node", style="name"), *numbers]
    rows = [
        (name, f"{n:,}", _text.size(size)) for name, (n, size) in found.tops.items()
    ]
    yield from _terminal.table(_tables.table(columns, rows[:_TOPS]))
    if len(rows) > _TOPS:
        yield f"  ... and {len(rows) - _TOPS} more"


_TOPS = 12


def as_json(usage: Usage | None) -> dict[str, Any] | None:
    """The files on the disk, as `--json` has them."""
    if usage is None:
        return None
    return {"count": usage.files, "nbytes": usage.nbytes, "own": usage.own}


def _metadata(metadata: object, most: int = 20) -> str:
    """Metadata as JSON, with a line for each key at its top."""
    if not isinstance(metadata, dict):
        return _text.cut(json.dumps(metadata, ensure_ascii=False), 200)
    texts = [
        _text.cut(f"{key}: {json.dumps(value, ensure_ascii=False)}", 200)
        for key, value in metadata.items()
    ]
    texts = [text.replace("\n", " ") for text in texts]
    return "\n".join(_text.first(texts, most, ""))
