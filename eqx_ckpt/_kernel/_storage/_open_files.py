"""Files that are open, where a path may be: a checkpoint in them is one file."""

import contextlib
import io
import os
import secrets
from typing import Any, Protocol, runtime_checkable

from . import _context, _root
from ._backend import Backend
from ._buffer import BufferStore


SUFFIX = ".zip"
_COPIES = "memory://eqx_ckpt.files/"


@runtime_checkable
class Writable(Protocol):
    """A file that is open for writing in binary."""

    def write(self, data: Any, /) -> Any: ...


@runtime_checkable
class Readable(Protocol):
    """A file that is open for reading in binary."""

    def read(self, size: int = ..., /) -> bytes: ...


class FileBytes:
    """Bytes as an open file, which are not copied: nobody changes them before what is
    read of them has been read."""

    def __init__(self, data: bytes | bytearray | memoryview):
        self.data = memoryview(data).cast("B")

    def read(self, size: int = -1) -> bytes:
        return bytes(self.data if size < 0 else self.data[:size])


def is_file(path: object) -> bool:
    """Whether a path is an open file."""
    return callable(getattr(path, "read", getattr(path, "write", None)))


def check_open(file: object) -> None:
    """**Raises:** `ValueError` or `TypeError` for an open file that a checkpoint cannot
    be written to."""
    if isinstance(file, io.TextIOBase):
        raise TypeError('The file is one of text: open it with "wb".')
    if "a" in str(getattr(file, "mode", "")):
        raise ValueError('The file is open for appending: open it with "wb".')
    place = _place(file)
    if place:
        raise ValueError(
            f"The file is at byte {place}, and a checkpoint takes a file of its own. "
            "What is written before the leaves elsewhere goes into `metadata=`."
        )


def is_archive(root: object) -> bool:
    """Whether a checkpoint is saved as one file."""
    return not isinstance(root, Backend) or root.url.endswith(SUFFIX)


def root_of(file: Any) -> Backend:
    """Where the bytes of an open file are read from: its path, as they are read when
    they are asked for. What has none, as an `io.BytesIO`, is copied to memory."""
    url = f"{_COPIES}{secrets.token_hex(8)}"
    if isinstance(file, FileBytes):
        return BufferStore(url, file=url, data=file.data)
    name = getattr(file, "name", None)
    if isinstance(name, (str, bytes)):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                return _root.resolve(os.fsdecode(name))
    data = file.read()
    if not data and _place(file):
        raise ValueError(
            f"The file is at its end, byte {_place(file)}, as after a write: call "
            "`file.seek(0)` before it is read."
        )
    root = _root.resolve(url)
    above, key = root.split()
    above.write(key, [data])
    return root


def _place(file: Any) -> int:
    """Where in an open file one is: 0 in a pipe."""
    try:
        return file.tell()
    except (AttributeError, OSError):
        return 0


def is_copy(root: Backend) -> bool:
    """Whether this is the copy of an open file, or bytes."""
    return root.url.startswith(_COPIES)


def forget(root: Backend) -> None:
    """Frees the copy of an open file, if there is one."""
    if is_copy(root) and not isinstance(root, BufferStore):
        with contextlib.suppress(RuntimeError):
            _context.check_fork()
            above, key = root.split()
            above.delete(key)
