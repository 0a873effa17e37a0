"""Settings of the process that a call changes while it lasts.

Calls overlap, in threads, and end in any order; and the program may change the same
settings meanwhile.
"""

import contextlib
import functools as ft
import os
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from . import _cleanup


T = TypeVar("T")


class Setting(Generic[T]):
    """A setting that blocks change, and that the last of them to end puts back. A block
    that begins as that one ends may go on without it: what is set this way makes calls
    faster, and nothing else.

    - `get`, `put`: the functions of the process.
    - `change`: from what blocks find to what they put there. `is_changed` tells that
        from whatever else the program may put there, which then stays.

    No lock is held, as Ctrl-C may come anywhere, and a signal handler may make a call.
    """

    def __init__(
        self,
        get: Callable[[], T],
        put: Callable[[T], object],
        change: Callable[[T], T],
        is_changed: Callable[[T], bool],
    ):
        self._get, self._put = get, put
        self._change, self._is_changed = change, is_changed
        self._found: T | None = None
        self._blocks: set[object] = set()
        os.register_at_fork(after_in_child=self._after_fork)

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Changes it for a block."""
        block = object()
        with _cleanup.surely(ft.partial(self._end, block)):
            self._blocks.add(block)
            now = self._get()
            if not self._is_changed(now):
                self._found = now
                self._put(self._change(now))
            yield

    def _end(self, block: object) -> None:
        self._blocks.discard(block)
        if not self._blocks and self._found is not None:
            if self._is_changed(self._get()):
                self._put(self._found)

    def _after_fork(self) -> None:
        # The threads of the other blocks are not in the child.
        self._blocks.clear()
        self._end(self)
