"""A run as a path: it stands for the checkpoint of its newest complete step."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from .._errors import DamagedError
from .._storage import _root
from .._storage._objects import KeyList, ObjectStore
from . import _numbered, _step_state
from ._listing import Listing
from ._steps import path_below, Steps


T = TypeVar("T")

# So many names in a directory are looked at for a run.
_SEARCHED = 8


def run_at(path: str | os.PathLike[str]) -> Steps | None:
    """The steps of the run at a path; None if there are none, or nobody can tell."""
    return _listed(_unless_it_fails(lambda: Steps(path)))[0]


def _listed(
    steps: Steps | None, asked: KeyList | None = None
) -> tuple[Steps | None, Listing | None]:
    """Steps that may be those of a run, with a list of them if they are."""
    listing = steps and _unless_it_fails(lambda: steps.listing(asked))
    is_run = lambda: bool(steps) and _step_state.is_run(steps, listing)
    if listing and _unless_it_fails(is_run):
        return steps, listing
    return None, None


def stands_for(path: str | os.PathLike[str]) -> Callable[[bool], Any]:
    """Begins to look for what is meant by a path without a checkpoint. Returns a
    function that gives the path of that: the newest complete step, if the path is that
    of a run. If it is neither that nor what follows, the function gives None.

    The argument of the function says whether nothing that is known was found at the
    path. If so, it also gives the path of what is in the directory of a step, and
    **raises** `FileNotFoundError` for a run without complete steps, for a step that is
    not there, and for a directory that has runs in it.
    """
    steps, asked = _unless_it_fails(lambda: Steps(path)), None
    if steps and isinstance(steps.root, ObjectStore) and steps.root.can_list():
        asked = _unless_it_fails(steps.root.ask_all)

    def meant(found_nothing: bool) -> Any:
        run, listing = _listed(steps, asked)
        step = run and _unless_it_fails(lambda: run.latest(first=listing))
        if run is None or step is None:
            return _step_at(path, run) if found_nothing else None
        return _path_of(run, step)

    return meant


def _path_of(run: Steps, step: int) -> str | os.PathLike[str]:
    """What a step is opened by. Orbax has metadata beside the tree, in the directory
    of the step."""
    path = run.path(step)
    key = run.orbax_key(step)
    return path if key is None else path_below(run.location, key.partition("/")[0])


def _step_at(path: str | os.PathLike[str], run: Steps | None) -> Any:
    """The path of the checkpoint in the directory of a step; None if the path is no
    such directory, or is that of the checkpoint itself. `run`: the run at the path, if
    it is one, without a complete step.

    **Raises:** as the function that `stands_for` returns."""
    why_incomplete = lambda: (
        run and _step_state.why_skipped(run, max(run.listing().steps, default=0))
    )
    if run is not None and _unless_it_fails(why_incomplete):
        raise FileNotFoundError(
            f"No step of the run at `{run.root}` is complete. `eqx-ckpt steps` says "
            "more."
        )
    text = os.fspath(path).rstrip("/")
    above, _, name = text.removesuffix("/default").rpartition("/")
    # A `Store` has options that the directory above needs too.
    is_text = isinstance(path, str) or "://" not in text
    is_known = is_text and _numbered.is_step(name)
    above_run = run_at(above or ("/" if text[0] == "/" else ".")) if is_known else None
    there = above_run and _unless_it_fails(above_run.complete)
    if above_run is None or not there:
        _check_no_runs(path)
        return None
    step = int(name)
    if step in there:
        return None if text.endswith("/default") else above_run.path(step)
    raise _step_state.missing_error(above_run, step, there)


def _check_no_runs(path: str | os.PathLike[str]) -> None:
    """**Raises:** `FileNotFoundError` for a local directory that has runs in it."""
    root = _unless_it_fails(lambda: _root.resolve(path))
    if root is None or root.is_remote:
        return
    tops = sorted(_unless_it_fails(root.list_top) or ())
    runs = (x for x in tops[:_SEARCHED] if run_at(path_below(path, x)))
    if (first := next(runs, None)) is not None:
        raise FileNotFoundError(
            f"There is no checkpoint at `{root}`: runs are in it, such as `{first}`. "
            "Open one; `ec.runs` lists them, the best first."
        )


def _unless_it_fails(ask: Callable[[], T]) -> T | None:
    """An answer about a run; None if nobody can tell: the path is what fails then."""
    try:
        return ask()
    except DamagedError:  # Which of its steps count cannot be told.
        raise
    except (OSError, ValueError):
        return None
