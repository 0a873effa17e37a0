"""Files of `flax.serialization.to_bytes`: nested maps in msgpack, with arrays in them.

Only what says where the arrays lie is read; the arrays are runs of bytes.
https://github.com/msgpack/msgpack/blob/master/spec.md
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _names, _template
from .._kernel._format._leaves import Unreadable
from .._kernel._load._source import Source
from .._kernel._storage._backend import Backend
from .._zips._probe import Probe
from .._zips._window import Window
from . import _foreign_index
from ._foreign_index import (
    array_leaf,
    ForeignLeaf,
    leaf_of,
    name_budget,
    names_of_paths,
)


_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # Types of flax's own.
_CHUNKED = "__msgpack_chunked_array__"
_MAX_TEXT = 2**20
_WINDOW = 2**12


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of a file that is a map with strings as keys."""
    key, head = probe.key, probe.head
    if key is None or len(head) < 2:
        return None
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    is_named = (
        is_map(head)
        and len(head) > at
        and (head[at] >> 5 == 5 or head[at] in (0xD9, 0xDA))
    )
    if not is_named and not probe.has_suffix(".msgpack"):
        return None
    items = leaves_of(probe.directory, key)
    named = names_of_paths([path for path, _ in items])
    leaves = [
        leaf._replace(name=name, template=leaf.template._replace(keys=keys))
        for (name, keys), (_, leaf) in zip(named, items)
    ]
    return _foreign_index.source(probe, "msgpack", [key], leaves)


def is_map(head: bytes) -> bool:
    """Whether a file that begins like this may be a map."""
    return head[:1] != b"" and (head[0] >> 4 == 8 or head[0] in (0xDE, 0xDF))


def leaves_of(
    directory: Backend, key: str, file: int = 0
) -> list[tuple[list[str], ForeignLeaf]]:
    """The leaves of a file, which has this number in the index, by the keys that lead
    to each. They have no names yet."""
    reader = _Reader(directory, key, file)
    items: list[tuple[list[str], ForeignLeaf]] = []
    _walk(reader, [], items)
    if reader.more():
        raise ValueError("it has more bytes than its map says")
    return items


def _walk(
    reader: "_Reader", path: list[str], items: list[tuple[list[str], ForeignLeaf]]
):
    """Collects what is at the ends of nested maps; None is no leaf."""
    if len(path) > _names.MAX_DEPTH:
        raise ValueError(f"it is nested more than {_names.MAX_DEPTH} deep")
    kind, value = reader.next()
    first = len(items)
    if kind == "map":
        seen: set[str] = set()
        for _ in range(value):
            what, name = reader.next()
            if what == "value" and type(name) is int:
                name = str(name)
            if what != "value" or type(name) is not str or name in seen:
                raise ValueError("it has a key that is no string, or a key twice")
            seen.add(name)
            _walk(reader, [*path, name], items)
        if _CHUNKED in seen:
            # Instead of what is in it.
            del items[first:]
            items.append((path, leaf_of("", "", _IN_PIECES)))
    elif kind == "list":
        for number in range(value):
            _walk(reader, [*path, str(number)], items)
    elif kind == "ext":
        reader.spend(path, reader.at)
        items.append((path, _ext(reader, path, *value)))
    elif value is not None:
        reader.spend(path, reader.at)
        items.append((path, leaf_of("", "", value)))


_IN_PIECES = Unreadable(
    "an array in pieces",
    "it has more than 1 GiB, which flax cuts into pieces that are not read here. Load "
    "it with flax",
    True,
)


def _ext(reader: "_Reader", path: list[str], code: int, size: int) -> ForeignLeaf:
    """A leaf of a type of flax's, which has no name yet."""
    end = reader.at + size
    if code == _COMPLEX:
        parts = [reader.next(), reader.next(), reader.next()]
        if parts[0] != ("list", 2) or {type(x) for _, x in parts[1:]} != {float}:
            raise ValueError("it has a malformed complex number")
        leaf = leaf_of("", "", complex(parts[1][1], parts[2][1]))
    elif code in (_ARRAY, _SCALAR):
        shape = []
        if reader.next() != ("list", 3):
            raise ValueError("it has a malformed array")
        kind, rank = reader.next()
        if kind != "list" or rank > 2 * _template.MAX_RANK:
            raise ValueError("it has an array of an impossible rank")
        for _ in range(rank):
            kind, length = reader.next()
            if kind != "value" or type(length) is not int or not 0 <= length < 2**60:
                raise ValueError("it has an array of an impossible shape")
            shape.append(length)
        _, dtype = reader.next()
        if isinstance(dtype, bytes):
            dtype = dtype.decode("ascii", "replace")
        if type(dtype) is not str:
            raise ValueError("it has an array without a dtype")
        kind, (offset, length) = "generic" if code == _SCALAR else "", reader.skip()
        leaf = array_leaf(
            "", "", dtype, shape, kind=kind, file=reader.file, offset=offset
        )
        if leaf.value is None and leaf.template.nbytes != length:
            name = _names.shorten(".".join(path))
            raise ValueError(f"{name} is not of the size of its shape")
    else:
        reader.pass_over(size)
        why = f"it is something of the unknown type {code}"
        leaf = leaf_of("", "", Unreadable(f"msgpack type {code}", why))
    if reader.at != end:
        raise ValueError("it has an array of another size than it says")
    return leaf


