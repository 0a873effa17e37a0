"""What `info` says of a checkpoint, and `info` and `steps` of a run."""

import collections
import datetime
import json
import math
from typing import Any

from .._format import _functions, _index, _template, _text
from .._format._leaves import Unreadable
from .._load._checkpoint import Checkpoint
from .._load._functions import Function
from .._run import _summary
from .._run._journal import metric_text
from .._run._policy import Policy
from .._run._summary import Summary
from .._storage._backend import Usage
from .._tree import _show
from . import _output
from ._open import Run
from ._output import Column, Line, Said, Span


def of(ckpt: Checkpoint) -> Said:
    """A checkpoint, by its index and the sizes of its files."""
    source = ckpt._source
    leaves = source.index.leaves
    is_ours = source.has_digests
    usage = source.root.usage()
    tops: dict[str, list[int]] = {}
    dtypes: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for record in leaves.records():
        t = record.template
        if record.place in leaves.aliases:
            continue
        top = tops.setdefault(record.name.partition(".")[0], [0, 0])
        top[0] += 1
        top[1] += t.nbytes
        kind = "unreadable" if isinstance(record.part, Unreadable) else t.kind
        if kind in _template.ARRAY_KINDS:
            dtypes[t.dtype] += math.prod(t.logical_shape)
        kinds[kind] += 1
    fields = sum(len(leaves.statics.values[row]) for row in leaves.statics.of.values())
    data = {
        "path": ckpt.path,
        "format": _index.FORMAT if is_ours else ckpt.layout,
        "layout": ckpt.layout,
        "save_id": ckpt.save_id if is_ours else None,
        "time": _moment(ckpt.saved.time if ckpt.saved else usage and usage.time),
        "writer": ckpt.writer,
        "processes": ckpt.saved and ckpt.saved.processes,
        "shardings": ckpt.saved.shardings if ckpt.saved else {},
        "leaves": len(ckpt),
        "kinds": dict(kinds),
        "shared": len(leaves.aliases),
        "nbytes": ckpt.nbytes,
        "files": _as_json(usage),
        "numbers": dict(dtypes),
        "tops": {
            name: {"leaves": n, "nbytes": size} for name, (n, size) in tops.items()
        },
        "static_fields": fields,
        "functions": {name: _function(f) for name, f in ckpt.functions.items()},
        "metadata": ckpt.metadata,
    }
    return Said(data, _lines(data, usage))


