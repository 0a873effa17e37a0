"""Publication of one file: it is written beside its path, or to a store as a whole, and
takes the place of what is there, atomically.
"""

import contextlib
import io
import os
import secrets
from collections.abc import Callable
from typing import BinaryIO

from .._save import _leftovers, _path_state
from .._save._transaction import discard, Transaction, unpublished
from .._storage import _descriptor
from .._storage._backend import Backend
from .._storage._local import LocalDirectory


def publish(
    root: Backend,
    write: Callable[[BinaryIO], None],
    overwrite: bool,
    sync: bool,
    nbytes: int = 0,
) -> None:
    """Lets a file of about `nbytes` be written, and puts it at its path: in the place
    of whatever file is there, or, without `overwrite`, if there is none.

    **Raises:** `FileExistsError`.
    """
    if not isinstance(root, LocalDirectory):
        directory, key = root.split()
        buffer = io.BytesIO()
        write(buffer)
        if overwrite:
            directory.write(key, [buffer.getbuffer()])
        elif not directory.replace(key, buffer.getvalue(), None):
            raise _came(root)
        return
    path = root.real()
    assert isinstance(path, LocalDirectory)
    number = secrets.token_hex(8)
    work = _leftovers.directory_of(path, number)

    def put(save: Transaction, *_: object) -> None:
        directory, key = path.split()
        save.last = "file"
        save.check_there()
        stamp = work.stamp("file")
        save.is_saved = lambda index: directory.stamp(key) == stamp
        save.commit(lambda: work.below("file").rename(path, overwrite=overwrite))
        with save.committed():
            if sync:
                path.sync_above(save.made)

    with contextlib.ExitStack() as stack:
        undo = stack.enter_context(contextlib.ExitStack())
        stack.callback(discard, work)
        save = Transaction(path, work, number, _path_state.NOTHING, undo, put)
        with contextlib.ExitStack() as held:
            with unpublished(root, nbytes):
                save.make(work, held)
                with open(f"{work.path}/file", "xb", opener=_descriptor.opener) as file:
                    write(file)
                    file.flush()
                    if sync:
                        os.fsync(file.fileno())
            try:
                put(save)
            except FileExistsError:
                raise _came(root) from None


def _came(root: Backend) -> FileExistsError:
    return FileExistsError(
        f"There is a file at `{root}`, which was not there when this save began, and "
        "`overwrite=False`."
    )
