"""Threads for the jobs of a call, and the words that they give each other.

Nothing needs a thread. While the interpreter shuts down none can be started, nor at
the system's limit, and a save may still have to be finished, or a load made: then the
thread that makes the call does all of it alone.

Ctrl-C raises `KeyboardInterrupt` between any two steps of the main thread. In a `with`
of Python 3.14 it may come after the lock is taken, and before the block; and Python's
own events, futures and `Thread.start` take locks in many steps. What is here takes
none: each change is one step, so that no interrupt leaves a lock locked, or a thread
half started.
"""

import _thread
import collections
import contextlib
import contextvars
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from . import _log, _machine


T = TypeVar("T")

_is_quiet = contextvars.ContextVar("_is_quiet", default=False)
# Of the 19 steps down. A save then costs a training loop that shares two cores with it
# next to nothing, where it cost two thirds. With all 19 it hardly gets on where other
# processes have taken all cores: 256 MiB took 30 s, and 5 s with these.
_NICENESS = 13
# Seconds between looks at whether what is waited for has gone without a word.
_LOOK = 1.0


# ---- What threads wait for.


class Event:
    """A `threading.Event` that an interrupt cannot break."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[queue.SimpleQueue[None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for bell in self._waiting.copy():
            bell.put(None)

    def wait(self, timeout: int | float | None = None) -> bool:
        """Waits, at most for so many seconds. Returns whether it is set."""
        if not self._is_set:
            bell: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._waiting.append(bell)
            # Who sets it now rings the bell.
            if not self._is_set:
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=None if timeout is None else max(0, timeout))
            self._waiting.remove(bell)
        return self._is_set


class Outcome(Generic[T]):
    """The result or the error of a job, like a `concurrent.futures.Future`. The first
    one that is set counts."""

    def __init__(self) -> None:
        # The result and the error, under the key "": `setdefault` takes one step, and
        # keeps the first.
        self._said: dict[str, tuple[Any, BaseException | None]] = {}
        self._event = Event()
        self._callbacks: collections.deque[Callable[[Any], Any]] = collections.deque()

    def set_result(self, result: T) -> None:
        self._say(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._say(None, error)

    def _say(self, *said: Any) -> None:
        self._said.setdefault("", said)
        self._event.set()
        self._call_back()

    def done(self) -> bool:
        return bool(self._said)

    def wait(self, timeout: int | float | None = None) -> bool:
        """Waits, at most for so many seconds. Returns whether it is done."""
        return self.done() or self._event.wait(timeout) or self.done()

    def result(self, timeout: int | float | None = None) -> T:
        """The result, once it is there. **Raises:** the error, or `TimeoutError`."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return self._said[""][0]
        finally:
            del error  # It would know this frame, and be known to it.

    def exception(self, timeout: int | float | None = None) -> BaseException | None:
        if not self.wait(timeout):
            raise TimeoutError
        return self._said[""][1]

    def cancel(self) -> bool:
        """Does nothing: what a thread has begun goes on."""
        return False

    def add_done_callback(self, callback: Callable[["Outcome[T]"], Any]) -> None:
        """Calls it with this once it is done: now, or in the thread that says so."""
        self._callbacks.append(callback)
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                _call(self._callbacks.popleft(), self)


def _call(callback: Callable[[Any], Any], outcome: Any) -> None:
    try:
        callback(outcome)
    except Exception as e:
        _log.say(_log.ERROR, f"A callback has failed: {type(e).__name__}: {e}")


class Lock:
    """A lock that runs calls of threads one after the other. It is reentrant: a signal
    handler may call in the middle of a call."""

    def __init__(self) -> None:
        # The thread that has the lock, and a mark of its call, under the key "".
        self._holder: dict[str, tuple[int, object]] = {}
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, call: Callable[[], T]) -> T:
        """Calls it while no other thread runs something."""
        own = threading.get_ident(), object()
        try:
            try:
                while self._holder.setdefault("", own)[0] != own[0]:
                    with contextlib.suppress(queue.Empty):
                        self._bell.get(timeout=0.05)
                return call()
            finally:
                self._leave(own)
        finally:
            self._leave(own)  # The first may have been interrupted.

    def _leave(self, own: tuple[int, object]) -> None:
        if self._holder.get("") is own:
            del self._holder[""]
            if self._bell.empty():
                self._bell.put(None)


