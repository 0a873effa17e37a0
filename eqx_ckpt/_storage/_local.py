"""Directories of a local file system, and the one file of one that is open."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Literal

import numpy as np
import tensorstore as ts

from .._errors import MissingError
from .._format import _text
from . import _context, _descriptor, _kv, _local_files
from ._backend import Renames, SavedFile, Usage, Value
from ._descriptor import Descriptor


_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
# What the system calls the files that a process has open.
_OPEN_FILES = next((p for p in ("/proc/self/fd", "/dev/fd") if os.path.isdir(p)), None)


def directory(path: str | os.PathLike[str]) -> "LocalBackend":
    return LocalBackend(os.fspath(path), os.fspath(path))


@dataclasses.dataclass(frozen=True)
class LocalBackend(Renames):
    """A directory of a local file system. `url` is the path as messages have it.

    `follow`: whether what is read in it may be a symbolic link. It itself may be.
    `depth`: how many last parts of its path are `below` a directory that somebody has
    named, and no links either, for whoever lists, writes or deletes.
    """

    url: str
    path: str
    follow: bool = False
    depth: int = dataclasses.field(default=0, compare=False, kw_only=True)

    def __str__(self) -> str:
        """For messages: a path may have any characters."""
        return _text.escape(self.url)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def target(self) -> str:
        return os.path.realpath(self.path)

    def real(self) -> "LocalBackend":
        return LocalBackend(self.url, self.target(), self.follow)

    def below(self, key: str) -> "LocalBackend":
        if not key:
            return self
        at = f"{self.url}/{key}", f"{self.path}/{key}", self.follow
        depth = 0 if self.follow else self.depth + 1 + key.count("/")
        return LocalBackend(*at, depth=depth)

    def split(self) -> tuple["LocalBackend", str]:
        # A link is one to the file.
        above, key = os.path.split(self.target())
        return LocalBackend(above, above, self.follow), key

    def pinned(self, key: str) -> "LocalBackend":
        if _OPEN_FILES is None:
            return self
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        file = Descriptor(f"{self.path}/{key}", flags)
        at = self.url, self.path, self.follow
        return FileBackend(*at, depth=self.depth, key=key, file=file)

    def entry(self) -> Literal["file", "directory", "other", "nothing"]:
        try:
            mode = os.stat(self.path).st_mode
        except OSError as e:
            if e.errno in _NOTHING:
                return "nothing"
            raise
        if stat.S_ISDIR(mode):
            return "directory"
        return "file" if stat.S_ISREG(mode) else "other"

    def is_link(self, key: str = "") -> bool:
        return os.path.islink(f"{self.path}/{key}" if key else self.path)

    # ---- Reads.

    def spec(self, key: str = "") -> dict[str, Any]:
        prefix = key + "/" if key else ""
        return {"driver": "file", "path": f"{self.path}/{prefix}"}

    def kv(self) -> ts.KvStore:
        _context.check_fork()
        return _kv.known(self)

    def explain(self, error: Exception) -> Exception:
        return _kv.explain(str(self), error)

    def _look(self, key: str) -> os.stat_result | None:
        return _local_files.look(self.path, key, self.follow)

    def _open(self, key: str) -> contextlib.AbstractContextManager[int]:
        """Opens a regular file. **Raises:** as `look`, and `FileNotFoundError` if there
        is none."""
        if _local_files.look(self.path, key, self.follow) is None:
            raise FileNotFoundError(f"There is no `{key}`.")
        return Descriptor(f"{self.path}/{key}", os.O_RDONLY | os.O_NONBLOCK)

    def has(self, key: str) -> bool:
        return self._look(key) is not None

    def stamp(self, key: str) -> str:
        try:
            found = self._look(key)
        except ValueError:
            return ""
        if found is None:
            return ""
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def size(self, key: str) -> int | None:
        found = self._look(key)
        return None if found is None else found.st_size

    def check_range(self, key: str, stop: int) -> int | None:
        size = self.size(key)
        if size is None:
            raise MissingError(f"`{key}` is missing")
        if size < stop:
            raise MissingError(f"the end of `{key}` is missing")
        return size

    def read(
        self, key: str, stop: int | None = None, limit: int | None = None
    ) -> Value | None:
        _context.check_fork()
        try:
            with self._open(key) as fd:
                # Another file may have come in the place of the one that was looked at.
                found = os.fstat(fd)
                if limit is not None and found.st_size > limit:
                    raise ValueError(f"`{key}` is longer than {limit} bytes")
                size = found.st_size if stop is None else min(stop, found.st_size)
                into = np.empty(size, np.uint8)
                data = into[: _local_files.read_into(fd, 0, into)].tobytes()
                return Value(data, time=found.st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_into(self, key: str, start: int, *into: np.ndarray) -> int:
        _context.check_fork()
        with self._open(key) as fd:
            return _local_files.read_into(fd, start, *into)

    def start_read(self, key: str, start: int, stop: int | None) -> ts.Future:
        kv = self.kv()
        try:
            self.check_range(key, abs(start) if stop is None else stop)
        except (ValueError, OSError) as e:
            promise, future = ts.Promise.new()
            promise.set_exception(e)
            return future
        return kv.read(key, byte_range=slice(start, stop))

    # ---- Lists.

    def list_top(self) -> dict[str, bool] | None:
        try:
            flags = _descriptor.DIRECTORY
            with _local_files.open_directory(self.path, self.depth, flags) as fd:
                return _local_files.names_in(fd)
        except FileNotFoundError:
            return None

    def list_all(self, start: str = "") -> list[str]:
        return [key for key in self.survey(2**63) if key.startswith(start)]

    def is_directory(self, key: str) -> bool:
        return os.path.isdir(f"{self.path}/{key}")

    def survey(self, most: int) -> dict[str, int]:
        return _local_files.survey(self.path, self.follow, most)

    def usage(self, keys: Sequence[str] = ()) -> Usage:
        return _local_files.usage(self.path, keys)

    # ---- Writes.

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

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        depth = 0 if self.follow else self.depth + 1 + key.count("/")
        _local_files.write(f"{self.path}/{key}", depth, buffers, sync)

    def replace(
        self, key: str, data: bytes, found: Value | None, aside: str = ""
    ) -> bool:
        now = self.read(key)
        if (now and now.data) != (found and found.data):
            return False
        self.swap(aside, key)
        return True

    def swap(self, aside: str, key: str) -> None:
        above = key.rpartition("/")[0]
        if above:
            self.make_directories([above])
        _local_files.adopt_mode(f"{self.path}/{aside}", f"{self.path}/{key}")
        os.replace(f"{self.path}/{aside}", f"{self.path}/{key}")

    def lock(self, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        return _descriptor.Lock(self.path, wait)

    def is_locked(self) -> bool:
        return _descriptor.is_locked(self.path)

    def copy(self, source: str, key: str, sync: bool) -> None:
        try:
            os.link(f"{self.path}/{source}", f"{self.path}/{key}")
            return
        except OSError:
            pass
        with self._open(source) as fd:
            self.write(key, _local_files.parts(fd), sync)

    def make_directories(self, keys: Iterable[str]) -> None:
        for key in keys:
            at = self.below(key)
            _local_files.open_directory(at.path, at.depth, make=True).close()

    def sync_directories(self, keys: Iterable[str]) -> None:
        for key in keys:  # TensorStore leaves that to us.
            _local_files.sync_directory(f"{self.path}/{key}" if key else self.path)

    def sync_above(self, made: Sequence[Renames] = ()) -> None:
        _local_files.sync_above(self.path, [directory.path for directory in made])

    def synced_together(
        self,
    ) -> contextlib.AbstractContextManager[Callable[[], None] | None]:
        return _local_files.synced_together(self.path)

    def drop_directory(self, key: str = "") -> None:
        with contextlib.suppress(OSError):
            at = self.below(key)
            _local_files.drop(at.path, at.depth)

    def delete(self, key: str) -> None:
        at = self.below(key)
        _local_files.remove(at.path, at.depth)

    def move(self, key: str, into: str, first: str) -> None:
        os.rename(f"{self.path}/{key}", f"{self.path}/{into}")

    # ---- Links.

    def hold(self, key: str, size: int) -> Descriptor:
        self.check_range(key, size)
        fd = Descriptor(f"{self.path}/{key}", os.O_RDONLY)
        if os.fstat(fd.fileno()).st_size != size:
            fd.close()
            raise ValueError(f"`{key}` is not of {size} bytes")
        return fd

    def link_from(self, origin: SavedFile, into: str, sync: bool) -> bool:
        if not isinstance(origin.directory, LocalBackend):
            return False
        source = f"{origin.directory.path}/{origin.key}"
        if origin.held is not None:
            fd = origin.held.fileno()
            if not _local_files.link_held(fd, source, f"{self.path}/{into}", sync):
                self.write(into, _local_files.parts(fd), sync)
            return True
        try:
            if origin.directory.check_range(origin.key, origin.size) != origin.size:
                return False
            if sync:
                # The other save may not have been durable.
                _local_files.sync(source)
            os.link(source, f"{self.path}/{into}")
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

    def made(
        self, is_aside: bool = False
    ) -> contextlib.AbstractContextManager[tuple[int | None, Callable[[], bool]]]:
        return _local_files.made(self.path, self.depth, is_aside)

    def rename(self, target: Renames, mode: int | None = None) -> None:
        _local_files.adopt_mode(self.path, target.path, mode)
        os.rename(self.path, target.path)

    def exchange(self, target: Renames) -> None:
        _local_files.adopt_mode(self.path, target.path)
        _local_files.exchange(self.path, target.path)

    def write_by(self, key: str, write: Callable[[BinaryIO], None], sync: bool) -> None:
        with open(f"{self.path}/{key}", "xb") as file:
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def become(self, key: str, target: Renames, overwrite: bool) -> None:
        file, path = f"{self.path}/{key}", target.path
        _local_files.adopt_mode(file, path)
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

    def unpinned(self) -> LocalBackend:
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

    def _open(self, key: str) -> contextlib.AbstractContextManager[int]:
        if key == self.key:
            return contextlib.nullcontext(self._fd)
        return super()._open(key)
