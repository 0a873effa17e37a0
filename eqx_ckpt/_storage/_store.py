"""Reads that all kinds of store do alike."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorstore as ts

from .._runtime import _threads
from . import _files
from ._backend import Backend, Value


# Requests to an object store that are under way at a time.
_REQUESTS = 16


def gather(root: Backend, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that look at files below a root: in turn, or some at a time
    in an object store, where each is a request."""
    return _threads.gather(jobs, _REQUESTS if root.is_far else 1, waiting=root.is_far)


def is_still(root: Backend, key: str, found: Value | None) -> bool:
    """Whether a file is what was found, or is still not there."""
    now = root.read(key)
    return (now and now.data) == (found and found.data)


def bytes_read() -> int:
    """The bytes that have been read from files in this process, by `pread` and by
    memory maps of TensorStore."""
    total = sum(_files.counts.copy().values())
    # By their names: TensorStore leaks a little of each metric that it is asked for.
    for name in (
        "/tensorstore/kvstore/file/bytes_read",
        "/tensorstore/file/mmap_bytes",
    ):
        for metric in ts.experimental_collect_matching_metrics(name):
            if metric["name"] == name:
                total += sum(value.get("value", 0) for value in metric["values"])
    return total
