"""The journal of a run: what the indices of its steps say, in one file.

It is a cache, which anyone may lose, damage or write: nothing in it counts unless the
index of the step still has the stamp that it had when it was read.
"""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _index, _json, _schema
from ._schema import COUNT, ID, optional


KEY = "eqx_ckpt.journal"
# Who looks at a step looks at each of its files.
_MOST_FILES = 10**6
_HEAD = b'{"format":"eqx_ckpt journal","version":1,"steps":'


class StepRow(NamedTuple):
    """Facts in the index of a step. `stamp`: that of the file of the index, and
    `time` when it was written, if that is known. `files`: see `Head`."""

    step: int
    stamp: str
    save: str
    leaves: int
    nbytes: int
    files: int | None
    time: float | None
    metrics: dict[str, Any]


_ROW = (
    *(COUNT, str, ID, COUNT, COUNT),
    optional(range(_MOST_FILES)),
    optional(float),
    dict,
)


def encode(rows: Iterable[StepRow]) -> bytes:
    """**Raises:** `ValueError` for more than is read."""
    body = json.dumps(sorted(rows), separators=(",", ":"), allow_nan=False)
    return _index.sealed(_HEAD + body.encode("ascii"))


def decode(data: bytes) -> list[StepRow]:
    """**Raises:** `ValueError` for what is torn, damaged or another version."""
    _index.check_digest(data)
    if not data.startswith(_HEAD):
        raise ValueError("it is not a journal that this release reads")
    found = _json.parse(data, "the journal")["steps"]
    if not _schema.fits(found, [_ROW]):
        raise ValueError("it has a malformed row")
    return [StepRow(*row) for row in found]
