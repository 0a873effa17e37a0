"""Publication in place: the save has its directory, `d/<save>`, at the path itself, and
the index that is put in place of the one that was found is its commit.
"""

import contextlib
import functools as ft
import os
from collections.abc import Iterable, Mapping

from .._format import _files
from .._load import _published
from .._runtime import _log
from .._storage import _store
from .._storage._local import LocalDirectory
from . import _leftovers
from ._transaction import discard, Transaction, unpublished


def put(save: Transaction, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
    root: LocalDirectory = save.root
    own = save.own
    keys = _files.INDEX, *side
    staged = dict(zip(keys, map(ft.partial(_files.staged, own), keys)))
    # What follows the commit is to need no more space: it only renames and deletes.
    with unpublished(root):
        for key, value in {**side, _files.INDEX: index}.items():
            root.write(staged[key], [value], sync)
        if sync:
            root.sync_directories([own, "d", ""])
            root.sync_above(save.made)
    # Whoever replaces what is at the path holds the lock of what is there, until other
    # readers' files are in place too.
    with contextlib.ExitStack() as held:
        save.lock(held)
        # A save that begins after the commit is not among these.
        others = {*_published.saves(root)} - {save.save}
        before = save.found.file
        what = _files.INDEX, index, before, staged.pop(_files.INDEX)
        save.commit(ft.partial(root.replace, *what), index)
        with save.committed():
            if sync:
                root.sync_directories([""])
            # Other readers' files follow; what they refer to until then is deleted
            # last.
            _swap_in(root, staged, save.found.entries - _store.tops_of(side).keys())
            for other in others:
                # Unless it is being written.
                _leftovers.delete_abandoned(root.below(f"d/{other}"))
            if sync:
                root.sync_directories({"", *map(os.path.dirname, side)})


def finish(root: LocalDirectory) -> None:
    """Does what follows a commit, as far as other readers' files go, if the save was
    killed before that. What cannot be done now may be later."""
    with contextlib.suppress(OSError, ValueError), root.lock() as held:
        got = _published.read_index(root) if held else None
        if got is None or got[0].layout != "ocdbt":
            return
        own = f"d/{got[0].save}"
        side = [key for key in got[0].others if not key.startswith("d/")]
        staged = {key: _files.staged(own, key) for key in side}
        staged = {key: new for key, new in staged.items() if root.has(new)}
        outdated = _files.SIDE.intersection(root.list_top() or ())
        outdated -= _store.tops_of(side).keys()
        if staged or outdated:
            _swap_in(root, staged, outdated)
            root.sync_directories({"", *map(os.path.dirname, side)})
            _log.say(_log.INFO, f"Finished the save at `{root}`, which was killed")


def _swap_in(
    root: LocalDirectory, staged: Mapping[str, str], outdated: Iterable[str]
) -> None:
    """Puts staged files in their place, and deletes those of another save."""
    for key, new in staged.items():
        root.swap(new, key)
    for key in _files.SIDE.intersection(outdated):
        discard(root, key)
    # It was of what was there.
    if not root.is_directory(_files.SIGNATURE):
        discard(root, _files.SIGNATURE)
