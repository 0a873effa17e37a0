"""The mark of a step of ours that is complete: a file that managers of Orbax look for
which write steps in place.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from .._load import _published
from .._storage import _store
from ._step_journal import index_of
from ._steps import Steps


def mark_complete(
    steps: Steps,
    step: int,
    is_new: bool = False,
    marked: Callable[[None], Any] = lambda _: None,
) -> None:
    """Marks a step of ours as complete. `is_new`: its save was just committed. `marked`
    is called as soon as the mark is there."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        with steps.at(step).lock(wait=True):
            if is_new and steps.listed is not None:
                steps.listed.add(step)
            if (is_new and not steps.is_local) or _is_ours(steps, step):
                write_mark(steps, step, marked)


def write_mark(
    steps: Steps, step: int, marked: Callable[[None], Any] = lambda _: None
) -> None:
    steps.root.write(f"{step}/{_published.DONE}", [_published.OURS])
    marked(None)
    # Where there are no locks, another may have deleted it.
    if not steps.is_local:
        look = lambda: steps.root.stamp(index_of(step))
        if not _store.look_twice(steps.root, look, bool):
            drop_mark(steps, step)


def unmark(steps: Steps, step: int) -> None:
    """Takes the mark away from a step of ours that is replaced."""
    if _is_ours(steps, step):
        drop_mark(steps, step)


def drop_mark(steps: Steps, step: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        steps.root.delete_files([f"{step}/{_published.DONE}"])


def _is_ours(steps: Steps, step: int) -> bool:
    return not steps.is_linked(step) and bool(steps.root.stamp(index_of(step)))
