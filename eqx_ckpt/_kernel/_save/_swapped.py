"""Publication by a swap: the save is a whole directory beside the path, which changes
places with what is there, atomically.
"""

import contextlib
import errno
import functools as ft
import os
import stat
from collections.abc import Mapping

from .._format import _files, _text
from .._storage import _store
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from . import _leftovers
from ._path_state import foreign, own_entries, PathState, replaced_error
from ._transaction import (
    BesideTransaction,
    CheckpointTransaction,
    errors_before_commit,
)


def check(root: Backend, found: PathState) -> None:
    """**Raises:** an error when what is at a path cannot be swapped away."""
    # Listed after the index was read, and the index looked at again after that: what is
    # listed is then of the checkpoint that was found.
    entries = root.list_top() or {}
    if not entries:
        return
    if not isinstance(root, LocalDirectory):
        raise ValueError(
            f"The store of `{root}` cannot exchange two directories atomically, so a "
            'checkpoint with `layout="zarr"` or `orbax=True` cannot be replaced there, '
            "nor replace another. Use another path."
        )
    others = foreign(root, found.leaf_entries, entries)
    if others:
        if not _store.is_still(root, _files.INDEX, found.index):
            raise replaced_error(root, found)
        raise FileExistsError(
            f"`{root}` has `{_text.escape(others[0])}` in it, which is not part of the "
            'checkpoint. A save with `layout="zarr"` or `orbax=True`, or over one that '
            "had these, replaces the whole directory. Move it elsewhere."
        )


class Swapped(BesideTransaction, CheckpointTransaction[LocalDirectory]):
    """A save in a directory beside the path, which takes the place of what is there."""

    def publish(self, index: bytes, side: Mapping[str, bytes], durable: bool) -> None:
        root, work, replaces = self.root, self.work, bool(self.found.entries)
        with errors_before_commit(root):
            self._complete(index, side, durable)
        with contextlib.ExitStack() as locks:
            if replaces:
                self.lock(locks)
                is_still = _store.is_still(root, _files.INDEX, self.found.index)
                if not (is_still or self.accept_added_files()):
                    raise replaced_error(root, self.found)
                check(root, self.found)
                put_there = ft.partial(work.exchange, root)
            else:
                self.check_there()
                mode = stat.S_IMODE(self.stat.st_mode)
                put_there = ft.partial(work.rename, root, mode)
            try:
                self.commit(put_there, index)
            except OSError as e:
                refused = _refusal_error(root, e, replaces)
                if refused is None or self.has_failed_late:
                    raise
                raise refused from e
            with self.errors_after_commit():
                if durable:
                    root.sync_above(self.made_above)
                if replaces:
                    # What came in since it was listed is not ours to delete.
                    ours = own_entries(self.found.leaf_entries)
                    for name in set(work.list_top() or {}) - ours:
                        work.below(name).rename(root.below(name))
                    _leftovers.discard(work)

    def _complete(self, index: bytes, side: Mapping[str, bytes], durable: bool) -> None:
        work = self.work
        inside = {key.rpartition("/")[0] for key in side}
        work.make_directories(inside)
        for key, value in side.items():
            work.write(key, [value], durable)
        work.write(_files.INDEX, [index], durable)
        self.stamp = work.stamp(_files.INDEX)  # Which no rename changes.
        if durable:
            inner = [self.data_key, "d"] if work.is_directory(self.data_key) else []
            work.sync_directories([*inner, *inside, ""])


# What the system says of two directories that it cannot exchange; and of a place that
# is not empty any more.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOTTY, errno.EXDEV)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def _refusal_error(
    root: LocalDirectory, error: OSError, replaces: bool
) -> OSError | RuntimeError | None:
    """The meaning of an error of the step that commits, if it has one there."""
    if error.errno == errno.EBUSY:
        return OSError(
            errno.EBUSY,
            f"`{root}` is a mount point, which cannot be renamed, so a checkpoint with "
            '`layout="zarr"` or `orbax=True` cannot be put there. What is there is '
            'left as it is. Save to a directory below it, or use `layout="ocdbt"` '
            "without `orbax`.",
        )
    if not replaces and error.errno in _NOT_EMPTY:
        return RuntimeError(
            f"`{root}` was written by another while this save was being written. "
            "It stands; this save is discarded."
        )
    if replaces and error.errno in _NO_EXCHANGE:
        return OSError(
            error.errno,
            f"The file system of `{root}` cannot exchange two directories atomically "
            f"({os.strerror(error.errno)}): the checkpoint there cannot be replaced "
            'with `layout="zarr"` or `orbax=True`. It is left as it is. Use another '
            "path.",
        )
    return None
