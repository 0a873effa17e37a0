"""Saves that go on behind their callers: their handles, their order, their errors.

Each has a thread, which the interpreter waits for before it exits: a script that ends
right after an asynchronous save has its checkpoint. They are written one after the
other, in the order of the calls.
"""

import atexit
import contextlib
import functools as ft
import io
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import _rooms
from .._limits import limits
from .._runtime import _arguments, _cleanup, _handlers, _log, _threads
from .._runtime._progress import Count
from .._storage import _context
from .._storage._backend import Backend


class Progress(NamedTuple):
    """Bytes of a save that are written, of the total."""

    nbytes: int
    total: int


class Committed(NamedTuple):
    """A save that is published: its id, if that has a directory, and the stamp of its
    index, in the process that has written that."""

    save_id: str = ""
    stamp: str = ""


class SaveHandle:
    """A save that goes on in the background, returned by
    [`async_tree_serialise_leaves`][].

    All of its methods but `add_done_callback` raise the error of the save, if there is
    one. If none of them has raised it, the next save of the process does, or else it is
    written at exit: see [`async_tree_serialise_leaves`][].

    In a forked child the methods raise `RuntimeError`: the save goes on in the parent.
    """

    def __init__(
        self, root: Backend, nbytes: int = 0, copied: int = 0, is_apart: bool = False
    ):
        self._root = root
        self._staged = _threads.Event()
        self._saved: _threads.Outcome[None] = _threads.Outcome()
        # Who takes what is in it runs the save, or gives it up: only one thread does.
        self._claim = [None]
        # None until it has been started, and where no thread can be.
        self._worker: _threads.Worker | None = None
        # The `SavedArrays` that it writes, for later saves: see `_reuse`.
        self._arrays: Any = None
        # What `write` has returned: see `committed_by`.
        self._committed: Committed | None = None
        # The bytes of the copies that it has of the caller's arrays.
        self._copied = copied
        # Whether it does not wait for other kinds of saves, nor they for it.
        self._is_apart = is_apart
        # The places of the checkpoints whose lazy leaves it saves.
        self._reads: frozenset[str] = frozenset()
        # The bytes of the leaves, and how many are written.
        self._nbytes, self._count = nbytes, Count()

    def __repr__(self) -> str:
        return f"<SaveHandle of `{self._root}`: {state_of(self)}>"

    def _repr_html_(self) -> str:
        return _rooms.html(self)

    @_handlers.pass_through
    def staged(self) -> None:
        """Waits until you may donate, delete or overwrite the arrays that are saved.

        On CPU you may once `async_tree_serialise_leaves` returns, whatever shares the
        memory of the arrays. On accelerators you may once all arrays have been copied
        to the host.

        **Raises:** what went wrong, if something has.
        """
        _context.check_fork()
        await_event(self, self._staged)
        if self._saved.done():
            self.result()

    @_handlers.pass_through
    def done(self) -> bool:
        """Whether the checkpoint is at its path. Does not wait.

        **Raises:** what went wrong, if something has.
        """
        _context.check_fork()
        _has_ended(self)
        if not self._saved.done():
            return False
        self.result()
        return True

    @property
    def progress(self) -> Progress:
        """Progress of the save: `handle.progress.nbytes` of `handle.progress.total`
        bytes of the leaves are written, or linked. Of many processes each counts its
        own part, until the save is over.
        """
        is_saved = self._saved.done() and self._saved.exception() is None
        done = self._nbytes if is_saved else min(self._count.nbytes, self._nbytes)
        return Progress(done, self._nbytes)

    @_handlers.pass_through
    def result(self, timeout: int | float | None = None) -> None:
        """Waits until the checkpoint is at its path.

        **Arguments:**

        - `timeout`: the most seconds to wait; without one, as long as it takes.

        **Raises:** the error of the save; `TimeoutError` if it is still going on after
        `timeout` seconds; it is not stopped.
        """
        _arguments.WAIT.check_argument("timeout", timeout)
        _context.check_fork()
        waiter = object()
        with _cleanup.surely(lambda: _asked.pop(waiter, None)):
            _asked[waiter] = self
            if not _wait([self], timeout):
                raise TimeoutError(
                    f"The save to `{self._root}` is still going on after {timeout} "
                    "seconds."
                )
            try:
                self._saved.result()
            finally:
                _drop(_failed, self)

    def add_done_callback(self, fn: Callable[["SaveHandle"], Any]) -> None:
        """Calls `fn(handle)` when the save is over, failed or not: now, if it is over.

        The thread of the save calls it, so it should be quick. What it raises is
        logged and ignored, as by `concurrent.futures.Future.add_done_callback`.
        """
        _context.check_fork()
        # A run deletes steps in one, and waits for that by `RunningSave.over`.
        self._saved.add_done_callback(lambda _: fn(self))


