"""`cat`, `stats`, `diff`, `suggest`; `info` of foreign files and runs: all with JAX."""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from typing import Any

import click
import jax.random as jr
import numpy as np

from .._edit import _diff, _stats
from .._edit._difference import Diff
from .._functions import _signature, _stored_function
from .._functions._stored_function import Function
from .._graft import _alike, _find_rules, _leaf_kinds, _rules_code
from .._kernel._format import _values
from .._kernel._load import _checkpoint, _lazy, _wording
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._source import Source
from .._kernel._run._steps import Steps
from .._kernel._tree import _folding
from .._show import _facts, _tables, _terminal
from .._show._tables import Column, Span
from .._show._terminal import Line
from . import _info, _paths, _run_info
from ._output import CommandResult


def info(path: str) -> CommandResult:
    found = _paths.open_any(path)
    if isinstance(found, Steps):
        return _run_info.of_run(found)
    functions = {name: _function(f) for name, f in found.functions.items()}
    return _info.of_checkpoint(_checkpoint.source_of(found), functions)


def _function(function: Function) -> dict[str, Any]:
    stored = _stored_function.stored_of(function)
    return {
        "takes": _signature.show(stored.args),
        "gives": _signature.show(stored.result),
        "leaves": len(stored.leaves),
        "platforms": stored.platforms,
        "vjp_order": stored.order,
        "nbytes": stored.nbytes,
        "versions": stored.versions,
    }


def source_at(path: str) -> Source:
    return _checkpoint.source_of(_checkpoint.open(path))


def check_node(source: Source, name: str) -> None:
    """**Raises:** `KeyError` if there is no such node."""
    _paths.node(Checkpoint(source), name)


# ---- Values.


def cat(path: str, name: str, whole: bool) -> CommandResult:
    ckpt = _checkpoint.open(path)
    name, index = _paths.split_slice(name)
    parent, _, last = name.rpartition(".")
    leaves = _checkpoint.source_of(ckpt).index.leaves
    plain = _values.plain_fields(leaves.fields_text(parent))
    if name not in ckpt and last in plain:
        if index is not None:
            text = f"`{name}` is a static field: print it without an index."
            raise click.BadParameter(text)
        return CommandResult(plain[last], [json.dumps(plain[last])])
    lazy = ckpt[name]
    if index is not None:
        lazy = lazy[index]
    template = _lazy.body_of(lazy).template
    kind = template.kind
    if kind in ("str", "bytes"):
        value = lazy.read()
        return CommandResult(value if kind == "str" else value.hex(), [repr(value)])
    value = np.asarray(jr.key_data(lazy.read()) if kind == "key" else lazy)
    what = _folding.show(template)
    if kind in ("jax", "numpy"):
        what = _folding.short_array(value.dtype.name, value.shape)
    head = [Span(what, "quiet")]
    return CommandResult(value.tolist(), [head, *_printed(value, whole)])


def _printed(value: np.ndarray, whole: bool) -> Iterator[Line]:
    most = max(1000, math.prod(value.shape)) if whole else 1000
    width = shutil.get_terminal_size((88, 24)).columns
    text = np.array2string(value, max_line_width=width, threshold=most)
    yield from text.split("\n")


def stats(path: str, name: str, progress: bool) -> CommandResult:
    ckpt = _checkpoint.open(path)
    found = _stats.stats(_paths.part(ckpt, name), progress=progress)
    columns = [Column("name"), Column("array")]
    columns += [Column(title, True) for title in _stats.NUMBERS]
    rows = []
    for leaf, row in found.items():
        cells = [Span(leaf), row.array]
        for title in _stats.NUMBERS:
            value = getattr(row, title)
            is_bad = title in ("nan", "inf") and bool(value)
            text = "" if title in ("nan", "inf") and value == 0 else _stats.short(value)
            cells.append(Span(text, "bad" if is_bad else ""))
        rows.append(cells)
    data = {leaf: row._asdict() for leaf, row in found.items()}
    lines = _terminal.table(_tables.table(columns, rows))
    return CommandResult({"path": ckpt.path, "leaves": data}, lines)


# ---- Differences.


