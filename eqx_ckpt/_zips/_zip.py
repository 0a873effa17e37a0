"""The list of the files in a zip, and the place of the bytes of each.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import bisect
import itertools as it
import struct
from collections.abc import Sequence
from typing import NamedTuple

from .._kernel._errors import DamagedError
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend


_LOCAL, _END, _END64, _LOCATOR = b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"
_NOTHING = _END + bytes(18)
_ENTRY = struct.Struct("<4s4x2H8x2I3H8xI")
_HEAD = 30  # The bytes of a header before the name.
# The bytes of the end record of a large zip, of its locator, and of the end record of
# any zip without a comment.
_END64_SIZE, _LOCATOR_SIZE, _END_SIZE = 56, 20, 22
_IN_EXTRA = 0xFFFFFFFF  # Stands for a number that is too large for its field.
_MAX_DIRECTORY = 32 * 2**20


class Member(NamedTuple):
    """A file in a zip, of so many bytes; `offset` is that of its header. `is_plain`: it
    is neither compressed nor encrypted. `has_footer`: its size is written after it."""

    offset: int
    size: int
    is_plain: bool
    has_footer: bool


class _Entry(NamedTuple):
    """An entry of the list of files, before its name, its extra fields and its comment,
    which have these lengths. A file is `packed` as so many bytes, of `full` ones."""

    mark: bytes
    flags: int
    method: int
    packed: int
    full: int
    name_length: int
    extra_length: int
    comment_length: int
    offset: int


class Zip(NamedTuple):
    """The files in a zip. Their bytes end at `end`, where the list of them begins."""

    directory: Backend
    key: str
    members: dict[str, Member]
    end: int


def begins(head: bytes) -> bool:
    """Whether a file begins as a zip does."""
    return head.startswith(_LOCAL)


def open_zip(directory: Backend, key: str | None, head: bytes) -> Zip | None:
    """The files in a zip, which begins with `head`; None for another file."""
    if key is not None and head == _NOTHING:
        return Zip(directory, key, {}, 0)
    return read_list(directory, key) if key is not None and begins(head) else None


def read_list(directory: Backend, key: str) -> Zip:
    """**Raises:** `ValueError` for a list of files that is damaged."""
    most = _END64_SIZE + _LOCATOR_SIZE + _END_SIZE
    reading = directory.start_read(key, -most, None)
    tail = _store.read_answer(directory, key, reading).value
    count, size, start = _end_record(tail)
    data = _store.read_bytes(directory, key, start, start + size)
    return Zip(directory, key, _members(data, count), start)


def _end_record(tail: bytes) -> tuple[int, int, int]:
    """How many files are in the zip that ends so, and the size and the start of the
    list of them."""
    end = tail[-_END_SIZE:]
    if not end.startswith(_END) or not end.endswith(b"\0\0"):
        raise DamagedError("it is a zip that is damaged, or is not whole")
    disk, other, _, count, size, start, _ = struct.unpack("<4x4H2IH", end)
    if start == _IN_EXTRA or size == _IN_EXTRA or count == 0xFFFF:
        locator = tail[-_LOCATOR_SIZE - _END_SIZE :]
        if not locator.startswith(_LOCATOR) or not tail.startswith(_END64):
            raise DamagedError("it is a zip that is damaged")
        count, size, start = struct.unpack("<32x3Q", tail[:_END64_SIZE])
    if disk or other or size > _MAX_DIRECTORY or count * _ENTRY.size > size:
        raise ValueError("it is a zip with an impossible list of files")
    return count, size, start


def _members(data: bytes, count: int) -> dict[str, Member]:
    """The files that a list of so many entries has."""
    members: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise _damaged_list()
        entry = _Entry(*_ENTRY.unpack_from(data, at))
        if entry.mark != b"PK\1\2":
            raise _damaged_list()
        name_start = at + _ENTRY.size
        extra_start = name_start + entry.name_length
        comment_start = extra_start + entry.extra_length
        entry = _with_large_numbers(entry, data[extra_start:comment_start])
        name = data[name_start:extra_start].decode("utf-8", "surrogateescape")
        if name in members:
            raise ValueError(f"the zip has the file {name!r:.60} twice")
        is_whole = entry.packed == entry.full
        is_plain = entry.method == 0 and not entry.flags & 1 and is_whole
        has_footer = bool(entry.flags & 8)
        members[name] = Member(entry.offset, entry.full, is_plain, has_footer)
        at = comment_start + entry.comment_length
    if at != len(data):
        raise _damaged_list()
    return members


def _with_large_numbers(entry: _Entry, extra: bytes) -> _Entry:
    """An entry with the sizes and the offset that are in `extra`, as large ones are."""
    values: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        number, size = struct.unpack_from("<2H", extra, at)
        if number == 1:
            body = extra[at + 4 : at + 4 + size]
            values = [v for (v,) in struct.iter_unpack("<Q", body[: size // 8 * 8])]
        at += 4 + size
    # Only large ones are there, in this order.
    names = [x for x in ("full", "packed", "offset") if getattr(entry, x) == _IN_EXTRA]
    if len(names) > len(values):
        raise _damaged_list()
    return entry._replace(**dict(zip(names, values)))


def _damaged_list() -> DamagedError:
    return DamagedError("the list of files in the zip is damaged")


def place(archive: Zip, name: str) -> tuple[int, int]:
    """Where the bytes of a file in a zip lie: from, to."""
    directory, key, members, end = archive
    member = members.get(name)
    if member is None:
        raise DamagedError(f"`{name}` is missing in it")
    if not member.is_plain:
        raise ValueError(f"`{name}` in it is compressed or encrypted: unzip it")
    offset = member.offset
    if offset + _HEAD > end:
        raise DamagedError(f"`{name}` in it is damaged")
    head = _store.read_bytes(directory, key, offset, offset + _HEAD)
    own, extra = struct.unpack("<2H", head[26:])
    start = offset + _HEAD + own + extra
    if head[:4] != _LOCAL or start + member.size > end:
        raise DamagedError(f"`{name}` in it is damaged")
    return start, start + member.size


def places(archive: Zip, names: list[str]) -> list[tuple[int, int]]:
    """Where the bytes of some files in a zip lie. No two of them overlap.

    In an object store it takes a request for each file to know how long its header is.
    So if the first one lies right before what comes next, the others are taken to.
    """
    found: list[tuple[int, int] | None] = [None] * len(names)
    if archive.directory.is_remote and names:
        guesses = _guesses(archive, names)
        if guesses[0] == place(archive, names[0]):
            found = guesses
    rest = [i for i, one in enumerate(found) if one is None]
    look = lambda i: place(archive, names[i])
    for i, one in zip(rest, _store.each(archive.directory, look, rest)):
        found[i] = one
    out = [one for one in found if one is not None]
    check_apart(out)
    return out


def check_apart(places: Sequence[tuple[int, int]]) -> None:
    """**Raises:** `ValueError` for two files that have bytes in common."""
    if any(a[1] > b[0] for a, b in it.pairwise(sorted(places))):
        raise ValueError("two files of the zip lie at one place")


# After the bytes of a file: a signature, its checksum, and its two sizes of 4 or of 8
# bytes each.
_FOOTERS = 16, 24
_ALIGN = 64  # Of the bytes in PyTorch's files, which have such footers.


def _guesses(archive: Zip, names: Sequence[str]) -> list[tuple[int, int] | None]:
    """Where files lie if each ends where the next begins; None where nothing tells."""
    offsets = sorted([*(m.offset for m in archive.members.values()), archive.end])
    out: list[tuple[int, int] | None] = []
    for name in names:
        member = archive.members.get(name)
        if member is None or not member.is_plain:
            out.append(None)
            continue
        stop = offsets[bisect.bisect(offsets, member.offset) % len(offsets)]
        starts = [stop - member.size - n for n in _FOOTERS if member.has_footer]
        starts = [s for s in starts if s % _ALIGN == 0] or [stop - member.size]
        least = member.offset + _HEAD + len(name.encode("utf-8", "surrogateescape"))
        is_sure = len(starts) == 1 and least <= starts[0] < least + 2**16
        is_sure = is_sure and not (member.has_footer and starts[0] % _ALIGN)
        out.append((starts[0], starts[0] + member.size) if is_sure else None)
    return out
