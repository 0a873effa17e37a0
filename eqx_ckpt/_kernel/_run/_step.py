"""`Step` and `Run`: what is known of a run without a look at any leaf."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A step of a run, as it was saved.

    **Attributes:**

    - `number`: the number of the step.
    - `metrics`: its metrics by name: those that it was saved with, and those that were
        added later.
    - `time`: when it was saved, in seconds since 1970. None if that is not known.
    - `nbytes`: the bytes of its leaves. None if that is not known.
    - `attempt`: 0 in a run that never went back or began anew, and one more each time
        that it did.
    - `path`: the path or URL of its checkpoint. None once that is deleted or replaced.
    """

    number: int
    metrics: dict[str, int | float]
    time: int | float | None = None
    nbytes: int | None = None
    attempt: int = 0
    path: str | os.PathLike[str] | None = None


class Run(NamedTuple):
    """A run: a directory with steps, as [`runs`][] finds it.

    **Attributes:**

    - `path`: the path or URL of its directory.
    - `latest`: the newest complete [`Step`][], as `CheckpointManager.latest` says; None
        if there is none.
    - `best`: the best step, by the metric that `runs` was asked for; None if no step
        has it.
    - `count`: how many complete steps there are.
    - `nbytes`: the bytes of their leaves. Steps may share files, and take less then.
    """

    path: str | os.PathLike[str]
    latest: Step | None
    best: Step | None
    count: int
    nbytes: int

    @property
    def metrics(self) -> dict[str, int | float]:
        """The metrics of the best step, or else of the newest."""
        step = self.best or self.latest
        return step.metrics if step else {}

    @property
    def time(self) -> int | float | None:
        """When the newest step was saved, in seconds since 1970."""
        return self.latest.time if self.latest else None


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Metrics as numbers: JSON has those that are not finite as texts."""
    out: dict[str, int | float] = {}
    for name, x in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            out[name] = float(x) if isinstance(x, str) else x
    return out
