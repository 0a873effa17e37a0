"""Descriptors of open files and directories.

Ctrl-C raises `KeyboardInterrupt` between any two steps of Python. If it came between
the call that opens a file and the step that notes its number, nobody could close the
file. So a file is opened and noted in one step: in `numbers.extend(map(os.open, ...))`
a function in C goes through an iterator, whose next item is what opens the file.
Closing works the same way: one step forgets the number and closes the file. A file that
is left open all the same is closed when nobody has its `Descriptor` any more.
"""

import collections
import fcntl
import functools as ft
import os


# A process may have been started without standard streams. If one of our files got the
# number 1 or 2, whatever a library prints would be written into it. So it is given a
# larger number.
_LEAST = 3
# The flags that open a directory, and that make a file where nothing is.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def _close(numbers: list[int], count: int) -> None:
    """Closes the last `count` files of a list. The step that closes one forgets its
    number: soon another file may have it."""
    collections.deque(map(os.close, map(numbers.pop, [-1] * count)), maxlen=0)


class _Closed:
    """A file that is closed: nothing is left to do. `Descriptor` adds what an open one
    needs; when it is closed, it becomes one of these. A closed one has no `__del__`: an
    interrupt that comes in a `__del__` is lost."""

    # The number of an open file; empty once it is closed.
    _numbers: list[int] = []

    @property
    def is_open(self) -> bool:
        return bool(self._numbers)

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def _become_closed(self) -> None:
        setattr(self, "__class__", _Closed)  # Checkers of types refuse an assignment.


class Descriptor(_Closed):
    """An open file, which is closed at the end of a block, or when nobody has it any
    more. `with` gives its number. The path is relative to the directory `above`, if
    that is given."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        flags: int,
        above: "Descriptor | int | None" = None,
    ):
        self._numbers = []
        if isinstance(above, Descriptor):
            above = above._numbers[0]
        open_it = ft.partial(os.open, dir_fd=above)
        opening = map(open_it, (path,), (flags | os.O_CLOEXEC,), (0o666,))
        try:
            self._numbers.extend(opening)
        except BaseException:
            if not self._numbers:
                self._become_closed()
            raise
        if self._numbers[0] < _LEAST:
            # The new number comes first. Then the low one, now the last, is closed.
            low = self._numbers[0]
            self._numbers[:0] = map(
                fcntl.fcntl, (low,), (fcntl.F_DUPFD_CLOEXEC,), (_LEAST,)
            )
            _close(self._numbers, 1)

    def fileno(self) -> int:
        return self._numbers[0]

    __enter__ = fileno

    def __exit__(self, *error: object) -> None:
        try:
            _close(self._numbers, len(self._numbers))
        finally:
            # Ctrl-C may have come before the step that closes it.
            _close(self._numbers, len(self._numbers))
            self._become_closed()

    close = __exit__

    def __del__(self):
        # At the end of the process modules go first, and the system closes all files.
        if os is not None:
            self.close()
