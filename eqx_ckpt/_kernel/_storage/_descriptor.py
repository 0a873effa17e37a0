"""Descriptors of open files and directories.

Ctrl-C raises `KeyboardInterrupt` between any two steps of Python. If it came between
the call that opens a file and the step that notes its number, nobody could close the
file. So a file is opened and noted in one step, by a function in C that goes through an
iterator of both. It is closed so too. A file that is left open all the same is closed
when nobody has its `Descriptor` any more. (`opener` is for Python's `open`, whose file
notes the number itself.)
"""

import collections
import fcntl
import functools as ft
import os


# A process may have been started without standard streams. A file of ours that had the
# number of one would get what any library says there. So it is given a larger number.
_LEAST = 3
_DUPLICATE = fcntl.F_DUPFD_CLOEXEC
# The flags that open a directory.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
# Goes through an iterator in one step.
_exhaust = ft.partial(collections.deque, maxlen=0)


def opener(path: str, flags: int) -> int:
    """Opens a file, for Python's `open`: not as a standard stream."""
    number = os.open(path, flags | os.O_CLOEXEC, 0o666)
    if number < _LEAST:
        low, number = number, fcntl.fcntl(number, _DUPLICATE, _LEAST)
        os.close(low)
    return number


class _Closed:
    """A file that is closed. It has no `__del__`: Ctrl-C in one would be lost."""

    # The number of the file, while it is open.
    _numbers: list[int] = []

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass


class Descriptor(_Closed):
    """An open file, which is closed at the end of a block, or when nobody has it any
    more. `with` gives its number."""

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
                # Nothing is left to do in `__del__`, where Python drops interrupts.
                setattr(self, "__class__", _Closed)
            raise
        if self._numbers[0] < _LEAST:
            # The new number comes before the low one, which is the last, and is closed.
            low = self._numbers[0]
            self._numbers[:0] = map(fcntl.fcntl, (low,), (_DUPLICATE,), (_LEAST,))
            _exhaust(map(os.close, map(self._numbers.pop, (-1,))))

    def fileno(self) -> int:
        return self._numbers[0]

    __enter__ = fileno

    def __exit__(self, *error: object) -> None:
        numbers = self._numbers
        try:
            # A number is forgotten in the step that closes it: soon another file may
            # have it.
            _exhaust(map(os.close, map(numbers.pop, [-1] * len(numbers))))
        finally:
            # Ctrl-C may come before that step. Then this one closes the file.
            _exhaust(map(os.close, map(numbers.pop, [-1] * len(numbers))))
            setattr(self, "__class__", _Closed)

    close = __exit__

    def __del__(self):
        # At the end of the process modules go first, and the system closes all files.
        if os is not None:
            self.close()
