"""Publication of one file: it is written beside its path, or to a store as a whole, and
takes the place of what is there, atomically.
"""

import contextlib
import io
import secrets
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from .._storage._backend import Backend, Renames
from . import _leftovers
from ._place import discard, drop_empty, unpublished


class FileOptions(NamedTuple):
    """`nbytes`: about how large the file will be, for errors."""

    overwrite: bool
    sync: bool
    nbytes: int = 0


def publish(
    root: Backend, write: Callable[[BinaryIO], None], options: FileOptions
) -> None:
    """Lets a file be written, and puts it at its path: in the place of whatever file is
    there, or, without `overwrite`, if there is none.

    **Raises:** `FileExistsError`.
    """
    if isinstance(root, Renames):
        _beside(root, write, options)
        return
    directory, key = root.split()
    buffer = io.BytesIO()
    write(buffer)
    if options.overwrite:
        directory.write(key, [buffer.getbuffer()])
    elif not directory.replace("", key, buffer.getvalue(), None):
        raise _came(root)


def _beside(
    root: Renames, write: Callable[[BinaryIO], None], options: FileOptions
) -> None:
    path = root.real()
    assert isinstance(path, Renames)
    for leftover in _leftovers.beside(path):
        _leftovers.delete_abandoned(leftover)
    # As a save that is to be swapped in.
    work = _leftovers.directory_of(path, secrets.token_hex(8))
    made = path.missing()
    with contextlib.ExitStack() as undo:
        undo.callback(drop_empty, made)
        undo.callback(discard, work)
        with contextlib.ExitStack() as locked:
            with unpublished(root, options.nbytes):
                locked.enter_context(work.made(is_aside=True))
                work.write_by("file", write, options.sync)
            try:
                work.become("file", path, options.overwrite)
            except FileExistsError:
                raise _came(root) from None
            if options.sync:
                levels = range(1 + len(made))
                path.parent().sync_directories(["../" * n for n in levels])


def _came(root: Backend) -> FileExistsError:
    return FileExistsError(
        f"There is a file at `{root}`, which was not there when this save began, and "
        "`overwrite=False`."
    )
