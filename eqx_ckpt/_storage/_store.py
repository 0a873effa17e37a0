"""Looks at the files below a root before they are opened, and reads them.

All is read through TensorStore, except what goes into memory that is there already.
"""

import functools as ft
import os
import pathlib
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from .._errors import MissingError
from .._runtime import _threads, _undo
from . import _remote, _root
from ._root import Root


# Where a memory-mapped file is one that this machine has: a network file system can
# lose it while we read, which is a SIGBUS.
_local_file_systems = frozenset(
    "ext2 ext3 ext4 xfs btrfs zfs f2fs tmpfs ramfs overlay bcachefs apfs hfs".split()
)


class Value(NamedTuple):
    data: bytes
    generation: bytes


def look(root: Root, key: str) -> os.stat_result | None:
    """A regular file below a local root; None where there is none.

    **Raises:** `ValueError` for anything else that is there. A link leads out of the
    checkpoint, and to read from a FIFO or a device may take for ever, or do something.
    """
    if root.pin is not None and key == root.pin.key:
        return os.fstat(root.pin.fd)
    path = str(root.local)
    parts = key.split("/")
    found = None
    for number, part in enumerate(parts, 1):
        path = f"{path}/{part}"
        try:
            found = os.stat(path, follow_symlinks=root.follow)
        except (FileNotFoundError, NotADirectoryError):
            return None
        is_right = stat.S_ISREG if number == len(parts) else stat.S_ISDIR
        if not is_right(found.st_mode):
            here = "/".join(parts[:number])
            if stat.S_ISLNK(found.st_mode):
                raise ValueError(
                    f"`{here}` in it is a symbolic link, which may lead anywhere. If "
                    "you trust it, open it with `follow_symlinks=True`"
                )
            what = "file" if number == len(parts) else "directory"
            raise ValueError(f"`{here}` in it is not a {what}")
    return found


def is_missing(error: Exception) -> bool:
    """Whether an error says that a file, or the end of it, is not there."""
    gone = FileNotFoundError, NotADirectoryError, IsADirectoryError
    return isinstance(error, (MissingError, *gone))


def check_range(root: Root, key: str, stop: int) -> os.stat_result | None:
    """Whether a file has at least `stop` bytes: before memory is allocated for them.

    **Raises:** `ValueError` if it has not, or as `look`.
    """
    if root.local is None:
        if stop:
            reading = _root.kv(root).read(key, byte_range=slice(stop - 1, stop))
            if not _is_there(root, reading):
                raise MissingError(f"`{key}`, or the end of it, is missing")
        return None
    found = look(root, key)
    if found is None:
        raise MissingError(f"`{key}` is missing")
    if found.st_size < stop:
        raise MissingError(f"the end of `{key}` is missing")
    return found


def read_file(
    root: Root, key: str, stop: int | None = None, limit: int | None = None
) -> Value | None:
    """A small file, or its bytes up to `stop`; None where there is none.

    **Raises:** `ValueError` if it is longer than `limit`, or as `look`.
    """
    _root.check_fork()
    if root.local is not None:
        found = look(root, key)
        if found is None:
            return None
        if limit is not None and found.st_size > limit:
            raise ValueError(f"`{key}` is longer than {limit} bytes")
        stop = None if stop is None else min(stop, found.st_size)
    kv = _root.kv(root)
    reading = kv.read(key, byte_range=slice(0, stop))
    if root.local is None and stop is None and limit is not None:
        # Nothing else says how long it is before all of it is here.
        beyond = kv.read(key, byte_range=slice(limit, limit + 1))
        try:
            if _root.wait(root, beyond).state == "value":
                raise ValueError(f"`{key}` is longer than {limit} bytes")
        except MissingError as e:
            if _remote.is_read_only(root.url) and not _remote.is_beyond(e):
                # The server may have sent all of it, and not know parts of files.
                _is_there(root, kv.read(key, byte_range=slice(0, 1)))
    got = _root.wait(root, reading)
    if got.state != "value":
        return None
    return Value(got.value, got.stamp.generation)


def _is_there(root: Root, reading: Any) -> bool:
    """Whether a range that is being read is within its file."""
    try:
        return _root.wait(root, reading).state == "value"
    except MissingError:
        return False