def diff(a: str, b: str, node: str, values: bool, progress: bool) -> CommandResult:
    both = [_checkpoint.open(x) for x in (a, b)]
    one, two = (_paths.part(x, node) for x in both)
    found = _diff.diff(one, two, values=values, progress=progress)
    if node:
        shown = {x: f"`{node}` of {ckpt.path}" for x, ckpt in zip("ab", both)}
        found = dataclasses.replace(found, **shown)
    data = {
        **dataclasses.asdict(found),
        "changed": {name: x._asdict() for name, x in found.changed.items()},
    }
    return CommandResult(data, _coloured(found), 1 if found else 0)


_MARKS = {
    "added": ("+", "good"),
    "removed": ("-", "bad"),
    "changed": ("~", "odd"),
    "static fields": ("~", "odd"),
    "metadata": ("~", "odd"),
}


def _coloured(found: Diff) -> Iterator[Line]:
    """The text of a `Diff` in colours. A line `  <title>:` begins a section: the lines
    below it get the mark and the style of that title."""
    head, *lines = repr(found).split("\n")
    yield [Span(head, "title")]
    mark, style = " ", ""
    for line in lines:
        title = line.strip().removesuffix(":")
        if line == f"  {title}:" and title in _MARKS:
            mark, style = _MARKS[title]
            yield [Span(line, "quiet")]
        else:
            yield [Span(f"  {mark} {line.strip()}", style)]


# ---- Names.


# Names of one side that are listed as alike.
_MOST = 40


def suggest(a: str, b: str) -> CommandResult:
    sides = [source_at(x).index.leaves for x in (a, b)]
    shown = [{r.name: _wording.show(r) for r in x.records()} for x in sides]
    kinds = [{r.name: _leaf_kinds.kind(r.whole) for r in x.records()} for x in sides]
    alike = _alike.pair_leaves(*kinds)
    rules = _find_rules.find_rules(alike.names, *kinds)
    names = {x: y for x, y in alike.names.items() if x == y or rules}
    # By side: a name may be unclear in one, and be that of another leaf in the other.
    unclear = [{name for both in alike.unclear for name in both[i]} for i in range(2)]
    left, missing = (
        [x for x in side if x not in done and x not in own_unclear]
        for side, done, own_unclear in zip(kinds, (names, {*names.values()}), unclear)
    )
    given = set(names.values())
    adapters = {x: how for x, how in alike.adapters.items() if x in given}
    squares = [x for x in alike.squares if x in given]
    data = {
        "rules": rules,
        "names": names,
        "adapters": adapters,
        "squares": squares,
        "unclear": [dict(zip("ab", x)) for x in alike.unclear],
        "left": left,
        "missing": missing,
    }
    count = f"{len(names)} of {_facts.leaf_count(len(kinds[1]))}"
    more = [f"{count} of {b}"]
    others = {x: y for x, y in alike.names.items() if x not in names}
    if others:
        leaves = _facts.leaf_count(len(others))
        more.append(f"  {leaves} alike, but for too many rules: write a function")
    found = {*others, *others.values()}
    more += _folding.sections(
        {
            "missing": [(x, shown[1][x]) for x in missing if x not in found],
            "left": [(x, shown[0][x]) for x in left if x not in found],
        },
        {
            "missing": f"of {b}, and like none of {a}",
            "left": f"of {a}, and like none of {b}",
        },
    )
    if alike.unclear:
        more.append("  alike, and names do not tell for sure which is which:")
    for both in alike.unclear:
        in_a, in_b = (", ".join(_folding.fold(x)[:_MOST]) for x in both)
        more.append(f"    {in_a}  {shown[0][both[0][0]]}, of {in_b}")
    if squares:
        more.append("  squares, which nobody knows to be transposed or not:")
        more += [f"    {x}" for x in _folding.fold(squares)]
    tied = _alike.tied_heads(kinds[0], {x: kinds[1][x] for x in missing})
    if tied:
        more.append("  perhaps tied, with no array of its own there:")
        more += [f"    {x}  as `{y}`" for x, y in tied.items()]
    lines: list[Line] = [*_rules_code.code_lines(rules, adapters, alike.names.values())]
    lines += [[Span(f"# {line}", "quiet")] for line in more]
    return CommandResult(data, lines, int(len(more) > 1))
