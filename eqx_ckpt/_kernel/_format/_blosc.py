"""Blosc, as chunks are compressed: its settings, and the header of what it makes.

https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
"""

import struct
from typing import Any


# The number of each compressor in a header, and its settings as Zarr has them. Measured
# on weights: a higher level costs more than it saves.
CODECS: dict[str, tuple[int, dict[str, Any]]] = {
    "blosc-lz4": (1, {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle"}),
    "blosc-zstd": (4, {"cname": "zstd", "clevel": 1, "shuffle": "shuffle"}),
}
# Blocks of the size that Blosc would choose are too small for a zstd of level 1.
_BLOCK = 2**20
# It cannot make or hold more.
MAX_BYTES = 2**31 - 17
_HEADER = 16


def configuration(codec: str, itemsize: int) -> dict[str, Any]:
    """The configuration of Zarr's `blosc` codec."""
    return {**CODECS[codec][1], "typesize": itemsize, "blocksize": _BLOCK}


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
        (version, inner, flags >> 5) != (2, 1, CODECS[codec][0])
        or width != itemsize
        or not 0 < block <= min(full, _BLOCK)
    ):
        raise ValueError("the Blosc header of a chunk is none that is ever written")
