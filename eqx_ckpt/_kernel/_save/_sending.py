"""Files on their way to an object store."""

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .._storage import _store
from .._storage._objects import ObjectStore


class UploadQueue:
    """Sends files side by side. Once more than `most` bytes are on their way, a call
    waits for the first of them; in the end all are waited for."""

    def __init__(self, store: ObjectStore, most: int):
        self._store, self._most = store, most
        # Of each: its key, the write, and its bytes. Threads take one step at a time.
        self._sending: collections.deque[tuple[str, Any, int]] = collections.deque()

    def send(self, key: str, buffers: Iterable[Any]) -> None:
        data = b"".join(buffers)
        self._sending.append((key, self._store.start_write(key, data), len(data)))
        del data
        self.wait(self._most)

    def wait(self, most: int = 0) -> None:
        """Waits until no more than `most` bytes are on their way; by default for all.

        **Raises:** what went wrong with a file that was sent.
        """
        size = lambda: sum(nbytes for *_, nbytes in self._sending.copy())
        while not most or size() > most:
            try:
                key, write, _ = self._sending.popleft()
            except IndexError:
                return
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
