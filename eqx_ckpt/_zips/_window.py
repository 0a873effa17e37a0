"""A file that is looked into from front to back, through one buffer."""

import numpy as np

from .._kernel._storage._backend import Backend


class Window:
    """A file and the part of it that was read last, into a buffer of bytes. It is read
    ahead: as far as that reaches, or up to `end`, if that is within reach."""

    def __init__(
        self, root: Backend, key: str, buffer: np.ndarray, end: int | None = None
    ):
        self._root, self._key, self._buffer, self._end = root, key, buffer, end
        self._start = self._stop = 0

    def forget(self) -> None:
        """Has the next call read anew."""
        self._start = self._stop = 0

    def read_range(self, start: int, stop: int) -> np.ndarray:
        """The bytes `[start, stop)`, or as many of them as there are, until the next
        call."""
        if not self._start <= start <= stop <= self._stop:
            room = len(self._buffer)
            ahead = room if self._end is None else self._end - start
            size = max(stop - start, ahead if ahead <= room else 0)
            if size > room:
                self._buffer = np.empty(size, np.uint8)
            into = self._buffer[:size]
            self._start = self._stop = start
            self._stop += self._root.read_into(self._key, start, into)
        return self._buffer[start - self._start : min(stop, self._stop) - self._start]