# ---- What other rooms ask of a handle.


def root_of(handle: SaveHandle) -> Backend:
    """The place that is saved to."""
    return handle._root


def state_of(handle: SaveHandle) -> str:
    """The state of a save, for people."""
    if not handle._saved.done():
        return "being saved"
    return "failed" if error_of(handle) else "saved"


def error_of(handle: SaveHandle) -> BaseException | None:
    """The error of a save that is over and has failed."""
    return handle._saved.exception() if handle._saved.done() else None


def committed_by(handle: SaveHandle) -> Committed | None:
    """The commit of a save that is over; None if it goes on, or has failed."""
    is_saved = handle._saved.done() and error_of(handle) is None
    return handle._committed if is_saved else None


def has_thread(handle: SaveHandle) -> bool:
    """Whether a thread of its own writes the save, or has written it. Else the call
    that starts it does, which has not returned yet."""
    return handle._worker is not None


def await_event(handle: SaveHandle, event: _threads.Event) -> bool:
    """Waits until the thread of a save sets an event. Returns False if that has ended
    without it."""
    while not event.wait(_LOOK):
        if _has_ended(handle):
            return event.is_set()
    return True


# ---- All saves that are under way.

# No lock is held where these are used, as signal handlers may save, and Ctrl-C may come
# anywhere. What threads do with them is one step each.

# In the order of the calls.
_pending: list[SaveHandle] = []
# Those whose error nobody has been told yet.
_failed: list[SaveHandle] = []
# Those that somebody waits for, who will be told.
_asked: dict[object, SaveHandle] = {}


def _drop(handles: list[SaveHandle], handle: SaveHandle) -> None:
    with contextlib.suppress(ValueError):
        handles.remove(handle)


def start(
    handle: SaveHandle,
    collect: Callable[[], Any] | None,
    write: Callable[[], Committed | None],
    give_up: Callable[[BaseException], None] = lambda error: None,
) -> SaveHandle:
    """Starts a thread that runs `collect`, which waits for copies from devices. When
    the saves before this one are over, it runs `write`. If it is interrupted before it
    begins, it calls `give_up`. Saves whose handle is apart have an order of their own,
    and their errors are told by the handle or at exit."""
    _context.watch_forks()
    if collect is None:
        handle._staged.set()
    work = ft.partial(_work_on, handle, collect, write)
    worker = _threads.Worker(work, "eqx_ckpt save")
    try:
        _pending.append(handle)
        if not _start_thread(handle, worker):
            work()
            handle.result()
    except BaseException as e:
        # By Ctrl-C. If the thread has been started all the same, it goes on.
        if end_unclaimed(handle):
            give_up(e)
        else:
            handle._worker = worker
        raise
    return handle


def end_unclaimed(handle: SaveHandle) -> bool:
    """Ends a save that was interrupted before anybody ran it. Returns whether it was.
    Its caller is told by an error."""
    if is_claimed := _claim(handle):
        _end_given_up(handle)
    return is_claimed


def make_room(nbytes: int) -> None:
    """Waits until the saves that are under way leave room for the copies of another."""
    together = lambda: [handle for handle in _pending.copy() if not handle._is_apart]
    for handle in together():
        copied = sum(other._copied for other in together())
        if copied + nbytes <= limits.queued_copy_bytes:
            return
        _wait([handle])


def _start_thread(handle: SaveHandle, worker: _threads.Worker) -> bool:
    """Starts the thread of a save. Returns whether that could be done."""
    # After the main thread nobody waits for a new one.
    if not threading.main_thread().is_alive() or not worker.start():
        return False
    handle._worker = worker
    return True


# Seconds between looks at whether threads that are waited for live.
_LOOK = 1.0


