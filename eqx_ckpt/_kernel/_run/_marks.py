"""The mark of a step of ours that is complete, `<step>/commit_success.txt`: a file that
managers of Orbax look for which write steps in place.

No load of ours asks for it: the index of a step completes it. In a store the mark tells
whoever pins a step that nobody is deleting it: see `_pins`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from .._load import _published
from .._storage import _store
from .._storage._backend import Backend
from ._step_journal import index_of
from ._steps import Steps


def mark_complete(
    steps: Steps,
    step: int,
    is_just_saved: bool = False,
    on_marked: Callable[[], Any] = lambda: None,
) -> None:
    """Marks a step of ours as complete. `is_just_saved`: its save was just committed,
    and in a store it is not looked for. `on_marked` is called as soon as the mark is
    there."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        with steps.own_directory(step).lock(wait=True):
            if (is_just_saved and not steps.is_local) or _is_ours(steps, step):
                write_mark(steps.root, step, on_marked)


def write_mark(
    run: Backend, step: int, on_marked: Callable[[], Any] = lambda: None
) -> None:
    run.write(f"{step}/{_published.DONE}", [_published.OURS])
    on_marked()
    # Where there are no locks, another may have deleted it.
    if run.is_remote:
        look = lambda: run.stamp(index_of(step))
        if not _store.look_twice(run, look, bool):
            drop_mark(run, step)


def unmark(steps: Steps, step: int) -> None:
    """Takes the mark away from a step of ours that is replaced."""
    if _is_ours(steps, step):
        drop_mark(steps.root, step)


def drop_mark(run: Backend, step: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        run.delete_files([f"{step}/{_published.DONE}"])


def _is_ours(steps: Steps, step: int) -> bool:
    return not steps.is_linked(step) and bool(steps.root.stamp(index_of(step)))
