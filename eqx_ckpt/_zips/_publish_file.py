"""Publication of one file, atomically.

On a disk it is written in a directory beside its path, and renamed, or linked where it
must replace nothing. An object store has no renames: there it is built in memory, and
put in place as a whole.
"""

import contextlib
import io
from collections.abc import Callable
from typing import BinaryIO

from .._kernel._save import _path_state
from .._kernel._save._transaction import (
    BesideTransaction,
    errors_before_commit,
    Fate,
    take_back,
)
from .._kernel._storage import _local_files
from .._kernel._storage._backend import Backend
from .._kernel._storage._descriptor import Descriptor, NEW_FILE
from .._kernel._storage._local import LocalDirectory


def publish(
    root: Backend,
    write: Callable[[BinaryIO], None],
    overwrite: bool,
    durable: bool,
    nbytes: int = 0,
) -> None:
    """Has `write` write a file, and puts it at its path, replacing any file there.
    Without `overwrite` the caller has seen that there is none. On a disk it is synced
    if it is `durable`, and `nbytes` is its size, more or less, for errors.

    **Raises:** `FileExistsError` if one has come since.
    """
    if isinstance(root, LocalDirectory):
        _publish_on_disk(root, write, overwrite, durable, nbytes)
    else:
        _put_in_store(root, write, overwrite)


def _publish_on_disk(
    root: LocalDirectory,
    write: Callable[[BinaryIO], None],
    overwrite: bool,
    durable: bool,
    nbytes: int,
) -> None:
    # At its end, `held` releases the lock of the working directory and deletes that
    # directory. `undo` also deletes the directories above it that were made, unless the
    # save gets to its commit.
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as held:
        txn = _FileTransaction(root.real(), undo, overwrite)
        # After the commit it is of no use, though it may still have the file (a link).
        held.callback(take_back, txn.work)
        with errors_before_commit(root, nbytes):
            txn.begin(held)
            path = f"{txn.work.path}/{txn.last_file}"
            with Descriptor(path, NEW_FILE) as fd:
                with open(fd, "wb", closefd=False) as file:
                    write(file)
                if durable:
                    _local_files.fsync(fd)
        try:
            txn.put_in_place(durable)
        except FileExistsError:  # An `OSError` of EEXIST is one.
            raise _came_meanwhile_error(root) from None


class _FileTransaction(BesideTransaction):
    """One file that is written in a directory beside its path, and holds everything."""

    last_file = "file"

    def __init__(
        self, root: LocalDirectory, undo: contextlib.ExitStack, overwrite: bool
    ):
        # What it replaces is one file, of which it needs to know nothing.
        super().__init__(root, _path_state.NOTHING, undo)
        self._overwrite = overwrite
        # The stamp of the written file. If the path has it too, the save is there.
        self._stamp = ""

    def put_in_place(self, durable: bool) -> None:
        self.check_there()
        self._stamp = self.work.stamp(self.last_file)
        written = self.work.below(self.last_file)
        self.commit(lambda: written.rename(self.root, overwrite=self._overwrite))
        with self.errors_after_commit():
            if durable:
                self.root.sync_above(self.made_above)

    def fate(self, index: bytes) -> Fate:
        directory, key = self.root.split()
        is_there = self._stamp != "" and directory.stamp(key) == self._stamp
        return Fate.SAVED if is_there else Fate.NOT_SAVED


def _put_in_store(
    root: Backend, write: Callable[[BinaryIO], None], overwrite: bool
) -> None:
    """Has a file written to memory, and puts it into a store as a whole."""
    directory, key = root.split()
    buffer = io.BytesIO()
    write(buffer)
    if overwrite:
        directory.write(key, [buffer.getbuffer()])
    elif not directory.replace(key, buffer.getvalue(), None):  # None: if none is there.
        raise _came_meanwhile_error(root)


def _came_meanwhile_error(root: Backend) -> FileExistsError:
    return FileExistsError(
        f"There is a file at `{root}`, which was not there when this save began, and "
        "`overwrite=False`."
    )
