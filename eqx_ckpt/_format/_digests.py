"""The digests of stored bytes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from . import _grid


# The bytes of a digest.
SIZE = 16


def block_digest(data: Any) -> bytes:
    """The digest of one block."""
    return xxhash.xxh3_128_digest(data)


def block_digests(data: Any) -> Iterator[bytes]:
    """The digest of each block of the bytes of a chunk."""
    if data.nbytes <= _grid.BLOCK:
        yield block_digest(data)
        return
    for start in range(0, data.nbytes, _grid.BLOCK):
        yield block_digest(data[start : start + _grid.BLOCK])


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The elements of an array in row-major order as bytes: a view if it can be."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
