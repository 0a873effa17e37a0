"""Writes files below a root, gives them other names, and deletes them.

On a local file system by plain writes, elsewhere as whole values.
"""

import contextlib
import fcntl
import functools as ft
import json
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from .._runtime import _undo
from .._runtime._undo import Descriptor
from . import _root, _store
from ._root import Root
from ._store import Value


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


def replace_file(
    root: Root, aside: str, key: str, data: bytes, found: Value | None
) -> bool:
    """Puts a staged file in its place, if what is there is what was `found` (None: if
    there is none). Returns whether it was. In a local directory the caller holds the
    lock of the root."""
    if root.local is None:
        # The store compares and writes in one step.
        expected = _absent if found is None else found.generation
        stamp = _root.wait(root, _root.kv(root).write(key, data, if_equal=expected))
        # If the answer to a write was lost it was tried again, and refused: what was
        # there before had been replaced by the first one.
        return bool(stamp.generation) or _store.is_still(root, key, Value(data, b""))
    if not _store.is_still(root, key, found):
        return False
    swap_file(root, aside, key, data)
    return True


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
    kv = _root.kv(root)
    found = _root.wait(root, kv.write(key, b"1")).generation
    _root.wait(root, kv.write(key, b"2"))
    tries = [
        kv.write(key, b"3", if_equal=generation) for generation in (_absent, found)
    ]
    if any(_root.wait(root, stamp).generation for stamp in tries):
        is_s3 = options["driver"] == "s3"
        names = "`If-Match`, `If-None-Match`" if is_s3 else "`ifGenerationMatch`"
        without = (
            "; or, if never more than one process saves to a path, `ec.Store(url, "
            "use_conditional_write=False)`"
        )
        raise RuntimeError(
            f"The server of `{root}` ignores the conditions of a write ({names}), "
            "which keep two saves to one path apart. Use a server that heeds them"
            f"{without if is_s3 else ''}."
        )
    _heeding.add(store)


def swap_file(root: Root, aside: str, key: str, data: bytes) -> None:
    """Puts a staged file in its place, whatever is there."""
    if root.local is None:
        _root.wait(root, _root.kv(root).write(key, data))
        return
    (root.local / key).parent.mkdir(exist_ok=True)
    os.replace(root.local / _staged(aside, key), root.local / key)


@contextlib.contextmanager
def lock(directory: pathlib.Path, wait: bool = False) -> Iterator[bool]:
    """Holds the advisory lock of a local directory, which ends with the process.

    Yields whether it is held: not if another has it and we do not `wait`, nor on file
    systems without locks.
    """
    while True:
        with _undo.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
            # A child that is forked meanwhile has the descriptor too, and would keep
            # the lock of a file that is only closed here.
            with _undo.surely(ft.partial(_unlock, fd)):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except OSError:
                    yield False
                    return
                # While we waited another directory may have come in its place.
                if _is_at(fd, directory):
                    yield True
                    return


def _unlock(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def _is_at(fd: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def new_directory(directory: pathlib.Path) -> Iterator[None]:
    """Makes a directory and those above it, and holds its lock."""
    with contextlib.ExitStack() as locked:
        for attempts_left in reversed(range(100)):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                locked.enter_context(lock(directory, wait=True))
                break
            except FileNotFoundError:
                # Before it had its lock another process took it for a leftover.
                if not attempts_left:
                    raise
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
        _root.wait(root, _root.kv(root).write(key, b"".join(buffers)))
        return
    path = root.local / key
    with _undo.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
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
    value = _store.read_file(root, source)
    assert value is not None
    write_file(root, key, [value.data], sync)


def link_other(
    source: Root, key: str, size: int, root: Root, into: str, sync: bool
) -> bool:
    """Gives a local file of `size` bytes below another root a second name. Returns
    whether it has: not in another file system, nor in one that has no links."""
    assert source.local is not None and root.local is not None
    try:
        found = _store.check_range(source, key, size)
        if found is None or found.st_size != size:
            return False
        if sync:
            # The other save may not have been durable.
            with _undo.opened(source.local / key, os.O_RDONLY) as fd:
                os.fsync(fd)
        os.link(source.local / key, root.local / into)
    except (OSError, ValueError):
        return False
    return True


def open_file(root: Root, key: str, size: int) -> Descriptor:
    """A descriptor of a local file of `size` bytes, which outlives its names.

    **Raises:** `ValueError` or `OSError` if there is none.
    """
    assert root.local is not None
    _store.check_range(root, key, size)
    fd = Descriptor(root.local / key, os.O_RDONLY)
    if os.fstat(fd.fileno()).st_size != size:
        fd.close()
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


def sync_directories(root: Root, keys: Iterable[str]) -> None:
    """Makes the names in local directories durable. TensorStore leaves that to us."""
    if root.local is None:
        return
    for key in keys:
        with _undo.opened(root.local / key, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)


def delete_tree(root: Root, key: str) -> None:
    """Deletes the file or directory `key` below the root, never through a link."""
    if root.local is None:
        kv = _root.kv(root)
        names = [
            n
            for n in _store.list_below(root, key)
            if n == key or n.startswith(f"{key}/")
        ]
        for deleting in [kv.write(name, None) for name in names]:
            _root.wait(root, deleting)
        return
    _remove(root.local / key)


def move_tree(root: Root, key: str, into: str, first: str) -> None:
    """Moves the directory `key` below the root. Where there are no renames its files
    are copied and then deleted, beginning with the file `first` in it."""
    if root.local is not None:
        os.rename(root.local / key, root.local / into)
        return
    kv = _root.kv(root)
    names = _store.list_below(root, key + "/")
    for name in names:
        value = _root.wait(root, kv.read(name)).value
        _root.wait(root, kv.write(into + name.removeprefix(key), value))
    for name in sorted(names, key=f"{key}/{first}".__ne__):
        _root.wait(root, kv.write(name, None))


def _remove(path: pathlib.Path) -> None:
    # Others may be deleting the same leftovers.
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        for child in path.iterdir():
            _remove(child)
        path.rmdir()


def writers_lock(root: Root) -> contextlib.AbstractContextManager[bool]:
    """Holds what writers hold from before their commit until all that follows it is
    done, and says whether there is such a thing."""
    if root.local is None:
        return contextlib.nullcontext(False)
    return lock(root.local, wait=True)
