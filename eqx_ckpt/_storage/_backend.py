"""The protocols of stores: `Backend` is what every kind can do, and each of the other
protocols what some kinds can.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorstore as ts

from .._runtime._undo import Descriptor


# What stands at a path.
Entry = Literal["file", "directory", "other", "nothing"]


class Value(NamedTuple):
    """The bytes of a small file, and what tells this version of it from another, where
    a store says so."""

    data: bytes
    generation: bytes = b""


class Usage(NamedTuple):
    """How many files there are, and their bytes; `own`: those of files that have no
    other name elsewhere; and when the newest was written, in seconds since 1970."""

    files: int
    nbytes: int
    own: int
    time: float | None


class Glance(NamedTuple):
    """The bytes of a small file, and when it was written, if that is known."""

    data: bytes
    time: float | None


@runtime_checkable
class Sink(Protocol):
    """Takes files, each of them once and whole."""

    @property
    def is_far(self) -> bool: ...

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None: ...


@runtime_checkable
class Backend(Sink, Protocol):
    """A directory in some kind of store. The keys of files are relative to it.

    `url` is absolute: a URL, or a path of the local file system. `is_far`: each access
    is a request, which costs more than what it transfers. So some are made at a time,
    large ones rather than small ones, and none only to look before a read.

    What is not there is a `MissingError` or a `FileNotFoundError`. What is there and
    must not be read is a `ValueError`: a link leads out of a checkpoint, and to read
    from a FIFO or a device may take for ever, or do something.
    """

    @property
    def url(self) -> str: ...

    # ---- The place itself.

    def as_url(self) -> str:
        """The URL, also of a path."""
        ...

    def target(self) -> str:
        """The URL, or the path that leads through no link: the same for one place."""
        ...

    def real(self) -> "Backend":
        """The same directory, which messages call the same, by its `target`."""
        ...

    def below(self, key: str) -> "Backend":
        """The directory `key` in this one."""
        ...

    def split(self) -> tuple["Backend", str]:
        """The directory of the file at this place, and its key there: "" for a whole
        bucket, which is no file."""
        ...

    def pinned(self, key: str) -> "Backend":
        """This directory, with the file `key` open and read as it is now, where there
        is such a thing. **Raises:** `OSError` if it cannot be opened."""
        ...

    def unpinned(self) -> "Backend": ...

    def entry(self) -> Entry | None:
        """The kind of entry at this place. None: it would take a request to know."""
        ...

    def is_file(self) -> bool:
        """Whether there is a file at this place, whatever it takes to know."""
        ...

    def is_link(self, key: str = "") -> bool: ...

    def check_bucket(self) -> None:
        """**Raises:** `FileNotFoundError` if there is no bucket of this name."""
        ...

    def folds_case(self) -> bool:
        """Whether names that differ by case only are one."""
        ...

    # ---- Reads.

    def spec(self, key: str = "") -> dict[str, Any]:
        """The TensorStore spec of the directory `key`."""
        ...

    def context(self) -> ts.Context:
        """The context in which arrays are read."""
        ...

    def wait(self, future: Any) -> Any:
        """The result of a call to TensorStore. **Raises:** as `explain` says."""
        ...

    def explain(self, error: Exception) -> Exception:
        """What TensorStore's error says; any other as it is.

        It is an `OSError` where the system or the store fails, a `MissingError` for
        what is not there, or shorter than was asked for. What TensorStore cannot make
        sense of stays a `ValueError`. So whoever reads tells damage from everything
        else by types.
        """
        ...

    def has(self, key: str) -> bool:
        """Whether there is a file, which is not opened."""
        ...

    def size(self, key: str) -> int | None:
        """The bytes of a file. None: there is none, or it would take a read to know."""
        ...

    def check_range(self, key: str, stop: int) -> int | None:
        """**Raises:** `MissingError` unless a file has at least `stop` bytes: before
        memory is allocated for them. Returns how many it has, if that is known."""
        ...

    def read(
        self, key: str, stop: int | None = None, limit: int | None = None
    ) -> Value | None:
        """A small file, or its bytes up to `stop`; None where there is none.

        **Raises:** `ValueError` if it is longer than `limit`.
        """
        ...

    def read_some(self, keys: Sequence[str], limit: int) -> list[bytes | None]:
        """Some small files, together. None: there is none, or it is longer."""
        ...

    def read_into(self, key: str, start: int, into: np.ndarray) -> int:
        """Reads a file from the byte `start` on, and returns how many bytes it has
        there. **Raises:** `FileNotFoundError` where there is no file."""
        ...

    def read_tail(self, key: str, count: int) -> bytes:
        """The last bytes of a file. **Raises:** `MissingError` if it has fewer."""
        ...

    def start_read(self, key: str, start: int, stop: int | None) -> ts.Future:
        """Starts to read a range of a file, or all from a byte on: a future with a
        `.value`."""
        ...

    def stamp(self, key: str) -> str:
        """A text that changes when a file is replaced or written to; "" if it is gone,
        or is no regular file any more."""
        ...

    def can_list(self) -> bool: ...

    def list_top(self) -> dict[str, bool] | None:
        """The names in the directory, and whether each is of a directory. None: there
        is no directory, or it cannot be listed."""
        ...

    def list_all(self) -> list[str] | None:
        """The keys of all files. None: they cannot be listed."""
        ...

    def survey(self, most: int) -> dict[str, int] | None:
        """The keys and sizes of all files. None: it would take requests to know.

        **Raises:** `ValueError` for anything but files and directories, and for more
        than `most` of them.
        """
        ...

    def usage(self, keys: Sequence[str] = ()) -> Usage | None:
        """The space that these files take, or all here. None: it would take requests to
        know."""
        ...

    def glance(self, key: str, limit: int) -> Glance | None:
        """As `read`, of files of which there are many."""
        ...

    def is_directory(self, key: str) -> bool:
        """Whether there is anything in the directory `key`, or it itself."""
        ...

    def may_hold(self, key: str) -> bool:
        """Whether there may be anything in the directory `key`."""
        ...

    def await_directory(self, key: str) -> None:
        """Waits until a directory that another process has made is there.

        **Raises:** `RuntimeError` if it does not appear.
        """
        ...

    # ---- Writes.

    def check_writable(self) -> None:
        """**Raises:** `ValueError` where files can only be read, `NotADirectoryError`
        below a file."""
        ...

    def check_conditions(self, key: str) -> None:
        """Writes a small file, and again on conditions that do not hold.

        **Raises:** `RuntimeError` if the store does not heed them, as not all servers
        of S3 do: of two saves at the same instant one would delete what the other has
        written.
        """
        ...

    def stage(self, aside: str, key: str, data: bytes, sync: bool) -> None:
        """Writes what `replace` or `swap` then puts in its place by a rename.

        `aside` is a directory of the caller's own. Stores that cannot rename write at
        that time, and do nothing now.
        """
        ...

    def replace(self, aside: str, key: str, data: bytes, found: Value | None) -> bool:
        """Puts a staged file in its place, if what is there is what was `found` (None:
        nothing). Returns whether it was. Where there are locks, the caller holds that
        of writers."""
        ...

    def swap(self, aside: str, key: str, data: bytes) -> None:
        """Puts a staged file in its place, whatever is there."""
        ...

    def writers_lock(self) -> contextlib.AbstractContextManager[bool]:
        """Holds what writers hold from before their commit until all that follows it is
        done, and says whether there is such a thing."""
        ...

    def copy(self, source: str, key: str, sync: bool) -> None:
        """Makes `key` another name of the file `source`, or else a copy of it."""
        ...

    def make_directories(self, keys: Iterable[str]) -> None: ...

    def sync_directories(self, keys: Iterable[str]) -> None:
        """Makes the names in directories durable."""
        ...

    def sync_above(self, made: "Sequence[Renames]" = ()) -> None:
        """Makes the name of this directory durable, and of those that lead to it: these
        once in a process, whoever has made them, and again if they were `made` since.
        """
        ...

    def drop_directory(self, key: str = "") -> None:
        """Deletes a directory if it is empty."""
        ...

    def delete(self, key: str) -> None:
        """Deletes the file or directory `key`, never through a link; "": all of it."""
        ...

    def move(self, key: str, into: str, first: str) -> None:
        """Gives the directory `key` another name. Where there are no renames its files
        are copied and then deleted, beginning with the file `first` in it."""
        ...


@runtime_checkable
class Locks(Backend, Protocol):
    """Knows whether the writer of a directory lives: it holds its lock."""

    def lock(self, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        """Holds the advisory lock of the directory, which ends with the process.

        Yields whether it is held: not if another has it and we do not `wait`, nor on
        file systems without locks.
        """
        ...

    def is_locked(self) -> bool:
        """Whether another holds the lock; False if there is no such directory, or the
        file system has no locks."""
        ...

    def made(
        self, is_aside: bool = False
    ) -> contextlib.AbstractContextManager[tuple[int | None, Callable[[], bool]]]:
        """Makes the directory and those above it, and holds its lock. What `is_aside`
        nobody else may look into: yields the mode that it would have otherwise, and a
        function that says whether it is still what is there."""
        ...


@runtime_checkable
class Sends(Backend, Protocol):
    """Takes files by requests, of which many may be under way."""

    def start_write(self, key: str, data: bytes) -> ts.Future:
        """Starts to write a file."""
        ...

    def list_parts(self, starts: Sequence[str]) -> list[str]:
        """The keys that begin with any of these, each asked for beside the others."""
        ...

    def delete_files(self, keys: Iterable[str]) -> None:
        """Deletes files that were listed, together."""
        ...


class SavedFile(NamedTuple):
    """A file that another save has written, of `size` bytes. `held`: its descriptor,
    which outlives its name."""

    directory: Backend
    key: str
    size: int
    held: Descriptor | None = None


@runtime_checkable
class Links(Backend, Protocol):
    """Gives one file several names."""

    def hold(self, key: str, size: int) -> Descriptor:
        """A descriptor of a file. **Raises:** `ValueError` or `OSError` if there is
        none of `size` bytes."""
        ...

    def link_from(self, origin: SavedFile, into: str, sync: bool) -> bool:
        """Gives a file of another directory a second name in this one. Returns whether
        it has: not in another file system, nor in one without links. A file that is
        held is copied then."""
        ...


@runtime_checkable
class Renames(Locks, Protocol):
    """Puts files and directories in the place of others, atomically."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        ...

    @property
    def path(self) -> str:
        """The path that the system knows it by."""
        ...

    def below(self, key: str) -> "Renames": ...

    def parent(self) -> "Renames":
        """The directory that this one is in."""
        ...

    def missing(self) -> list["Renames"]:
        """The directories on the way to this one that are not there, the last first."""
        ...

    def synced_together(
        self,
    ) -> contextlib.AbstractContextManager[Callable[[], None] | None]:
        """Yields a function that makes all files and names here durable in one step,
        together with what others have written to the same file system. It raises an
        `OSError` if anything that was written since could not be. None: each file and
        directory has to be synced by itself."""
        ...

    def rename(self, target: "Renames", mode: int | None = None) -> None:
        """Moves this directory to where none is, or an empty one, whose mode it gets;
        else `mode`, if that is said."""
        ...

    def exchange(self, target: "Renames") -> None:
        """Lets two directories change places, each with the mode of the other."""
        ...

    def give(self, key: str, target: "Renames") -> None:
        """Moves what is at `key` to that key in another directory."""
        ...

    def write_by(self, key: str, write: Callable[[BinaryIO], None], sync: bool) -> None:
        """Lets a file be written by a function."""
        ...

    def become(self, key: str, target: "Renames", overwrite: bool) -> None:
        """Puts the file `key` at the path of `target`, with the mode of a file there.

        **Raises:** `FileExistsError` if there is one, and not `overwrite`.
        """
        ...