def read_into(root: Root, key: str, start: int, into: np.ndarray) -> int:
    """Reads a file from a byte on into bytes, and returns how many of them it has.

    **Raises:** `FileNotFoundError` where there is no file, `ValueError` as `look`.
    """
    _root.check_fork()
    if root.local is not None:
        if look(root, key) is None:
            raise FileNotFoundError(f"There is no `{key}`.")
        if root.pin is not None and key == root.pin.key:
            return _read_open(root.pin.fd, start, into)
        with _undo.opened(root.local / key, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return _read_open(fd, start, into)
    # A range that goes on where the file ends is refused; one without an end is not.
    for stop in (start + into.nbytes, None):
        try:
            reading = _root.kv(root).read(key, byte_range=slice(start, stop))
            got = _root.wait(root, reading)
        except MissingError as e:
            if _remote.is_beyond(e):
                return 0
            continue
        if got.state != "value":
            raise FileNotFoundError(f"There is no `{key}`.")
        into[: len(got.value)] = np.frombuffer(got.value, np.uint8)
        return len(got.value)
    return 0


def _read_open(fd: int, start: int, into: np.ndarray) -> int:
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:].data], start + done)
        if count == 0:
            break
        done += count
    thread = threading.get_ident()
    _counts[thread] = _counts.get(thread, 0) + done
    return done


def read_tail(root: Root, key: str, count: int) -> bytes:
    """The last bytes of a file. **Raises:** `ValueError` if it has not so many."""
    _root.check_fork()
    if root.local is None:
        kv = _root.kv(root)
        return _root.wait(root, kv.read(key, byte_range=slice(-count, None))).value
    found = look(root, key)
    if found is None or found.st_size < count:
        raise MissingError(f"`{key}` is too short")
    into = np.empty(count, np.uint8)
    read_into(root, key, found.st_size - count, into)
    return into.tobytes()


def is_still(root: Root, key: str, found: Value | None) -> bool:
    """Whether a file is what was found, or is still not there."""
    now = read_file(root, key)
    return (now and now.data) == (found and found.data)


# Seconds that a file system of the network may take to show what another host has made.
_SHOWN = 30


def await_directory(root: Root, key: str) -> None:
    """Waits until a local directory that another process has made is there.

    **Raises:** `RuntimeError` if it does not appear.
    """
    if root.local is None:
        return
    end = time.monotonic() + _SHOWN
    while not (root.local / key).is_dir():
        if time.monotonic() > end:
            raise RuntimeError(
                f"`{root.local / key}`, which process 0 has made, is not there. The "
                "path has to be one that all processes share."
            )
        time.sleep(0.05)


def list_top(root: Root) -> dict[str, bool] | None:
    """The entries of the root, and whether each is a directory; None: no root, or one
    that cannot be listed."""
    if _remote.is_read_only(root.url):
        return None
    if root.local is None:
        tops: dict[str, bool] = {}
        for key in list_below(root, ""):
            first, slash, _ = key.partition("/")
            tops[first] = bool(slash)
        return tops or None
    try:
        with os.scandir(root.local) as entries:
            return {e.name: e.is_dir(follow_symlinks=False) for e in entries}
    except FileNotFoundError:
        return None


def list_below(root: Root, start: str) -> list[str]:
    """The keys below a root in an object store that begin with `start`."""
    # Whole keys are listed and looked at. Not all servers heed the range that they are
    # asked for, and TensorStore cuts as much off the beginning of any key: somebody
    # else's would be taken for ours, and deleted.
    top = root._replace(url=_remote.bucket(root.url))
    path = root.kvstore()["path"].removeprefix(top.kvstore()["path"]).encode()
    first = path + start.encode()
    stop = first[:-1] + bytes([first[-1] + 1]) if first else b""
    keys = _root.wait(root, _root.kv(top).list(ts.KvStore.KeyRange(first, stop)))
    ours = [key[len(path) :] for key in keys if key.startswith(first)]
    return [key.decode("utf-8", "surrogateescape") for key in ours]


# Requests to an object store that are under way at a time.
_REQUESTS = 16


