"""What a notebook shows of a manager: the steps of a run that is on this machine."""

from typing import Any

from .._storage._backend import Backend
from .._tree import _html
from .._tree._show import TreeLine
from ._journal import metric_text
from ._steps import Steps


# The newest ones.
_MOST = 20


def run(steps: Steps) -> str:
    root: Backend = steps.root
    if root.is_far:
        # It would take requests to know.
        return _html.card(f"CheckpointManager {root}", "see .steps()")
    complete = steps.complete()
    newest = complete[: -_MOST - 1 : -1]
    pins = steps.pins.steps()
    lines = [TreeLine(str(step), _about(steps, step, step in pins)) for step in newest]
    count = len(complete)
    quiet = f"{count:,} {'step' if count == 1 else 'steps'}"
    if count > _MOST:
        quiet += f", of which the newest {_MOST} are shown"
    table = _html.table(lines, None, copy=False)
    return _html.card(f"CheckpointManager {root}", quiet, table)


def _about(steps: Steps, step: int, is_pinned: bool) -> str:
    """The metrics of a step, and whether it is pinned."""
    texts = ["pinned"] * is_pinned
    try:
        signature = steps.signature(step)
        metrics: dict[str, Any] = {}
        if signature is not None:
            metrics = steps.read_metrics(step, signature)
        texts += [f"{name} {metric_text(x)}" for name, x in metrics.items()]
    except (OSError, ValueError, RuntimeError) as e:
        texts.append(type(e).__name__)
    return ", ".join(texts)
