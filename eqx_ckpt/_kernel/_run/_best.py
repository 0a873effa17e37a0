"""The best steps of a run, by a metric."""

from collections.abc import Mapping
from typing import Any

from .._runtime import _log
from . import _policy, _step_facts
from ._policy import Policy
from ._steps import Steps


def best_steps(steps: Steps, policy: Policy, count: int) -> list[int]:
    """So many steps with the best metric, of those that count, the best first.

    **Raises:** as `metrics_of`; `ValueError` if steps have metrics, and none has it.
    """
    if policy.best is None:
        raise ValueError('Pass `best=(metric, "min")` or "max" to the manager.')
    before, found = None, metrics_of(steps, of_all=False)
    policy.check_metric(found)
    # Others may delete those that were found, once a newer one is complete.
    while found.keys() != before:
        if best := _best_of(steps, policy, dict(found), count):
            return best
        before, found = found.keys(), metrics_of(steps, of_all=False)
    return []


def warn_if_missing(
    steps: Steps, policy: Policy, step: int, metrics: Mapping[str, Any]
) -> None:
    """Warns of metrics without that of `best`, as long as no step has it: it may be
    misspelt, or an evaluator adds it later."""
    best = policy.best
    if best is None or best[0] in metrics or policy.has_metric(metrics_of(steps)):
        return
    _log.warn(
        f"`best` is by the metric `{best[0]}`, which no step of `{steps.root}` has, "
        f"and the `metrics` of step {step} are {_policy.nearest(best[0], metrics)}. No "
        "step is deleted until one has it, as when an evaluator adds it "
        "(`add_metrics`)."
    )


def _best_of(
    steps: Steps, policy: Policy, known: dict[int, dict[str, Any]], count: int
) -> list[int]:
    if not steps.root.is_remote:
        return policy.ranked(known)[:count]
    out: list[int] = []
    while len(out) < count and (step := policy.best_of(known)) is not None:
        # A list does not show whether its index is damaged.
        now = _step_facts.survey(steps, [step])[step]
        if now.error is not None:
            raise now.error
        if now.metrics == known.pop(step):
            out.append(step)
        elif now.metrics is not None:
            known[step] = now.metrics
    return out


def metrics_of(steps: Steps, of_all: bool = True) -> dict[int, dict[str, Any]]:
    """Metrics of the steps that have any, of all or of those that count.

    **Raises:** `OSError` for a step that cannot be read now.
    """
    for listing in steps.listings():
        steps.history.refresh_added(listing.history)
        known = {}
        for step, (_, found, error) in _step_facts.survey(steps, listing.steps).items():
            if error is not None:
                raise error
            if found is not None:
                known[step] = found
        if known:
            left = set() if of_all else steps.lineage(listing).left(known)
            return {step: known[step] for step in known.keys() - left}
    return {}
