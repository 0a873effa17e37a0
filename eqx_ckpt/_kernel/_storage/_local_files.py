"""Files of a local file system: their reads, writes, deletion and mounts."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .._format import _text
from .._runtime import _log
from ._descriptor import Descriptor, DIRECTORY


# The longest names and paths of file systems, in bytes.
LONGEST_NAME, LONGEST_PATH = 255, 4096
# Errors of the system for names that no file has, or that are too long for one.
NOWHERE = errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG
# Errors of a system that has no more files or memory for this process.
EXHAUSTED = errno.EMFILE, errno.ENFILE, errno.ENOMEM
# The file systems of this machine itself, as `statfs` of Linux numbers them. A network
# file system can lose a memory-mapped file while we read it, which is a SIGBUS.
_LOCAL_TYPES = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
}
# File systems of which one call syncs all files, and reports those that could not be
# written. In others, such as overlays and FUSE, it may not reach the disk.
_SYNCED_WHOLE = frozenset(("ext4", "xfs", "btrfs"))
# The buffers that one system call reads into.
_MOST_BUFFERS = 1024
# The bytes that each thread has read here, and not TensorStore. Threads count apart, as
# Ctrl-C could leave a lock locked.
counts: dict[int, int] = {}


def read_into(fd: int, start: int, *into: np.ndarray) -> int:
    """Reads an open file from a byte on into arrays of bytes, one after the other.
    Returns how many bytes the file has there. All reads of local files but
    TensorStore's are made here."""
    # The next one to be filled is the last of those `left`.
    done, left = 0, [array.data for array in reversed(into) if array.size]
    while left:
        count = os.preadv(fd, left[: -_MOST_BUFFERS - 1 : -1], start + done)
        if count == 0:
            break
        done += count
        while left and count >= len(left[-1]):
            count -= len(left.pop())
        if count:
            left[-1] = left[-1][count:]
    thread = threading.get_ident()
    counts[thread] = counts.get(thread, 0) + done
    return done


def read_bytes(fd: int, start: int, size: int) -> bytes:
    """So many bytes of an open file, unless it has fewer."""
    into = np.empty(size, np.uint8)
    return into[: read_into(fd, start, into)].tobytes()


# At most so many directories are open, one in the other: each takes a descriptor.
_MAX_OPEN_DEPTH = 64


def adopt_mode(path: str, target: str, mode: int | None = None) -> None:
    """Gives a file or directory the mode, the group and the access list of the one
    whose place it is about to take; or `mode`, if there is none. Where it cannot have
    that group or list, its own group gets nothing."""
    with contextlib.suppress(OSError):
        own, found, is_like = os.lstat(path), None, True
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(target)
            mode = stat.S_IMODE(found.st_mode)
        access = _access_list(target) if found else b""
        if found:
            is_like = found.st_gid == own.st_gid and access == _access_list(path)
        if mode is None or is_like and mode == stat.S_IMODE(own.st_mode):
            return
        with Descriptor(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            if found and not is_like:
                try:
                    os.fchown(fd, -1, found.st_gid)
                    if access:
                        os.setxattr(fd, _ACCESS, access)
                    elif _access_list(path):
                        os.removexattr(fd, _ACCESS)
                except OSError:
                    mode &= ~stat.S_IRWXG
            os.fchmod(fd, mode)


_ACCESS = "system.posix_acl_access"


def _access_list(path: str) -> bytes:
    """The access list of a file, as Linux encodes it; empty if it has none."""
    with contextlib.suppress(AttributeError, OSError):  # Linux has these.
        return os.getxattr(path, _ACCESS)
    return b""


_MAX_BUFFERS = 512
_MAX_BATCH = 2**18
# After so many bytes of a file that is to be synced, the system starts to write them to
# the disk, while the next ones are made.
_WRITE_BACK = 8 * 2**20


def write_buffers(fd: int, buffers: Iterable[Any], sync: bool) -> None:
    """Writes buffers, which are drawn one by one, to an open file."""
    waiting, left, is_more = 0, iter(buffers), True
    while is_more:
        size, batch = 0, []
        is_more = False
        for buffer in left:
            batch.append(memoryview(buffer))
            size += batch[-1].nbytes
            if size >= _MAX_BATCH or len(batch) >= _MAX_BUFFERS:
                is_more = True
                break
        waiting += size
        done = 0  # Buffers that are written whole: a write may take fewer bytes.
        while size:
            written = os.writev(fd, batch[done:])
            size -= written
            while done < len(batch) and written >= batch[done].nbytes:
                written -= batch[done].nbytes
                done += 1
            if written:
                batch[done] = batch[done].cast("B")[written:]
        if sync and waiting >= _WRITE_BACK:
            _start_write_back(fd)
            waiting = 0
    if sync:
        fsync(fd)


def fsync(fd: int) -> None:
    """Makes an open file or directory durable. On macOS the system's `fsync` leaves it
    in the cache of the drive, which may write later files first."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        # Not all file systems have it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, full)
            return
    os.fsync(fd)


_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _offset = ctypes.c_int64
    _sync_file_range.argtypes = [ctypes.c_int, _offset, _offset, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


def _start_write_back(fd: int) -> None:
    """Lets the system begin to write what a file has to the disk, if it can. Whatever
    comes of it, the file has still to be synced."""
    if _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def parts(fd: int) -> Iterator[bytes]:
    """The bytes of an open file, a few at a time. **Raises:** `OSError` if it loses
    some meanwhile."""
    size = os.fstat(fd).st_size
    for start in range(0, size, _MAX_BATCH):
        part = read_bytes(fd, start, min(_MAX_BATCH, size - start))
        if len(part) < min(_MAX_BATCH, size - start):
            raise OSError(errno.EIO, "A file that is copied has lost its end")
        yield part


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable, where the file system can do that, and
    this process may read it."""
    with contextlib.suppress(PermissionError), Descriptor(path, DIRECTORY) as fd:
        try:
            fsync(fd)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            device = os.fstat(fd).st_dev
            if device not in _unsynced:
                _unsynced.add(device)
                where = f"The file system of `{_text.escape(path)}`"
                what = "cannot sync directories: a power cut may take new names away"
                _log.say(_log.WARNING, f"{where} {what}", path=path)


# File systems that cannot sync directories, of which a log line has said so.
_unsynced: set[int] = set()


def names_in(fd: int) -> dict[str, bool]:
    """The names in an open directory, and whether each is of a directory."""
    names: dict[str, bool] = {}
    with os.scandir(fd) as entries:
        for entry in entries:
            names[entry.name] = entry.is_dir(follow_symlinks=False)
    return names


def remove(above: int, name: str, way: Sequence[int] = ()) -> None:
    """Deletes a file or a directory in an open one, by descriptors: whatever comes to
    the place of a directory that is being deleted is left alone. `way`: the descriptors
    of the directories that this is in, from the one that the first call deletes down to
    `above`; none in that call."""
    with contextlib.suppress(FileNotFoundError):
        try:
            here = Descriptor(name, DIRECTORY | os.O_NOFOLLOW, above)
        except OSError as e:
            if e.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=above)
            return
        with here as fd:
            while True:
                names = names_in(fd)
                for inner, is_directory in names.items():
                    if is_directory and len(way) < _MAX_OPEN_DEPTH:
                        remove(fd, inner, [*way, fd])
                        continue
                    # What has become a directory is one in the next list.
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        if is_directory:
                            to = secrets.token_hex(16)
                            os.rename(inner, to, src_dir_fd=fd, dst_dir_fd=way[0])
                        else:
                            os.unlink(inner, dir_fd=fd)
                try:
                    os.rmdir(name, dir_fd=above)
                    return
                except OSError as e:
                    # What is deeper was moved up here, after the names were listed.
                    is_full = e.errno in (errno.ENOTEMPTY, errno.EEXIST)
                    if way or not names or not is_full:
                        raise