def _wait(handles: Sequence[SaveHandle], timeout: int | float | None = None) -> bool:
    """Waits until saves are over, or for so many seconds. Returns whether they are."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    for handle in handles:
        while not handle._saved.wait(min(_LOOK, end - time.monotonic())):
            _has_ended(handle)
            if time.monotonic() >= end:
                return handle._saved.done()
    return True


def _has_ended(handle: SaveHandle) -> bool:
    """Whether the thread of a save has ended. If it has without a word, by an error
    such as a `MemoryError` before its first step, this says that the save is over."""
    is_over = handle._worker is not None and handle._worker.is_over
    if is_over:
        _end(handle, [_ended()])
    return is_over


def _ended() -> RuntimeError:
    return RuntimeError("The thread of the save has ended.")


def _claim(handle: SaveHandle) -> bool:
    """Whether this thread is the one that claims a save."""
    try:
        handle._claim.pop()
    except IndexError:
        return False
    return True


def _work_on(
    handle: SaveHandle,
    collect: Callable[[], Any] | None,
    write: Callable[[], Committed | None],
) -> None:
    # The error to tell. The list is empty once the save has succeeded.
    errors: list[BaseException] = [_ended()]
    with _cleanup.surely(ft.partial(_end, handle, errors)):
        try:
            if not _claim(handle):
                _end_given_up(handle)
                return
            if collect is not None:
                collect()
                handle._staged.set()
            # Each save before, and not only the last: if that fails as it is staged, it
            # is over while others go on.
            pending = _pending.copy()
            before = pending[: pending.index(handle)]
            before = [x for x in before if x._is_apart == handle._is_apart]
            _wait(before)
            pending.clear()
            before.clear()
            handle._committed = write()
            errors.clear()
        except BaseException as e:
            errors[:] = [e]
            _forget_locals(e)
            what = f"The save to `{handle._root}` has failed: {type(e).__name__}: {e}"
            _log.say(_log.ERROR, what, path=str(handle._root))


def _end(handle: SaveHandle, errors: list[BaseException]) -> None:
    """Says that a save is over. Called again, it does what has not been done."""
    if not handle._saved.done():
        if errors and handle not in _failed:
            _failed.append(handle)
        _drop(_pending, handle)
        # Another thread may say so at the same time. What is said first counts.
        if errors:
            handle._saved.set_exception(errors[0])
        else:
            handle._saved.set_result(None)
    handle._staged.set()


def _end_given_up(handle: SaveHandle) -> None:
    """Says that a save is over which nobody runs. Its caller is told by an error."""
    _end(handle, [RuntimeError("It was interrupted before it began.")])
    _drop(_failed, handle)


def _forget_locals(error: BaseException | None) -> None:
    # Until somebody asks for it, the error would keep the arrays of the save.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def raise_unreported() -> None:
    """Raises the errors of earlier saves that nobody has asked for, once."""
    if not (failed := _failed.copy()):
        return
    asked = _asked.copy().values()
    failed = [x for x in failed if x not in asked and not x._is_apart]
    if not failed:
        return
    errors = [e for handle in failed if (e := handle._saved.exception()) is not None]
    lines = [
        f"  `{handle._root}`: {type(e).__name__}: {e}"
        for handle, e in zip(failed, errors)
    ]
    try:
        raise RuntimeError(
            "Asynchronous saves of this process have failed, and nobody has asked "
            "their handles for the error:\n" + "\n".join(lines) + "\nThe save that "
            "raises this has not been started. Call again to start it."
        ) from (errors[0] if len(errors) == 1 else BaseExceptionGroup("", errors))
    finally:
        for handle in failed:
            _drop(_failed, handle)


# The places of checkpoints whose lazy leaves are saved, by an object for each save.
_readers: dict[object, frozenset[str]] = {}


@contextlib.contextmanager
def reading(places: frozenset[str]) -> Iterator[None]:
    """A save of lazy leaves of the checkpoints at these places goes on in the block."""
    reader = object()
    with _cleanup.surely(lambda: _readers.pop(reader, None)):
        _readers[reader] = places
        yield


def is_read(root: Backend) -> bool:
    """Whether a save of this process that goes on, or waits, reads the checkpoint
    there."""
    waiting = [handle._reads for handle in _pending.copy()]
    places = frozenset().union(*waiting, *_readers.copy().values())
    return bool(places) and root.target() in places


def wait_for(root: Backend) -> None:
    """Waits for the asynchronous saves to a path that are under way."""
    if pending := _pending.copy():
        place = root.target()
        _wait([handle for handle in pending if handle._root.target() == place])


@atexit.register
def _report() -> None:
    """Writes the errors that nobody has asked for to stderr, and fails the exit."""
    if _context.is_forked():
        return
    untold = [(handle._root, handle._saved.exception()) for handle in _failed]
    # Only when the wait for their threads was interrupted.
    untold += [(handle._root, None) for handle in _pending]
    if not untold:
        return
    # A program without a terminal may have none, or have closed it.
    stderr = io.StringIO() if getattr(sys.stderr, "closed", True) else sys.stderr
    for root, error in untold:
        what = (
            "was interrupted. The path holds what it held before, or all of the save "
            "if it was at its end."
            if error is None
            else "has failed, and nobody has asked its handle for the error. The path "
            "holds what it held before."
        )
        print(f"The asynchronous save to `{root}` {what}", file=stderr)
        if error is not None:
            traceback.print_exception(error, file=stderr)
    sys.stderr = _FailingExit(stderr)


class _FailingExit:
    """Stands for a stream, and fails the interpreter's own last flush of it.

    That makes the exit status 120, as `sys.exit` documents; nothing that is raised in
    an `atexit` handler does, and `os._exit` would skip the handlers of others.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise RuntimeError("An asynchronous save has failed.")
