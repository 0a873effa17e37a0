"""One file whose bytes are in memory of the caller's, and are read where they are."""

import dataclasses
import types
from typing import Any

import numpy as np

from .._errors import BeyondError, MissingError
from .._runtime._threads import Outcome
from ._objects import ABSENT, DriverlessStore


@dataclasses.dataclass(frozen=True)
class BufferStore(DriverlessStore):
    """A store of one `file`, which can only be read."""

    file: str = ""
    data: Any = dataclasses.field(default=None, repr=False, compare=False)

    is_remote = False

    def _path(self) -> str:
        return f"{self.url}/"

    def wait(self, future: Any, soon: bool = False) -> Any:
        return future.result()

    def _range(self, key: str, start: int, stop: int | None) -> Any:
        """**Raises:** `MissingError` if the file ends before."""
        size = len(self.data)
        start = max(0, size + start) if start < 0 else start
        stop = size if stop is None else stop
        if not start <= stop <= size:
            error = BeyondError if start >= size else MissingError
            raise error(f"the end of `{key}` is missing")
        return self.data[start:stop]

    def start_read(self, key: str, start: int, stop: int | None) -> Any:
        reading, is_there = Outcome(), f"{self.url}/{key}" == self.file
        stamp = types.SimpleNamespace(generation=b"1" if is_there else ABSENT)
        try:
            found = bytes(self._range(key, start, stop)) if is_there else b""
        except MissingError as e:
            reading.set_exception(e)
            return reading
        state = "value" if is_there else "missing"
        got = types.SimpleNamespace(value=found, stamp=stamp, state=state)
        reading.set_result(got)
        return reading

    def _read_into(self, key: str, start: int, into: np.ndarray) -> int:
        if f"{self.url}/{key}" != self.file:
            raise FileNotFoundError(f"There is no `{key}`.")
        found = self.data[start : start + into.nbytes]
        into[: len(found)] = np.frombuffer(found, np.uint8)
        return len(found)

    def start_list(self, first: bytes) -> Any:
        listing = Outcome()
        file = self.file.encode()
        listing.set_result([file] if file.startswith(first) else [])
        return listing
