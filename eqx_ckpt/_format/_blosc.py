"""Blosc, as chunks are compressed: its settings, and the header of what it makes.

https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
"""

import struct
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """`number` is that of the compressor in a header."""

    compressor: str
    number: int
    level: int
    shuffle: str


# Measured on weights: a higher level costs more than it saves.
CODECS = {
    "blosc-lz4": Settings("lz4", 1, 5, "bitshuffle"),
    "blosc-zstd": Settings("zstd", 4, 1, "shuffle"),
}
# Blocks of the size that Blosc would choose are too small for a zstd of level 1.
_BLOCK = 2**20
# It cannot make or hold more.
MAX_BYTES = 2**31 - 17
_HEADER = 16


def configuration(codec: str, itemsize: int) -> dict[str, Any]:
    """The configuration of Zarr's `blosc` codec."""
    settings = CODECS[codec]
    return {
        "cname": settings.compressor,
        "clevel": settings.level,
        "shuffle": settings.shuffle,
        "typesize": itemsize,
        "blocksize": _BLOCK,
    }


def check_header(data: Any, codec: str, full: int, itemsize: int) -> None:
    """Whoever decodes a chunk allocates what its header says, up to 2 GiB.

    **Raises:** `ValueError` unless that is a chunk of `full` bytes, of all of `data`.
    """
    if len(data) < _HEADER:
        raise ValueError("a chunk of it ends within its Blosc header")
    version, inner, flags, width, nbytes, block, length = struct.unpack(
        "<4B3I", bytes(data[:_HEADER])
    )
    if (nbytes, length) != (full, len(data)):
        raise ValueError(
            f"the Blosc header of a chunk of {full} bytes, stored as {len(data)}, says "
            f"{nbytes} bytes, stored as {length}"
        )
    if (
        (version, inner, flags >> 5) != (2, 1, CODECS[codec].number)
        or width != itemsize
        or not 0 < block <= min(full, _BLOCK)
    ):
        raise ValueError("the Blosc header of a chunk is none that is ever written")
