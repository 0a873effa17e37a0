"""The chunk grid of an array: pure arithmetic on shapes.

The chunks of an array that is in one piece are slabs: whole in the trailing axes, cut
along the leading ones. So each is one contiguous run of the bytes of a row-major array,
and is written without a copy. Those of a sharded array fit into its shards, which may
cut any axis.
"""

import collections
import functools as ft
import itertools as it
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ._view import IndexArray, Picks


# Digests are taken of blocks of this many bytes of a chunk.
BLOCK = 4 * 2**20
# Of the chunks of one array: a factor of 2 for each axis that they do not divide.
_MAX_SIZES = 256


def choose(shape: Sequence[int], itemsize: int, target: int) -> tuple[int, ...]:
    """The shape of the slabs that cut `shape` into chunks of about `target` bytes.

    Axes are cut from the first one on, each into parts as equal as can be, so that the
    padding of the last chunk is small. An empty axis gets chunks of length 1.
    """
    chunk = [max(1, n) for n in shape]
    for axis, length in enumerate(chunk):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        if length * rest <= target:
            break
        parts = math.ceil(length / max(1, target // rest))
        chunk[axis] = math.ceil(length / parts)
    return tuple(chunk)


# Chunks of sharded arrays are not made smaller than this so as to suit shardings.
LEAST = 256 * 2**10


def choose_sharded(
    shape: Sequence[int], shard: Sequence[int], itemsize: int, target: int
) -> tuple[int, ...]:
    """Does what `choose` does, for an array that is cut into equal shards: no chunk is
    in two of them.

    Where the chunks stay large enough, every axis is also cut into as many parts as
    there are shards. So as many devices that share the array in another way, by its
    columns instead of its rows, each have chunks of their own to read.
    """
    chunk = list(shard)
    count = math.prod(grid(shape, shard))
    # Nor are there to be very many of them.
    least = max(LEAST, math.prod(shape) * itemsize >> 10)
    for axis, length in enumerate(shape):
        part = length // count
        if length % count or part == 0 or chunk[axis] % part:
            continue
        if math.prod(chunk) // chunk[axis] * part * itemsize >= least:
            chunk[axis] = part
    for axis, length in enumerate(chunk):
        size = math.prod(chunk) * itemsize
        if size <= target:
            break
        chunk[axis] = length // _parts(length, -(-size // target))
    return tuple(chunk)


def _parts(length: int, wanted: int) -> int:
    """Into how many equal parts to cut a length: about so many."""
    above = range(wanted, min(length, 4 * wanted) + 1)
    below = range(min(length, wanted), 0, -1)
    return next(n for n in (*above, *below) if length % n == 0)


def grid(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Number of chunks along each axis."""
    return tuple([-(-n // c) for n, c in zip(shape, chunk)])


def indices(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The index of every chunk in row-major order."""
    return it.product(*map(range, grid(shape, chunk)))


def region(
    shape: Sequence[int], chunk: Sequence[int], index: Sequence[int]
) -> tuple[slice, ...]:
    """The part of the array that a chunk holds, without its padding."""
    return tuple(
        slice(i * c, min(n, (i + 1) * c)) for n, c, i in zip(shape, chunk, index)
    )


def block_counts(shape: Sequence[int], chunk: Sequence[int], itemsize: int) -> int:
    """Number of digests of an array: at least one for each of its chunks."""
    # How many chunks there are of each size: an axis has at most two lengths of them.
    sizes = {itemsize: 1}
    for n, c in zip(shape, chunk):
        longer = collections.Counter[int]()
        for length, times in ((c, n // c), (n % c, min(1, n % c))):
            for size, count in sizes.items():
                longer[size * length] += count * times
        sizes = +longer
        if len(sizes) > _MAX_SIZES:
            raise ValueError("the chunks of an array have too many sizes")
    return sum(count * -(-size // BLOCK) for size, count in sizes.items())


def block_starts(
    shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int
) -> np.ndarray:
    """The number of the first digest of each chunk among those of the array; and at the
    end, how many digests there are."""
    sizes = np.asarray(itemsize, np.int64)
    for n, c in zip(shape, chunk):
        sizes = np.multiply.outer(sizes, np.minimum(c, n - np.arange(0, n, c)))
    return np.append(0, np.cumsum(np.maximum(1, -(-sizes.reshape(-1) // BLOCK))))


class Grid(NamedTuple):
    """All chunks of an array, in row-major order."""

    regions: list[tuple[slice, ...]]
    keys: list[str]
    blocks: list[int]  # the first block of each chunk, and the count of all
    full: int  # bytes of a chunk


@ft.lru_cache(maxsize=256)
def lay(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> Grid:
    """The chunks of an array, with their keys, digest blocks and sizes."""
    every = list(indices(shape, chunk))
    regions = [region(shape, chunk, i) for i in every]
    keys = [key(i) for i in every]
    full = math.prod(chunk) * itemsize
    # One chunk has no padding.
    blocks = [0, -(-full // BLOCK)]
    if len(keys) != 1:
        blocks = block_starts(shape, chunk, itemsize).tolist()
    return Grid(regions, keys, blocks, full)


def within(region: Sequence[slice], outer: Sequence[slice]) -> tuple[slice, ...]:
    """A region of an array, in another one of it that it lies in."""
    return tuple(
        slice(s.start - o.start, s.stop - o.start) for s, o in zip(region, outer)
    )


def touched(
    shape: tuple[int, ...], chunk: tuple[int, ...], picks: Sequence[Picks | int]
) -> Iterator[int]:
    """The numbers of the chunks that hold the elements at `picks`, in order."""
    found = [touched_along(c, pick) for c, pick in zip(chunk, picks)]
    axes = [x if isinstance(x, range) else x.tolist() for x in found]
    counts = grid(shape, chunk)
    for index in it.product(*axes):
        number = 0
        for i, count in zip(index, counts):
            number = number * count + i
        yield number


def touched_along(length: int, pick: Picks | int) -> range | np.ndarray:
    """Which parts of this length, of an axis, hold the elements that are picked."""
    if isinstance(pick, IndexArray):
        parts = pick.ascending // length
        return parts[np.append(True, parts[1:] > parts[:-1])]
    pick = range(pick, pick + 1) if isinstance(pick, int) else pick
    low, high = sorted((pick[0], pick[-1]))
    if abs(pick.step) <= length:
        return range(low // length, high // length + 1)
    return np.arange(low, high + 1, abs(pick.step)) // length


def runs(
    numbers: Iterable[int], shape: tuple[int, ...], chunk: tuple[int, ...], most: int
) -> Iterator[range]:
    """Chunks that follow each other, at most so many, which together are a region."""
    counts = [n for n in grid(shape, chunk) if n > 1]
    period = counts[-1] if counts else 1
    run = range(0)
    for number in numbers:
        if run and number == run.stop and number % period and len(run) < most:
            run = range(run.start, number + 1)
        else:
            if run:
                yield run
            run = range(number, number + 1)
    if run:
        yield run


def box(regions: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """The region that those of a run of chunks are together."""
    return tuple(slice(a.start, b.stop) for a, b in zip(regions[0], regions[-1]))


def cut_axis(shape: Sequence[int], chunk: Sequence[int]) -> int | None:
    """The axis along which chunks are cut that, one after the other, are the array row
    by row: all axes after it are whole, and all before it are cut into single indices.
    Of (4, 6) in chunks of (1, 3) it is 1. The last chunk may be padded. None for any
    other chunks, such as (2, 3)."""
    axis = max((i for i, (n, c) in enumerate(zip(shape, chunk)) if c < n), default=0)
    if any(c != 1 for c in chunk[:axis]):
        return None
    is_padded = axis > 0 and shape[axis] % chunk[axis]
    return None if is_padded and math.prod(shape[:axis]) > 1 else axis


def key(index: Sequence[int]) -> str:
    """The key of a chunk in Zarr's default encoding: `c/1/0`; `c` for a 0-d array."""
    return "/".join(["c", *map(str, index)])