def _function(function: Function) -> dict[str, Any]:
    stored = function._stored
    return {
        "takes": _functions.show(stored.args),
        "gives": _functions.show(stored.result),
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


def _lines(data: dict[str, Any], usage: Usage | None) -> list[Line]:
    rows = [("format", data["format"])]
    if data["save_id"] is not None:
        rows = [("format", f"{data['format']}, layout {data['layout']}")]
        rows.append(("save", data["save_id"]))
    rows.append(("time", data["time"]))
    rows.append(
        ("written by", ", ".join(f"{k} {v}" for k, v in data["writer"].items()))
    )
    if data["processes"] is not None:
        few = "process" if data["processes"] == 1 else "processes"
        rows.append(("saved by", f"{data['processes']:,} {few}"))
    shardings = [f"{text}: {n:,}" for text, n in data["shardings"].items()]
    rows.append(("shardings", "\n".join(shardings)))
    rows.append(("in memory", _text.size(data["nbytes"])))
    if usage is not None:
        files = f"{usage.files:,} file{'s' * (usage.files != 1)}"
        rows.append(
            ("on disk", f"{_text.size(usage.nbytes)} in {files}{_shared(usage)}")
        )
    kinds = ", ".join(
        f"{n:,} {_KINDS.get(kind, kind)}" for kind, n in data["kinds"].items()
    )
    shared = f", and {data['shared']:,} more names of these" * bool(data["shared"])
    rows.append(("leaves", f"{data['leaves']:,}: {kinds}{shared}"))
    numbers = sorted(data["numbers"].items(), key=lambda row: -row[1])
    shown = [f"{_show.short_dtype(dtype)}  {count:,}" for dtype, count in numbers]
    rows.append(("numbers", "\n".join(shown)))
    if data["static_fields"]:
        rows.append(("static", f"{data['static_fields']:,} fields: see `ls`"))
    functions = [
        f"{name}: {f['takes']} -> {f['gives']}, on {', '.join(f['platforms'])}"
        for name, f in data["functions"].items()
    ]
    rows.append(("functions", "\n".join(map(_bounded, functions))))
    if data["metadata"] is not None:
        rows.append(("metadata", _metadata(data["metadata"])))
    lines = _output.fields(row for row in rows if row[1])
    columns = [
        Column("node", style="name"),
        Column("leaves", True),
        Column("size", True),
    ]
    tops = [
        (name, f"{top['leaves']:,}", _text.size(top["nbytes"]))
        for name, top in data["tops"].items()
    ]
    more = [f"  ... and {len(tops) - _TOPS} more"] * (len(tops) > _TOPS)
    below = ["", *_output.table(columns, tops[:_TOPS]), *more] if len(tops) > 1 else []
    return [[Span(data["path"], "title")], *lines, *below]


_TOPS = 12
_KINDS = {"jax": "jax.Array", "numpy": "np.ndarray", "generic": "np.generic"}


def _shared(usage: Usage) -> str:
    if usage.own == usage.nbytes:
        return ""
    return f", {_text.size(usage.own)} of them its own"


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


def _moment(time: float | int | None) -> str:
    """Seconds since 1970, in the zone of the machine."""
    if time is None:
        return ""
    when = datetime.datetime.fromtimestamp(time).astimezone()
    return when.isoformat(" ", "seconds")


# ---- Runs.


def of_run(run: Run, best: tuple[str, str] | None = None) -> Said:
    """The steps of a run. `best`: a metric, and "min" or "max".

    **Raises:** `ValueError` if no complete step has the metric.
    """
    found = _summary.summaries(run.steps)
    chosen = None
    if best is not None:
        known = {x.step: x.metrics for x in found if x.metrics is not None}
        chosen = Policy(best=best).best_of(known)
        if chosen is None:
            names = sorted({name for metrics in known.values() for name in metrics})
            some = ", ".join(f"`{name}`" for name in names[:20]) or "none"
            raise ValueError(
                f"No complete step of `{run.path}` has a number as the metric "
                f"`{best[0]}`. The metrics there are: {some}."
            )
    data = lambda: {
        "path": run.steps.root.url,
        "best": chosen,
        "steps": [_step_as_json(x) for x in found],
    }
    return Said(data, _table(run, found, chosen))


def _step_as_json(x: Summary) -> dict[str, Any]:
    return {
        "step": x.step,
        "state": x.state,
        "why": x.why,
        "saved_by": "eqx_ckpt" if x.is_ours else "orbax",
        "pinned": x.is_pinned,
        "time": _moment(x.time),
        "leaves": x.leaves,
        "nbytes": x.nbytes,
        "data": _as_json(x.data),
        "metrics": x.metrics,
    }


def _table(run: Run, found: list[Summary], best: int | None) -> list[Line]:
    counts = collections.Counter(x.state for x in found)
    states = ", ".join(f"{n:,} {state}" for state, n in counts.items())
    shares = any(x.data and x.data.own < x.data.nbytes for x in found)
    head = [Span(run.steps.root.url, "title"), Span(f"  {states}")]
    metrics = list(dict.fromkeys(name for x in found for name in x.metrics or ()))
    columns = [
        Column("step", True, "name"),
        Column("time", style="quiet"),
        Column("size", True),
        Column("own", True),
        *(Column(name, True) for name in metrics[:_METRICS]),
        Column(""),
    ]
    rows = []
    for x in found:
        values = x.metrics or {}
        rows.append(
            [
                str(x.step),
                _moment(x.time)[:19],
                "" if x.nbytes is None else _text.size(x.nbytes),
                _text.size(x.data.own) if x.data and shares else "",
                *(metric_text(values.get(name, "")) for name in metrics[:_METRICS]),
                _marks(x, x.step == best),
            ]
        )
    return [head, *_output.table(columns, rows)]


# As many fit beside the rest.
_METRICS = 6


def _marks(x: Summary, is_best: bool) -> Span:
    said = ["best"] * is_best + ["pinned"] * x.is_pinned
    said += ["by Orbax"] * (not x.is_ours)
    if x.state == "complete":
        return Span(", ".join(said), "good")
    why = " ".join(x.why.split())
    text = ", ".join([*said, f"{x.state}: {_bounded(why, 120)}"])
    return Span(text, "odd" if x.state == "incomplete" else "bad")
