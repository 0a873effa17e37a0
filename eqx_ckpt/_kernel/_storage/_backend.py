"""`Backend`: what every kind of store can do.

There are two: `LocalDirectory` of `_local`, which has locks, links and renames, and
`ObjectStore` of `_objects`, which takes files by requests. Stores on servers are
subclasses of the second one in `_stores`, which say how such a request is made:
`_root.resolve` asks that room for them (`_rooms.kinds_of_stores`).
"""

import abc
import contextlib
import errno
import functools as ft
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import tensorstore as ts

from .._errors import BeyondError, DamagedError, MissingError
from .._format import _text
from . import _context, _local_files


B = TypeVar("B", bound="Backend")


class Value(NamedTuple):
    """The bytes of a small file; the tag of this version of it, in a store that has
    tags; and when it was written, if that is known."""

    data: bytes
    generation: bytes = b""
    time: float | None = None


class Usage(NamedTuple):
    """The number of files, and their bytes; `own`: of those that have no other
    name elsewhere; and when the newest was written, in seconds since 1970."""

    files: int
    nbytes: int
    own: int
    time: float | None


class Backend(abc.ABC):
    """A directory in some kind of store. The keys of files are relative to it.

    `url` is absolute: a URL, or a path of the local file system. `is_remote`: each
    access is a request, which costs more than what it transfers. So some are made at a
    time, large ones rather than small ones, and none only to look before a read.

    What is not there is a `MissingError` or a `FileNotFoundError`. What is there and
    must not be read is a `ValueError`: a link leads out of a checkpoint, and to read
    from a FIFO or a device may take for ever, or do something.
    """

    url: str
    is_remote: bool

    @property
    def has_slow_writes(self) -> bool:
        """Whether threads that write here spend their time waiting."""
        return self.is_remote

    def __str__(self) -> str:
        """For messages: a path or URL may have any characters."""
        return _text.escape(self.url)

    # ---- The place itself.

    @abc.abstractmethod
    def target(self) -> str:
        """The URL, or the path that leads through no link: the same for one place."""

    def check_bucket(self) -> None:
        """**Raises:** `FileNotFoundError` if it is known that nothing can be here."""

    @abc.abstractmethod
    def below(self: B, key: str) -> B:
        """The directory `key` in this one."""

    @abc.abstractmethod
    def split(self: B) -> tuple[B, str]:
        """The directory of the file at this place, and its key there: "" for a whole
        bucket, which is no file."""

    def real(self: B) -> B:
        """The same directory, which messages call the same, by its `target`."""
        return self

    def pinned(self: B, key: str) -> B:
        """This directory, with the file `key` open and read as it is now, where there
        is such a thing. **Raises:** `OSError` if it cannot be opened."""
        return self

    def unpinned(self: B) -> B:
        return self

    def entry(self) -> Literal["file", "directory", "other", "nothing"] | None:
        """The kind of entry at this place. None: it would take a request to know."""
        return None

    def is_link(self, key: str = "") -> bool:
        return False

    # ---- Reads.

    @abc.abstractmethod
    def spec(self, key: str = "") -> dict[str, Any]:
        """The TensorStore spec of the directory `key`.

        **Raises:** `ValueError` where it has no driver.
        """

    def kv(self) -> ts.KvStore:
        """The TensorStore of the directory, open."""
        _context.check_fork()
        return _known_kv(self)

    def open_kv(self) -> ts.KvStore:
        """The same, which is not kept."""
        _context.check_fork()
        try:
            opening = ts.KvStore.open(self.spec(), context=_context.context())
            return opening.result()
        except Exception as e:
            raise self.explain(e) from e

    def has_driver(self) -> bool:
        """Whether TensorStore can read the directory by itself."""
        return True

    def wait(self, future: object, soon: bool = False) -> Any:
        """The result of a call to TensorStore, which a server gives `soon` or never.
        **Raises:** as `explain` says."""
        try:
            return _context.result(future)
        except Exception as e:
            raise self.explain(e) from e

    def explain(self, error: Exception, said: OSError | None = None) -> Exception:
        """TensorStore's error, as one of a type that tells it; any other as it is.
        `said`: what a server's own answer says.

        It is an `OSError` where the system or the store fails, a `MissingError` for
        what is not there, or shorter than was asked for: a `BeyondError` if a server
        says that it has no byte of that. What TensorStore cannot make sense of stays a
        `ValueError`. So whoever reads tells damage from everything else by types.
        """
        if isinstance(error, (OSError, DamagedError)):
            return error
        text = str(error)
        if text == os.strerror(errno.EAGAIN):
            return _context.no_threads()
        refused = _number.match(text)
        if refused:
            return OSError(int(refused[2]), _status.sub("", refused[1], 1))
        if said is not None:
            return said
        status = _status.match(text)
        if status is None or status[1] in _DAMAGED:
            return error
        if status[1] in _MISSING:
            return (BeyondError if _beyond.search(text) else MissingError)(text)
        return OSError(f"`{self}` cannot be reached: {text}")

    @abc.abstractmethod
    def has(self, key: str) -> bool:
        """Whether there is a file, which is not opened."""

    @abc.abstractmethod
    def stamp(self, key: str) -> str:
        """A text that changes when a file is replaced or written to; "" if it is gone,
        or is no regular file any more."""

    def size(self, key: str) -> int | None:
        """The bytes of a file. None: there is none, or it would take a read to know."""
        return None

    @abc.abstractmethod
    def check_range(self, key: str, stop: int) -> int | None:
        """**Raises:** `MissingError` unless a file has at least `stop` bytes: before
        memory is allocated for them. Returns how many it has, if that is known."""

    @abc.abstractmethod
    def read(
        self, key: str, stop: int | None = None, limit: int | None = None
    ) -> Value | None:
        """A small file, or its bytes up to `stop`; None where there is none.

        **Raises:** `ValueError` if it is longer than `limit`.
        """

    @abc.abstractmethod
    def read_into(self, key: str, start: int, *into: np.ndarray) -> int:
        """Reads a file from the byte `start` on into arrays of bytes, one after the
        other, and returns how many bytes it has there.

        **Raises:** `FileNotFoundError` where there is no file.
        """

    def read_parts(self, key: str, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Reads parts of a file, each from a byte on into an array of bytes.

        **Raises:** `MissingError` if the file ends before, and as `read_into`.
        """
        for start, into in parts:
            if self.read_into(key, start, into) < into.size:
                raise MissingError(f"the end of `{key}` is missing")

    @abc.abstractmethod
    def start_read(self, key: str, start: int, stop: int | None) -> ts.Future:
        """Starts to read a range of a file. If `stop` is None it is all from `start`
        on or, if that is negative, so many of the last bytes. The future has a `.value`
        with all of these, or its `state` is "missing": there is no such file.

        **Raises:** `MissingError` if the file ends before the last byte that is asked
        for: in a store when it is waited for, on a disk at once. A server that has said
        that the first one is not there either makes it a `BeyondError`, after which
        nobody asks once more.
        """

    # ---- Lists.

    def can_list(self) -> bool:
        return True

    @abc.abstractmethod
    def list_top(self) -> dict[str, bool] | None:
        """The names in the directory, but for those of the system, and whether each is
        of a directory. None: there is no directory, or it cannot be listed."""

    @abc.abstractmethod
    def list_all(self, start: str = "") -> list[str] | None:
        """The keys of files that begin with `start`. None: they cannot be listed."""

    @abc.abstractmethod
    def is_directory(self, key: str) -> bool:
        """Whether there is anything in the directory `key`, or it itself."""

    def survey(self, most: int) -> dict[str, int] | None:
        """The keys and sizes of all files. None: it would take requests to know.

        **Raises:** `ValueError` for anything but files and directories, and for more
        than `most` of them.
        """
        return None

    def usage(self, keys: Sequence[str] = ()) -> Usage | None:
        """The space that these files take, or all here. None: it would take requests to
        know."""
        return None

    # ---- Writes.

    def check_writable(self) -> None:
        """**Raises:** `ValueError` where files can only be read, `NotADirectoryError`
        below a file."""

    @abc.abstractmethod
    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        """Writes a file, once and whole."""

    @abc.abstractmethod
    def replace(
        self, key: str, data: bytes, found: Value | None, staged: str = ""
    ) -> Value | None:
        """Puts a file in the place of what was `found` (None: nothing). Where there are
        renames, it is the file `staged`, and the caller holds the lock of writers; else
        it is written. Returns what is there then, or None if it was something else."""

    def lock(self, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        """Holds the advisory lock of the directory, which ends with the process: that
        of its writer, or, at the path of a checkpoint, what writers hold from before
        their commit until all that follows it is done.

        Yields whether it is held: not if another has it and we do not `wait`, nor
        where there are no locks.
        """
        return contextlib.nullcontext(False)

    def is_locked(self) -> bool:
        """Whether another holds the lock; False if there is no such directory, or there
        are no locks."""
        return False

    @abc.abstractmethod
    def copy(self, source: str, key: str, sync: bool) -> None:
        """Makes `key` another name of the file `source`, or else a copy of it."""

    def make_directories(self, keys: Iterable[str]) -> None: ...

    def sync_directories(self, keys: Iterable[str]) -> None:
        """Makes the names in directories durable."""

    def sync_above(self, made: "Sequence[Backend]" = ()) -> None:
        """Makes the name of this directory durable, and of those that lead to it: these
        once in a process, whoever has made them, and again if they were `made` since.
        """

    def drop_directory(self, key: str = "") -> None:
        """Deletes a directory if it is empty."""

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Deletes the file or directory `key`, never through a link; "": all of it."""

    @abc.abstractmethod
    def delete_files(self, keys: Iterable[str]) -> None:
        """Deletes files, together, and nothing below such a key. One that is not there
        is no error."""

    @abc.abstractmethod
    def delete_as(self, key: str, stamp: str) -> bool:
        """Deletes a file if it still has this `stamp`. Returns whether it is gone. Not
        all stores know such a condition: others look right before."""

    @abc.abstractmethod
    def move(self, key: str, into: str, first: str) -> bool:
        """Gives the directory `key` another name. Where there are no renames its files
        are copied and then deleted, beginning with the file `first` in it. Returns
        whether it has: not if that file was replaced meanwhile."""


@ft.lru_cache(maxsize=256)
def _known_kv(backend: Backend) -> ts.KvStore:
    return backend.open_kv()


def is_missing(error: Exception) -> bool:
    """Whether an error says that a file, or the end of it, is not there."""
    if isinstance(error, OSError) and error.errno in _local_files.NOWHERE:
        return True
    return isinstance(error, (MissingError, FileNotFoundError, IsADirectoryError))


def is_exhausted(error: Exception) -> bool:
    """Whether an error says only that this process gets no more files or memory, and
    nothing of what it was about to read or write."""
    if isinstance(error, OSError):
        return error.errno in _local_files.EXHAUSTED
    return isinstance(error, MemoryError)


# The answer of a server to a range that begins where its file ends, or later.
_beyond = re.compile("(?:http_response_code='|HTTP code )416")
# How TensorStore's errors begin and, where the system has refused a call, end.
_status = re.compile(r"([A-Z_]+): ")
_number = re.compile(r"(.*?) ?\[os_error_code='(\d+)'", re.DOTALL)
_MISSING = frozenset(["NOT_FOUND", "OUT_OF_RANGE"])
_DAMAGED = frozenset(["DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT"])
