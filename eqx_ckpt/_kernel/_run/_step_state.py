"""The state of a step that may not be complete: why it is not restored."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._format import _files, _text
from .._load import _published
from .._save import _leftovers
from .._storage._backend import Backend
from ._listing import Listing, names_in
from ._orbax_steps import METADATA
from ._steps import MAX_LOOKS, Signature, Steps


# Seconds in which a save that has made its directory has locked it, too.
_LOCKING_SECONDS = 0.01

# So many steps are listed in an error.
_SHOWN = 20


class Skip(NamedTuple):
    """Why a step is not restored. `is_lost`: there was something to restore.
    `is_going`: another writer is about to complete it. `is_unread`: nothing says that
    anything is wrong with it."""

    why: str
    is_lost: bool
    is_going: bool = False
    is_unread: bool = False


def look(steps: Steps, step: int) -> Signature | Skip | None:
    """State of a step. What is not complete is looked at twice: another process may
    have completed it since, and a store may have erred."""
    found = steps.signature(step)
    if found is not None:
        return found
    skip = why_skipped(steps, step)
    return steps.signature(step) or skip


def why_skipped(steps: Steps, step: int) -> Skip | None:
    """State of a step that is not complete; None if there is nothing of it."""
    if steps.is_linked(step):
        return Skip("it is a symbolic link, and a manager follows none", True)
    root = steps.own_directory(step)
    tops, data, works = _contents(root)
    for looks_left in reversed(range(MAX_LOOKS)):
        # A save makes its directory, locks it, and then writes there.
        is_new = not root.is_remote and {} in [x.list_top() for x in works.values()]
        if any(work.is_locked() for work in works.values()):
            return Skip("it is being saved", False, is_going=True)
        # So one that is empty may have no lock yet. A save that was seen may have ended
        # since. A second look tells, after a moment.
        time.sleep(_LOCKING_SECONDS if works else 0)
        before = tops, data, works.keys()
        tops, data, works = _contents(root)
        if before == (tops, data, works.keys()) and not (is_new and looks_left):
            break
    if _files.INDEX in tops:
        return Skip(f"its `{_files.INDEX}` is not a file", True)
    if METADATA in tops or _files.DIGESTS in tops:
        return Skip("its save was not completed, or its index was deleted", True)
    # A save that has begun just now has no more than an empty directory.
    if data or _files.CLAIM in tops or works:
        return Skip("its save was not completed, as when a process is killed", False)
    if items := steps.orbax.items(step):
        has = " and ".join(f"`{_text.escape(item)}`" for item in items)
        why = f"Orbax has saved it as {has}: load each by its path"
        return Skip(why, False, is_unread=True)
    return None


def _contents(
    root: Backend,
) -> tuple[Mapping[str, bool], Mapping[str, bool], dict[str, Backend]]:
    """What is at a path, what is in its `d` if that has no save, and the directories of
    saves to it."""
    tops, works = names_in(root), _work_directories(root)
    data = names_in(root.below("d")) if tops.get("d") and not works else {}
    return tops, data, works


def _work_directories(root: Backend) -> dict[str, Backend]:
    """The directories of saves to a path that go on, or were stopped, by URL."""
    inside = [root.below("d").below(save) for save in _published.saves(root)]
    return {work.url: work for work in [*_leftovers.beside(root), *inside]}


def is_run(steps: Steps, listing: Listing | None = None) -> bool:
    """Whether there is a run: steps, complete or begun, or a history. An empty
    directory with the name of a step is none. **Raises:** as `Steps.listing`."""
    listing = listing or steps.listing()
    if listing.history != []:
        return True
    newest = sorted(listing.steps, reverse=True)
    is_complete = lambda step: steps.is_complete(step, listing)
    # A link with the name of a step may lead to another run, beside others.
    is_begun = lambda step: not steps.is_linked(step) and why_skipped(steps, step)
    return any(map(is_complete, newest)) or any(map(is_begun, newest))


def missing_error(steps: Steps, step: int, there: Sequence[int]) -> FileNotFoundError:
    """The error of a step that is not among those that are complete."""
    skip = why_skipped(steps, step)
    why = f" that is complete ({skip.why})" if skip else ""
    shown = ", ".join(map(str, there[-_SHOWN:]))
    what = "the newest steps" if len(there) > _SHOWN else "all steps"
    what = f"{what} are {shown}" if len(there) > 1 else f"its only step is {shown}"
    what = what if there else "it has none"
    return FileNotFoundError(f"There is no step {step} in `{steps.root}`{why}: {what}.")
