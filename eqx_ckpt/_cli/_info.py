"""Reports of `info` on a checkpoint, and of `info` and `steps` on a run."""

import collections
import json
from collections.abc import Iterator
from typing import Any

from .._format import _index, _text
from .._functions import _signature
from .._functions._stored_function import Function
from .._load._checkpoint import Checkpoint
from .._run._policy import Policy
from .._run._steps import Steps
from .._show import _model, _summary, _terminal
from .._show._model import Column, Contents, Span
from .._show._summary import Summary
from .._show._terminal import Line
from .._storage._backend import Usage
from ._output import CommandResult


def of(ckpt: Checkpoint) -> CommandResult:
    """A checkpoint, by its index and the sizes of its files."""
    source = ckpt._source
    is_ours = source.has_digests
    usage = source.root.usage()
    found = _model.contents(ckpt)
    tops = {x: {"leaves": n, "nbytes": size} for x, (n, size) in found.tops.items()}
    data = {
        "path": ckpt.path,
        "format": _index.FORMAT if is_ours else ckpt.layout,
        "layout": ckpt.layout,
        "save_id": ckpt.save_id if is_ours else None,
        "time": _model.moment(ckpt.saved.time if ckpt.saved else usage and usage.time),
        "writer": ckpt.writer,
        "processes": ckpt.saved and ckpt.saved.processes,
        "shardings": ckpt.saved.shardings if ckpt.saved else {},
        "leaves": len(ckpt),
        "kinds": found.kinds,
        "shared": len(source.index.leaves.aliases),
        "nbytes": ckpt.nbytes,
        "base": ckpt.base and ckpt.base._asdict(),
        "files": _as_json(usage),
        "numbers": found.numbers,
        "tops": tops,
        "static_fields": found.static_fields,
        "functions": {name: _function(f) for name, f in ckpt.functions.items()},
        "metadata": ckpt.metadata,
    }
    rows = _model.facts(ckpt, found)
    rows["time"] = data["time"]
    if usage is not None:
        files = _model.counted(usage.files, "file")
        rows["on disk"] = f"{_text.size(usage.nbytes)} in {files}"
        if usage.own != usage.nbytes:
            rows["on disk"] += f", {_text.size(usage.own)} of them its own"
    if found.static_fields:
        rows["static"] += ": see `ls`"
    functions = [
        f"{name}: {f['takes']} -> {f['gives']}, on {', '.join(f['platforms'])}"
        for name, f in data["functions"].items()
    ]
    rows["functions"] = "\n".join(map(_bounded, functions))
    if ckpt.metadata is not None:
        rows["metadata"] = _metadata(ckpt.metadata)
    shown = {title: rows[title] for title in _TITLES if rows.get(title)}
    lines = [[Span(ckpt.path, "title")], *_terminal.fields(shown)]
    if len(found.tops) > 1:
        lines += ["", *_tops(found)]
    return CommandResult(data, lines)


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
    yield from _terminal.table(_model.table(columns, rows[:_TOPS]))
    if len(rows) > _TOPS:
        yield f"  ... and {len(rows) - _TOPS} more"


_TOPS = 12


def _function(function: Function) -> dict[str, Any]:
    stored = function._stored
    return {
        "takes": _signature.show(stored.args),
        "gives": _signature.show(stored.result),
        "leaves": len(stored.leaves),
        "platforms": stored.platforms,
        "vjp_order": stored.order,
        "nbytes": stored.nbytes,
        "versions": stored.versions,
    }


def _as_json(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {"count": usage.files, "nbytes": usage.nbytes, "own": usage.own}


def _metadata(metadata: Any, most: int = 20) -> str:
    """As JSON: a key of the top in a line."""
    if not isinstance(metadata, dict):
        return _bounded(json.dumps(metadata, ensure_ascii=False))
    texts = [
        _bounded(f"{key}: {json.dumps(value, ensure_ascii=False)}")
        for key, value in metadata.items()
    ]
    more = [f"... and {len(texts) - most} more"] * (len(texts) > most)
    return "\n".join([*(text.replace("\n", " ") for text in texts[:most]), *more])


def _bounded(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + " ..."


# ---- Runs.


def of_run(run: Steps, best: tuple[str, str] | None = None) -> CommandResult:
    """The steps of a run. `best`: a metric, and "min" or "max".

    **Raises:** `ValueError` if no complete step has the metric.
    """
    found = _summary.summaries(run)
    chosen = None
    if best is not None:
        left = run.left()
        counting = [x for x in found if x.step not in left]
        known = {x.step: x.metrics for x in counting if x.metrics is not None}
        chosen = Policy(best=best).best_of(known)
        if chosen is None:
            names = sorted({name for metrics in known.values() for name in metrics})
            some = ", ".join(f"`{name}`" for name in names[:20]) or "none"
            raise ValueError(
                f"No complete step of `{run.root.url}` has a number as the metric "
                f"`{best[0]}`. The metrics there are: {some}."
            )
    data = lambda: {
        "path": run.root.url,
        "best": chosen,
        "steps": [_step_as_json(x) for x in found],
    }
    counts = collections.Counter(x.state for x in found)
    states = ", ".join(f"{n:,} {state}" for state, n in counts.items())
    head = [Span(run.root.url, "title"), Span(f"  {states}")]
    table = _model.steps(found, chosen, _METRICS)
    return CommandResult(data, [head, *_terminal.table(table)])


# As many fit beside the rest.
_METRICS = 6


def _step_as_json(x: Summary) -> dict[str, Any]:
    return {
        "step": x.step,
        "state": x.state,
        "why": x.why,
        "saved_by": "eqx_ckpt" if x.is_ours else "orbax",
        "pinned": x.is_pinned,
        "time": _model.moment(x.time),
        "leaves": x.leaves,
        "nbytes": x.nbytes,
        "data": _as_json(x.data),
        "metrics": x.metrics,
    }
