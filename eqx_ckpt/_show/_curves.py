"""Curves of the metrics of runs, from their histories."""

import itertools as it
import math
from collections.abc import Iterable
from typing import NamedTuple

from .._kernel._run._records import Step


def lines(history: list[Step]) -> list[list[Step]]:
    """The steps that the newest attempt goes on from, and it; then, of each earlier
    one, those that were left."""
    line: list[Step] = []
    left: list[list[Step]] = []
    for _, found in it.groupby(history, lambda step: step.attempt):
        attempt = list(found)
        first = attempt[0].number
        gone = [step for step in line if step.number >= first]
        left += [gone] if gone else []
        line = [step for step in line if step.number < first] + attempt
    return [line, *left]


def curves(some: Iterable[list[Step]]) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """Steps and numbers of each metric, by the number of the line that they are of."""
    out: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for number, line in enumerate(some):
        for step in line:
            for name, x in step.metrics.items():
                points = out.setdefault(name, {}).setdefault(number, [])
                points.append((step.number, float(x)))
    return out


class MetricRange(NamedTuple):
    last: float
    least: float
    greatest: float


def range_of(line: list[Step], metric: str) -> MetricRange | None:
    """The finite numbers of a metric; None if there are none."""
    found = [float(x.metrics[metric]) for x in line if metric in x.metrics]
    values = [x for x in found if math.isfinite(x)]
    return MetricRange(values[-1], min(values), max(values)) if values else None
