"""A checkpoint of ours in one file: a zip of its directory, read in place.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import dataclasses
import itertools as it
import struct
from typing import Any, NamedTuple

from ..._errors import DamagedError
from ..._format import _files, _index, _json
from ..._format._index import Index
from ..._storage._backend import Backend
from .._source import Foreign, Source
from . import _found, _magic
from ._found import Candidate


_LOCAL, _END, _END64, _LOCATOR = b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"
_ENTRY = struct.Struct("<4s6H3I5H2I")
_MAX_DIRECTORY = 32 * 2**20


class _Member(NamedTuple):
    offset: int  # of its header
    size: int
    is_plain: bool  # neither compressed nor encrypted


def is_zip(found: Candidate) -> bool:
    return found.head.startswith(_LOCAL)


def read(found: Candidate, like: Any) -> Source | None:
    """The source of a zip with one index of ours in it."""
    key = found.key
    if key is None or not is_zip(found):
        return None
    directory = found.directory
    members, end = _members(directory, key)
    above = [n for n in members if n == _files.INDEX or n.endswith("/" + _files.INDEX)]
    other = None if above else _magic.name_of_zip(members)
    if other is not None:
        raise ValueError(f"it is no checkpoint of ours, but {other}")
    if len(above) != 1:
        raise ValueError(
            f"it is a zip with {len(above) or 'no'} `{_files.INDEX}` in it"
        )
    prefix = above[0].removesuffix(_files.INDEX)
    start, stop = _place(directory, key, members, above[0], end)
    if stop - start > _json.MAX_INDEX:
        raise ValueError("its index is too long")
    index = _index.decode(_found.read(directory, key, start, stop))
    if index.layout != "ocdbt":
        raise ValueError(f"it holds the layout {index.layout!r}: unzip it")
    placement = index.placement
    base = f"{prefix}d/{index.save}/"
    files = [
        _place(directory, key, members, base + name, end) for name in placement.files
    ]
    digests = _place(directory, key, members, base + "digests", end)
    if digests[1] - digests[0] != 16 * index.block_count:
        raise DamagedError("its file of digests is damaged")
    _check(index, files, [(start, stop), digests])
    shifted = dataclasses.replace(
        index,
        placement=dataclasses.replace(
            placement,
            files=[key],
            file=[0] * len(placement.file),
            offset=[
                files[f][0] + at for f, at in zip(placement.file, placement.offset)
            ],
            splits=[(x, c, 0, files[f][0] + at) for x, c, f, at in placement.splits],
        ),
        others={},
    )
    stamp = lambda directory: directory.stamp(key)
    foreign = Foreign(directory, [key], stamp, stamp(directory), {}, digests)
    return Source(found.root, shifted, foreign)


def _members(directory: Backend, key: str) -> tuple[dict[str, _Member], int]:
    """The files in a zip, and where the list of them begins, as what they are in ends
    there."""
    tail = directory.read_tail(key, 98)
    if tail[-22:-18] != _END or tail[-2:] != b"\0\0":
        raise DamagedError("it is a zip that is damaged, or is not whole")
    disk, other, _, count, size, start, _ = struct.unpack("<4H2IH", tail[-18:])
    if start == 0xFFFFFFFF or size == 0xFFFFFFFF or count == 0xFFFF:
        if tail[-42:-38] != _LOCATOR or tail[:4] != _END64:
            raise DamagedError("it is a zip that is damaged")
        count, size, start = struct.unpack("<3Q", tail[32:56])
    if disk or other or size > _MAX_DIRECTORY or count * _ENTRY.size > size:
        raise ValueError("it is a zip with an impossible list of files")
    data = _found.read(directory, key, start, start + size)
    members: dict[str, _Member] = {}
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
        members[text] = _Member(offset, full, is_plain)
        at += _ENTRY.size + sum(lengths)
    if at != size:
        raise DamagedError("the list of files in the zip is damaged")
    return members, start


def _large(extra: bytes, packed: int, full: int, offset: int) -> tuple[int, int, int]:
    """The sizes and the offset of a file, which are elsewhere if they are large."""
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


def _place(
    directory: Backend, key: str, members: dict[str, _Member], name: str, end: int
) -> tuple[int, int]:
    """Where the bytes of a file in the zip lie: from, to."""
    member = members.get(name)
    if member is None:
        raise DamagedError(f"`{name}` is missing in it")
    if not member.is_plain:
        raise ValueError(f"`{name}` in it is compressed or encrypted: unzip it")
    offset = member.offset
    if offset + 30 > end:
        raise DamagedError(f"`{name}` in it is damaged")
    head = _found.read(directory, key, offset, offset + 30)
    own, extra = struct.unpack("<2H", head[26:])
    start = offset + 30 + own + extra
    if head[:4] != _LOCAL or start + member.size > end:
        raise DamagedError(f"`{name}` in it is damaged")
    return start, start + member.size


def _check(
    index: Index, files: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    """**Raises:** `ValueError` unless each file has bytes of its own, and in them all
    that the index says."""
    spans = sorted([*files, *others])
    if any(a[1] > b[0] for a, b in zip(spans, spans[1:])):
        raise ValueError("two files of the zip lie at one place")
    for record in index.leaves.records():
        for first, stop, file, offset in index.segments(record):
            start, end = files[file]
            if offset + index.extent(record, first, stop) > end - start:
                raise ValueError(f"the bytes of `{record.name}` are not in it")
