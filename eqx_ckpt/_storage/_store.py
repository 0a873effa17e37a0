"""Reads that all kinds of store do alike."""

import concurrent.futures as cf
import functools as ft
from collections.abc import Callable, Iterable, Sequence
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
    if root.is_far:
        return _threads.gather_requests(jobs, _REQUESTS)
    return _threads.gather(jobs, 1)


def ahead(
    root: Backend, jobs: Sequence[Callable[[], Any]]
) -> Sequence[Callable[[], Any]]:
    """Jobs that look at files below a root, of which not all may be needed. Each is
    done when it is called, and raises then; in a store all are done now, together."""
    if not root.is_far:
        return jobs
    done = gather(root, [ft.partial(_outcome, job) for job in jobs])
    return [outcome.result for outcome in done]


def _outcome(job: Callable[[], Any]) -> cf.Future[Any]:
    out = cf.Future()
    try:
        out.set_result(job())
    except Exception as e:
        out.set_exception(e)
    return out


def tops_of(keys: Iterable[str]) -> dict[str, bool]:
    """The first parts of keys, and whether each is of a directory."""
    tops: dict[str, bool] = {}
    for key in keys:
        first, slash, _ = key.partition("/")
        tops[first] = bool(slash)
    return tops


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
