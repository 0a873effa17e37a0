"""Records of steps and of runs: `history`, `runs`."""

import contextlib
import functools as ft
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

from .._errors import ReplacedError
from .._format import _files
from .._format._history import PLACE
from .._format._journal import JournalRow
from .._load import _checkpoint
from .._load._checkpoint import Checkpoint
from .._runtime import _arguments
from .._runtime._arguments import Rule
from .._storage import _root, _store
from .._storage._local import LocalDirectory
from . import _numbered, _pending, _pins, _step_facts, _step_state, _steps
from ._attempts import Lineage
from ._listing import Listing
from ._policy import Policy
from ._step import as_numbers, Run, Step
from ._steps import Signature, Steps


BEST = _arguments.optional(
    Rule(
        '`(metric, "min")` or `(metric, "max")`',
        lambda x: isinstance(x, (tuple, list)) and len(x) == 2,
        lambda x: isinstance(x[0], str) and x[1] in ("min", "max"),
    )
)


@_arguments.checked()
def history(run: str | os.PathLike[str]) -> list[Step]:
    """Every step that a run has ever saved, with its metrics: those that are deleted
    too.

    Nothing of an array is read. A step that was saved twice in one attempt is there
    once, as it was saved last.

    **Arguments:**

    - `run`: the directory of a run, or its URL. `CheckpointManager.history` is the
        same.

    **Returns:** a list of [`Step`][]s, by attempt and number.

    **Raises:** `FileNotFoundError` if there is no run; `OSError` for what cannot be
    read now.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> with ec.CheckpointManager("curve", keep=1) as manager:
        ...     for step in (1, 2, 3):
        ...         _ = manager.save(step, {"x": jnp.ones(2)}, {"loss": 1 / step})
        >>> for step in ec.history("curve"):
        ...     print(step.number, step.metrics["loss"], step.path is not None)
        1 1.0 False
        2 0.5 False
        3 0.3333333333333333 True

        ```
    """
    return steps_of(steps_at(run))


@_arguments.checked(metrics=Rule("a dict", lambda x: isinstance(x, Mapping)))
def add_metrics(
    run: str | os.PathLike[str],
    step: SupportsIndex | Checkpoint,
    metrics: Mapping[str, Any],
) -> None:
    """Adds metrics to a step of a run that is saved, from whichever process.

    An evaluator calls it beside the process that trains. From then on the metrics count
    for `best` and for [`history`][], and managers go by them. The checkpoint is not
    touched: its `metadata` has the metrics that it was saved with.

    **Arguments:**

    - `run`: the directory of a run, or its URL. `CheckpointManager.add_metrics` is the
        same.
    - `step`: the number of the step, or its open [`Checkpoint`][], whose metrics then
        never get to another save of that number.
    - `metrics`: numbers, or arrays of one number. One that the step has already is
        replaced.

    **Raises:** `FileNotFoundError` if the step is not there, or is being deleted;
    [`ReplacedError`][] if it is another save than the `Checkpoint`, or is replaced
    meanwhile; `TypeError` for what is no number; `ValueError` if its index is damaged.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> with ec.CheckpointManager("judged", best=("accuracy", "max")) as manager:
        ...     _ = manager.save(1, {"x": jnp.ones(2)})
        ...     _ = manager.save(2, {"x": jnp.zeros(2)})
        >>> ec.add_metrics("judged", 1, {"accuracy": 0.9})
        >>> ec.add_metrics("judged", 2, {"accuracy": jnp.array(0.5)})
        >>> manager.best()
        1

        ```
    """
    add_to(steps_at(run), step, metrics)


