"""Publication in place: the save has its directory, `d/<save>`, at the path itself, and
the index that is put in place of the one that was found is its commit.
"""

import contextlib
import functools as ft
from collections.abc import Iterable, Mapping

from .._format import _files, _index, _layouts
from .._load import _published
from .._storage import _store
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from . import _leftovers
from ._transaction import (
    CheckpointTransaction,
    DirectoryTransaction,
    errors_before_commit,
)


class InPlace(DirectoryTransaction, CheckpointTransaction[LocalDirectory]):
    """A save in a directory at the path itself, which its index commits."""

    def begin(self, held: contextlib.ExitStack) -> None:
        self.make(self.root.below(self.data_key), held)

    def publish(self, index: bytes, side: Mapping[str, bytes], durable: bool) -> None:
        assert not side  # A save that has some is swapped in: see `_publish.begin`.
        root = self.root
        staged = _files.staged(self.data_key, _files.INDEX)
        with errors_before_commit(root):
            root.write(staged, [index], durable)
            self.stamp = root.stamp(staged)  # Which a rename does not change.
            if durable:
                # "" is the root itself: the save before may not have been durable.
                root.sync_directories([self.data_key, "d", ""])
                root.sync_above(self.made_above)
        # Whoever replaces what is at the path holds the lock of what is there.
        with contextlib.ExitStack() as locks:
            self.lock(locks)
            # A save that begins after the commit is not among these.
            others = {*_published.saves(root)} - {self.save_id}
            self.commit(ft.partial(self._replace_index, index, staged), index)
            with self.errors_after_commit():
                if durable:
                    root.sync_directories([""])
                # `write_orbax` may have added some since.
                _delete_side(root, root.list_top() or {})
                # A signature is of what was there before. A directory is not ours.
                if not root.is_directory(_files.SIGNATURE):
                    _leftovers.discard(root, _files.SIGNATURE)
                for other in others:
                    # Unless it is being written.
                    _leftovers.delete_abandoned(root.below(f"d/{other}"))

    def _replace_index(self, index: bytes, staged: str) -> bool:
        replace = lambda: self.root.replace(
            _files.INDEX, index, self.found.index, staged
        )
        return bool(replace() or (self.accept_added_files() and replace()))


def delete_outdated(root: Backend) -> None:
    """Deletes files for other readers that the save which is there does not have, files
    that were to be put in place at its root, and directories in which it has nothing. A
    signature stays, as it may be of that save. What cannot be done now may be later.
    Where there are no locks, the caller knows that nobody saves there."""
    with contextlib.suppress(OSError, ValueError), root.lock() as is_locked:
        published = None
        if is_locked or root.is_remote:
            published = _published.read_index(root, _index.decode)
        if published is not None:
            index = published.content
            tops = {*_store.tops_of(index.others), _files.DIGESTS}
            _delete_side(root, (root.list_top() or {}).keys() - tops)
            own = root.below(f"d/{index.save}")
            for name in filter(_files.is_staged, own.list_top() or ()):
                _leftovers.discard(own, name)
            if index.layout not in _layouts.PACKED:
                root.drop_directory(f"d/{index.save}")
                root.drop_directory("d")


def _delete_side(root: Backend, entries: Iterable[str]) -> None:
    """Deletes what `_files.SIDE` names at a root, as it is of another save: files for
    other readers, and the claim and the digests of the layout "zarr"."""
    for key in _files.SIDE.intersection(entries):
        _leftovers.discard(root, key)
