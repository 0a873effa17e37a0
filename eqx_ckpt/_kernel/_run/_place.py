"""The directory that the steps of a run go to."""

import os

from .._runtime import _log
from .._storage._backend import Backend
from .._storage._local import LocalDirectory


class Place:
    """A directory on a disk, which may be moved while steps are saved there, or be in a
    file system that is not mounted any more. A save makes another one then."""

    def __init__(self, root: Backend):
        self._root = root
        # The last step that was saved, its key, the stamp of that, and the directory as
        # it was then.
        self._last: tuple[int, str, str, os.stat_result] | None = None

    def note(self, step: int, key: str) -> None:
        """Notes that a step was saved, whose index has this key. Warns if it has gone
        to another directory than the one before, which is not there."""
        root, before = self._root, self._last
        if not isinstance(root, LocalDirectory):
            return
        self._last = step, key, root.stamp(key), os.stat(root.path)
        if before is not None:
            last, last_key, stamp, found = before
            if not root.is_same(found) and root.stamp(last_key) != stamp:
                said = f"Step {last} is not where step {step} is: in `{root}`"
                _log.say(_log.WARNING, said, step=step, path=root.url)
                _log.warn(
                    f"Step {step} is saved in another directory `{root}` than step "
                    f"{last}, which is not there: the one of before was moved or "
                    "deleted, or its disk is not mounted any more. Put it back, and "
                    "`restore`, if you want the steps that it has."
                )
