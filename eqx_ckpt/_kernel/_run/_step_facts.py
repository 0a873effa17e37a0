"""Facts about the steps of a run: their metrics, times and sizes, by the journal and
the history; and the rows that saves add to the history.
"""

import contextlib
import functools as ft
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._format import _index, _json
from .._format._history import HistoryRow
from .._format._journal import JournalRow
from .._storage import _store
from ._step import as_numbers, Step
from ._step_journal import index_of
from ._steps import Signature, Steps


class StepFacts(NamedTuple):
    """Facts about a step: its signature, if it is complete; its metrics, if it can
    be opened; or the error of a system that could not tell."""

    signature: Signature | None
    metrics: dict[str, Any] | None = None
    error: OSError | None = None


def survey(
    steps: Steps, of: Mapping[int, str | None] | Iterable[int], metrics: bool = True
) -> dict[int, StepFacts]:
    """Facts about each of some steps, in order, with or without its metrics. `of` may
    be some of the `steps` of a `Listing`, each with what that says of its save."""
    listed = of if isinstance(of, Mapping) else dict.fromkeys(of)
    known: dict[int, StepFacts] = {}
    for step, save in listed.items():
        # A list shows that it is still what the journal has.
        row = None if save is None else steps.journal.row_of(step, save)
        if row is not None:
            found = steps.history.with_added(row).metrics if metrics else None
            known[step] = StepFacts(Signature(row.stamp), found)
    rest = sorted(step for step in listed if step not in known)
    know = lambda step: _facts_of(steps, step, listed[step] is not None, metrics)
    known.update(zip(rest, _store.each(steps.root, know, rest)))
    return dict(sorted(known.items()))


def _facts_of(steps: Steps, step: int, is_listed: bool, metrics: bool) -> StepFacts:
    try:
        signature = steps.signature(step)
        if signature is None and is_listed:  # A store that denies it is asked again.
            signature = steps.signature(step)
        if signature is not None and metrics:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return StepFacts(signature, read_metrics(steps, step, signature))
        return StepFacts(signature)
    except OSError as e:
        return StepFacts(None, error=e)


def read_metrics(steps: Steps, step: int, signature: Signature) -> dict[str, Any]:
    """The metrics of a step, with those that were added later."""
    saved = steps.saved.get(step)
    if saved is not None and saved.signature == signature:
        return steps.history.with_added(saved.row).metrics
    if signature.is_ours:
        row = steps.journal.row(step, signature.stamp)
        return steps.history.with_added(row).metrics
    of_orbax = ft.partial(steps.orbax.metrics, step)
    own = steps.journal.known(step, signature, of_orbax)
    return {**own, **steps.history.added(step, "")}


def row_of(steps: Steps, step: int, found: Signature) -> JournalRow | None:
    """The journal's row of a step; None if it is gone, damaged or not ours."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return steps.journal.row(step, found.stamp) if found.is_ours else None


def time_of(steps: Steps, step: int, signature: Signature) -> int | None:
    """The time of a save of ours, in seconds since 1970, if its index has one."""
    if not signature.is_ours:
        return None
    found, saved = steps.root.read(index_of(step), limit=_json.MAX_INDEX), None
    with contextlib.suppress(ValueError):
        saved = None if found is None else _index.decode(found.data).saved
    return None if saved is None else saved.time


def as_step(
    steps: Steps, step: int, found: Signature, metrics: Mapping[str, Any]
) -> Step:
    """A step that is there, with its metrics, as `keep_if` is given it."""
    row = row_of(steps, step, found)
    saved = row and steps.history.row_of(step, row.save)
    when = saved or row
    return Step(
        step,
        as_numbers(metrics),
        when and when.time,
        row and row.nbytes,
        saved.attempt or 0 if saved else 0,
        steps.path(step),
    )


def add_to_history(
    steps: Steps, those: Iterable[int], attempt: int | None = None
) -> None:
    """Adds saves of steps to the history, unless they are there. `attempt`: its number;
    None if it is that of the run."""
    rows: list[HistoryRow] = []
    for step in those:
        found = steps.signature(step)
        row = found and row_of(steps, step, found)
        if found and row and not steps.history.has(step, row.save):
            if attempt is None:
                attempt = steps.lineage(steps.listing()).number
            saved = row.time if row.time is not None else time_of(steps, step, found)
            when = round(time.time() if saved is None else saved, 3)
            facts = attempt, when, row.nbytes, row.metrics
            rows.append(HistoryRow(step, row.save, *facts))
    if rows:
        steps.history.append(rows)
