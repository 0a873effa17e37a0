"""Publication in an object store, where there are no locks and renames: the conditional
write of the index is the commit, as of `_inplace`.

Each request is a round trip. So all that is to be known is asked for before the first
write, in one, and what need not be in order is done together. In order are: the data;
the files for other readers, at a path that was empty; the index; and the deletion of
what was there.
"""

import contextlib
import functools as ft
from collections.abc import Iterable, Mapping

from .._format import _files, _index, _layouts
from .._storage import _store
from .._storage._objects import ObjectStore
from ._path_state import claimed_error
from ._transaction import (
    CheckpointTransaction,
    drop_unlisted,
    stamps_of,
    take_back,
)


class InStore(CheckpointTransaction[ObjectStore]):
    """A save in an object store, which the conditional write of its index commits."""

    # Stamps of the files for other readers that were there right before the commit.
    _stamps: dict[str, str] = {}

    def begin(self, held: contextlib.ExitStack) -> None:
        self.undo.callback(take_back, self.root, self.data_key)
        self.root.check_conditions(f"{self.data_key}/digests")

    def publish(self, index: bytes, side: Mapping[str, bytes], durable: bool) -> None:
        root = self.root
        _store.each(root, lambda key: root.write(key, [side[key]]), side)
        self.commit(ft.partial(self._replace_index, index), index)
        with self.errors_after_commit():
            with contextlib.suppress(OSError, ValueError):
                # `write_orbax` may add some as soon as there is the new index.
                drop_unlisted(root, self._stamps)
                root.delete_files(self._outdated(side))

    def _replace_index(self, index: bytes) -> bool:
        replace = ft.partial(self.root.replace, _files.INDEX, index)
        while True:
            self._stamps = stamps_of(self.root, self._found_keys())
            if (written := replace(self.found.index)) is not None:
                self.stamp = written.generation.hex()
                return True
            if not self.accept_added_files():
                return False

    def _found_keys(self) -> Iterable[str]:
        """The files that were there before this save."""
        # `write_orbax` may have added some since they were listed.
        found = self.found.index
        added = _index.others_in(found.data) if found else ()
        return dict.fromkeys([*self.found.keys, *added])

    def _outdated(self, side: Mapping[str, bytes]) -> list[str]:
        """The files that were there before, and that nothing refers to any more. A save
        that has begun meanwhile has none: it would find this index."""
        tops = {key.partition("/")[0] for key in side}
        gone = {*_files.SIDE, _files.CLAIM} - tops
        out = []
        for key in self._found_keys() - self._stamps.keys():
            top, _, inside = key.partition("/")
            other, slash, _ = inside.partition("/")
            is_data = top == "d" and slash and _index.is_save_id(other)
            is_old = is_data and other != self.save_id
            if top in gone or is_old or key == _files.SIGNATURE:
                out.append(key)
        return out


class Claimed(InStore):
    """Takes a path for files that have the same names in every save, in a store that
    cannot write them elsewhere and rename them: a path takes one save, ever."""

    def begin(self, held: contextlib.ExitStack) -> None:
        self.found = self.found._replace(keys=(*self.found.keys, _files.CLAIM))
        if self.root.replace(_files.CLAIM, self.save_id.encode(), None) is None:
            raise claimed_error(self.root)
        self.undo.callback(self._unclaim)

    def _unclaim(self) -> None:
        """Deletes what this save has written, and its claim last."""
        with contextlib.suppress(OSError, ValueError):
            keys = self.root.list_all() or ()
            # There was nothing at the path. By now others may save below it.
            ends = f"/{_files.INDEX}", f"/{_files.CLAIM}"
            others = {key.partition("/")[0] for key in keys if key.endswith(ends)}
            own = _files.SIDE - {_files.CLAIM}

            def is_own(key: str) -> bool:
                top, _, inside = key.partition("/")
                is_of_leaf = inside.partition("/")[0] in _layouts.MEMBERS
                is_data = key.startswith(f"{self.data_key}/")
                return is_data or top in own or (is_of_leaf and top not in others)

            self.root.delete_files([*filter(is_own, keys)])
            self.root.delete_files([_files.CLAIM])
