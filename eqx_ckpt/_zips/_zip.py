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
_ENTRY = struct.Struct("<4s6H3I5H2I")
_HEAD = 30  # The bytes of a header before the name.
_MAX_DIRECTORY = 32 * 2**20


class Member(NamedTuple):
    offset: int  # of its header
    size: int
    is_plain: bool  # neither compressed nor encrypted
    has_footer: bool  # its size is written after its bytes


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
    # The end record of a large zip (56 bytes), its locator (20), and the end record of
    # any zip without a comment (22).
    tail = _store.read_answer(
        directory, key, directory.start_read(key, -98, None)
    ).value
    if tail[-22:-18] != _END or tail[-2:] != b"\0\0":
        raise DamagedError("it is a zip that is damaged, or is not whole")
    disk, other, _, count, size, start, _ = struct.unpack("<4H2IH", tail[-18:])
    if start == 0xFFFFFFFF or size == 0xFFFFFFFF or count == 0xFFFF:
        if tail[-42:-38] != _LOCATOR or tail[:4] != _END64:
            raise DamagedError("it is a zip that is damaged")
        count, size, start = struct.unpack("<3Q", tail[32:56])
    if disk or other or size > _MAX_DIRECTORY or count * _ENTRY.size > size:
        raise ValueError("it is a zip with an impossible list of files")
    data = _store.read_bytes(directory, key, start, start + size)
    members: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > size:
            raise DamagedError("the list of files in the zip is damaged")
        row = _ENTRY.unpack_from(data, at)
        mark, flags, method, lengths = row[0], row[3], row[4], row[10:13]
        ends = list(it.accumulate(lengths[:2], initial=at + _ENTRY.size))
        name, extra = data[ends[0] : ends[1]], data[ends[1] : ends[2]]
        if mark != b"PK\1\2":
            raise DamagedError("the list of files in the zip is damaged")
        packed, full, offset = _large(extra, row[8], row[9], row[16])
        text = name.decode("utf-8", "surrogateescape")
        if text in members:
            raise ValueError(f"the zip has the file {text!r:.60} twice")
        is_plain = method == 0 and not flags & 1 and packed == full
        members[text] = Member(offset, full, is_plain, bool(flags & 8))
        at += _ENTRY.size + sum(lengths)
    if at != size:
        raise DamagedError("the list of files in the zip is damaged")
    return Zip(directory, key, members, start)


def _large(extra: bytes, packed: int, full: int, offset: int) -> tuple[int, int, int]:
    """The sizes and the offset of a file, which are in `extra` if they are large."""
    values: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        number, size = struct.unpack_from("<2H", extra, at)
        if number == 1:
            body = extra[at + 4 : at + 4 + size]
            values = [v for (v,) in struct.iter_unpack("<Q", body[: size // 8 * 8])]
        at += 4 + size
    rest = iter(values)
    try:
        full = next(rest) if full == 0xFFFFFFFF else full
        packed = next(rest) if packed == 0xFFFFFFFF else packed
        offset = next(rest) if offset == 0xFFFFFFFF else offset
    except StopIteration:
        raise DamagedError("the list of files in the zip is damaged") from None
    return packed, full, offset


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


# What comes after the bytes of a file: its checksum and its size, of 4 or of 8 bytes.
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
