"""Directories of a local file system, and the one file of one that is open."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import stat
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
import tensorstore as ts

from .._errors import MissingError
from .._format import _text
from .._format._files import staged
from .._runtime import _undo
from .._runtime._undo import Descriptor
from . import _context, _files, _kv
from ._backend import Backend, Entry, Glance, Renames, SavedFile, Usage, Value


# Seconds that a file system of the network may take to show what another host has made.
_SHOWN = 30
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
# What the system calls the files that a process has open.
_OPEN_FILES = next((p for p in ("/proc/self/fd", "/dev/fd") if os.path.isdir(p)), None)


def directory(path: str | os.PathLike[str]) -> "LocalBackend":
    return LocalBackend(os.fspath(path), os.fspath(path))


@dataclasses.dataclass(frozen=True)
class _LocalReads:
    """Reads of files in a directory. `url` is the path as messages have it.

    `follow`: whether what is read in it may be a symbolic link. It itself may be.
    `depth`: how many last parts of its path are `below` a directory that somebody has
    named, and no links either, for whoever lists, writes or deletes.
    """

    url: str
    path: str
    follow: bool = False
    depth: int = dataclasses.field(default=0, compare=False, kw_only=True)

    is_far = False

    def __str__(self) -> str:
        """For messages: a path may have any characters."""
        return _text.escape(self.url)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def as_url(self) -> str:
        return "file://" + urllib.parse.quote(self.url)

    def target(self) -> str:
        return os.path.realpath(self.path)

    def real(self) -> "LocalBackend":
        return LocalBackend(self.url, self.target(), self.follow)

    def below(self, key: str) -> "LocalBackend":
        url, depth = f"{self.url}/{key}", self._depth(key)
        return LocalBackend(url, self._at(key), self.follow, depth=depth)

    def split(self) -> tuple["LocalBackend", str]:
        # A link is one to the file.
        above, key = os.path.split(self.target())
        return LocalBackend(above, above, self.follow), key

    def entry(self) -> Entry | None:
        try:
            mode = os.stat(self.path).st_mode
        except OSError as e:
            if e.errno in _NOTHING:
                return "nothing"
            raise
        if stat.S_ISDIR(mode):
            return "directory"
        return "file" if stat.S_ISREG(mode) else "other"

    def is_file(self) -> bool:
        return self.entry() in ("file", "other")

    def is_link(self, key: str = "") -> bool:
        return pathlib.Path(self.path, key).is_symlink()

    def check_bucket(self) -> None:
        pass

    def folds_case(self) -> bool:
        return _files.folds_case(self.path)

    def _at(self, key: str) -> str:
        return os.path.join(self.path, key) if key else self.path

    def _depth(self, key: str) -> int:
        if self.follow:
            return 0
        return self.depth + (1 + key.count("/") if key else 0)

    def spec(self, key: str = "") -> dict[str, Any]:
        prefix = key + "/" if key else ""
        return {"driver": "file", "path": f"{self.path}/{prefix}"}

    def context(self) -> ts.Context:
        # A link in it may lead anywhere.
        is_mapped = not self.follow and _files.is_on_this_machine(self.path)
        return _context.mmap_context() if is_mapped else _context.context()

    def kv(self) -> ts.KvStore:
        _context.check_fork()
        return _kv.known(self)

    def wait(self, future: Any) -> Any:
        try:
            return future.result()
        except Exception as e:
            raise self.explain(e) from e

    def explain(self, error: Exception) -> Exception:
        return _kv.explain(str(self), error)

    def _look(self, key: str) -> os.stat_result | None:
        return _files.look(self.path, key, self.follow)

    def has(self, key: str) -> bool:
        return self._look(key) is not None

    def size(self, key: str) -> int | None:
        found = self._look(key)
        return None if found is None else found.st_size

    def check_range(self, key: str, stop: int) -> int | None:
        found = self._look(key)
        if found is None:
            raise MissingError(f"`{key}` is missing")
        if found.st_size < stop:
            raise MissingError(f"the end of `{key}` is missing")
        return found.st_size

    def read(
        self, key: str, stop: int | None = None, limit: int | None = None
    ) -> Value | None:
        found = self._read(key, stop, limit)
        return None if found is None else Value(found.data)

    def _read(self, key: str, stop: int | None, limit: int | None) -> Glance | None:
        _context.check_fork()
        if self._look(key) is None:
            return None
        try:
            with self._opened(key) as fd:
                # Another file may have come in the place of the one that was looked at.
                found = os.fstat(fd)
                if limit is not None and found.st_size > limit:
                    raise ValueError(f"`{key}` is longer than {limit} bytes")
                size = found.st_size if stop is None else min(stop, found.st_size)
                return Glance(_files.read_bytes(fd, 0, size), found.st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _opened(self, key: str) -> contextlib.AbstractContextManager[int]:
        return _undo.opened(self._at(key), os.O_RDONLY | os.O_NONBLOCK)

    def read_some(self, keys: Sequence[str], limit: int) -> list[bytes | None]:
        read = [self.read(key, limit + 1) for key in keys]
        values = [None if found is None else found.data for found in read]
        return [None if v is None or len(v) > limit else v for v in values]

    def read_into(self, key: str, start: int, into: np.ndarray) -> int:
        _context.check_fork()
        if self._look(key) is None:
            raise FileNotFoundError(f"There is no `{key}`.")
        with self._opened(key) as fd:
            return _files.read_into(fd, start, into)

    def read_tail(self, key: str, count: int) -> bytes:
        _context.check_fork()
        found = self._look(key)
        if found is None or found.st_size < count:
            raise MissingError(f"`{key}` is too short")
        with self._opened(key) as fd:
            data = _files.read_bytes(fd, found.st_size - count, count)
        if len(data) < count:
            raise MissingError(f"`{key}` is too short")
        return data

    def start_read(self, key: str, start: int, stop: int | None) -> ts.Future:
        kv = self.kv()
        try:
            self.check_range(key, start if stop is None else stop)
        except (ValueError, OSError) as e:
            promise, future = ts.Promise.new()
            promise.set_exception(e)
            return future
        return kv.read(key, byte_range=slice(start, stop))

    def stamp(self, key: str) -> str:
        try:
            found = self._look(key)
        except ValueError:
            return ""
        if found is None:
            return ""
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def can_list(self) -> bool:
        return True

    def list_top(self) -> dict[str, bool] | None:
        try:
            return _files.names_in(self.path, self.depth)
        except FileNotFoundError:
            return None

    def list_all(self) -> list[str] | None:
        return list(self.survey(2**63))

    def survey(self, most: int) -> dict[str, int]:
        return _files.survey(self.path, self.follow, most)

    def usage(self, keys: Sequence[str] = ()) -> Usage:
        return _files.usage(self.path, keys)

    def glance(self, key: str, limit: int) -> Glance | None:
        return self._read(key, None, limit)

    def is_directory(self, key: str) -> bool:
        return os.path.isdir(self._at(key))

    def may_hold(self, key: str) -> bool:
        return True

    def await_directory(self, key: str) -> None:
        end = time.monotonic() + _SHOWN
        while not self.is_directory(key):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"`{self._at(key)}`, which process 0 has made, is not there. The "
                    "path has to be one that all processes share."
                )
            time.sleep(0.05)


class LocalBackend(_LocalReads):
    """A directory of a local file system, with locks, links and renames."""

    def pinned(self, key: str) -> Backend:
        if _OPEN_FILES is None:
            return self
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        file = Descriptor(self._at(key), flags)
        at = self.url, self.path, self.follow
        return FileBackend(*at, depth=self.depth, key=key, file=file)

    def unpinned(self) -> Backend:
        return self

    def check_writable(self) -> None:
        for parent in pathlib.Path(self.path).parents:
            if parent.is_dir():
                break
            if parent.exists():
                raise NotADirectoryError(
                    errno.ENOTDIR,
                    f"`{parent}` is a file, so that nothing can be saved at `{self}`. "
                    "Choose another path.",
                )

    def check_conditions(self, key: str) -> None:
        pass

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        _files.write(self._at(key), self._depth(key), buffers, sync)

    def stage(self, aside: str, key: str, data: bytes, sync: bool) -> None:
        self.write(staged(aside, key), [data], sync)

    def replace(self, aside: str, key: str, data: bytes, found: Value | None) -> bool:
        now = self.read(key)
        if (now and now.data) != (found and found.data):
            return False
        self.swap(aside, key, data)
        return True

    def swap(self, aside: str, key: str, data: bytes) -> None:
        aside, path = self._at(staged(aside, key)), self._at(key)
        _files.make_directory(os.path.dirname(path), max(0, self._depth(key) - 1))
        _files.adopt_mode(aside, path)
        os.replace(aside, path)

    def writers_lock(self) -> contextlib.AbstractContextManager[bool]:
        return self.lock(wait=True)

    def copy(self, source: str, key: str, sync: bool) -> None:
        try:
            os.link(self._at(source), self._at(key))
            return
        except OSError:
            pass
        with self._opened(source) as fd:
            self.write(key, _files.parts(fd), sync)

    def make_directories(self, keys: Iterable[str]) -> None:
        for key in keys:
            _files.make_directory(self._at(key), self._depth(key))

    def sync_directories(self, keys: Iterable[str]) -> None:
        for key in keys:  # TensorStore leaves that to us.
            _files.sync_directory(self._at(key))

    def sync_above(self, made: Sequence[Renames] = ()) -> None:
        _files.sync_above(self.path, [directory.path for directory in made])

    def synced_together(
        self,
    ) -> contextlib.AbstractContextManager[Callable[[], None] | None]:
        return _files.synced_together(self.path)

    def drop_directory(self, key: str = "") -> None:
        with contextlib.suppress(OSError):
            _files.drop(self._at(key), self._depth(key))

    def delete(self, key: str) -> None:
        _files.remove(self._at(key), self._depth(key))

    def move(self, key: str, into: str, first: str) -> None:
        os.rename(self._at(key), self._at(into))

    # ---- Locks.

    def lock(self, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        return _files.lock(self.path, wait)

    def is_locked(self) -> bool:
        return _files.is_locked(self.path)

    def made(
        self, is_aside: bool = False
    ) -> contextlib.AbstractContextManager[tuple[int | None, Callable[[], bool]]]:
        return _files.made(self.path, self.depth, is_aside)

    # ---- Links.

    def hold(self, key: str, size: int) -> Descriptor:
        self.check_range(key, size)
        fd = Descriptor(self._at(key), os.O_RDONLY)
        if os.fstat(fd.fileno()).st_size != size:
            fd.close()
            raise ValueError(f"`{key}` is not of {size} bytes")
        return fd

    def link_from(self, origin: SavedFile, into: str, sync: bool) -> bool:
        if not isinstance(origin.directory, LocalBackend):
            return False
        source = origin.directory._at(origin.key)
        if origin.held is not None:
            fd = origin.held.fileno()
            if not _files.link_held(fd, source, self._at(into), sync):
                self.write(into, _files.parts(fd), sync)
            return True
        try:
            if origin.directory.check_range(origin.key, origin.size) != origin.size:
                return False
            if sync:
                # The other save may not have been durable.
                _files.sync(source)
            os.link(source, self._at(into))
        except (OSError, ValueError):
            return False
        return True

    # ---- Renames.

    def parent(self) -> "LocalBackend":
        above, depth = os.path.dirname(self.path), max(0, self.depth - 1)
        return LocalBackend(above, above, depth=depth)

    def missing(self) -> list[Renames]:
        above = pathlib.Path(self.path).parents
        return [directory(path) for path in above if not path.exists()]

    def rename(self, target: Renames, mode: int | None = None) -> None:
        _files.adopt_mode(self.path, target.path, mode)
        os.rename(self.path, target.path)

    def exchange(self, target: Renames) -> None:
        _files.adopt_mode(self.path, target.path)
        _files.exchange(self.path, target.path)

    def give(self, key: str, target: Renames) -> None:
        os.rename(self._at(key), os.path.join(target.path, key))

    def write_by(self, key: str, write: Callable[[BinaryIO], None], sync: bool) -> None:
        with open(self._at(key), "xb") as file:
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def become(self, key: str, target: Renames, overwrite: bool) -> None:
        file, path = self._at(key), target.path
        _files.adopt_mode(file, path)
        if overwrite:
            os.replace(file, path)
            return
        try:
            os.link(file, path)
        except FileExistsError:
            raise
        except OSError:  # There are no links.
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.replace(file, path)


@dataclasses.dataclass(frozen=True)
class FileBackend(LocalBackend):
    """A directory of which one file, `key`, is open: it is read as it was when it was
    opened, whatever has come to its name since. It is open for as long as somebody has
    this."""

    key: str = ""
    file: Descriptor | None = None

    @property
    def _fd(self) -> int:
        assert self.file is not None
        return self.file.fileno()

    def unpinned(self) -> Backend:
        return LocalBackend(self.url, self.path, self.follow, depth=self.depth)

    def spec(self, key: str = "") -> dict[str, Any]:
        files = super().spec(key)
        if key:
            return files
        pinned = {"driver": "file", "path": f"{_OPEN_FILES}/{self._fd}"}
        layers = [{"base": files}, {"base": pinned, "exact": self.key}]
        return {"driver": "kvstack", "layers": layers}

    def kv(self) -> ts.KvStore:
        return _kv.open(self)  # What is kept would keep the file open.

    def _look(self, key: str) -> os.stat_result | None:
        return os.fstat(self._fd) if key == self.key else super()._look(key)

    def _opened(self, key: str) -> contextlib.AbstractContextManager[int]:
        if key == self.key:
            return contextlib.nullcontext(self._fd)
        return super()._opened(key)
