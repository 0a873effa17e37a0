"""TensorStore's contexts, and the processes that may not use it."""

import errno
import functools as ft
import os
import pathlib
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from .. import _rooms


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


@ft.cache
def watch_forks() -> None:
    """From now on `check_fork` raises in forked children."""
    os.register_at_fork(after_in_child=_after_fork)


def _once(make: Callable[[], ts.Context]) -> Callable[[], ts.Context]:
    """`make`, whose result is the same for all threads: what one context has in memory
    the others do not. (`ft.cache` calls it in each thread that is first.)"""
    made: dict[str, ts.Context] = {}

    @ft.wraps(make)
    def get() -> ts.Context:
        return made.get("") or made.setdefault("", make())

    return get


def _spec() -> dict[str, Any]:
    """So that nothing reads more than a leaf's own bytes, chunks are not cached. Kinds
    of store add what they need."""
    return {"cache_pool": {"total_bytes_limit": 0}, **_rooms.context_of_stores()}


@_once
def context() -> ts.Context:
    watch_forks()
    return ts.Context(_spec())


@_once
def mmap_context() -> ts.Context:
    return ts.Context({**_spec(), "file_io_mode": {"mode": "memmap"}}, parent=context())


def with_nodes(parent: ts.Context) -> ts.Context:
    """A context that keeps the nodes of a database, which is all that it is used for:
    the next one at the same path would be taken for the one that is known."""
    return ts.Context(
        {"cache_pool#nodes": {"total_bytes_limit": 64 * 2**20}}, parent=parent
    )


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


# Seconds between looks at whether TensorStore's threads live, and after how many of
# these without any of them nothing is waited for.
_LOOK, _LOOKS = 1.0, 5
_WORKER = "ts_pool_worker"


def result(future: Any) -> Any:
    """Waits for TensorStore. **Raises:** `OSError` if it never ends, as TensorStore
    could start no thread."""
    if future.done():
        return future.result()
    count = 0
    while count < _LOOKS:
        try:
            return future.result(timeout=_LOOK)
        except TimeoutError:
            if future.done():
                return future.result()
            count = 0 if _has_workers() else count + 1
    raise no_threads()


def no_threads() -> OSError:
    return OSError(
        errno.ENOMEM,
        "TensorStore could start no thread: this process is at the system's limit of "
        "memory or of threads. Give it more, and do this in a new process",
    )


def _has_workers() -> bool:
    """Whether threads of TensorStore live, or the system does not tell."""
    try:
        tasks = list(pathlib.Path("/proc/self/task").iterdir())
    except OSError:
        return True
    return any(_name(task) == _WORKER for task in tasks)


def _name(task: pathlib.Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # It has ended.
        return ""
