"""Reads the OCDBT databases of others: where the value of each key lies.

TensorStore would decode whatever a node says, and a node of a megabyte can say that it
has gigabytes of keys. So manifest and nodes are parsed here, with a bound on all that
is made of them; what is read through TensorStore then is a database in memory that is
made of what was found. https://google.github.io/tensorstore/kvstore/ocdbt
"""

import bisect
from typing import NamedTuple

import google_crc32c
import numpy as np

from .._kernel._errors import DamagedError, MissingError
from .._kernel._format import _extents, _ocdbt
from .._kernel._format._ocdbt import Entries
from .._kernel._storage import _store, _zstd
from .._kernel._storage._backend import Backend


MANIFEST = "manifest.ocdbt"
# Of the manifest, which has the last versions only, and of one node, encoded or not.
_MAX_MANIFEST, _MAX_NODE = 2**20, 2**27
# What may be made of nodes altogether: so many bytes, and so many for each of theirs.
# 100,000 keys have some 10 MB of text, and 350 kB are nodes of theirs.
_MADE, _MADE_OF_ONE = 2**22, 256
_MAX_PATH = 2**16


class _Reference(NamedTuple):
    """Where a node lies, and what is known of it: the directory that its paths begin
    in, its height, and what its keys begin with."""

    file: str
    start: int
    length: int
    base: str
    height: int
    prefix: bytes


