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
from ._place import discard, Found, Place, unpublished


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


class OneFile(Place[Renames]):
    """The file is `file` in `work`, as of a save that is to be swapped in."""

    def put(self, options: FileOptions) -> None:
        directory, key = self.root.split()
        self.last = "file"
        self.check_there()
        stamp = self.work.stamp("file")
        # See `is_saved`.
        self._is_put = lambda: directory.stamp(key) == stamp
        with self.commit():
            self.work.become("file", self.root, options.overwrite)
        with self.committed():
            if options.sync:
                self.root.sync_above(self.made)

    def is_saved(self, index: bytes) -> bool | None:
        return self._is_put()


def _beside(
    root: Renames, write: Callable[[BinaryIO], None], options: FileOptions
) -> None:
    path = root.real()
    assert isinstance(path, Renames)
    save = secrets.token_hex(8)
    work = _leftovers.directory_of(path, save)
    nothing = Found(None, None, frozenset())
    with contextlib.ExitStack() as stack:
        undo = stack.enter_context(contextlib.ExitStack())
        stack.callback(discard, work)
        place = OneFile(path, work, save, nothing, undo)
        with contextlib.ExitStack() as locked:
            with unpublished(root, options.nbytes):
                locked.enter_context(place.alone(path, work))
                work.write_by("file", write, options.sync)
            try:
                place.put(options)
            except FileExistsError:
                raise _came(root) from None


def _came(root: Backend) -> FileExistsError:
    return FileExistsError(
        f"There is a file at `{root}`, which was not there when this save began, and "
        "`overwrite=False`."
    )
