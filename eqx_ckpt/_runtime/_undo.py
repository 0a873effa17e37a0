"""Clean-ups at the end of a block, whatever ends it.

Ctrl-C raises `KeyboardInterrupt` between any two steps of Python: also before a `try`
that is to undo what was just done, and in the `finally` that undoes it.
"""

import collections
import contextlib
import functools as ft
import os
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def surely(undo: Callable[[], Any]) -> Iterator[None]:
    """Calls `undo` at the end, and again, as the first call may be interrupted. What it
    undoes is done inside."""
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


class _Closable:
    """A file that is open, until it is closed."""

    # Of one that has not got as far as to be opened.
    _numbers: list[int] = []

    def __init__(
        self,
        path: str | os.PathLike[str],
        flags: int,
        mode: int = 0o666,
        above: "Descriptor | None" = None,
    ):
        self._numbers = []
        open_it = ft.partial(os.open, dir_fd=above and above.fileno())
        # Python does not interrupt the one call that opens it and notes its number.
        self._numbers.extend(map(open_it, [path], [flags | os.O_CLOEXEC], [mode]))

    def fileno(self) -> int:
        return self._numbers[0]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes it, if it is open."""
        # One call here too: its number may soon be that of another file.
        closing = map(os.close, map(self._numbers.pop, [-1] * len(self._numbers)))
        collections.deque(closing, maxlen=0)
        # Ctrl-C at the beginning of a `__del__` would be lost: of what is closed there
        # is none.
        setattr(self, "__class__", _Closable)


class Descriptor(_Closable):
    """A file that is open, until it is closed or nobody has it any more."""

    def __del__(self):
        # At the end of the process modules go first, and the system closes all files.
        if os is not None:
            self.close()


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str],
    flags: int,
    mode: int = 0o666,
    above: Descriptor | None = None,
) -> Iterator[int]:
    """A descriptor for a block; of a path in the directory `above`, if that is open."""
    own: list[Descriptor] = []
    with surely(lambda: own and own[0].close()):
        own.append(Descriptor(path, flags, mode, above))
        yield own[0].fileno()
