"""`.eqx` files of Equinox: `.npy` records in the order of a tree, and no names.

Before them there may be a line of JSON, as in the recipe of Equinox's documentation for
hyperparameters.
"""

import math
import re
from typing import Any

import numpy as np

from ..._format import _json, _names, _template
from ..._storage import _store
from ..._tree import _flatten, _leaf, _restore, _show
from .._source import Source
from . import _found
from ._found import Found, Leaf


_MAGIC = b"\x93NUMPY\x01\x00"
# NumPy writes this, and pads it with spaces to a multiple of 64 bytes.
_header = re.compile(
    rb"\{'descr': '([<>|=][A-Za-z][0-9]+)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]+,)?|[0-9]+(?:, [0-9]+)+)\), \} *\n"
)
_MAX_LINE = 2**20
_WINDOW = 2**12  # Small leaves share one.


def read(found: Found, like: Any) -> Source | None:
    """The source of a `.eqx` file, whose records are those of the leaves of `like`."""
    key = found.key
    if key is None:
        return None
    line = _line(found, key)
    if line is None and not found.has_suffix(".eqx"):
        return None
    if like is None:
        raise ValueError(
            "it is a `.eqx` file, whose leaves have no names: their order is all there "
            "is. Pass `like=`, a tree of the structure that was saved"
        )
    if line is None:
        raise ValueError("it has no records of arrays: it is no `.eqx` file")
    metadata = _json.parse(line, "its first line") if line else None
    flat = _flatten.flatten(like, None)
    window = _Window(found, key)
    leaves: list[Leaf] = []
    places: dict[int, int] = {}
    at = len(line) + 1 if line else 0
    for number, (path, leaf) in enumerate(zip(flat.paths, flat.leaves)):
        if not _leaf.is_own(leaf):
            continue
        name, keys = _names.name_of(path)
        target = _restore.target_of(leaf)
        if target.kind == "key":
            raise ValueError(
                f"`like` has a typed PRNG key, `{name}`, which Equinox does not save"
            )
        # `like` says what a record of unnamed bytes is, and no more than that.
        dtype = target.dtype or np.dtype(_template.SCALAR_KINDS[target.kind])
        text, shape, at = _record(window, at, name, len(leaves))
        known = _template.dtype_of(dtype.name)
        if text != known.str.replace("|", "<") or shape != target.shape:
            raise _other(found, name, len(leaves), text, shape, dtype, target.shape)
        t = _found.template(target.kind, dtype.name, shape, keys)
        places[number] = len(leaves)
        leaves.append(Leaf(name, t, 0, at))
        at += t.nbytes
    if window.read(at, 1):
        raise ValueError(
            f"it has more than the {len(leaves)} records that `like` has leaves: it is "
            "of another tree, and none of its leaves can be told"
        )
    entries = _flatten.state_entries(like, flat.paths, "")
    markers = {
        places[number]: entry.label
        for number, entry in entries.items()
        if number in places and entry.label is not None
    }
    return _found.source(found, "eqx", [key], leaves, b"", metadata, markers)


def _line(found: Found, key: str) -> bytes | None:
    """What is before the records: b"" or a line of JSON. None: there are no records."""
    if found.head.startswith(_MAGIC):
        return b""
    if found.head[:1] not in (b"{", b"["):
        return None
    into = np.empty(_MAX_LINE, np.uint8)
    data = into[: _store.read_into(found.directory, key, 0, into)].tobytes()
    line, end, rest = data.partition(b"\n")
    return line if end and (rest.startswith(_MAGIC) or not rest) else None


class _Window:
    """A file that is looked into from front to back."""

    def __init__(self, found: Found, key: str):
        self._directory, self._key = found.directory, key
        self._start, self._data = 0, b""

    def read(self, at: int, count: int) -> bytes:
        """So many bytes, or as many as there are."""
        if not self._start <= at <= at + count <= self._start + len(self._data):
            into = np.empty(max(_WINDOW, count), np.uint8)
            size = _store.read_into(self._directory, self._key, at, into)
            self._start, self._data = at, into[:size].tobytes()
        return self._data[at - self._start :][:count]


def _record(
    window: _Window, at: int, name: str, number: int
) -> tuple[str, tuple[int, ...], int]:
    """The dtype and the shape of a record, and where its data begin."""
    which = f"the record {number} of it, which should be `{name}`,"
    head = window.read(at, 10)
    if not head:
        raise ValueError(
            f"it has {number} records, and `like` has more leaves, from `{name}` on: "
            "it is of another tree, and none of its leaves can be told"
        )
    if not head.startswith(_MAGIC) or len(head) < 10:
        raise ValueError(f"{which} is none that Equinox writes")
    size = int.from_bytes(head[8:], "little")
    header = _header.fullmatch(window.read(at + 10, size))
    if header is None:
        raise ValueError(f"{which} is none of numbers")
    shape = tuple(int(n) for n in header[3].decode().replace(" ", "").split(",") if n)
    if header[2] == b"True" and len(shape) > 1 and math.prod(shape):
        raise ValueError(
            f"{which} is in Fortran order, which is not read here. Load the file with "
            "`eqx.tree_deserialise_leaves`"
        )
    return header[1].decode().replace("|", "<"), shape, at + 10 + size


def _other(
    found: Found,
    name: str,
    number: int,
    text: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    wanted: tuple[int, ...],
) -> ValueError:
    try:
        saved = np.dtype(text)
        was = _show.short_array(
            saved.name if saved.kind != "V" else f"{8 * saved.itemsize} bits", shape
        )
    except TypeError:
        was = text
    return ValueError(
        f"the record {number} of it is {was}, where `like` has "
        f"{_show.short_array(dtype.name, wanted)}, `{name}`: it is of another tree, or "
        "in another order, and none of its leaves can be told"
    )