def add_to(
    run: Steps, step: SupportsIndex | Checkpoint, metrics: Mapping[str, Any]
) -> None:
    ckpt = step if isinstance(step, Checkpoint) else None
    step = _number_of(step) if isinstance(step, Checkpoint) else _steps.check_step(step)
    numbers = _pending.as_json(metrics)
    if not numbers:
        return
    with _pins.locked(run, step) as found:
        save = run.journal.row(step, found.stamp).save if found.is_ours else ""
        now = run.find_signature(step)
        is_other = now is not None and now != found
        if is_other or (ckpt is not None and ckpt.save_id != save):
            old = "it was a moment before"
            if ckpt is not None:
                old = f"the one that was opened at `{ckpt.path}`"
            raise ReplacedError(
                f"Step {step} of `{run.root}` is another save than {old}, and gets "
                "none of its metrics. Open it again."
            )
        if now is not None:
            run.history.add(step, save, numbers)
            if _pins.is_staying(run, step):
                return
    raise _pins.missing_error(run, step)


def _number_of(ckpt: Checkpoint) -> int:
    """The number of the step that an open checkpoint is."""
    directory, _ = _checkpoint.source_of(ckpt).root.split()
    number = _numbered.number_of(directory.split()[1])
    if number is None:
        raise ValueError(f"The checkpoint at `{ckpt.path}` is no step of a run.")
    return number


def steps_at(path: str | os.PathLike[str]) -> Steps:
    """The steps of a run. **Raises:** `FileNotFoundError` if there is none."""
    run = Steps(path)
    if not _step_state.is_run(run):
        raise FileNotFoundError(
            f"There is no run at `{run.root}`: a run has steps at `<step>/default`."
        )
    return run


def steps_of(run: Steps) -> list[Step]:
    """The history of a run."""
    return _look(run).steps


class _Records(NamedTuple):
    """The history of a run, the steps that there are, and which of them count."""

    steps: list[Step]
    listing: Listing
    lineage: Lineage


def _look(run: Steps) -> _Records:
    listing = run.listing()
    look = ft.partial(_row, run, listing)
    there = _store.each(run.root, look, sorted(listing.steps))
    rows = [row for row in there if row is not None]
    # After the steps: one that is deleted in between is in the history by then.
    run.history.refresh()
    lineage = run.lineage(listing)
    paths = {(row.step, row.save): run.path(row.step) for row in rows}
    saved = {(row.step, row.save): row for row in run.history.rows()}
    found: list[Step] = []
    for key, x in saved.items():
        facts = as_numbers(x.metrics), x.time, x.nbytes, x.attempt or 0, paths.get(key)
        found.append(Step(x.step, *facts))
    for (key, path), row in zip(paths.items(), rows):
        if key not in saved:
            x = run.history.with_added(row)
            facts = as_numbers(x.metrics), x.time, x.nbytes, lineage.number, path
            found.append(Step(x.step, *facts))
    return _Records(_dense(found), listing, lineage)


def _dense(found: Iterable[Step]) -> list[Step]:
    """Steps in order, of each the last save of an attempt; attempts are counted."""
    presence_and_time = lambda step: (step.path is not None, step.time or -math.inf)
    last = {(x.attempt, x.number): x for x in sorted(found, key=presence_and_time)}
    places = {number: i for i, number in enumerate(sorted({a for a, _ in last}))}
    return [last[key]._replace(attempt=places[key[0]]) for key in sorted(last)]


def _row(run: Steps, listing: Listing, step: int) -> JournalRow | None:
    """The facts of a step that is complete and can be opened."""
    save = listing.steps[step]
    row = None if save is None else run.journal.row_of(step, save)
    if row is not None:
        return row
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = run.signature(step)
        if found is not None and found.is_ours:
            return run.journal.row(step, found.stamp)
        return None if found is None else _orbax(run, step, found)


def _orbax(run: Steps, step: int, found: Signature) -> JournalRow:
    ckpt = _checkpoint.open(run.path(step))
    metrics = _step_facts.read_metrics(run, step, found)
    return JournalRow(step, "", "", len(ckpt), ckpt.nbytes, None, None, metrics)


# ---- Many runs.


