"""What there is of each step of a run: a table to look at. Nothing is changed."""

import functools as ft
from typing import Any, NamedTuple

from .._errors import DamagedError
from .._load import _checkpoint
from .._storage._backend import Usage
from ._steps import metrics_in, Steps


class Summary(NamedTuple):
    """A step of a run. `state` is "complete", "incomplete" (its save was killed, or
    goes on), "damaged", or "unread" if nobody can tell now; `why` says more. `nbytes`
    are those of its arrays in memory; `usage` is what it takes on disk, if it is on
    one."""

    step: int
    state: str
    why: str = ""
    is_ours: bool = True
    is_pinned: bool = False
    leaves: int | None = None
    nbytes: int | None = None
    metrics: dict[str, Any] | None = None
    usage: Usage | None = None


def summaries(steps: Steps) -> list[Summary]:
    """Of all steps, in order. An index is read of each, and no array.

    **Raises:** `ValueError` where nobody can tell which steps there are.
    """
    there = sorted(steps.directories())
    pins = steps.pins() if there else set()
    found = steps.each(ft.partial(_summary, steps), there)
    return [x._replace(is_pinned=x.step in pins) for x in found]


def _summary(steps: Steps, step: int) -> Summary:
    try:
        signature = steps.signature(step)
        if signature is None:
            return _without(steps, step)
        ckpt = _checkpoint.open(steps.path(step))
        metrics = metrics_in(ckpt.metadata)
        if not signature.is_ours:
            metrics = steps.read_metrics(step, signature)
        usage = steps.usage(step)
        return Summary(
            step, "complete", "", signature.is_ours, False, len(ckpt), ckpt.nbytes
        )._replace(metrics=metrics, usage=usage)
    except FileNotFoundError as e:
        return Summary(step, "incomplete", str(e))
    except DamagedError as e:
        return Summary(step, "damaged", str(e))
    except (OSError, ValueError) as e:
        return Summary(step, "unread", str(e))


def _without(steps: Steps, step: int) -> Summary:
    """Of a step that has no index."""
    skip = steps.skip(step)
    if skip is None:
        return Summary(step, "incomplete", "there is no checkpoint in it")
    return Summary(step, "damaged" if skip.is_lost else "incomplete", skip.why)