class _Body:
    """The fields of a manifest or a node, one after the other."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise DamagedError("it ends in the middle of something")
        self._at += count
        return part

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        return self.numbers(1)[0]

    def numbers(self, count: int) -> list[int]:
        """So many numbers: each in groups of seven bits, the lowest first, with the top
        bit set in all but the last."""
        if not count:
            return []
        if count > len(self._data) - self._at:
            raise DamagedError("it ends in the middle of something")
        part = np.frombuffer(self._data, np.uint8, offset=self._at)[: 10 * count]
        ends = np.flatnonzero(part < 0x80)[:count]
        if len(ends) < count:
            raise DamagedError("it ends in the middle of something")
        starts = np.concatenate([[0], ends[:-1] + 1])
        widths = ends - starts + 1
        if widths.max() > 10:
            raise DamagedError("it has an impossible number")
        out = np.zeros(count, np.uint64)
        for group in range(int(widths.max())):
            some = widths > group
            bits = part[starts[some] + group].astype(np.uint64) & np.uint64(0x7F)
            out[some] |= bits << np.uint64(7 * group)
        self._at += int(ends[-1]) + 1
        return out.tolist()


class ValuePlace(NamedTuple):
    """The place of a value: the number of its file, and its bytes there."""

    file: int
    offset: int
    nbytes: int


class Database:
    """A database of others, which is read as this is made: where the value of each key
    lies. The file after the last of `files` is `inline`."""

    def __init__(self, root: Backend, most: int):
        """**Raises:** `ValueError` if it cannot be read, or has more than `most`
        keys."""
        value = root.read(MANIFEST, limit=_MAX_MANIFEST)
        if value is None:
            raise MissingError(f"`{MANIFEST}` is missing")
        # What may still be made of its nodes.
        self._root, self._room = root, _MADE
        self._paths: dict[str, int] = {}
        self._inline = bytearray()
        self.entries = Entries([], [], [], [])
        try:
            self._read_nodes(value.data, most)
            self._check_places()
        except DamagedError as e:
            raise DamagedError(f"its database is damaged: {e}") from e
        self.files, self.inline = list(self._paths), bytes(self._inline)
        del self._inline, self._paths
        # What was inline is the last file.
        count = len(self.files)
        files = [count if file < 0 else file for file in self.entries.files]
        self.entries = self.entries._replace(files=files)

    def locate(self, key: str) -> ValuePlace | None:
        """Finds the value of a key; None: there is none."""
        name = key.encode("utf-8", "surrogatepass")
        keys, files, offsets, lengths = self.entries
        at = bisect.bisect_left(keys, name)
        if at == len(keys) or keys[at] != name:
            return None
        return ValuePlace(files[at], offsets[at], lengths[at])

    def read_range(
        self, root: Backend, place: ValuePlace, start: int, count: int
    ) -> bytes:
        """Some bytes of a value that lies at a place.

        **Raises:** `ValueError` if it has not so many.
        """
        file, offset, length = place
        if start + count > length:
            raise DamagedError("a value in its database is too short")
        start += offset
        if file == len(self.files):
            return self.inline[start : start + count]
        return _store.read_bytes(root, self.files[file], start, start + count)

    def _read_nodes(self, manifest: bytes, most: int) -> None:
        # Nodes from left to right, so that keys come in order. None can be there twice:
        # a few that lead to each other would have any number of keys.
        above = self._top(manifest)
        seen: set[tuple[str, int]] = set()
        while above:
            node = above.pop()
            if (node.file, node.start) in seen:
                raise DamagedError("it has a node twice")
            seen.add((node.file, node.start))
            above += reversed(self._node(node))
            if len(above) + len(self.entries.keys) > most:
                raise ValueError(f"its database has more than {most} keys")

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ValueError("nodes of its database would become too large")

    def _open(self, magic: int, data: bytes) -> _Body:
        """The body of a manifest or a node."""
        self._room += _MADE_OF_ONE * len(data)
        head = int.from_bytes(data[:4], "big")
        size = int.from_bytes(data[4:12], "little")
        if len(data) < 18 or head != magic or size != len(data):
            raise DamagedError("it has something else than a node")
        if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise DamagedError("a node is not as it was written")
        version, compression = data[12:14]
        if version or compression > 1:
            raise DamagedError("it is of an unknown version")
        body = data[14:-4]
        if compression:
            try:
                body = _zstd.decode(body, min(_MAX_NODE, self._room))
            except ValueError as e:
                raise DamagedError(str(e)) from e
        self._spend(len(body))
        return _Body(body)

    def _top(self, manifest: bytes) -> list[_Reference]:
        """The root of the last version."""
        body = self._open(_ocdbt.MANIFEST, manifest)
        body.take(16)
        if body.number():
            raise ValueError("its database has numbered manifests: they are not read")
        body.numbers(2)
        body.byte()
        if body.number():
            body.take(4)  # The level of compression.
        paths = self._table(body, "")
        count = body.number()
        body.numbers(count)
        heights = body.take(count)
        numbers, starts, lengths = (body.numbers(count) for _ in range(3))
        if not count or starts[-1] == lengths[-1] == _ocdbt.MISSING:
            return []  # There are no keys.
        path, base = _at(paths, numbers[-1])
        return [_Reference(path, starts[-1], lengths[-1], base, heights[-1], b"")]

    def _table(self, body: _Body, base: str) -> list[tuple[str, str]]:
        """The paths of files, and what the paths in nodes there begin with."""
        count = body.number()
        shared = [0, *body.numbers(max(0, count - 1))]
        own, bases = body.numbers(count), body.numbers(count)
        self._spend(sum(shared) + sum(own))
        out: list[tuple[str, str]] = []
        path = b""
        for begin, length, above in zip(shared, own, bases):
            if begin > len(path) or above > begin + length:
                raise DamagedError("it has an impossible path")
            path = path[:begin] + body.take(length)
            if len(path) + len(base) > _MAX_PATH:
                raise DamagedError("it has an impossible path")
            try:
                out.append((base + path.decode(), base + path[:above].decode()))
            except UnicodeError:
                raise DamagedError("it has an impossible path") from None
        return out

    def _node(self, node: _Reference) -> list[_Reference]:
        """Adds the keys of a node, or returns those that it leads to."""
        _check_path(node.file)
        if node.length > _MAX_NODE:
            raise DamagedError("it has a node that is too long")
        end = node.start + node.length
        self._root.check_range(node.file, end)
        data = _store.read_bytes(self._root, node.file, node.start, end)
        body = self._open(_ocdbt.NODE, data)
        height = body.byte()
        if height != node.height:
            raise DamagedError("a node is not where it belongs")
        paths = self._table(body, node.base)
        count = body.number()
        shared, own = [0, *body.numbers(max(0, count - 1))], body.numbers(count)
        commons = body.numbers(count) if height else []
        self._spend(sum(shared) + sum(own) + count * len(node.prefix))
        keys = []
        key = b""
        for begin, length in zip(shared, own):
            if begin > len(key):
                raise DamagedError("it has an impossible key")
            key = key[:begin] + body.take(length)
            keys.append(key)
        if not height:
            self._add([node.prefix + key for key in keys], paths, body)
            return []
        numbers, starts, lengths = (body.numbers(count) for _ in range(3))
        out = []
        for key, common, number, *at in zip(keys, commons, numbers, starts, lengths):
            path, base = _at(paths, number)
            prefix = node.prefix + key[:common]
            out.append(_Reference(path, at[0], at[1], base, height - 1, prefix))
        return out

    def _add(
        self, keys: list[bytes], paths: list[tuple[str, str]], body: _Body
    ) -> None:
        entries = self.entries
        lengths = body.numbers(len(keys))
        kinds = body.take(len(keys))
        count = kinds.count(1)
        if count + kinds.count(0) != len(keys):
            raise DamagedError("it has a value of an unknown kind")
        places = iter(list(zip(body.numbers(count), body.numbers(count))))
        last = entries.keys[-1] if entries.keys else None
        for key, length, kind in zip(keys, lengths, kinds):
            if last is not None and key <= last:
                raise DamagedError("its keys are not in order")
            last = key
            if kind:
                number, start = next(places)
                path, _ = _at(paths, number)
                file = self._paths.setdefault(path, len(self._paths))
            else:
                file, start = -1, len(self._inline)
                self._inline += body.take(length)
            entries.keys.append(key)
            entries.files.append(file)
            entries.offsets.append(start)
            entries.lengths.append(length)

    def _check_places(self) -> None:
        """**Raises:** `ValueError` unless each value has bytes of its own."""
        entries = self.entries
        if max([0, *entries.offsets, *entries.lengths]) > 2**62:
            raise DamagedError("it has a value at an impossible place")
        file, start, length = (np.asarray(x, np.int64) for x in entries[1:])
        taken = (file >= 0) & (length > 0)
        file, start, stop = file[taken], start[taken], (start + length)[taken]
        try:
            _extents.check_apart(file, start, stop)
        except ValueError:
            raise DamagedError("it has two values at one place") from None
        ends = np.zeros(len(self._paths), np.int64)
        np.maximum.at(ends, file, stop)
        for path in self._paths:
            _check_path(path)
        _store.each(self._root, self._root.check_range, self._paths, ends.tolist())


def _at(paths: list[tuple[str, str]], number: int) -> tuple[str, str]:
    if number >= len(paths):
        raise DamagedError("it names a file that it does not have")
    return paths[number]


def leads_out(path: str) -> bool:
    """Whether a path may lead out of the directory that it is in."""
    is_odd = "\\" in path or "\0" in path
    return is_odd or not {"", ".", ".."}.isdisjoint(path.split("/"))


def _check_path(path: str) -> None:
    if leads_out(path):
        raise DamagedError(f"it has a file of the impossible name {path!r:.60}")
