"""Publication by a swap: the save is a whole directory beside the path, which changes
places with what is there, atomically.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Mapping

from .._format import _files, _text
from .._storage import _store
from .._storage._backend import Backend, Renames
from . import _leftovers
from ._place import discard, foreign, Found, own_entries, Place, replaced, unpublished


@contextlib.contextmanager
def begin(root: Renames, found: Found, undo: contextlib.ExitStack) -> Iterator["Swap"]:
    save = secrets.token_hex(8)
    work = _leftovers.directory_of(root, save)
    place = Swap(root, work, save, found, undo)
    with place.alone(root, work):
        yield place


def check(root: Backend, found: Found) -> None:
    """**Raises:** an error when what is at a path cannot be swapped away."""
    # Listed after the index was read, and the index looked at again after that: what is
    # listed is then of the checkpoint that was found.
    entries = root.list_top() or {}
    if not entries:
        return
    if not isinstance(root, Renames):
        raise ValueError(
            f"The store of `{root}` cannot exchange two directories atomically, so a "
            'checkpoint with `layout="zarr"` cannot be replaced there, nor replace '
            'another. Use `layout="ocdbt"`, or another path.'
        )
    others = foreign(root, found, entries)
    if others:
        if not _store.is_still(root, _files.INDEX, found.file):
            raise replaced(root, found)
        raise FileExistsError(
            f"`{root}` has `{_text.escape(others[0])}` in it, which is not part of "
            'the checkpoint, and `layout="zarr"` replaces the whole directory. Move it '
            "elsewhere."
        )


class Swap(Place[Renames]):
    def publish(self, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
        with unpublished(self.root):
            self._complete(index, side, sync)
        if self.found.entries:
            self._exchange(index, sync)
        else:
            self._rename(index, sync)

    def _complete(self, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
        work = self.work
        inside = {key.rpartition("/")[0] for key in side}
        work.make_directories(inside)
        for key, value in side.items():
            work.write(key, [value], sync)
        work.write(_files.INDEX, [index], sync)
        if sync:
            inner = [self.own, "d"] if work.is_directory(self.own) else []
            work.sync_directories([*inner, *inside, ""])

    def _rename(self, index: bytes, sync: bool) -> None:
        root = self.root
        self.check_there()
        try:
            with self.commit(index):
                self.work.rename(root, self.mode)
        except OSError as e:
            if self.is_committed:
                raise
            if e.errno == errno.EBUSY:
                raise _mounted(root) from e
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise RuntimeError(
                f"`{root}` was written by another while this save was being written. "
                "It stands; this save is discarded."
            ) from e
        with self.committed():
            if sync:
                root.sync_above(self.made)

    def _exchange(self, index: bytes, sync: bool) -> None:
        root, work = self.root, self.work
        with self.locked():
            if not _store.is_still(root, _files.INDEX, self.found.file):
                raise replaced(root, self.found)
            check(root, self.found)
            try:
                with self.commit(index):
                    work.exchange(root)
            except OSError as e:
                if self.is_committed:
                    raise
                raise _refused(root, e) from e
            with self.committed():
                if sync:
                    root.sync_above(self.made)
                # What came in since it was listed is not ours to delete.
                for name in set(work.list_top() or {}) - own_entries(self.found):
                    work.give(name, root)
                discard(work)


def _mounted(root: Renames) -> OSError:
    return OSError(
        errno.EBUSY,
        f"`{root}` is a mount point, which cannot be renamed, so a checkpoint with "
        '`layout="zarr"` cannot be put there. What is there is left as it is. Save to '
        'a directory below it, or use `layout="ocdbt"`.',
    )


# What the system says of two directories that it cannot exchange.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOTTY, errno.EXDEV)


def _refused(root: Renames, error: OSError) -> OSError:
    if error.errno == errno.EBUSY:
        return _mounted(root)
    if error.errno not in _NO_EXCHANGE:
        return error
    return OSError(
        error.errno,
        f"The file system of `{root}` cannot exchange two directories atomically "
        f"({os.strerror(error.errno)}), so the checkpoint there cannot be replaced "
        'with `layout="zarr"`, and is left as it is. Use another path.',
    )
