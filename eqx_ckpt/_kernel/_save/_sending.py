"""Files on their way to an object store."""

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .._runtime import _threads
from .._storage import _store
from .._storage._objects import ObjectStore


class UploadQueue:
    """Sends files side by side. Once more than `most` bytes are on their way, a call
    waits for the first of them; in the end all are waited for."""

    def __init__(self, store: ObjectStore, most: int):
        self._store, self._most = store, most
        self._sending: collections.deque[tuple[str, Any, int]] = collections.deque()
        self._size = 0
        self._lock = _threads.Lock()

    def send(self, key: str, buffers: Iterable[Any]) -> None:
        data = b"".join(buffers)
        sending = key, self._store.start_write(key, data), len(data)
        del data
        self._lock.run(lambda: self._add(sending))
        self.wait(self._most)

    def _add(self, sending: tuple[str, Any, int]) -> None:
        self._sending.append(sending)
        self._size += sending[2]

    def _next(self, most: int) -> tuple[str, Any, int] | None:
        if not self._sending or (most and self._size <= most):
            return None
        self._size -= self._sending[0][2]
        return self._sending.popleft()

    def wait(self, most: int = 0) -> None:
        """Waits until no more than `most` bytes are on their way; by default for all.

        **Raises:** what went wrong with a file that was sent.
        """
        while sending := self._lock.run(lambda: self._next(most)):
            key, write, _ = sending
            _store.finish_write(self._store, key, write)

    @contextlib.contextmanager
    def open(self) -> Iterator["UploadQueue"]:
        """After an error nothing is on its way any more: it can be deleted."""
        try:
            yield self
        except BaseException:
            while self._sending:
                with contextlib.suppress(OSError, ValueError):
                    self.wait()
            raise
