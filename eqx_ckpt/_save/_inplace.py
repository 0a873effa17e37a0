"""Publication in place: the save has its directory, `d/<save>`, at the path itself, and
the index that is put in place of the one that was found is its commit.
"""

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

from .._format import _files
from .._load import _published
from .._runtime import _log
from .._storage._backend import Renames
from . import _leftovers
from ._place import discard, Found, Place, replaced, unpublished


@contextlib.contextmanager
def begin(root: Renames, found: Found, undo: ExitStack) -> Iterator["InPlace"]:
    place = InPlace(root, root, secrets.token_hex(8), found, undo)
    with place.alone(root, root.below("d").below(place.save)):
        yield place


class InPlace(Place[Renames]):
    def publish(self, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
        root, own = self.root, self.own
        # What follows the commit is to need no more space: it only renames and deletes.
        with unpublished(root):
            for key, value in {**side, _files.INDEX: index}.items():
                root.stage(own, key, value, sync)
            if sync:
                root.sync_directories([own, "d", ""])
                root.sync_above(self.made)
        # Whoever replaces what is at the path holds the lock of what is there, until
        # other readers' files are in place too.
        with self.locked():
            # A save that begins after the commit is not among these.
            others = _published.saves(root)
            with self.commit(index) as undo:
                is_ours = root.replace(own, _files.INDEX, index, self.found.file)
            if not is_ours:
                undo.close()
                raise replaced(root, self.found)
            with self.committed():
                self._follow_up(others, side, sync)

    def _follow_up(
        self, others: list[str], side: Mapping[str, bytes], sync: bool
    ) -> None:
        root = self.root
        if sync:
            root.sync_directories([""])
        # Other readers' files follow; what they refer to until then is deleted last.
        _swap_in(root, self.own, side, self.found.entries - _tops(side))
        for save in others:
            if save != self.save:
                # Unless it is being written.
                _leftovers.delete_abandoned(root.below("d").below(save))
        if sync:
            _sync(root, side)


def finish(root: Renames) -> None:
    """Does what follows a commit, as far as other readers' files go, if the save was
    killed before that. What cannot be done now may be later."""
    with contextlib.suppress(OSError, ValueError), root.lock() as held:
        got = _published.read_index(root) if held else None
        if got is None or got[0].layout != "ocdbt":
            return
        own = f"d/{got[0].save}"
        side = [key for key in got[0].others if not key.startswith("d/")]
        staged = [key for key in side if root.has(_files.staged(own, key))]
        outdated = _files.SIDE.intersection(root.list_top() or ()) - _tops(side)
        if staged or outdated:
            _swap_in(root, own, staged, outdated)
            _sync(root, side)
            _log.say(_log.INFO, f"Finished the save at `{root}`, which was killed")


def _swap_in(
    root: Renames, own: str, side: Iterable[str], outdated: Iterable[str]
) -> None:
    """Puts staged files in their place, and deletes those of another save."""
    for key in side:
        root.swap(own, key, b"")
    for key in _files.SIDE.intersection(outdated):
        discard(root, key)
    # It was of what was there.
    if not root.is_directory(_files.SIGNATURE):
        discard(root, _files.SIGNATURE)


def _tops(keys: Iterable[str]) -> set[str]:
    return {key.partition("/")[0] for key in keys}


def _sync(root: Renames, side: Iterable[str]) -> None:
    root.sync_directories({"", *(key.rpartition("/")[0] for key in side)})
