"""A checkpoint as one file: a zip of the files of its directory, not compressed.

Every file in it starts at a multiple of 64, as the leaves do in theirs, so that what is
read in place is aligned.
"""

import contextlib
import io
import os
import secrets
import threading
import zipfile
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from . import _context, _root
from ._backend import Backend


SUFFIX = ".zip"
_COPIES = "memory://eqx_ckpt.files/"
_ALIGN = 64
# Of the header of a file: what is fixed, and what makes it one of any size.
_HEADER, _LARGE = 30, 20
# Bytes that mean nothing, as Android's zipalign marks them.
_PADDING = 0xD935
_DATE = (1980, 1, 1, 0, 0, 0)


@runtime_checkable
class Writable(Protocol):
    """A file that is open for writing in binary."""

    def write(self, data: Any, /) -> Any: ...


@runtime_checkable
class Readable(Protocol):
    """A file that is open for reading in binary."""

    def read(self, size: int = ..., /) -> bytes: ...


def is_file(path: Any) -> bool:
    """Whether a path is an open file."""
    return callable(getattr(path, "read", getattr(path, "write", None)))


def check_open(file: Any) -> None:
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


def is_archive(root: Any) -> bool:
    """Whether a checkpoint is saved as one file."""
    return not isinstance(root, Backend) or root.url.endswith(SUFFIX)


def root_of(file: Any) -> Backend:
    """Where the bytes of an open file are read from: its path, as they are read when
    they are asked for. What has none, as an `io.BytesIO`, is copied to memory."""
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
    root = _root.resolve(f"{_COPIES}{secrets.token_hex(8)}")
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
    """Whether this is the copy of an open file."""
    return root.url.startswith(_COPIES)


def forget(root: Backend) -> None:
    """Frees the copy of an open file, if there is one."""
    if is_copy(root):
        with contextlib.suppress(RuntimeError):
            _context.check_fork()
            above, key = root.split()
            above.delete(key)


class _Zip(zipfile.ZipFile):
    """A zip that gets its list of files when it is closed, and never by itself: the
    file may have another zip by the time that this is collected."""

    def __del__(self):
        pass


class Archive:
    """A zip that is being written, to anything that has a `write`."""

    def __init__(self, file: Any):
        # What has no buffer may write a part of what it is given.
        self._is_raw = isinstance(file, io.RawIOBase)
        self._file = io.BufferedWriter(file) if self._is_raw else file
        self._zip = _Zip(self._file, "w", zipfile.ZIP_STORED)
        self._lock = threading.Lock()

    is_far = True

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        """Adds a file. Threads that write at the same time wait for each other."""
        with self._lock:
            info = zipfile.ZipInfo(key, _DATE)
            info.external_attr = 0o644 << 16
            assert self._zip.fp is not None
            start = self._zip.fp.tell() + _HEADER + len(key.encode()) + _LARGE + 4
            count = -start % _ALIGN
            info.extra = _PADDING.to_bytes(2, "little") + count.to_bytes(2, "little")
            info.extra += bytes(count)
            with self._zip.open(info, "w", force_zip64=True) as member:
                for buffer in buffers:
                    member.write(memoryview(buffer))

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Writes the list of the files. Without it none of them is there."""
        try:
            if kind is None:
                self._zip.close()
                # Else the list of a longer zip would be found at the end of the file.
                if getattr(self._file, "seekable", bool)():
                    self._file.truncate()
        finally:
            if self._is_raw:
                self._file.detach()


# What files are written to, each of them once and whole.
Sink = Backend | Archive
