"""Files of rows of a run: its journal and its history. Each is a zlib stream of JSON
that says what it is, and ends in a digest as an index does.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from . import _index, _json, _schema


R = TypeVar("R", bound=tuple)


def is_torn(data: bytes) -> bool:
    """Whether a file of rows ends before its end, as a killed writer leaves it."""
    stream = zlib.decompressobj()
    try:
        stream.decompress(data, _json.MAX_INDEX)
    except zlib.error:
        return False  # It is damaged.
    return not (stream.eof or stream.unconsumed_tail)


@dataclasses.dataclass(frozen=True)
class RowFormat(Generic[R]):
    """The format of one kind of file: `what` it is called, such as `"journal"`, the
    type of its rows, and the kinds of the entries of a row."""

    what: str
    row: type[R]
    kinds: Sequence[_schema.Kind]

    @property
    def _head(self) -> bytes:
        return f'{{"format":"eqx_ckpt {self.what}","version":1,"rows":'.encode()

    def encode(self, rows: Iterable[R]) -> bytes:
        """**Raises:** `ValueError` for more than is read."""
        body = json.dumps([*rows], separators=(",", ":"), allow_nan=False)
        return zlib.compress(_index.sealed(self._head + body.encode("ascii")))

    def decode(self, data: bytes) -> list[R]:
        """**Raises:** `ValueError` for what is torn before the end of its rows, damaged
        or another version."""
        try:
            text = zlib.decompressobj().decompress(data, _json.MAX_INDEX)
        except zlib.error as e:
            raise ValueError(f"it is torn or damaged: {e}") from e
        _index.check_digest(text, f"the {self.what}")
        if not text.startswith(self._head):
            raise ValueError(f"it is not a {self.what} that this release reads")
        found: list[Any] = _json.parse(text, f"the {self.what}")["rows"]
        if not _schema.fits(found, [tuple(self.kinds)]):
            raise ValueError("it has a malformed row")
        return [self.row(*row) for row in found]