def gather(root: Root, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that look at files below a root: in turn, or some at a time
    in an object store, where each is a request."""
    is_far = root.local is None
    return _threads.gather(jobs, _REQUESTS if is_far else 1, waiting=is_far)


def is_directory(root: Root, key: str) -> bool:
    """Whether there is anything below the directory `key`."""
    if root.local is not None:
        return (root.local / key).is_dir()
    return bool(list_below(root, key + "/"))


def survey(root: Root, most: int) -> dict[str, int] | None:
    """The keys and sizes of all files below a local root; None: it is not local.

    **Raises:** `ValueError` as `look` for anything but files and directories, and for
    more than `most` of them.
    """
    if root.local is None:
        return None
    sizes: dict[str, int] = {}
    count = 0
    above = [""]
    while above:
        key = above.pop()
        with os.scandir(root.local / key) as entries:
            for entry in entries:
                count += 1
                below = f"{key}{entry.name}"
                if entry.is_dir(follow_symlinks=root.follow):
                    above.append(below + "/")
                elif entry.is_file(follow_symlinks=root.follow):
                    sizes[below] = entry.stat(follow_symlinks=root.follow).st_size
                else:
                    look(root, below)
                    raise ValueError(f"`{below}` in it is not a file")
                if count > most:
                    raise ValueError(f"it has more than {most} files")
    return sizes


def list_keys(root: Root) -> list[str] | None:
    """The keys below a root in an object store; None: it cannot be listed."""
    return None if _remote.is_read_only(root.url) else list_below(root, "")


@ft.lru_cache(maxsize=64)
def _maps(local: pathlib.Path) -> bool:
    """Whether files in a directory are on a file system of this machine."""
    try:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    best = ("", "")
    place = str(local)
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        if place == point or place.startswith(point.rstrip("/") + "/"):
            if len(point) >= len(best[0]):
                best = (point, rest.split()[0])
    return best[1] in _local_file_systems


def read_context(root: Root) -> ts.Context:
    """For reads of arrays: memory maps where no network can take the file away."""
    return _root.mmap_context() if root.local and _maps(root.local) else _root.context()


# Bytes that are read here and not by TensorStore.
# Each thread counts its own: a lock could be left locked by Ctrl-C.
_counts: dict[int, int] = {}


def bytes_read() -> int:
    """The bytes that have been read from files in this process, by `pread` and by
    memory maps of TensorStore."""
    total = sum(_counts.copy().values())
    # By their names: TensorStore leaks a little of each metric that it is asked for.
    for name in (
        "/tensorstore/kvstore/file/bytes_read",
        "/tensorstore/file/mmap_bytes",
    ):
        for metric in ts.experimental_collect_matching_metrics(name):
            if metric["name"] == name:
                total += sum(value.get("value", 0) for value in metric["values"])
    return total


def read_keys(root: Root, keys: Sequence[str], limit: int) -> list[bytes | None]:
    """Some small files, together; None where there is none, or it is longer."""
    _root.check_fork()
    if root.local is not None:
        read = [read_file(root, key, limit + 1) for key in keys]
        values = [None if value is None else value.data for value in read]
    else:
        kv = _root.kv(root)
        futures = [kv.read(key) for key in keys]
        found = [_root.wait(root, future) for future in futures]
        values = [got.value if got.state == "value" else None for got in found]
    return [None if v is None or len(v) > limit else v for v in values]


def is_file(root: Root) -> bool:
    """Whether there is a file at the root itself; not if that is a whole bucket."""
    if root.local is not None:
        return root.local.exists() and not root.local.is_dir()
    return root.url != _remote.bucket(root.url) and bool(stamp(*_root.split(root)))


def stamp(root: Root, key: str) -> str:
    """What is another one after a file was replaced or written to; "" if it is gone."""
    if root.local is not None:
        is_pinned = root.pin is not None and key == root.pin.key
        try:
            found = look(root, key) if is_pinned else os.stat(root.local / key)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        assert found is not None
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
    # Of no bytes TensorStore asks for what is known of a file; of a page it may not be.
    few = slice(0, 1 if _remote.is_read_only(root.url) else 0)
    got = _root.wait(root, _root.kv(root).read(key, byte_range=few))
    return got.stamp.generation.hex() if got.state == "value" else ""


def start_read_range(root: Root, key: str, start: int, stop: int) -> ts.Future:
    """Starts to read a range of the bytes of a file: a future with a `.value`."""
    if root.local is not None:
        try:
            check_range(root, key, stop)
        except (ValueError, OSError) as e:
            promise, future = ts.Promise.new()
            promise.set_exception(e)
            return future
    return _root.kv(root).read(key, byte_range=slice(start, stop))
