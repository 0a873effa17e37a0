"""A few threads for the jobs of one call."""

import collections
import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any


_is_quiet = contextvars.ContextVar("_is_quiet", default=False)
# Of the 19 steps down. A save then costs a training loop that shares two cores with it
# next to nothing, where it cost two thirds. With all 19 it hardly gets on where other
# processes have taken all cores: 256 MiB took 30 s, and 5 s with these.
_NICENESS = 13


@contextlib.contextmanager
def quietly(is_quiet: bool = True) -> Iterator[None]:
    """Lets `gather` use one thread only, of low priority where the system has that."""
    token = _is_quiet.set(is_quiet)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def _lower_priority() -> None:
    # On Linux this is of the thread, elsewhere it would be of the process.
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))


def gather(jobs: Sequence[Any], threads: int = 8, waiting: bool = False) -> list[Any]:
    """Calls every job on a few threads, and returns the results in order.

    They are not more than the cores, unless the jobs spend their time `waiting`. Waits
    for all that have begun, also when one raises: none is left at work behind an error.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    results: list[Any] = [None] * len(jobs)
    todo = collections.deque(range(len(jobs)))
    errors: list[BaseException] = []
    is_quiet = _is_quiet.get()

    def help() -> None:
        if is_quiet:
            with contextlib.suppress(OSError):
                _lower_priority()
        try:
            work()
        except BaseException as e:
            errors.append(e)

    def work() -> None:
        while not errors:
            try:
                number = todo.popleft()
            except IndexError:
                return
            results[number] = jobs[number]()

    most = threads if waiting else min(threads, os.cpu_count() or 1)
    count = 1 if is_quiet else min(most, len(jobs)) - 1
    helpers = [threading.Thread(target=help, name="eqx_ckpt") for _ in range(count)]
    try:
        for helper in helpers:
            # While the interpreter shuts down no thread can be started, and a save may
            # still have to be finished: then this thread does it alone.
            with contextlib.suppress(RuntimeError):
                helper.start()
        # A thread cannot raise its priority again, and threads that TensorStore starts
        # have that of the one they are started from: so this one does not lower its.
        if is_quiet:
            _join(helpers)
        work()
        _join(helpers)
    except BaseException as e:
        errors.append(e)
        _join(helpers)
    try:
        if errors:
            raise errors[0]
        return results
    finally:
        # An error that knows itself would keep all that is here.
        errors.clear()


def gather_requests(jobs: Sequence[Any], threads: int) -> list[Any]:
    """As `gather`, of jobs that take no core, as they wait for a server: so many at a
    time, also in what is done `quietly`."""
    with quietly(False):
        return gather(jobs, threads, waiting=True)


def _join(helpers: Sequence[threading.Thread]) -> None:
    for helper in helpers:
        # One that comes to life only now finds nothing to do.
        if helper.is_alive():
            helper.join()
