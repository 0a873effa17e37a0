"""Roots and their files, in a local file system or in an object store.

Files are written by plain writes on a local file system and as whole values elsewhere;
everything is read through TensorStore.
"""

import contextlib
import fcntl
import functools as ft
import json
import os
import pathlib
import re
import stat
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from . import _remote
from ._remote import Store


INDEX = "eqx_ckpt.json"
LAYOUTS = ("ocdbt", "zarr")

# So that nothing reads more than a leaf's own bytes, chunks are not cached; the nodes
# that lead to them are.
_context_spec = {
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#nodes": {"total_bytes_limit": 64 * 2**20},
    **_remote.CONTEXT,
}
# Where a memory-mapped file is one that this machine has: a network file system can
# lose it while we read, which is a SIGBUS.
_local_file_systems = frozenset(
    "ext2 ext3 ext4 xfs btrfs zfs f2fs tmpfs ramfs overlay bcachefs apfs hfs".split()
)

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


@ft.cache
def watch_forks() -> None:
    """From now on `check_fork` raises in forked children."""
    os.register_at_fork(after_in_child=_after_fork)


@ft.cache
def _context() -> ts.Context:
    watch_forks()
    _remote.bound_waits()
    return ts.Context(_context_spec)


@ft.cache
def _mmap_context() -> ts.Context:
    return ts.Context(
        {**_context_spec, "file_io_mode": {"mode": "memmap"}}, parent=_context()
    )


@ft.cache
def _sync_context(sync: bool) -> ts.Context:
    return ts.Context({"file_io_sync": sync}, parent=_context())


def is_forked() -> bool:
    return _forked


def check_fork() -> None:
    """**Raises:** `RuntimeError` in a forked child, where TensorStore would abort."""
    if _forked:
        raise RuntimeError(
            "This process was forked from one that has used eqx_ckpt, and TensorStore "
            "does not work in such a process. Start processes with `spawn`: "
            "`multiprocessing.get_context('spawn')`."
        )


class Root(NamedTuple):
    """A directory, local or in an object store. `url` is absolute, and a path here.

    `follow`: whether what is read below it may be a symbolic link. It itself may be.
    `options`: of the object store, as JSON.
    `archive`: what gets the files that are written, if they all become one.
    """

    url: str
    local: pathlib.Path | None
    follow: bool = False
    options: str = "{}"
    archive: Any = None

    def kvstore(self, key: str = "") -> dict[str, Any]:
        """The TensorStore spec of the directory `key` below the root."""
        prefix = key + "/" if key else ""
        if self.local is not None:
            return {"driver": "file", "path": f"{self.local}/{prefix}"}
        spec = ts.KvStore.Spec(self.url + "/").to_json() | json.loads(self.options)
        path = spec.get("path", "")
        if not path.strip("/"):  # The whole of it.
            path = "/" if spec["driver"] == "http" else ""
        spec["path"] = path + prefix
        return spec

    def __str__(self) -> str:
        return self.url


def resolve(path: Any, follow: bool = False) -> Root:
    """The root that a path or TensorStore URL means."""
    check_fork()
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise TypeError(
            f"A path must be a string or an `os.PathLike` of one, not a "
            f"`{type(path).__name__}`."
        )
    if text == "" or "\0" in text:
        raise ValueError(f"{text!r} is not a path.")
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        if not text.startswith("file://"):
            return _resolve_url(text, path.options if isinstance(path, Store) else {})
        text = urllib.parse.unquote(text.removeprefix("file://"))
    local = pathlib.Path(os.path.abspath(os.path.expanduser(text)))
    if "\\" in str(local):
        raise ValueError(
            f"`{local}` has a backslash in it, which TensorStore takes for a slash. "
            "Choose another path."
        )
    return Root(str(local), local, follow)


def _resolve_url(url: str, given: dict[str, Any]) -> Root:
    if re.search("[?#]", url):
        raise ValueError(
            f"{url!r} has a query or a fragment, and files below it have names without "
            "one. What a server wants to see can be in `headers` of an `ec.Store`."
        )
    options = json.dumps(_remote.options_of(url, given), sort_keys=True)
    root = Root(url.rstrip("/"), None, options=options)
    try:
        ts.KvStore.Spec(root.kvstore())
    except ValueError as e:
        raise ValueError(f"{url!r} is not a TensorStore URL: {e}") from e
    return root


