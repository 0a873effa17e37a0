"""Reports of `info` and `steps` on a run, and of `runs` on several."""

import collections
from typing import Any

from .._kernel._run._policy import Policy
from .._kernel._run._step import Run
from .._kernel._run._steps import Steps
from .._show import _facts, _summary, _tables, _terminal
from .._show._tables import Span, Summary
from . import _info
from ._output import CommandResult


def of_run(run: Steps, best: tuple[str, str] | None = None) -> CommandResult:
    """The steps of a run. `best`: a metric, and "min" or "max".

    **Raises:** `ValueError` if no complete step has the metric.
    """
    found = _summary.summaries(run)
    chosen = None
    if best is not None:
        left = run.left_steps()
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
    table = _tables.steps(found, chosen, _METRICS)
    return CommandResult(data, [head, *_terminal.table(table)])


# Metrics that have a column in a table: as many fit beside the rest.
_METRICS = 6


def _step_as_json(x: Summary) -> dict[str, Any]:
    return {
        "step": x.step,
        "state": x.state,
        "why": x.why,
        "saved_by": "eqx_ckpt" if x.is_ours else "orbax",
        "pinned": x.is_pinned,
        "time": _facts.moment(x.time),
        "leaves": x.leaves,
        "nbytes": x.nbytes,
        "data": _info.as_json(x.data),
        "metrics": x.metrics,
    }


def of_runs(directory: str, found: list[Run]) -> CommandResult:
    """The table of the runs in a directory."""
    data = lambda: {"directory": directory, "runs": [_run_as_json(x) for x in found]}
    head = [Span(directory, "title"), Span(f"  {_facts.counted(len(found), 'run')}")]
    table = _tables.runs(found, directory, _METRICS)
    return CommandResult(data, [head, *_terminal.table(table)])


def _run_as_json(x: Run) -> dict[str, Any]:
    return {
        "path": str(x.path),
        "steps": x.count,
        "latest": x.latest and x.latest.number,
        "best": x.best and x.best.number,
        "time": _facts.moment(x.time),
        "nbytes": x.nbytes,
        "metrics": x.metrics,
    }
