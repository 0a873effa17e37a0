"""The share of the machine that this process may have: memory, and cores.

The system sets limits for the process, as of a container: by the control groups that it
is in, in either version of these.
"""

import contextlib
import functools as ft
import os
import pathlib
from collections.abc import Iterator


_ROOT = pathlib.Path("/")


@ft.cache
def memory(root: pathlib.Path = _ROOT) -> int:
    """The bytes of memory that it may have."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = _limits(root, "memory", "memory.max", "memory.limit_in_bytes")
    # Or it is "max".
    return min([host, *(int(text) for text, _ in files if text.isdecimal())])


@ft.cache
def cores(root: pathlib.Path = _ROOT) -> int:
    """The cores that it may use at a time."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS lacks it.
    host = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    found = [host]
    for text, group in _limits(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):
            numbers = text.split()
            if len(numbers) < 2:
                numbers.append((group / "cpu.cfs_period_us").read_text())
            # Without a limit it is "max", or -1.
            quota, period = map(int, numbers)
            if quota > 0 and period > 0:
                found.append(-(-quota // period))
    return min(found)


def _limits(
    root: pathlib.Path, kind: str, new: str, old: str
) -> Iterator[tuple[str, pathlib.Path]]:
    """The texts in the files of a kind of limit, from all control groups of this
    process, each with its group's directory. `new` and `old` name the file in both
    versions."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and kind not in kinds.split(","):
                continue
            top = root / "sys/fs/cgroup"
            # A container may see its own group at the top.
            parts = pathlib.PurePosixPath(path).parts[1:]
            for depth in range(len(parts) + 1):
                group = (top / kind if kinds else top).joinpath(*parts[:depth])
                with contextlib.suppress(OSError):
                    yield (group / (old if kinds else new)).read_text().strip(), group