def check_writable(root: Root) -> None:
    """**Raises:** `ValueError` for a URL from which files can only be read."""
    if _remote.is_read_only(root.url):
        raise ValueError(
            f"`{root}` can only be read: nothing is saved over HTTP. Save to a "
            "directory, or to an `s3://` or `gs://` URL, and publish that."
        )


@ft.lru_cache(maxsize=256)
def _kv(root: Root, key: str, sync: bool | None) -> ts.KvStore:
    context = _context() if sync is None else _sync_context(sync)
    return _wait(root, ts.KvStore.open(root.kvstore(key), context=context))


def _wait(root: Root, future: Any) -> Any:
    """The result of a call to the store of a root.

    **Raises:** what is wrong with a store, in words.
    """
    try:
        return future.result()
    except Exception as e:
        raise explain(root, e) from e


def explain(root: Root, error: Exception) -> Exception:
    """What has gone wrong with the store of a root, in words; any other error as it is.

    What is not there, or shorter than was asked for, is nothing wrong with the store.
    """
    if root.local is not None or isinstance(error, OSError):
        return error
    return _remote.explain(root.url, error) or error


class Value(NamedTuple):
    data: bytes
    generation: bytes


def look(root: Root, key: str) -> os.stat_result | None:
    """A regular file below a local root; None where there is none.

    **Raises:** `ValueError` for anything else that is there. A link leads out of the
    checkpoint, and to read from a FIFO or a device may take for ever, or do something.
    """
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


def check_range(root: Root, key: str, stop: int) -> os.stat_result | None:
    """Whether a file has at least `stop` bytes: before memory is allocated for them.

    **Raises:** `ValueError` if it has not, or as `look`.
    """
    if root.local is None:
        if stop:
            reading = _kv(root, "", None).read(key, byte_range=slice(stop - 1, stop))
            if not _is_there(root, reading):
                raise ValueError(f"`{key}`, or the end of it, is missing")
        return None
    found = look(root, key)
    if found is None:
        raise ValueError(f"`{key}` is missing")
    if found.st_size < stop:
        raise ValueError(f"the end of `{key}` is missing")
    return found


def read_file(
    root: Root, key: str, stop: int | None = None, limit: int | None = None
) -> Value | None:
    """A small file, or its bytes up to `stop`; None where there is none.

    **Raises:** `ValueError` if it is longer than `limit`, or as `look`.
    """
    check_fork()
    if root.local is not None:
        found = look(root, key)
        if found is None:
            return None
        if limit is not None and found.st_size > limit:
            raise ValueError(f"`{key}` is longer than {limit} bytes")
        stop = None if stop is None else min(stop, found.st_size)
    kv = _kv(root, "", None)
    reading = kv.read(key, byte_range=slice(0, stop))
    if root.local is None and stop is None and limit is not None:
        # Nothing else says how long it is before all of it is here.
        beyond = kv.read(key, byte_range=slice(limit, limit + 1))
        if _is_there(root, beyond):
            raise ValueError(f"`{key}` is longer than {limit} bytes")
    got = _wait(root, reading)
    if got.state != "value":
        return None
    return Value(got.value, got.stamp.generation)


def _is_there(root: Root, reading: Any) -> bool:
    """Whether a range that is being read is within its file."""
    try:
        return _wait(root, reading).state == "value"
    except ValueError as e:
        if "OUT_OF_RANGE" not in str(e):
            raise
        return False


# The generation of what is not there. An empty one would be any.
_absent = b"\x02"


def stage_file(root: Root, aside: str, key: str, data: bytes, sync: bool) -> None:
    """Writes what `replace_file` or `swap_file` then puts in its place by a rename.

    `aside` is a directory of the caller's own below the root. Stores that cannot rename
    write at once, and need none of this.
    """
    if root.local is not None:
        write_file(root, _staged(aside, key), [data], sync)


