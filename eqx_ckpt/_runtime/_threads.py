"""A few threads for the jobs of one call.

Nothing needs them. While the interpreter shuts down no thread can be started, nor at
the system's limit, and a save may still have to be finished, or a load made: then the
thread that makes the call does all of it alone.
"""

import collections
import concurrent.futures as cf
import contextlib
import contextvars
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from . import _cleanup


T = TypeVar("T")

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
            is_started(helper)
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


# Seconds between looks at whether threads that are waited for live.
_LOOK = 1.0


class Crew:
    """A few threads for the jobs of a block, whose results are taken one by one. They
    are started as jobs come. At the end of the block none is left at work."""

    def __init__(self, most: int):
        self._most = most
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def submit(self, job: Callable[[], T]) -> cf.Future[T]:
        """Lets a thread do a job; or does it, if there is no thread."""
        future: cf.Future[T] = cf.Future()

        def do() -> None:
            try:
                future.set_result(job())
            except BaseException as e:
                future.set_exception(e)

        if len(self._helpers) < self._most:
            helper = threading.Thread(target=self._help, name="eqx_ckpt")
            if is_started(helper):
                self._helpers.append(helper)
            else:
                self._most = len(self._helpers)
        self._todo.put(do)
        if not self._helpers:
            self._help_out()
        return future

    def result(self, future: cf.Future[T]) -> T:
        while not future.done() and not cf.wait([future], _LOOK).done:
            if not any(helper.is_alive() for helper in self._helpers):
                self._help_out()
                if not future.done():
                    raise RuntimeError("The thread of a read has ended.")
        return future.result()

    def _help(self) -> None:
        while (do := self._todo.get()) is not None:
            do()
            del do  # It has the result, which may be large.

    def _help_out(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (do := self._todo.get_nowait()) is not None:
                do()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._helpers:
            self._todo.put(None)
        _join(self._helpers)


class Turn:
    """What threads do one after the other. One that has its turn may take it again, as
    by a signal handler.

    No lock is left locked, whatever Ctrl-C interrupts: each change is one step.
    """

    def __init__(self) -> None:
        self._holder: dict[str, tuple[int, object]] = {}

    @contextlib.contextmanager
    def taken(self, check: Callable[[], object]) -> Iterator[None]:
        """Waits for the turn, while `check` raises nothing, and has it for a block."""
        own = threading.get_ident(), object()
        with _cleanup.surely(lambda: self._give_back(own)):
            pause = 0.001
            while self._holder.setdefault("", own)[0] != own[0]:
                check()
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            yield

    def _give_back(self, own: tuple[int, object]) -> None:
        if self._holder.get("") is own:
            del self._holder[""]


def is_started(thread: threading.Thread) -> bool:
    """Starts a thread. Returns whether that could be done."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _join(helpers: Sequence[threading.Thread]) -> None:
    for helper in helpers:
        # One that comes to life only now finds nothing to do.
        if helper.is_alive():
            helper.join()
