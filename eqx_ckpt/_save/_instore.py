"""Publication in an object store, where there are no locks and renames: the conditional
write of the index is the commit, as of `_inplace`.

Each request is a round trip. So all that is to be known is asked for before the first
write, in one, and what need not be in order is done together. In order are: the data;
the index; the files for other readers; and the deletion of what those referred to.
"""

import contextlib
import functools as ft
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from .._format import _files, _index
from .._load import _published
from .._storage import _store
from .._storage._backend import Backend, Sends
from ._place import discard, foreign_among, Found, not_part, Place, replaced


@contextlib.contextmanager
def begin(root: Sends, found: Found, undo: ExitStack) -> Iterator["InStore"]:
    place = InStore(root, root, secrets.token_hex(8), found, undo)
    undo.callback(discard, root, place.own)
    root.check_conditions(f"{place.own}/digests")
    yield place


@contextlib.contextmanager
def claim(root: Sends, found: Found, undo: ExitStack) -> Iterator["InStore"]:
    """A place for files that have the same names in every save, in a store that cannot
    write them elsewhere and rename them: a path takes one save, ever."""
    found = found._replace(keys=(*found.keys, _files.CLAIM))
    place = InStore(root, root, secrets.token_hex(8), found, undo)
    if not root.replace("", _files.CLAIM, place.save.encode(), None):
        raise claimed(root)
    undo.callback(_unclaim, root)
    yield place


def _unclaim(root: Sends) -> None:
    for key in sorted(root.list_top() or {}, key=_files.CLAIM.__eq__):
        # There was nothing at the path: all is ours but what others save below it.
        if root.below(key).read(_files.INDEX) is None:
            discard(root, key)


def claimed(root: Backend) -> FileExistsError:
    return FileExistsError(
        f'A save to `{root}` with `layout="zarr"` is running or was interrupted; in '
        "this store nothing tells which. It is left as it is. Delete all of it when "
        "you know that nothing writes there, or choose another path."
    )


class InStore(Place[Sends]):
    def publish(self, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
        root = self.root
        with self.commit(index) as undo:
            is_ours = root.replace(self.own, _files.INDEX, index, self.found.file)
        if not is_ours:
            undo.close()
            raise replaced(root, self.found)
        with self.committed():
            swap = ft.partial(root.swap, self.own)
            _store.gather(root, [ft.partial(swap, *file) for file in side.items()])
            with contextlib.suppress(OSError, ValueError):
                root.delete_files(self._outdated(side))

    def _outdated(self, side: Mapping[str, bytes]) -> list[str]:
        """The files that were there before, and that nothing refers to any more. A save
        that has begun meanwhile has none: it would find this index."""
        tops = {key.partition("/")[0] for key in side}
        gone = {*_files.SIDE, _files.CLAIM} - tops
        out = []
        for key in self.found.keys:
            top, _, inside = key.partition("/")
            save, slash, _ = inside.partition("/")
            is_data = top == "d" and slash and _index.is_save_id(save)
            is_old = is_data and save != self.save
            if top in gone or is_old or key == _files.SIGNATURE:
                out.append(key)
        return out


def remove(root: Sends) -> bool:
    """Deletes a checkpoint, its index first. Returns whether there was one.

    **Raises:** as `_publish.remove`.
    """
    read = ft.partial(_published.read_outline, root)
    got, listed = (job() for job in _store.ahead(root, [read, root.list_all]))
    keys = listed or []
    if got is None and _files.INDEX in keys:
        got = read()
    if got is None:
        return False
    inside: dict[str, set[str]] = {}
    for key in keys:
        top, slash, rest = key.partition("/")
        entries = inside.setdefault(top, set())
        if slash:
            entries.add(rest.partition("/")[0])
    found = Found(got[0], got[1], frozenset(inside))
    others = foreign_among(found, inside, lambda name: inside.get(name, ()))
    if others:
        raise not_part(root, others[0])
    root.delete_files([_files.INDEX])
    root.delete_files(key for key in keys if key != _files.INDEX)
    return True
