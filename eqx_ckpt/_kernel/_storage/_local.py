"""Directories of a local file system: they have locks, their files have several names,
and each can be put in the place of another, atomically.
"""

import contextlib
import dataclasses
import errno
import itertools as it
import os
import pathlib
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorstore as ts

from .._errors import MissingError
from .._format import _files
from . import _context, _directory_lock, _local_files
from ._backend import Backend, Usage, Value
from ._descriptor import Descriptor, DIRECTORY, NEW_FILE


_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
# What the system calls the files that a process has open.
_OPEN_FILES = next((p for p in ("/proc/self/fd", "/dev/fd") if os.path.isdir(p)), None)
# A directory that is only passed through need not be readable.
_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
# Directories that this process has made and locked: by their paths, the descriptors of
# their locks.
_own_directories: dict[str, Descriptor] = {}
# Directories that this process has synced, with all above them: by path, the device,
# inode and ctime right before. Another directory at the path has another inode, and a
# new name in it changes its ctime.
_lasting: dict[str, tuple[int, int, int]] = {}
_MOST_LASTING = 4096


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors of the system in the block get this path as their file name. By themselves
    they have the number of an open directory, a name in it, or nothing."""
    try:
        yield
    except OSError as e:
        has_path = isinstance(e.filename, str) and os.path.isabs(e.filename)
        # One that has no number says in its own words what went wrong.
        if e.errno is not None and not has_path:
            e.filename = path
        raise


class SavedFile(NamedTuple):
    """A file that another save has written, of `size` bytes. `held`: its descriptor,
    which outlives its name."""

    directory: Backend
    key: str
    size: int
    held: Descriptor | None = None


@dataclasses.dataclass(frozen=True)
class LocalDirectory(Backend):
    """A directory of a local file system. `url` is the path as messages have it, and
    `path` what the system calls it.

    `follow`: whether what is read in it may be a symbolic link. It itself may be.
    `depth`: how many last parts of its path were added by `below` to a directory that
    somebody has named. Whoever lists, writes or deletes goes through no link among
    these parts. `pin`: the key of a file and its descriptor. It is read as it was when
    it was opened, whatever has come to its name since, and is open for as long as
    somebody has this.
    """

    url: str
    path: str
    follow: bool = False
    depth: int = dataclasses.field(default=0, compare=False, kw_only=True)
    pin: tuple[str, Descriptor] | None = dataclasses.field(default=None, kw_only=True)

    is_remote = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    def target(self) -> str:
        return os.path.realpath(self.path)

    def real(self) -> "LocalDirectory":
        return LocalDirectory(self.url, self.target(), self.follow)

    def below(self, key: str) -> "LocalDirectory":
        if not key:
            return self
        at = f"{self.url}/{key}", f"{self.path}/{key}", self.follow
        depth = 0 if self.follow else self.depth + 1 + key.count("/")
        return LocalDirectory(*at, depth=depth)

    def split(self) -> tuple["LocalDirectory", str]:
        # A link is one to the file.
        above, key = os.path.split(self.target())
        return LocalDirectory(above, above, self.follow), key

    def parent(self) -> "LocalDirectory":
        """The directory that this one is in."""
        above, depth = os.path.dirname(self.path), max(0, self.depth - 1)
        return LocalDirectory(above, above, depth=depth)

    def missing(self) -> list["LocalDirectory"]:
        """The directories on the way to this one that are not there, the last first."""
        above = map(str, pathlib.Path(self.path).parents)
        paths = list(it.filterfalse(os.path.exists, above))
        return list(map(LocalDirectory, paths, paths))

    def pinned(self, key: str) -> "LocalDirectory":
        if _OPEN_FILES is None:
            return self
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        file = Descriptor(f"{self.path}/{key}", flags)
        return dataclasses.replace(self, pin=(key, file))

    def unpinned(self) -> "LocalDirectory":
        return self if self.pin is None else dataclasses.replace(self, pin=None)

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
        files = {"driver": "file", "path": f"{self.path}/{prefix}"}
        if key or self.pin is None:
            return files
        path = f"{_OPEN_FILES}/{self.pin[1].fileno()}"
        layer = {"base": {"driver": "file", "path": path}, "exact": self.pin[0]}
        return {"driver": "kvstack", "layers": [{"base": files}, layer]}

    def kv(self) -> ts.KvStore:
        # What is kept would keep the file open.
        return super().kv() if self.pin is None else self.open_kv()

    def _look(self, key: str) -> os.stat_result | None:
        """The facts of a regular file; None where there is none.

        **Raises:** `ValueError` for anything else that is there, and, unless `follow`,
        for a link on the way to it.
        """
        if self.pin is not None and key == self.pin[0]:
            return os.fstat(self.pin[1].fileno())
        path, look = self.path, os.stat if self.follow else os.lstat
        parts = key.split("/")
        found = None
        for number, part in enumerate(parts, 1):
            path = f"{path}/{part}"
            try:
                found = look(path)
            except OSError as e:
                if e.errno in _local_files.NOWHERE:
                    return None
                raise
            is_right = stat.S_ISREG if number == len(parts) else stat.S_ISDIR
            if not is_right(found.st_mode):
                here = "/".join(parts[:number])
                if stat.S_ISLNK(found.st_mode):
                    raise ValueError(
                        f"`{here}` in `{self}` is a symbolic link, which may lead "
                        "anywhere. Put the file in its place; or, if you trust it, "
                        "open the checkpoint with `follow_symlinks=True`"
                    )
                what = "file" if number == len(parts) else "directory"
                raise ValueError(f"`{here}` in `{self}` is not a {what}")
        return found

    def _open(self, key: str) -> contextlib.AbstractContextManager[int]:
        """Opens a regular file. **Raises:** as `_look`, and `FileNotFoundError` if
        there is none."""
        _context.check_fork()
        if self.pin is not None and key == self.pin[0]:
            return contextlib.nullcontext(self.pin[1].fileno())
        if self._look(key) is None:
            raise FileNotFoundError(f"There is no `{key}`.")
        return Descriptor(f"{self.path}/{key}", os.O_RDONLY | os.O_NONBLOCK)

    def has(self, key: str) -> bool:
        return self._look(key) is not None

    def stamp(self, key: str) -> str:
        with contextlib.suppress(ValueError):
            if found := self._look(key):
                return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
        return ""

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
        try:
            with _named(f"{self.url}/{key}"), self._open(key) as fd:
                # Another file may have come in the place of the one that was looked at.
                found = os.fstat(fd)
                if limit is not None and found.st_size > limit:
                    raise ValueError(f"`{key}` is longer than {limit} bytes")
                size = found.st_size if stop is None else min(stop, found.st_size)
                data = _local_files.read_bytes(fd, 0, size)
                return Value(data, time=found.st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_into(self, key: str, start: int, *into: np.ndarray) -> int:
        with _named(f"{self.url}/{key}"), self._open(key) as fd:
            return _local_files.read_into(fd, start, *into)

    def read_parts(self, key: str, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        with _named(f"{self.url}/{key}"), self._open(key) as fd:
            for start, into in parts:
                if _local_files.read_into(fd, start, into) < into.size:
                    raise MissingError(f"the end of `{key}` is missing")

    def start_read(self, key: str, start: int, stop: int | None) -> ts.Future:
        self.check_range(key, abs(start) if stop is None else stop)
        return self.kv().read(key, byte_range=slice(start, stop))

    # ---- Lists.

    def list_top(self) -> dict[str, bool] | None:
        try:
            with _named(self.url), self._open_directory(DIRECTORY) as fd:
                names = _local_files.names_in(fd)
        except FileNotFoundError:
            return None
        return {x: names[x] for x in names if not _files.is_of_system(x)}

    def names(self) -> list[str]:
        """All names here, whatever they are of: many of them several times as fast as
        by `list_top`."""
        with _named(self.url), self._open_directory(DIRECTORY) as fd:
            return os.listdir(fd)

    def list_all(self, start: str = "") -> list[str]:
        return [key for key in self.survey(2**63) if key.startswith(start)]

    def is_directory(self, key: str) -> bool:
        return os.path.isdir(f"{self.path}/{key}")

    def survey(self, most: int) -> dict[str, int]:
        sizes: dict[str, int] = {}
        count, above, follow = 0, [""], self.follow
        while above:
            key = above.pop()
            with os.scandir(f"{self.path}/{key}" if key else self.path) as entries:
                for entry in entries:
                    count += 1
                    below = f"{key}{entry.name}"
                    if entry.is_dir(follow_symlinks=follow):
                        above.append(below + "/")
                    elif entry.is_file(follow_symlinks=follow):
                        sizes[below] = entry.stat(follow_symlinks=follow).st_size
                    else:
                        self._look(below)
                        raise ValueError(f"`{below}` in `{self}` is not a file")
                    if count > most:
                        raise ValueError(f"it has more than {most} files")
        return sizes

    def usage(self, keys: Sequence[str] = ()) -> Usage:
        # Links count as nothing.
        above = []
        found = [os.lstat(f"{self.path}/{key}") for key in keys]
        if not keys and os.path.isdir(self.path):
            above.append(self.path)
        elif not keys:
            found.append(os.lstat(self.path))
        while above:
            # Whoever saves there deletes what was there before.
            entries: list[os.DirEntry[str]] = []
            with contextlib.suppress(FileNotFoundError):
                entries = list(os.scandir(above.pop()))
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    above.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(entry.stat(follow_symlinks=False))
        return Usage(
            len(found),
            sum(x.st_size for x in found),
            sum(x.st_size for x in found if x.st_nlink == 1),
            max((x.st_mtime for x in found), default=None),
        )

    # ---- Writes.

    def check_writable(self) -> None:
        for parent in map(str, pathlib.Path(self.path).parents):
            # What the system refuses is raised. `pathlib` of Python 3.14 hides it.
            found = LocalDirectory(parent, parent).entry()
            if found == "directory":
                break
            if found != "nothing":
                raise NotADirectoryError(
                    errno.ENOTDIR,
                    f"`{parent}` is a file, so that nothing can be saved at `{self}`. "
                    "Choose another path.",
                )

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        above, _, name = f"{self.path}/{key}".rpartition("/")
        # The descriptor of its lock, if this process holds it: without one the way to
        # the directory is walked for each file.
        borrowed = _own_directories.get(above)
        directory = borrowed or self.below(key).parent()._open_directory()
        with _named(f"{self.url}/{key}"), Descriptor(name, NEW_FILE, directory) as fd:
            if directory is not borrowed:
                directory.close()
            _local_files.write_buffers(fd, buffers, sync)

    def replace(
        self, key: str, data: bytes, found: Value | None, staged: str = ""
    ) -> Value | None:
        now = self.read(key)
        if (now and now.data) != (found and found.data):
            return None
        self.rename_over(staged, key)
        return Value(data)

    def rename_over(self, staged: str, key: str) -> None:
        """Puts the file `staged` in the place of the file `key`, whatever that is."""
        above = key.rpartition("/")[0]
        if above:
            self.make_directories([above])
        self.below(staged).rename(self.below(key))

    def lock(self, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        return _directory_lock.DirectoryLock(self.path, wait)

    def is_locked(self) -> bool:
        return _directory_lock.is_locked(self.path)

    @contextlib.contextmanager
    def make_locked(self, is_aside: bool = False) -> Iterator[os.stat_result]:
        """Makes the directory and those above it, and holds its lock. Yields its state,
        by which `is_same` knows it. If it `is_aside`, nobody else may look into it; the
        mode in the state is that from before."""
        path = self.path
        lock = _directory_lock.DirectoryLock(path, True, self._make_directory)
        with lock:
            fd = lock.descriptor.fileno()
            found = os.fstat(fd)
            if is_aside:
                # Before anything is in it. Nobody can ask what the umask is. Where the
                # file system has no modes, the one that all files have stays.
                with contextlib.suppress(OSError):
                    os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~0o077)
            try:
                _own_directories[path] = lock.descriptor
                yield found
            finally:
                _own_directories.pop(path, None)

    def is_same(self, made: os.stat_result) -> bool:
        """Whether the directory that was `made` is still what is there."""
        return _directory_lock.is_same(self.path, made)

    def _make_directory(self) -> Descriptor:
        """Makes the directory, unless it is there, and opens it."""
        flags = DIRECTORY | os.O_NOFOLLOW
        for _ in range(99):
            # Before it had its lock another process took it for a leftover; or what it
            # is in was deleted.
            with contextlib.suppress(FileNotFoundError):
                return self._open_directory(flags, make=True)
        return self._open_directory(flags, make=True)

    def _open_directory(self, flags: int = _WAY, make: bool = False) -> Descriptor:
        """Opens the directory, to get at what is in it; it is made where there is none,
        if that is said. None of the last `depth` parts of its path may be a link, or
        become one meanwhile: each is opened in the one before."""
        top, *inside = self.path.rsplit("/", self.depth) if self.depth else [self.path]
        if make and not os.path.isdir(top):
            with contextlib.suppress(FileExistsError):
                os.makedirs(top)
        way = Descriptor(top or "/", _WAY if inside else flags)
        for number, part in enumerate(inside, 1):
            is_last = number == len(inside)
            own = os.O_NOFOLLOW | (flags if is_last else _WAY)
            try:
                try:
                    below = Descriptor(part, own, way)
                except FileNotFoundError:
                    if not make:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=way.fileno())
                    below = Descriptor(part, own, way)
            except OSError as e:
                is_link = e.errno in (errno.ENOTDIR, errno.ELOOP)
                code = errno.ENOTDIR if is_link else e.errno
                why = "Not a directory, or a symbolic link" if is_link else e.strerror
                raise OSError(code, why, self.path) from None
            way.close()
            way = below
        return way

    def make_directories(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.below(key)._open_directory(make=True).close()

    def sync_directories(self, keys: Iterable[str]) -> None:
        for key in keys:  # TensorStore leaves that to us.
            _local_files.sync_directory(f"{self.path}/{key}" if key else self.path)

    def sync_above(self, made: Sequence[Backend] = ()) -> None:
        for directory in made:
            _lasting.pop(directory.url, None)
        found: dict[str, tuple[int, int, int]] = {}
        for above in map(str, pathlib.Path(self.path).parents):
            there, known = os.stat(above), _lasting.get(above)
            stamp = there.st_dev, there.st_ino, there.st_ctime_ns
            if known == stamp:
                break  # Its names are those that were synced.
            _local_files.sync_directory(above)
            found[above] = stamp
            if known is not None and known[:2] == stamp[:2]:
                break  # Only names in it are new: those that lead to it were synced.
        if len(_lasting) > _MOST_LASTING:
            _lasting.clear()
        _lasting.update(found)

    @contextlib.contextmanager
    def synced_together(self) -> Iterator[Callable[[], None] | None]:
        """Yields a function that makes all files and names here durable in one step,
        together with what others have written to the same file system. It raises an
        `OSError` if anything that was written since could not be. None: each file and
        directory has to be synced by itself."""
        if not _local_files.reports_all(self.path):
            yield None
            return
        # `syncfs` tells what could not be written since this was opened.
        with Descriptor(self.path, DIRECTORY) as fd:
            yield lambda: _local_files.syncfs(fd)

    def _clear(self) -> None:
        """Deletes what is the system's in a directory that has nothing else."""
        with Descriptor(self.path, DIRECTORY | os.O_NOFOLLOW) as fd:
            names = _local_files.names_in(fd)
            if all(map(_files.is_of_system, names)):
                for name in names:
                    _local_files.remove(fd, name)

    def drop_directory(self, key: str = "") -> None:
        with contextlib.suppress(OSError):
            at = self.below(key)
            at._clear()
            with at.parent()._open_directory() as fd:
                os.rmdir(at.name, dir_fd=fd)

    def delete_files(self, keys: Iterable[str]) -> None:
        for key in keys:
            at = self.below(key)
            with contextlib.suppress(FileNotFoundError), _named(at.url):
                with at.parent()._open_directory() as fd:
                    os.unlink(at.name, dir_fd=fd)

    def delete_as(self, key: str, stamp: str) -> bool:
        if (now := self.stamp(key)) == stamp:
            self.delete_files([key])
        return now in (stamp, "")

    def delete(self, key: str) -> None:
        at = self.below(key)
        # Others may be deleting the same leftovers.
        with contextlib.suppress(FileNotFoundError), _named(at.url):
            os.lstat(at.path)  # Mostly there is nothing.
            with at.parent()._open_directory() as fd:
                _local_files.remove(fd, at.name)

    # ---- Links and renames.

    def copy(self, source: str, key: str, sync: bool) -> None:
        with contextlib.suppress(OSError):
            os.link(f"{self.path}/{source}", f"{self.path}/{key}")
            return
        with self._open(source) as fd:
            self.write(key, _local_files.parts(fd), sync)

    def hold(self, key: str, size: int) -> Descriptor:
        """A descriptor of a file. **Raises:** `ValueError` or `OSError` if there is
        none of `size` bytes."""
        self.check_range(key, size)
        fd = Descriptor(f"{self.path}/{key}", os.O_RDONLY)
        if os.fstat(fd.fileno()).st_size != size:
            fd.close()
            raise ValueError(f"`{key}` is not of {size} bytes")
        return fd

    def link_from(self, origin: SavedFile, into: str, sync: bool) -> bool:
        """Gives a file of another directory a second name in this one. Returns whether
        it has: not in another file system, nor in one without links. A file that is
        held is copied then."""
        if not isinstance(origin.directory, LocalDirectory):
            return False
        source, path = f"{origin.directory.path}/{origin.key}", f"{self.path}/{into}"
        try:
            held = origin.held or origin.directory.hold(origin.key, origin.size)
        except (OSError, ValueError):
            return False
        with held if origin.held is None else contextlib.nullcontext():
            fd = held.fileno()
            with contextlib.suppress(OSError):
                if sync:
                    _local_files.fsync(fd)  # The other save may not have been durable.
                os.link(source, path)
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    return True
                os.unlink(path)  # It has lost that name.
            if origin.held is None:
                return False
            self.write(into, _local_files.parts(fd), sync)
            return True

    def move(self, key: str, into: str, first: str) -> bool:
        os.rename(f"{self.path}/{key}", f"{self.path}/{into}")
        return True

    def rename(
        self, target: "LocalDirectory", mode: int | None = None, overwrite: bool = True
    ) -> None:
        """Renames this, a file or a directory, to where nothing is, or to the place of
        a file or an empty directory, whose mode it gets; else `mode`, if that is said.
        Without `overwrite` a file keeps its old name too, where there are links.

        **Raises:** `FileExistsError` if there is a file, and not `overwrite`.
        """
        _local_files.adopt_mode(self.path, target.path, mode)
        if not overwrite:
            try:
                os.link(self.path, target.path)
                return
            except FileExistsError:
                raise
            except OSError:  # There are no links.
                if os.path.lexists(target.path):
                    raise FileExistsError(target.path) from None
        try:
            os.replace(self.path, target.path)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            target._clear()
            os.replace(self.path, target.path)

    def exchange(self, target: "LocalDirectory") -> None:
        """Lets two directories change places. This one gets the mode of the `target`,
        which keeps its own."""
        _local_files.adopt_mode(self.path, target.path)
        _local_files.exchange(self.path, target.path)
