"""zstd, decoded by TensorStore and no further than is asked for.

A frame need not say how much it makes, and TensorStore would make all of it: 100 kB can
be gigabytes. https://datatracker.ietf.org/doc/html/rfc8878
"""

import secrets
import struct
from typing import NamedTuple

import tensorstore as ts


_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 2**17  # What a block makes at most.
_RAW, _RLE, _PACKED = 0, 1, 2
# Bits of the byte that describes a frame. `_SINGLE`: its window is all of it.
# `_CHECKSUM`: a checksum ends it. `_NOT_READ`: it is of another version, or needs a
# dictionary. `_LAST_BLOCK` is a bit of the head of a block.
_SINGLE, _CHECKSUM, _NOT_READ, _LAST_BLOCK = 32, 4, 8 | 3, 1
# TensorStore refuses a file of a zip that is more than so many times its packed size.
_MAX_RATIO = 1000


def decode(data: bytes, most: int) -> bytes:
    """The decoded bytes of a frame, at most `most` of them.

    **Raises:** `ValueError` if it could be more, or it is not one whole frame.
    """
    frame = _walk(data, most)
    if frame.size is not None:
        return _decode(data, frame.size)
    # Its size is not known, and TensorStore has to be asked for a size that is there.
    # So the frame loses its checksum, and gets a random mark and then zeros: all before
    # the mark was its own.
    mark = secrets.token_bytes(16)
    rest = frame.max_total
    blocks = [_block(_RAW, len(mark), rest == 0) + mark]
    while rest:
        count = min(rest, frame.max_block)
        rest -= count
        blocks.append(_block(_RLE, count, rest == 0) + b"\0")
    out = bytearray(data[: frame.end])
    out[4] &= ~_CHECKSUM
    out[frame.last] &= ~_LAST_BLOCK
    made = _decode(bytes(out) + b"".join(blocks), frame.max_total + len(mark))
    body, found, _ = made.partition(mark)
    if not found:
        raise ValueError("a frame of zstd is damaged")
    return body


def _block(kind: int, size: int, is_last: bool) -> bytes:
    """The head of a block."""
    return (_LAST_BLOCK * is_last | kind << 1 | size << 3).to_bytes(3, "little")


class _Frame(NamedTuple):
    """Bounds of a frame. `size`: its decoded bytes, if it says so. `max_block`,
    `max_total`: the most bytes that one block makes, and that all of them make. `last`,
    `end`: where the last block begins and ends."""

    size: int | None
    max_block: int
    last: int
    end: int
    max_total: int


def _walk(data: bytes, most: int) -> _Frame:
    """The bounds of a frame, by the heads of its blocks. **Raises:** `ValueError` as
    `decode`."""
    if len(data) < 6 or not data.startswith(_MAGIC) or data[4] & _NOT_READ:
        raise ValueError("a frame of zstd is damaged, or needs a dictionary")
    is_single, has_checksum = bool(data[4] & _SINGLE), bool(data[4] & _CHECKSUM)
    at = 5 if is_single else 6
    # The bytes that say how many the frame makes. There are none if it does not say so.
    width = (is_single, 2, 4, 8)[data[4] >> 6]
    size = int.from_bytes(data[at : at + width], "little") + 256 * (width == 2)
    # How far back a decoder has to look, which no block goes beyond.
    window = size if is_single else (8 + (data[5] & 7)) << 7 + (data[5] >> 3)
    block = min(window, _BLOCK)
    at += width
    total = last = 0
    is_last = False
    while not is_last:
        head = int.from_bytes(data[at : at + 3], "little")
        is_last, kind, length = bool(head & _LAST_BLOCK), head >> 1 & 3, head >> 3
        last = at
        at += 4 if kind == _RLE else 3 + length
        total += block if kind == _PACKED else length
        if kind > _PACKED or length > block or at > len(data):
            raise ValueError("a frame of zstd is damaged")
    if at + 4 * has_checksum != len(data):
        raise ValueError("a frame of zstd is damaged")
    if max(total, size) > most or window > max(most, 2**23):
        raise ValueError("a frame of zstd makes more than is read")
    if width and size > total:
        raise ValueError("a frame of zstd is damaged")
    return _Frame(size if width else None, block, last, at, total)


def _decode(frame: bytes, size: int) -> bytes:
    """The first `size` bytes that a frame makes: as a file of a zip in memory."""
    if size == 0:
        return b""
    frame += bytes(size // _MAX_RATIO)  # Is not read.
    fields = (63, 0, 93, 0, 33, 0, len(frame), size, 1, 0)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + b"x" + frame
    entry = struct.pack("<4sH5H3I5H2I", b"PK\1\2", 63, *fields, *(0,) * 5) + b"x"
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local), 0)
    context = ts.Context()
    memory = {"driver": "memory", "path": "zip"}
    ts.KvStore.open(memory, context=context).result().write("", local + entry + end)
    files = ts.KvStore.open({"driver": "zip", "base": memory}, context=context)
    try:
        made = files.result().read("x", byte_range=slice(0, size)).result().value
    except ValueError as e:
        raise ValueError("a frame of zstd is damaged") from e
    if len(made) != size:
        raise ValueError("a frame of zstd is damaged")
    return made
