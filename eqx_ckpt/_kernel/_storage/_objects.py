"""`ObjectStore`: stores, and memory, that have keys and no directories."""

import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorstore as ts

from .._errors import BeyondError, MissingError
from . import _store
from ._backend import Backend, Value


# The generation of a file that is not there. An empty one would match any file.
ABSENT = b"\x02"
# So many bytes arrive soon, over any connection.
_SOON_BYTES = 2**20


class KeyList(NamedTuple):
    """Keys that a store was asked for: whether they are there; and `wait` gives
    them."""

    is_there: Callable[[], bool]
    wait: Callable[[], list[str]]


@dataclasses.dataclass(frozen=True)
class ObjectStore(Backend):
    """A store that takes files by requests, of which many may be under way; in memory,
    unless another kind says how a request is made. `options`: of the store, as JSON."""

    url: str
    options: str = dataclasses.field(default="{}", repr=False)

    is_remote = True

    def target(self) -> str:
        return self.url

    def _bucket(self) -> str:
        """The URL of all of the store."""
        return "memory://"

    def check_url(self) -> None:
        """**Raises:** `ValueError` if nothing can be at such a URL."""
        ts.KvStore.Spec(self.spec())

    def spec(self, key: str = "") -> dict[str, Any]:
        options = json.loads(self.options)
        options.pop("timeout", None)
        spec = ts.KvStore.Spec(self.url + "/").to_json() | options
        path = spec.get("path", "")
        spec["path"] = (path if path.strip("/") else self._top()) + (key and key + "/")
        return spec

    def _top(self) -> str:
        """The path of all of the store."""
        return ""

    def check_conditions(self, key: str) -> None:
        """Writes a small file, if that has to be done to know that the conditions of a
        write are heeded. **Raises:** `RuntimeError` if they are not."""

    def _got(self, key: str, reading: object, soon: bool = True) -> Any:
        return _store.read_answer(self, key, reading, soon)

    def has(self, key: str) -> bool:
        try:
            return self.read(key, 1) is not None
        except MissingError:
            return True  # It is empty.

    def check_range(self, key: str, stop: int) -> int | None:
        if stop:
            last = self.start_read(key, stop - 1, stop)
            if not self._is_there(key, last):
                raise MissingError(f"`{key}`, or the end of it, is missing")
        return None

    def _is_there(self, key: str, reading: object) -> bool:
        """Whether a range that is being read is within its file."""
        try:
            return self._got(key, reading).state == "value"
        except MissingError:
            return False

    def read(
        self, key: str, stop: int | None = None, limit: int | None = None
    ) -> Value | None:
        reading = self.start_read(key, 0, stop)
        if stop is None and limit is not None:
            # Nothing else says how long it is before all of it is here.
            with contextlib.suppress(MissingError):
                self._check_limit(key, limit)
        got = self._got(key, reading)
        return Value(got.value, got.stamp.generation) if got.state == "value" else None

    def _check_limit(self, key: str, limit: int) -> None:
        """**Raises:** `ValueError` if a value is longer; `MissingError` if the store
        does not say that it ends there."""
        try:
            beyond = self._got(key, self.start_read(key, limit, limit + 1))
        except BeyondError:
            return
        if beyond.state == "value":
            raise ValueError(f"`{key}` is longer than {limit} bytes")

    def read_into(self, key: str, start: int, *into: np.ndarray) -> int:
        count = 0
        for array in into:
            count += self._read_into(key, start + count, array)
        return count

    def _read_into(self, key: str, start: int, into: np.ndarray) -> int:
        # A range that goes on where the file ends is refused; one without an end is
        # not.
        soon = into.nbytes <= _SOON_BYTES
        for stop in (start + into.nbytes, None):
            try:
                reading = self.start_read(key, start, stop)
                got = self._got(key, reading, soon)
            except BeyondError:
                return 0
            except MissingError:
                continue
            if got.state != "value":
                raise FileNotFoundError(f"There is no `{key}`.")
            found = got.value[: into.nbytes]
            into[: len(found)] = np.frombuffer(found, np.uint8)
            return len(found)
        return 0

    def start_read(self, key: str, start: int, stop: int | None) -> ts.Future:
        return self.kv().read(key, byte_range=slice(start, stop))

    # A stamp asks for so many bytes of a file. For none, TensorStore asks for the facts
    # about the file alone.
    _stamp_bytes = 0

    def stamp(self, key: str) -> str:
        try:
            got = self._got(key, self.start_read(key, 0, self._stamp_bytes))
        except MissingError:
            return "empty"
        return got.stamp.generation.hex() if got.state == "value" else ""

    def list_top(self) -> dict[str, bool] | None:
        return _store.tops_of(self.list_all() or ()) or None

    def is_directory(self, key: str) -> bool:
        return bool(self.list_all(key + "/"))

    def list_all(self, start: str = "") -> list[str] | None:
        return self.ask_all(start).wait()

    def ask_all(self, start: str = "") -> KeyList:
        """Asks for the keys of files that begin with `start`. If what this returns is
        dropped the request is, too."""
        # Whole keys are listed and looked at. Not all servers heed the range that they
        # are asked for, and TensorStore cuts as much off the beginning of any key:
        # somebody else's would be taken for ours, and deleted.
        top = dataclasses.replace(self, url=self._bucket())
        path = self._path().removeprefix(top._path()).encode()
        first = path + start.encode()
        listing = top.start_list(first)

        def keys() -> list[str]:
            found = self._listed(listing)
            ours = [key[len(path) :] for key in found if key.startswith(first)]
            return [key.decode("utf-8", "surrogateescape") for key in ours]

        return KeyList(listing.done, keys)

    def _path(self) -> str:
        """The prefix of the keys in this directory."""
        return self.spec()["path"]

    def start_list(self, first: bytes) -> Any:
        """Starts to list the keys of files that begin with `first`. These, and what
        comes of it, are bytes, and relative to all of the store (`_bucket`), whatever
        directory of it this is."""
        stop = first[:-1] + bytes([first[-1] + 1]) if first else b""
        return self.kv().list(ts.KvStore.KeyRange(first, stop))

    def _listed(self, listing: object) -> list[bytes]:
        return _store.answer(self, "", listing)

    def below(self, key: str) -> "ObjectStore":
        # In a URL a `%` begins another character.
        url = f"{self.url}/{urllib.parse.quote(key)}"
        return dataclasses.replace(self, url=url)

    def split(self) -> tuple["ObjectStore", str]:
        if self.url == self._bucket():
            return self, ""
        url, _, key = self.url.rpartition("/")
        return dataclasses.replace(self, url=url), key

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        _store.finish_write(self, key, self.start_write(key, b"".join(buffers)))

    def start_write(
        self, key: str, data: bytes | None, expected: bytes | None = None
    ) -> ts.Future:
        """Starts to write a file, or to delete it (None). With `expected` this is done
        if the file has that generation (`ABSENT`: if there is none); the answer has an
        empty generation if it was not."""
        return self.kv().write(key, data, if_equal=expected)

    def replace(
        self, key: str, data: bytes, found: Value | None, staged: str = ""
    ) -> Value | None:
        # The store compares and writes in one step.
        expected = ABSENT if found is None else found.generation
        writing = self.start_write(key, data, expected)
        if generation := _store.answer(self, key, writing).generation:
            return Value(data, generation)
        # If the answer to a write was lost it was tried again, and refused: what was
        # there before had been replaced by the first one.
        is_ours = lambda now: now is not None and now.data == data
        is_either = lambda now: now == found or is_ours(now)
        now = _store.look_twice(self, lambda: self.read(key), is_either)
        if now == found:
            raise _store.odd(self, key, "a write was refused on a condition that holds")
        return now if is_ours(now) else None

    def copy(self, source: str, key: str, sync: bool) -> None:
        read = lambda: self.read(source)
        value = _store.look_twice(self, read, lambda value: value is not None)
        if value is None:
            raise _store.odd(self, source, "it is in a list, and is not there")
        self.write(key, [value.data], sync)

    def delete(self, key: str) -> None:
        listed = self.list_all(key) or ()
        self.delete_files(
            n for n in listed if n == key or n.startswith(key and f"{key}/")
        )

    def delete_files(self, keys: Iterable[str]) -> None:
        for key, deleting in [(key, self.start_write(key, None)) for key in keys]:
            _store.finish_write(self, key, deleting)

    def delete_as(self, key: str, stamp: str) -> bool:
        if stamp:
            deleting = self.start_write(key, None, bytes.fromhex(stamp))
            if _store.answer(self, key, deleting).generation:
                return True
        # If the answer was lost it was tried again, and refused: it is gone then.
        return not self.has(key)

    def move(self, key: str, into: str, first: str) -> bool:
        first = f"{key}/{first}"
        stamp = self.stamp(first)
        names, is_same = self.list_all(key + "/") or [], True
        try:
            for name in names:
                self.copy(name, into + name.removeprefix(key), sync=True)
        except OSError:
            # Who replaces that file deletes what was beside it.
            is_same = self.stamp(first) == stamp
            if is_same:
                raise
        if not (is_same and self.delete_as(first, stamp)):
            self.delete(into)
            return False
        self.delete_files(name for name in names if name != first)
        return True


class DriverlessStore(ObjectStore):
    """A store of a kind that TensorStore has no driver for."""

    def has_driver(self) -> bool:
        return False

    def spec(self, key: str = "") -> NoReturn:
        raise ValueError(f"TensorStore has no driver for `{self}`. Use `.read`.")
