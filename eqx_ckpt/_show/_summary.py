"""Table of the steps of a run, to look at. Nothing is changed."""

import functools as ft

from .._kernel._errors import DamagedError
from .._kernel._format._index import Newer
from .._kernel._format._journal import JournalRow
from .._kernel._load import _checkpoint
from .._kernel._run import _pins, _step_facts, _step_state
from .._kernel._run._listing import ITEM
from .._kernel._run._step_state import Skip
from .._kernel._run._steps import Signature, Steps
from .._kernel._storage import _store
from .._kernel._storage._backend import Usage
from ._tables import Summary


def summaries(steps: Steps, newest: int = 0) -> list[Summary]:
    """Summaries of all steps, or of so many, in order. Of each the journal is read, or
    its index, and no array.

    **Raises:** `ValueError` where nobody can tell which steps there are.
    """
    listing = steps.listing()
    steps.history.refresh_added(listing.history)
    there = sorted(listing.steps)[-newest:]
    pins = _pins.pinned(steps) if there else set()
    left = steps.lineage(listing).left(there) if there else set()
    found = _store.each(steps.root, ft.partial(_summary, steps), there)
    return [
        x._replace(is_pinned=x.step in pins, why=x.why or _LEFT * (x.step in left))
        for x in found
    ]


_LEFT = "of an earlier attempt"


def _summary(steps: Steps, step: int) -> Summary:
    try:
        signature = _step_state.look(steps, step)
        if not isinstance(signature, Signature) or not signature.is_ours:
            return _without(steps, step, signature)
        try:
            row = steps.history.with_added(steps.journal.row(step, signature.stamp))
        except Newer:
            raise
        except ValueError as e:
            raise DamagedError(str(e)) from e
        return Summary(
            step,
            "complete",
            time=row.time,
            leaves=row.leaves,
            nbytes=row.nbytes,
            metrics=row.metrics,
            data=_usage(steps, row),
        )
    except DamagedError as e:
        return Summary(step, "damaged", str(e))
    except FileNotFoundError as e:
        return Summary(step, "damaged", f"a file of it is missing ({e})")
    except (OSError, ValueError) as e:
        return Summary(step, "unread", str(e))


def _usage(steps: Steps, row: JournalRow) -> Usage | None:
    """Usage of the data files of a step."""
    if row.files is None:
        return steps.own_directory(row.step).usage()
    start = f"{row.step}/{ITEM}/d/{row.save}"
    return steps.root.usage([f"{start}/{number}" for number in range(row.files)])


def _without(steps: Steps, step: int, signature: Signature | Skip | None) -> Summary:
    """Summary of a step that has no index of ours."""
    if signature is None:
        return Summary(step, "incomplete", "there is no checkpoint in it")
    if isinstance(signature, Skip):
        state = "unread" if signature.is_unread else "incomplete"
        if signature.is_lost:
            state = "damaged"
        return Summary(step, state, signature.why)
    ckpt = _checkpoint.open(steps.path(step))
    return Summary(
        step,
        "complete",
        is_ours=False,
        leaves=len(ckpt),
        nbytes=ckpt.nbytes,
        metrics=_step_facts.read_metrics(steps, step, signature),
    )