@_arguments.checked(best=BEST)
def runs(
    directory: str | os.PathLike[str], *, best: tuple[str, str] | None = None
) -> list[Run]:
    """The runs in a directory, and in directories below it.

    Of each step the journal of its run is read, or its index, and no array. Symbolic
    links are not followed.

    **Arguments:**

    - `directory`: a directory, or its URL. If it is itself a run, that is the only one.
    - `best`: `(metric, "min")` or `(metric, "max")`: by this each run has a best step,
        and they are sorted, the best first. Without it, or without the metric, they are
        in the order of their paths.

    **Returns:** a list of [`Run`][]s.

    **Raises:** `FileNotFoundError` if there is no such directory; `OSError` for what
    cannot be read now; `ValueError` if runs have metrics, and none has this one.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> for rate in (0.1, 0.01):
        ...     with ec.CheckpointManager(f"sweep/rate={rate}") as manager:
        ...         _ = manager.save(1, {"x": jnp.ones(2)}, {"loss": 3 * rate})
        >>> run, *others = ec.runs("sweep", best=("loss", "min"))
        >>> run.path.endswith("rate=0.01"), run.best.number, run.metrics
        (True, 1, {'loss': 0.03})

        ```
    """
    policy = Policy(best=best)
    found = [_run_of(run, policy) for run in runs_below(directory)]
    policy.check_metric({i: run.metrics for i, run in enumerate(found)})
    # Of equal ones the highest number is the best, as the newest step is: here, that of
    # the first path.
    metrics = {-i: run.best.metrics for i, run in enumerate(found) if run.best}
    ranked = [-number for number in policy.ranked(metrics)]
    rest = sorted(set(range(len(found))) - {*ranked})
    return [found[i] for i in [*ranked, *rest]]


def _run_of(run: Steps, policy: Policy) -> Run:
    steps, listing, lineage = _look(run)
    there = {x.number: x for x in steps if x.path is not None}
    counting = {s: x.metrics for s, x in there.items() if not lineage.is_left(s)}
    best = policy.best_of(counting)
    latest = next(
        (s for s in _steps.in_restore_order(listing, lineage) if s in there), None
    )
    return Run(
        run.location,
        None if latest is None else there[latest],
        None if best is None else there[best],
        len(there),
        sum(x.nbytes or 0 for x in there.values()),
    )


# The key of a file that is only in runs. The first group is the directory of the run.
_in_run = re.compile(
    r"(?:(.+)/)?"
    r"(?:(?:0|[1-9][0-9]{0,17})/(?:default/eqx_ckpt\.json|[^/]+/_METADATA)"
    rf"|{re.escape(PLACE)}/[^/]+)"
)


def runs_below(directory: str | os.PathLike[str]) -> Iterator[Steps]:
    """The runs in a directory, in the order of their paths."""
    root = _root.resolve(directory)
    if isinstance(root, LocalDirectory):
        if root.entry() != "directory":
            raise FileNotFoundError(f"There is no directory at `{root}`.")
        yield from _walk(root.real())
        return
    if not root.can_list():
        raise ValueError(
            f"`{root}` has no list of its files, so no runs can be found in it. Give "
            "the path of one run, to `ec.history`."
        )
    keys = root.list_all() or []
    found = {match[1] or "" for key in keys if (match := _in_run.fullmatch(key))}
    for key in sorted(found):
        run = Steps(_steps.path_below(directory, key))
        if _step_state.is_run(run):
            yield run


def _walk(place: LocalDirectory) -> Iterator[Steps]:
    run = Steps(place.url)
    if _step_state.is_run(run):
        yield run
        return
    names = place.list_top() or {}
    names.pop(_files.LOST, None)
    # Checkpoints, also those that are being written, have no runs in them.
    if _files.INDEX in names or _files.is_beside(place.name):
        return
    for name in sorted(name for name, is_directory in names.items() if is_directory):
        # Others may be deleting it.
        with contextlib.suppress(FileNotFoundError):
            yield from _walk(place.below(name))
