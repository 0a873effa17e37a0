"""The advisory lock of a directory, which a writer holds as long as it lives.

`contextlib` is written in Python, so Ctrl-C may come between the end of a block and
that of what it holds. A lock that is left so is let go of when we next wait for it.
"""

import contextlib
import errno
import fcntl
import functools as ft
import inspect
import os
import pathlib
import re
import sys
import time
import types
import weakref
from collections.abc import Callable

from .._format import _text
from .._limits import limits
from .._runtime import _log
from ._descriptor import Descriptor, DIRECTORY


# Seconds of waiting for a lock until we look whether a call of our own has left it.
_OWN = 0.2
_PACKAGE = __name__.partition(".")[0] + "."


class DirectoryLock:
    """The lock of a directory, for a block. `with` gives whether it is held: not if
    another has it and we do not `wait`, nor if the file system has no locks. It ends
    with the process. `open_it` opens the directory, if it is to be made too."""

    descriptor: Descriptor
    # The directory as it was opened: another may have come in its place since.
    found: os.stat_result
    # The frame of the call that holds it: of the outermost function of the package.
    call: types.FrameType | None = None

    def __init__(
        self,
        directory: str,
        wait: bool = False,
        open_it: Callable[[], Descriptor] | None = None,
    ):
        self._directory, self._wait = directory, wait
        self._open = open_it or ft.partial(Descriptor, directory, DIRECTORY)

    def __enter__(self) -> bool:
        call = frame = sys._getframe()
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
                call = frame
            frame = frame.f_back
        while True:
            self.descriptor = self._open()
            try:
                fd = self.descriptor.fileno()
                # Also for whoever looks whether it is left.
                self.found, self.call = os.fstat(fd), call
                _locks[id(self)] = weakref.ref(self)
                if not _take(fd, self._directory, self._wait):
                    return False
                # While we waited another directory may have come in its place.
                if is_same(self._directory, self.found):
                    return True
            except BaseException:
                self.__exit__()
                raise
            self.__exit__()

    def __exit__(self, *error: object) -> None:
        # A child that is forked meanwhile has the descriptor too, and would keep the
        # lock of a file that is only closed here. Another thread may close it just now,
        # if it is no more among the locks: the number is then that of another file.
        try:
            if _locks.pop(id(self), None) and self.descriptor.is_open:
                with contextlib.suppress(OSError):
                    fcntl.flock(self.descriptor.fileno(), fcntl.LOCK_UN)
        finally:
            self.descriptor.close()
            self.call = None  # Or all that it has would live as long as this.


# Those of this process, by `id`, that are held or waited for.
_locks: dict[int, weakref.ref[DirectoryLock]] = {}


def _release_abandoned(fd: int) -> None:
    """Lets go of locks of an open directory that calls of this process have left."""
    found = os.fstat(fd)
    for key, reference in _locks.copy().items():
        lock = reference()
        if lock and os.path.samestat(lock.found, found) and _is_over(lock.call):
            # Whoever takes it from there is the only one to do so.
            if _locks.pop(key, None) is reference:
                lock.descriptor.close()


def _is_over(call: types.FrameType | None) -> bool:
    """Whether the call of a function has ended, in whichever thread it was."""
    if call is None or call.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    try:
        call.clear()
    except RuntimeError:
        return False
    return True


def _take(fd: int, directory: str, wait: bool) -> bool:
    """Locks an open directory; if another has locked it and we `wait`, once that can be
    done. Returns whether it has."""
    start, pause, told = time.monotonic(), 0.001, limits.lock_log_seconds
    since, looked = time.strftime("%H:%M:%S"), _OWN
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as e:
            if not (wait and isinstance(e, BlockingIOError)):
                return False  # Or there are no locks.
        waited = time.monotonic() - start
        if waited > looked:
            looked *= 4
            _release_abandoned(fd)
        if waited > min(told, limits.lock_seconds):
            told *= 4
            who = f"{_holder(fd)} holds the lock of `{_text.escape(directory)}`"
            if waited > limits.lock_seconds:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"{who}, which this has waited for since {since}"
                )
            text = f"{who}: waiting for it since {since}"
            _log.say(_log.WARNING, text, path=directory)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _holder(fd: int) -> str:
    """The process that has locked a file, and what it does, as far as that is known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = os.fstat(fd)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        for line in pathlib.Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[-3] == f"{device}:{found.st_ino}" and "->" not in fields:
                process = int(fields[-4])
                status = pathlib.Path(f"/proc/{process}/status").read_text()
                facts = dict(re.findall(r"^(Name|State):\t(.*)", status, re.MULTILINE))
                return f"process {process} ({facts['Name']}, {facts['State']})"
    return "another process"


def is_locked(directory: str) -> bool:
    """Whether another holds the lock of a directory; False if there is none, or the
    file system has no locks."""
    try:
        with Descriptor(directory, DIRECTORY) as fd:
            # Two that ask at the same time do not see one another.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as e:
        return isinstance(e, BlockingIOError)
    return False


def is_same(path: str | os.PathLike[str], found: os.stat_result) -> bool:
    """Whether a path still leads to the file that was found there."""
    try:
        return os.path.samestat(os.stat(path), found)
    except FileNotFoundError:
        return False
