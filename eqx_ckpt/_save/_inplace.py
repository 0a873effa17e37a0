"""Publication in place: the save has its directory, `d/<save>`, at the path itself, and
the index that is put in place of the one that was found is its commit.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from .._format import _files
from .._load import _published
from .._storage._backend import Renames
from . import _leftovers
from ._place import discard, Found, Place, replaced, unpublished


@contextlib.contextmanager
def begin(root: Renames, found: Found, undo: ExitStack) -> Iterator["InPlace"]:
    place = InPlace(root, root, secrets.token_hex(8), found, undo)
    with place.alone(root, root.below("d").below(place.save)) as made:
        # Two of those are `d` and the root.
        place.above = ["../" * n for n in range(1, 2 + max(0, made - 2))]
        yield place


class InPlace(Place[Renames]):
    def publish(self, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
        root, own = self.root, self.own
        # What follows the commit is to need no more space: it only renames and deletes.
        with unpublished(root):
            for key, value in {**side, _files.INDEX: index}.items():
                root.stage(own, key, value, sync)
            if sync:
                root.sync_directories([own, "d", "", *self.above])
        # Whoever replaces what is at the path holds the lock of what is there, until
        # other readers' files are in place too.
        with root.writers_lock():
            # A save that begins after the commit is not among these.
            others = _published.saves(root)
            # If this fails, the commit may have been made all the same: nothing is
            # undone.
            undo = self.undo.pop_all()
            with self.noted(
                f"What is at `{root}` is whole: this save, or what was there."
            ):
                is_ours = root.replace(own, _files.INDEX, index, self.found.file)
            if not is_ours:
                undo.close()
                raise replaced(root)
            with self.committed():
                self._follow_up(others, side, sync)

    def _follow_up(
        self, others: list[str], side: Mapping[str, bytes], sync: bool
    ) -> None:
        root = self.root
        if sync:
            root.sync_directories([""])
        # Other readers' files follow; what they refer to until then is deleted last.
        for key, value in side.items():
            root.swap(self.own, key, value)
        tops = {key.partition("/")[0] for key in side}
        for key in (self.found.entries & _files.SIDE) - tops:
            discard(root, key)
        # It was of what was there.
        if not root.is_directory(_files.SIGNATURE):
            discard(root, _files.SIGNATURE)
        for save in others:
            if save != self.save:
                # Unless it is being written.
                _leftovers.delete_abandoned(root.below("d").below(save))
        if sync:
            inside = {key.rpartition("/")[0] for key in side}
            root.sync_directories({"", *inside})
