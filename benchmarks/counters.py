"""What Linux counts of this process, and its page cache. Imports nothing heavy: the new
processes of the partial reads start with it."""

import ctypes
import os
import pathlib
import sys
from collections.abc import Iterator


def _fields(path: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for line in pathlib.Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()[:1]
        if value and value[0].isdigit():
            out[name] = int(value[0])
    return out


def reset_peak() -> int:
    """Makes what is resident now the peak of resident memory, and returns that."""
    # What earlier calls freed and the allocator kept would hide a copy made in it.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return 1024 * _fields("/proc/self/status")["VmRSS"]


def peak() -> int:
    return 1024 * _fields("/proc/self/status")["VmHWM"]


def written() -> int:
    """The bytes that were written, by system calls."""
    return _fields("/proc/self/io")["wchar"]


def reads() -> dict[str, int]:
    """The bytes that were read and in how many requests, by system calls and through
    TensorStore's memory maps; and what the disk itself gave, where nothing was cached.

    Other memory maps are in the last figure only.
    """
    io = _fields("/proc/self/io")
    out = {"read": io["rchar"], "requests": io["syscr"], "disk_read": io["read_bytes"]}
    if ts := sys.modules.get("tensorstore"):
        for key, name in (("read", "mmap_bytes"), ("requests", "mmap_count")):
            for metric in ts.experimental_collect_matching_metrics(
                f"/tensorstore/file/{name}"
            ):
                out[key] += sum(value.get("value", 0) for value in metric["values"])
    return out


def reads_since(before: dict[str, int]) -> dict[str, int]:
    return {key: value - before[key] for key, value in reads().items()}


def files(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def sync(directory: pathlib.Path) -> None:
    """Makes all that is in a directory durable: the files, and their names."""
    for fd in _descriptors([*files(directory), *_directories(directory)]):
        os.fsync(fd)


def evict(directory: pathlib.Path) -> None:
    """Drops the files from the page cache, which it can do only for what is on disk."""
    for fd in _descriptors(files(directory)):
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _directories(directory: pathlib.Path) -> list[pathlib.Path]:
    return [directory, *(path for path in directory.rglob("*") if path.is_dir())]


def _descriptors(paths: list[pathlib.Path]) -> Iterator[int]:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