# By each mark that a size follows: the format of the size, and of what kind that is.
# Marks of one kind follow each other, each with a wider size than the one before.
_SIZED = {
    first + i: (f">{format}", kind)
    for first, kind, formats in (
        (0xC4, "bin", "BHI"),
        (0xC7, "ext", "BHI"),
        (0xD9, "str", "BHI"),
        (0xDC, "list", "HI"),
        (0xDE, "map", "HI"),
    )
    for i, format in enumerate(formats)
}
# Marks of numbers, by their formats.
_NUMBERS = dict(enumerate((f">{format}" for format in "fdBHIQbhiq"), 0xCA))
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Token(NamedTuple):
    """An object of a file ("value"); or the kind of a container, and its size, or the
    type and size of an extension ("ext")."""

    kind: str
    value: Any


class _Reader:
    """The objects of a file, one after the other, without what is skipped."""

    def __init__(self, directory: Backend, key: str, file: int):
        self._window = Window(directory, key, np.empty(_WINDOW, np.uint8))
        self.file = file
        self.at = 0
        self.spend = name_budget()

    def _take(self, count: int) -> bytes:
        data = self._window.read_range(self.at, self.at + count).tobytes()
        if len(data) < count:
            raise ValueError("it ends in the middle of something")
        self.at += count
        return data

    def _number(self, format: str) -> Any:
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def more(self) -> bool:
        return self._window.read_range(self.at, self.at + 1).size > 0

    def _head(self) -> _Token:
        """The next token, without the bytes of texts, which come next."""
        mark = self._take(1)[0]
        if mark < 0x80:
            return _Token("value", mark)
        if mark >= 0xE0:
            return _Token("value", mark - 0x100)
        if mark in _CONSTANTS:
            return _Token("value", _CONSTANTS[mark])
        if mark in _NUMBERS:
            return _Token("value", self._number(_NUMBERS[mark]))
        if mark < 0xC0:
            kind = {8: "map", 9: "list"}.get(mark >> 4, "str")
            return _Token(kind, mark & (0x1F if kind == "str" else 0x0F))
        if 0xD4 <= mark <= 0xD8:
            return _Token("ext", (self._number(">b"), 1 << (mark - 0xD4)))
        if mark not in _SIZED:
            raise ValueError(f"it has the byte {mark:#x}, which is nothing")
        format, kind = _SIZED[mark]
        size = self._number(format)
        return _Token(kind, (self._number(">b"), size) if kind == "ext" else size)

    def next(self) -> _Token:
        """The next value, map, list or extension. The bytes of the last come next."""
        token = self._head()
        kind, value = token
        if kind not in ("str", "bin"):
            return token
        if value > _MAX_TEXT:
            self.pass_over(value)
            what = "a text" if kind == "str" else "bytes"
            why = f"it has {value} bytes, and at most {_MAX_TEXT} are read of {what}"
            return _Token("value", Unreadable(what, f"{why}. Load it with flax"))
        data = self._take(value)
        try:
            return _Token("value", data if kind == "bin" else data.decode())
        except UnicodeError:
            raise ValueError("it has a text that is not UTF-8") from None

    def pass_over(self, count: int) -> None:
        """**Raises:** `ValueError` if the file ends before."""
        self.at += count
        if count and not self._window.read_range(self.at - 1, self.at).size:
            raise ValueError("it ends in the middle of something")

    def skip(self) -> tuple[int, int]:
        """Where some bytes lie, and how many: they are not read."""
        kind, size = self._head()
        if kind not in ("bin", "str"):
            raise ValueError("it has an array without bytes")
        start = self.at
        self.at += size
        return start, size
