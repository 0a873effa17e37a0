"""The deletion of a step, and of what killed saves of it have left. A damaged step is
moved aside."""

import contextlib
import secrets
from collections.abc import Callable
from typing import SupportsIndex

from .. import _rooms
from .._format import _files
from .._runtime import _log
from .._save import _background, _delete
from . import _clean, _marks, _pins, _step_facts, _step_place
from ._listing import ITEM
from ._steps import check_step, Signature, Steps


def delete_step(steps: Steps, step: SupportsIndex) -> None:
    """Deletes a step, as the caller asks for. **Raises:** `ValueError` if it has to
    stay."""
    step = check_step(step)
    if is_read(steps, step):
        raise ValueError(
            f"A save that goes on reads lazy leaves of step {step}. Delete it once "
            "that is over (`result()`)."
        )
    _step_place.check_not_linked(steps, step)
    found = steps.signature(step)
    if found and not found.is_ours:
        raise ValueError(
            f"Step {step} of `{steps.root}` was saved by Orbax, and is left as it "
            "is. Delete it with Orbax's own manager."
        )
    if not remove_step(steps, step):
        raise ValueError(f"Step {step} is pinned. Call `unpin({step})` before.")


def is_read(steps: Steps, step: int) -> bool:
    """Whether a save that goes on reads lazy leaves of it."""
    return _background.is_read(steps.own_directory(step))


def remove_step(
    steps: Steps,
    step: int,
    may_still_go: Callable[[], bool] = lambda: True,
    unless: Callable[[], bool] = lambda: False,
    seen: Signature | None = None,
) -> bool:
    """Deletes a step of ours, and returns whether it has. `_delete.remove_checkpoint`
    goes through these, on a disk under the lock of writers:

    1. `may_still_go()` says yes. In a store, the step also has to be the one `seen`.
    2. Its mark is dropped. It is looked after that whether it has a pin, or `unless()`
       holds: either is a no.
    3. It is renamed away, or its index deleted in a store: nobody can open it then.
    4. The mark is dropped again, as another may have put it there since 2.

    At the first no the step stays, and has its mark.
    """
    if (saved := steps.saved.get(step)) is None or saved.signature != seen:
        # Nothing else says later that there was this save.
        _step_facts.add_to_history(steps, [step])

    with _log.timed("delete") as timer:
        is_deleted = _delete.remove_checkpoint(
            steps.own_directory(step),
            confirm=lambda: _pins.may_go(steps.root, step, unless),
            may_still_go=may_still_go,
            once_gone=lambda: _marks.drop_mark(steps.root, step),
            stamp=seen.stamp if seen else "",
        )
        if not is_deleted:
            if not steps.is_local:  # The mark may be that of a save since.
                _marks.mark_complete(steps, step)
            return False
        steps.root.drop_directory(str(step))
    steps.note_deleted(step)
    steps.log_step(_log.INFO, "Deleted", step, seconds=timer.seconds)
    return True


def clean_step(steps: Steps, step: int) -> None:
    """Deletes what a killed save of a step has left, and a killed deletion."""
    if steps.is_local and not steps.is_linked(step):
        with contextlib.suppress(FileNotFoundError):
            _clean.clean(steps.root.below(str(step)).url)
        steps.root.drop_directory(str(step))


def set_aside(steps: Steps, step: int, force: bool) -> None:
    """Moves a damaged step away, whole, so that none is replaced that may be good.

    **Raises:** `FileExistsError` if it is not damaged after all, and not `force`;
    `OSError` if nobody can tell.
    """
    while (found := steps.signature(step)) is not None:
        if not force and _is_whole(steps, step):
            raise FileExistsError(
                f"Step {step} at `{steps.path(step)}` could not be read when a step "
                "was restored, and is whole now. Restore it, or replace it with "
                "`force=True`."
            )
        # Another may have deleted it, or saved it anew since.
        with contextlib.suppress(FileNotFoundError):
            with steps.own_directory(step).lock(wait=True):
                if steps.signature(step) == found and _move_aside(steps, step):
                    return


def _move_aside(steps: Steps, step: int) -> bool:
    away = f"{ITEM}.damaged-{secrets.token_hex(4)}"
    if not steps.root.below(str(step)).move(ITEM, away, _files.INDEX):
        return False
    steps.log_step(
        _log.WARNING, "Moved aside", step, f"it is damaged, and is `{away}` now"
    )
    return True


def _is_whole(steps: Steps, step: int) -> bool:
    try:
        return not _rooms.verify(steps.path(step))
    except ValueError:
        return False  # Of another format, which cannot be verified.
