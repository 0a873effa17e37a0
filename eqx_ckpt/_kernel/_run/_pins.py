"""Pins: a step that has one is never deleted. Each is a file, called by the step.

Whoever pins a step or adds metrics to it holds its lock, under which a deletion looks
for both. An object store has no locks. There a deletion first takes the mark of the
step away, and then looks; so a step that still has its mark after the pin is there
stays (`is_staying`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import SupportsIndex

from .._load import _published
from .._storage import _store
from .._storage._backend import Backend
from . import _marks, _numbered, _step_state
from ._listing import ITEM
from ._numbered import PINS
from ._steps import check_step, Signature, Steps


# The most seconds from a deletion's look for a pin to its end, in an object store.
_DELETION_SECONDS = 5


def pin(steps: Steps, step: SupportsIndex) -> None:
    """**Raises:** `FileNotFoundError` if there is no such step."""
    step = check_step(step)
    with locked(steps, step):
        is_new = False
        with contextlib.suppress(FileExistsError):
            _numbered.create_file(steps.root, PINS, step, b"\n")
            is_new = True
        if is_staying(steps, step):
            return
        if is_new:
            unpin(steps, step)
    raise missing_error(steps, step)


def unpin(steps: Steps, step: SupportsIndex) -> None:
    _numbered.delete(steps.root, PINS, check_step(step))


def pinned(steps: Steps) -> set[int]:
    return set(_numbered.numbers(steps.root, PINS))


def may_go(run: Backend, step: int, unless: Callable[[], bool] = lambda: False) -> bool:
    """Whether a step may be deleted, right before it is: it has no pin, and `unless()`
    does not hold. It has no mark then, until it is gone."""
    _marks.drop_mark(run, step)  # First: see above.
    is_pinned = lambda: has_pin(run, step)
    if not any(look() for look in _store.ahead(run, [is_pinned, unless])):
        return True
    with contextlib.suppress(FileExistsError):
        _marks.write_mark(run, step)
    return False


def may_checkpoint_go(root: Backend) -> bool:
    """The same of a checkpoint, which may be a step of a run."""
    directory, name = root.split()
    run, step = directory.split()
    is_step = name == ITEM and _numbered.is_step(step)
    return not is_step or may_go(run, int(step))


def has_pin(run: Backend, step: int) -> bool:
    # Twice, as of `look_twice`; and in a store together, as each is a round trip.
    look = lambda: _numbered.has(run, PINS, step)
    return any(found() for found in _store.ahead(run, [look, look]))


@contextlib.contextmanager
def locked(steps: Steps, step: int) -> Iterator[Signature]:
    """Holds the lock of a step. **Raises:** `FileNotFoundError` if there is no such
    step."""
    found = steps.find_signature(step)
    if found is None:
        raise missing_error(steps, step)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        with steps.root.below(steps.last_known_key(step)).lock(wait=True):
            yield found
            return
    raise missing_error(steps, step)


def is_staying(steps: Steps, step: int) -> bool:
    """Whether a step is there, once it is pinned. In a store whoever deletes a step
    puts its mark back if there is a pin: so a step of ours without a mark may be on its
    way."""
    end = time.monotonic() + _DELETION_SECONDS
    while (found := steps.find_signature(step)) is not None:
        is_marked = steps.is_local or steps.root.has(f"{step}/{_published.DONE}")
        if not found.is_ours or is_marked or time.monotonic() > end:
            return True
        time.sleep(0.05)
    return False


def missing_error(steps: Steps, step: int) -> FileNotFoundError:
    return _step_state.missing_error(steps, step, steps.complete())