def _staged(aside: str, key: str) -> str:
    return f"{aside}/{key.replace('/', '%')}.new"


def read_into(root: Root, key: str, start: int, into: np.ndarray) -> int:
    """Reads a file from a byte on into bytes, and returns how many of them it has.

    **Raises:** `FileNotFoundError` where there is no file, `ValueError` as `look`.
    """
    check_fork()
    if root.local is not None:
        if look(root, key) is None:
            raise FileNotFoundError(f"There is no `{key}`.")
        fd = os.open(root.local / key, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            done = 0
            while done < into.nbytes:
                count = os.preadv(fd, [into[done:].data], start + done)
                if count == 0:
                    break
                done += count
            with _counting:
                _counts["read"] += done
            return done
        finally:
            os.close(fd)
    # A range that goes on where the file ends is refused; one without an end is not.
    for stop in (start + into.nbytes, None):
        try:
            reading = _kv(root, "", None).read(key, byte_range=slice(start, stop))
            got = _wait(root, reading)
        except ValueError as e:
            if "OUT_OF_RANGE" not in str(e):
                raise
            if _remote.is_beyond(e):
                return 0
            continue
        if got.state != "value":
            raise FileNotFoundError(f"There is no `{key}`.")
        into[: len(got.value)] = np.frombuffer(got.value, np.uint8)
        return len(got.value)
    return 0


def read_tail(root: Root, key: str, count: int) -> bytes:
    """The last bytes of a file. **Raises:** `ValueError` if it has not so many."""
    check_fork()
    if root.local is None:
        kv = _kv(root, "", None)
        return _wait(root, kv.read(key, byte_range=slice(-count, None))).value
    found = look(root, key)
    if found is None or found.st_size < count:
        raise ValueError(f"`{key}` is too short")
    into = np.empty(count, np.uint8)
    read_into(root, key, found.st_size - count, into)
    return into.tobytes()


def replace_file(
    root: Root, aside: str, key: str, data: bytes, found: Value | None, sync: bool
) -> bool:
    """Puts a staged file in its place, if what is there is what was `found` (None: if
    there is none). Returns whether it was. In a local directory the caller holds the
    lock of the root."""
    if root.local is None:
        # The store compares and writes in one step.
        expected = _absent if found is None else found.generation
        stamp = _wait(root, _kv(root, "", sync).write(key, data, if_equal=expected))
        # If the answer to a write was lost it was tried again, and refused: what was
        # there before had been replaced by the first one.
        return bool(stamp.generation) or is_still(root, key, Value(data, b""))
    if not is_still(root, key, found):
        return False
    swap_file(root, aside, key, data)
    return True


def is_still(root: Root, key: str, found: Value | None) -> bool:
    """Whether a file is what was found, or is still not there."""
    now = read_file(root, key)
    return (now and now.data) == (found and found.data)


# Buckets of which it is known that they heed the conditions of a write.
_heeding: set[str] = set()


def check_conditions(root: Root, key: str) -> None:
    """Writes a small file to a store, and again on conditions that do not hold.

    **Raises:** `RuntimeError` if the store does not heed them, as not all servers of S3
    do: of two saves at the same instant one would delete what the other has written.
    """
    options = root.kvstore()
    del options["path"]
    store = json.dumps(options, sort_keys=True)
    is_asked = options.get("use_conditional_write", options["driver"] == "gcs")
    if not is_asked or store in _heeding:
        return
    kv = _kv(root, "", None)
    found = _wait(root, kv.write(key, b"1")).generation
    _wait(root, kv.write(key, b"2"))
    tries = [
        kv.write(key, b"3", if_equal=generation) for generation in (_absent, found)
    ]
    if any(_wait(root, stamp).generation for stamp in tries):
        raise RuntimeError(
            f"The server of `{root}` ignores the conditions of a write (`If-Match`, "
            "`If-None-Match`), which keep two saves to one path apart. Use a server "
            "that heeds them; or, if never more than one process saves to a path, "
            "`ec.Store(url, use_conditional_write=False)`."
        )
    _heeding.add(store)


def swap_file(root: Root, aside: str, key: str, data: bytes) -> None:
    """Puts a staged file in its place, whatever is there."""
    if root.local is None:
        _wait(root, _kv(root, "", None).write(key, data))
        return
    (root.local / key).parent.mkdir(exist_ok=True)
    os.replace(root.local / _staged(aside, key), root.local / key)


@contextlib.contextmanager
def lock(directory: pathlib.Path, wait: bool = False) -> Iterator[bool]:
    """Holds the advisory lock of a local directory, which ends with the process.

    Yields whether it is held: not if another has it and we do not `wait`, nor on file
    systems without locks.
    """
    held = False
    fd = -1
    try:
        while not held:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                break
            # While we waited another directory may have come in its place.
            held = _is_at(fd, directory)
            if not held:
                os.close(fd)
                fd = -1
        yield held
    finally:
        if fd >= 0:
            # A child that was forked meanwhile has the descriptor too, and would keep
            # the lock of a file that is only closed here.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _is_at(fd: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def new_directory(directory: pathlib.Path) -> Iterator[None]:
    """Makes a directory and those above it, and holds its lock."""
    locked = contextlib.ExitStack()
    for attempts_left in reversed(range(100)):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            locked.enter_context(lock(directory, wait=True))
            break
        except FileNotFoundError:
            # Before it had its lock another process took it for a leftover.
            if not attempts_left:
                raise
    with locked:
        yield


_MAX_BUFFERS = 512
_MAX_BATCH = 2**20


def write_file(
    root: Root, key: str, buffers: Iterable[Any], sync: bool = False
) -> None:
    """Writes a new file of `buffers`, which are drawn one by one."""
    if root.archive is not None:
        root.archive.write(key, buffers)
        return
    if root.local is None:
        _wait(root, _kv(root, "", None).write(key, b"".join(buffers)))
        return
    path = root.local / key
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        batch: list[memoryview] = []
        size = 0
        for buffer in buffers:
            view = memoryview(buffer)
            if not view.nbytes:
                continue
            batch.append(view)
            size += view.nbytes
            if size >= _MAX_BATCH or len(batch) == _MAX_BUFFERS:
                _write_all(fd, batch)
                batch, size = [], 0
        _write_all(fd, batch)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(fd, views)
        done = 0
        while done < len(views) and written >= views[done].nbytes:
            written -= views[done].nbytes
            done += 1
        views = views[done:]
        if views and written:
            views[0] = views[0].cast("B")[written:]


def link_file(root: Root, source: str, key: str, sync: bool) -> None:
    """Makes `key` another name of the file `source`, or a copy where there are none."""
    if root.local is not None:
        try:
            os.link(root.local / source, root.local / key)
            return
        except OSError:
            pass
    value = read_file(root, source)
    assert value is not None
    write_file(root, key, [value.data], sync)


def link_other(
    source: Root, key: str, size: int, root: Root, into: str, sync: bool
) -> bool:
    """Gives a local file of `size` bytes below another root a second name. Returns
    whether it has: not in another file system, nor in one that has no links."""
    assert source.local is not None and root.local is not None
    try:
        found = check_range(source, key, size)
        if found is None or found.st_size != size:
            return False
        if sync:
            # The other save may not have been durable.
            fd = os.open(source.local / key, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        os.link(source.local / key, root.local / into)
    except (OSError, ValueError):
        return False
    return True


def open_file(root: Root, key: str, size: int) -> int:
    """A descriptor of a local file of `size` bytes, which outlives its names.

    **Raises:** `ValueError` or `OSError` if there is none.
    """
    assert root.local is not None
    check_range(root, key, size)
    fd = os.open(root.local / key, os.O_RDONLY | os.O_CLOEXEC)
    if os.fstat(fd).st_size != size:
        os.close(fd)
        raise ValueError(f"`{key}` is not of {size} bytes")
    return fd


def link_open(
    fd: int, source: Root, key: str, root: Root, into: str, sync: bool
) -> None:
    """Gives the open file `key` another name, or copies it, where it has lost that name
    or there are no links."""
    assert source.local is not None and root.local is not None
    with contextlib.suppress(OSError):
        os.link(source.local / key, root.local / into)
        if os.path.samestat(os.stat(root.local / into), os.fstat(fd)):
            if sync:
                os.fsync(fd)
            return
        os.unlink(root.local / into)
    starts = range(0, os.fstat(fd).st_size, _MAX_BATCH)
    parts = (os.pread(fd, _MAX_BATCH, start) for start in starts)
    write_file(root, into, parts, sync)


def make_directories(root: Root, keys: Iterable[str]) -> None:
    if root.local is not None:
        for key in keys:
            (root.local / key).mkdir(parents=True, exist_ok=True)


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


def sync_directories(root: Root, keys: Iterable[str]) -> None:
    """Makes the names in local directories durable. TensorStore leaves that to us."""
    if root.local is None:
        return
    for key in keys:
        fd = os.open(root.local / key, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def list_top(root: Root) -> dict[str, bool] | None:
    """The entries of the root, and whether each is a directory; None: no root, or one
    that cannot be listed."""
    if _remote.is_read_only(root.url):
        return None
    if root.local is None:
        tops: dict[str, bool] = {}
        for key in _list(root, ""):
            first, slash, _ = key.partition("/")
            tops[first] = bool(slash)
        return tops or None
    try:
        with os.scandir(root.local) as entries:
            return {e.name: e.is_dir(follow_symlinks=False) for e in entries}
    except FileNotFoundError:
        return None


def _list(root: Root, start: str) -> list[str]:
    """The keys below a root in an object store that begin with `start`."""
    # Whole keys are listed and looked at. Not all servers heed the range that they are
    # asked for, and TensorStore cuts as much off the beginning of any key: somebody
    # else's would be taken for ours, and deleted.
    top = root._replace(url=_remote.bucket(root.url))
    path = root.kvstore()["path"].removeprefix(top.kvstore()["path"]).encode()
    first = path + start.encode()
    stop = first[:-1] + bytes([first[-1] + 1]) if first else b""
    keys = _wait(root, _kv(top, "", None).list(ts.KvStore.KeyRange(first, stop)))
    ours = [key[len(path) :] for key in keys if key.startswith(first)]
    return [key.decode("utf-8", "surrogateescape") for key in ours]


def is_directory(root: Root, key: str) -> bool:
    """Whether there is anything below the directory `key`."""
    if root.local is not None:
        return (root.local / key).is_dir()
    return bool(_list(root, key + "/"))


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
    return None if _remote.is_read_only(root.url) else _list(root, "")


def list_database(root: Root, most: int) -> list[str]:
    """The keys in the OCDBT database at a root.

    **Raises:** `ValueError` for more than `most`, and for a node that is there twice: a
    few nodes that lead to each other could have any number of keys, and TensorStore
    would list them all.
    """
    kv = _kv(root, "", None)
    dump = lambda node: _wait(root, ts.ocdbt.dump(kv, node, context=_context()))
    tops = [version["root"].get("location") for version in dump(None)["versions"][-1:]]
    above = [(top, b"") for top in tops if top]
    seen: set[str] = set()
    keys: list[str] = []
    while above:
        node, prefix = above.pop()
        if node in seen:
            raise ValueError("its database has a node twice")
        seen.add(node)
        for entry in dump(node)["entries"]:
            if "location" in entry:
                below = prefix + entry["subtree_common_prefix"]
                above.append((entry["location"], below))
            else:
                keys.append((prefix + entry["key"]).decode())
            if len(keys) + len(above) > most:
                raise ValueError(f"its database has more than {most} keys")
    return keys


def check_blosc(root: Root, key: str, most: int) -> None:
    """Whether a chunk that Blosc has made says that it is not longer than `most`:
    TensorStore would allocate what it says, up to 2 GiB.

    **Raises:** `ValueError` if it is longer.
    """
    head = np.zeros(16, np.uint8)
    try:
        read_into(root, key, 0, head)
    except FileNotFoundError:
        return  # Whoever reads it will say so.
    if int.from_bytes(head[4:8].tobytes(), "little") > most:
        raise ValueError(f"`{key}` is not a chunk of it")


def delete_tree(root: Root, key: str) -> None:
    """Deletes the file or directory `key` below the root, never through a link."""
    if root.local is None:
        kv = _kv(root, "", None)
        names = [n for n in _list(root, key) if n == key or n.startswith(f"{key}/")]
        for deleting in [kv.write(name, None) for name in names]:
            _wait(root, deleting)
        return
    _remove(root.local / key)


def move_tree(root: Root, key: str, into: str, first: str) -> None:
    """Moves the directory `key` below the root. Where there are no renames its files
    are copied and then deleted, beginning with the file `first` in it."""
    if root.local is not None:
        os.rename(root.local / key, root.local / into)
        return
    kv = _kv(root, "", None)
    names = _list(root, key + "/")
    for name in names:
        value = _wait(root, kv.read(name)).value
        _wait(root, kv.write(into + name.removeprefix(key), value))
    for name in sorted(names, key=f"{key}/{first}".__ne__):
        _wait(root, kv.write(name, None))


def _remove(path: pathlib.Path) -> None:
    # Others may be deleting the same leftovers.
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        for child in path.iterdir():
            _remove(child)
        path.rmdir()


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
    return _mmap_context() if root.local and _maps(root.local) else _context()


# Bytes that are read here and not by TensorStore.
_counting = threading.Lock()
_counts = {"read": 0}


def bytes_read() -> int:
    """The bytes that have been read from files in this process, by `pread` and by
    memory maps of TensorStore."""
    total = _counts["read"]
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/"):
        if metric["name"] in (
            "/tensorstore/kvstore/file/bytes_read",
            "/tensorstore/file/mmap_bytes",
        ):
            total += sum(value.get("value", 0) for value in metric["values"])
    return total


def kvstore_of(root: Root, key: str, is_ocdbt: bool) -> dict[str, Any]:
    """The spec of a directory of the root, or of the database that is at its top."""
    if not is_ocdbt:
        return root.kvstore(key)
    return {
        "driver": "ocdbt",
        "base": root.kvstore(),
        "path": key + "/",
        "cache_pool": "cache_pool#nodes",
    }


def read_keys(
    root: Root, keys: Sequence[str], is_ocdbt: bool, limit: int
) -> list[bytes | None]:
    """Some small files, together; None where there is none, or it is longer.

    `is_ocdbt`: from the database that TensorStore finds at the root.
    """
    check_fork()
    if not is_ocdbt and root.local is not None:
        read = [read_file(root, key, limit + 1) for key in keys]
        values = [None if value is None else value.data for value in read]
    else:
        kv = _kv(root, "", None)
        if is_ocdbt:
            spec = {**kvstore_of(root, "", True), "path": ""}
            kv = _wait(root, ts.KvStore.open(spec, context=_context()))
        futures = [kv.read(key) for key in keys]
        found = [_wait(root, future) for future in futures]
        values = [got.value if got.state == "value" else None for got in found]
    return [None if v is None or len(v) > limit else v for v in values]


def split(root: Root) -> tuple[Root, str]:
    """The directory of a file, and its key there. A link is one to the file."""
    if root.local is None:
        url, _, key = root.url.rpartition("/")
        return root._replace(url=url), key
    real = pathlib.Path(os.path.realpath(root.local))
    return Root(str(real.parent), real.parent, root.follow), real.name


def is_file(root: Root) -> bool:
    """Whether there is a file at the root itself; not if that is a whole bucket."""
    if root.local is not None:
        return root.local.exists() and not root.local.is_dir()
    return root.url != _remote.bucket(root.url) and bool(stamp(*split(root)))


def stamp(root: Root, key: str) -> str:
    """What is another one after a file was replaced or written to; "" if it is gone."""
    if root.local is not None:
        try:
            found = os.stat(root.local / key)
        except OSError:
            return ""
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
    # Of no bytes TensorStore asks for what is known of a file; of a page it may not be.
    few = slice(0, 1 if _remote.is_read_only(root.url) else 0)
    got = _wait(root, _kv(root, "", None).read(key, byte_range=few))
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
    return _kv(root, "", None).read(key, byte_range=slice(start, stop))