_exchange_flag = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS.
_at_cwd = -100


def exchange(a: str, b: str) -> None:
    """Lets two directories change places, atomically.

    **Raises:** `OSError` with the error of the system, and no text of its own.
    """
    x, y = os.fsencode(a), os.fsencode(b)
    if hasattr(_libc, "renameat2"):
        _check_call(_libc.renameat2(_at_cwd, x, _at_cwd, y, _exchange_flag))
    elif hasattr(_libc, "renamex_np"):
        _check_call(_libc.renamex_np(x, y, _exchange_flag))
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _check_call(failed: int) -> None:
    """**Raises:** `OSError` if a call of the system has failed."""
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def folds_case(directory: str) -> bool:
    """Whether the file system takes names that differ by case only for one."""
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    # Its own name is in the directory above, which may be in another file system.
    above, name = os.path.split(directory)
    for place, names in ((directory, None), (above, [name])):
        with contextlib.suppress(OSError):
            listed = frozenset(os.listdir(place))
            for name in listed if names is None else names:
                other = name.swapcase()
                if other != name:
                    there = os.path.lexists(os.path.join(place, other))
                    return there and other not in listed
    return False


def reports_all(directory: str) -> bool:
    """Whether one call syncs all of a file system, and says what it could not."""
    return _reports_all and _type_of(directory) in _SYNCED_WHOLE


def _can_report() -> bool:
    """Whether `syncfs` says of files that could not be written: Linux, from 5.8 on."""
    if sys.platform != "linux" or not hasattr(_libc, "syncfs"):
        return False
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and tuple(map(int, version.groups())) >= (5, 8)


_reports_all = _can_report()


def syncfs(fd: int) -> None:
    """Syncs all that was written to the file system of an open file, by whomever.

    **Raises:** `OSError` if that fails, or has failed since the file was opened.
    """
    _check_call(_libc.syncfs(fd))


def is_on_this_machine(directory: str) -> bool:
    """Whether no network can take the files in a directory away."""
    return _type_of(directory) != ""


def _type_of(directory: str) -> str:
    """The type of the file system that a directory is in: "" for one that is none of
    `_LOCAL_TYPES`, or that nobody knows."""
    if sys.platform != "linux":
        return ""
    # The first field is the type; what follows it is no more than this.
    found = (ctypes.c_ulong * 64)()
    if _libc.statfs(os.fsencode(directory), found):
        return ""
    return _LOCAL_TYPES.get(found[0] & 0xFFFFFFFF, "")