# ---- Threads.


class _End(list[Event]):
    """Says that a thread is over once that has dropped it: also one that had no memory
    for its first step."""

    def __del__(self) -> None:
        for over in self:
            over.set()


def _work(work: Callable[[], Any], end: _End) -> None:
    try:
        work()
    finally:
        end[0].set()


class Worker:
    """A thread that does some work. The interpreter waits for it before it exits,
    unless it is a `daemon`."""

    def __init__(
        self, work: Callable[[], Any], name: str = "eqx_ckpt", daemon: bool = False
    ):
        self._begun, self._over = Event(), Event()
        args = work, _End([self._over])
        self._thread = threading.Thread(
            target=_work, args=args, name=name, daemon=daemon
        )
        # Whether it is, or will be, started. What is said first counts.
        self._starts: dict[str, bool] = {}

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def start(self) -> bool:
        """Starts it. Returns whether that could be done."""
        return bool(start([self]))

    def _start(self) -> None:
        try:
            if self._starts.setdefault("", True):
                self._thread.start()
        except (RuntimeError, MemoryError):
            self._starts[""] = False
        finally:
            if self._thread.ident is None:
                self._over.set()
            self._begun.set()

    def join(self) -> None:
        """Waits until it has ended. If it has not been started, it will not be."""
        if self._starts.setdefault("", False):
            self._over.wait()

    def has_started(self) -> bool:
        self._begun.wait()
        return self._starts[""]


def start(workers: Sequence[Worker]) -> list[Worker]:
    """Starts them. Returns those with which that could be done."""

    def start_all() -> None:
        for worker in workers:
            worker._start()

    if threading.current_thread() is not threading.main_thread():
        start_all()
    else:
        # What `Thread.start` does in another thread, nothing interrupts.
        try:
            _thread.start_new_thread(start_all, ())
        except RuntimeError:
            return []
    return [worker for worker in workers if worker.has_started()]


def _join(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.join()


# ---- Jobs.


@contextlib.contextmanager
def quietly(is_quiet: bool = True) -> Iterator[None]:
    """Lets `gather` use one thread only, of low priority where the system has that. One
    job alone is done by the caller, whose priority stays."""
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

    most = threads if waiting else min(threads, _machine.cores())
    count = 1 if is_quiet else min(most, len(jobs)) - 1
    helpers = [Worker(help) for _ in range(count)]
    try:
        start(helpers)
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
    """Gathers jobs that wait for a server and take no core, `threads` at a time, also
    within `quietly`."""
    with quietly(False):
        return gather(jobs, threads, waiting=True)


class Crew:
    """A few threads for the jobs of a block, whose results are taken one by one. They
    are started as jobs come. At the end of the block none is left at work."""

    def __init__(self, most: int):
        self._most = most
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._helpers: list[Worker] = []

    def submit(self, job: Callable[[], T]) -> Outcome[T]:
        """Lets a thread do a job; or does it, if there is no thread."""
        outcome: Outcome[T] = Outcome()

        def do() -> None:
            try:
                outcome.set_result(job())
            except BaseException as e:
                outcome.set_exception(e)

        if len(self._helpers) < self._most:
            helper = Worker(self._help)
            self._helpers.append(helper)
            if not helper.start():
                self._helpers.remove(helper)
                self._most = len(self._helpers)
        self._todo.put(do)
        if not self._helpers:
            self._help_out()
        return outcome

    def result(self, outcome: Outcome[T]) -> T:
        while not outcome.wait(_LOOK):
            if all(helper.is_over for helper in self._helpers):
                self._help_out()
                if not outcome.done():
                    raise RuntimeError("The thread of a read has ended.")
        return outcome.result()

    def _help(self) -> None:
        while True:
            try:
                do = self._todo.get(timeout=_LOOK)
            except queue.Empty:
                # The call may have been interrupted, even as it ended.
                if not threading.main_thread().is_alive():
                    return
                continue
            if do is None:
                return
            do()
            del do  # It has the result, which may be large.

    def _help_out(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (do := self._todo.get_nowait()) is not None:
                do()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._end()
        finally:
            self._end()  # The first may have been interrupted.

    def _end(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._helpers:
            self._todo.put(None)
        _join(self._helpers)
