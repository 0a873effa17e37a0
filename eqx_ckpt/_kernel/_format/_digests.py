"""The digests of blocks of chunks: XXH3, of 128 bits. Nobody else says how one is made,
or how long it is.

The index and its `others` have digests of their own, in hexadecimal: `_index.digest`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from . import _grid


# The bytes of a digest.
SIZE = 16


# The digest of one block.
block_digest: Callable[[Any], bytes] = xxhash.xxh3_128_digest
# That of a block which comes in pieces.
Stream = xxhash.xxh3_128


def block_digests(data: Any) -> list[bytes]:
    """The digest of each block of the bytes of a chunk."""
    if data.nbytes <= _grid.BLOCK:
        return [block_digest(data)]
    starts = range(0, data.nbytes, _grid.BLOCK)
    return [block_digest(data[start : start + _grid.BLOCK]) for start in starts]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The elements of an array in row-major order as bytes: a view if it can be."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
