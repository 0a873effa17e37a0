"""The maths of `merging`: pure functions of blocks of a leaf, the same of each tree.

A method computes an element of what its sources have there, of where that is, and of a
state, for which it has looked at the whole leaf. So what it gives does not depend on
how the leaf is cut into blocks.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash

from .._tree import _leaf


Blocks = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to merge leaves.

    Blocks are in float32, or in float64 if the leaf is. With `has_base` the first of
    them is that of the base.
    """

    has_base: ClassVar[bool] = False
    looks_first: ClassVar[bool] = False

    def check(self, count: int) -> None:
        """**Raises:** `ValueError` for another number of trees than it merges."""

    def look(self, blocks: Iterable[Blocks], place: "MergedLeaf") -> Any:
        """The state, of all blocks of a leaf in row-major order."""

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: "MergedLeaf"
    ) -> np.ndarray:
        """A block of the leaf, which begins at `start`."""
        raise NotImplementedError


class MergedLeaf(NamedTuple):
    """A leaf that a method merges, from blocks of the leaf's own dtype."""

    method: Method
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def look(self, blocks: Iterable[Blocks]) -> Any:
        """The state of the method. The blocks have to be cut in one way whenever it is
        computed, as it may have sums of them."""
        with np.errstate(all="ignore"):
            return self.method.look((self._widened(x) for x in blocks), self)

    def combine(self, blocks: Blocks, state: Any, start: tuple[int, ...]) -> np.ndarray:
        """A block of the merged leaf."""
        shape, place = blocks[0].shape, self
        if not shape:
            place, start = self._replace(shape=(1,)), (0,)
        with np.errstate(all="ignore"):
            out = self.method.combine(self._widened(blocks), state, start, place)
            return _leaf.astype(out, self.dtype).reshape(shape)

    def _widened(self, blocks: Blocks) -> list[np.ndarray]:
        wide = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        # What NumPy computes of arrays without axes are no arrays.
        return [_leaf.astype(np.atleast_1d(x), wide) for x in blocks]


def _check_weights(weights: float | tuple[float, ...], count: int) -> None:
    if isinstance(weights, tuple) and len(weights) != count:
        raise ValueError(f"There are {len(weights)} weights for {count} trees.")


def _each(weights: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    return weights if isinstance(weights, tuple) else (weights,) * count


def _sum(weights: Sequence[float], blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of blocks times weights, in their order."""
    out: np.ndarray | None = None
    for weight, block in zip(weights, blocks):
        part = block * block.dtype.type(weight)
        if out is None:
            out = part
        else:
            out += part
    assert out is not None
    return out


# ---- Averages.


@dataclasses.dataclass(frozen=True)
class Average(Method):
    weights: tuple[float, ...] | None

    def check(self, count: int) -> None:
        _check_weights(self.weights or 1.0, count)

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: MergedLeaf
    ) -> np.ndarray:
        weights = self.weights or (1.0,) * len(blocks)
        return _sum(weights, blocks) / blocks[0].dtype.type(math.fsum(weights))


@dataclasses.dataclass(frozen=True)
class Ema(Method):
    decay: float

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: MergedLeaf
    ) -> np.ndarray:
        number = blocks[0].dtype.type
        out = blocks[0].copy()
        for block in blocks[1:]:
            out *= number(self.decay)
            out += block * number(1 - self.decay)
        return out


# Of the angle between two leaves: beyond it they are on one line.
_LINE = 0.9995


@dataclasses.dataclass(frozen=True)
class Slerp(Method):
    t: float
    looks_first: ClassVar[bool] = True

    def check(self, count: int) -> None:
        if count != 2:
            raise ValueError(f"`slerp` is between 2 trees, not {count}.")

    def look(self, blocks: Iterable[Blocks], place: MergedLeaf) -> tuple[float, float]:
        """Factors that the two are multiplied by."""
        parts = [(0.0, 0.0, 0.0)]
        for x, y in blocks:
            a, b = x.astype(float), y.astype(float)
            one, two = float(np.sum(a * a)), float(np.sum(b * b))
            parts.append((float(np.sum(a * b)), one, two))
        dot, one, two = (math.fsum(column) for column in zip(*parts))
        lengths = math.sqrt(one) * math.sqrt(two)
        cosine = dot / lengths if lengths else 1.0
        if not abs(cosine) <= _LINE:
            return 1 - self.t, self.t
        angle = math.acos(cosine)
        sine = math.sin(angle)
        return (
            math.sin((1 - self.t) * angle) / sine,
            math.sin(self.t * angle) / sine,
        )

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: MergedLeaf
    ) -> np.ndarray:
        return _sum(state, blocks)


# ---- Sums of task vectors: of what each tree differs from the base.


@dataclasses.dataclass(frozen=True)
class TaskArithmetic(Method):
    weights: float | tuple[float, ...]
    has_base: ClassVar[bool] = True

    def check(self, count: int) -> None:
        _check_weights(self.weights, count)

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: MergedLeaf
    ) -> np.ndarray:
        base, *trees = blocks
        return base + _sum(_each(self.weights, len(trees)), (x - base for x in trees))


# Magnitudes are counted by the first bits of them in float32: all of the exponent, and
# 12 of the mantissa.
_BITS = 20
_REST = 31 - _BITS
_INFINITE = np.uint32(0x7F800000)


def magnitudes(x: np.ndarray) -> np.ndarray:
    """The absolute values in float32."""
    return np.abs(x).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Ties(Method):
    weights: float | tuple[float, ...]
    density: float
    has_base: ClassVar[bool] = True
    looks_first: ClassVar[bool] = True

    def check(self, count: int) -> None:
        _check_weights(self.weights, count)

    def look(self, blocks: Iterable[Blocks], place: MergedLeaf) -> list[np.float32]:
        """The least magnitude that is kept of each tree."""
        counts: list[np.ndarray] = []
        for base, *trees in blocks:
            for number, tree in enumerate(trees):
                bits = magnitudes(tree - base).reshape(-1).view(np.uint32) >> _REST
                found = np.bincount(bits, minlength=2**_BITS)
                if number == len(counts):
                    counts.append(found)
                else:
                    counts[number] += found
        kept = max(1, round(self.density * math.prod(place.shape)))
        return [_threshold(x, kept) for x in counts]

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: MergedLeaf
    ) -> np.ndarray:
        base, *trees = blocks
        number = base.dtype.type
        parts = []
        for tree, least, weight in zip(trees, state, _each(self.weights, len(trees))):
            task = tree - base
            is_trimmed = magnitudes(task) < least  # A NaN is not.
            parts.append(np.where(is_trimmed, number(0), task * number(weight)))
        mass = ft.reduce(np.add, parts)
        sign = np.sign(mass)
        total, count = np.zeros_like(base), np.zeros_like(base)
        for part in parts:
            agrees = (np.sign(part) == sign) & (part != 0)
            total += np.where(agrees, part, number(0))
            count += agrees
        merged = base + total / np.maximum(count, number(1))
        return np.where(np.isnan(mass), mass, merged)


def _threshold(counts: np.ndarray, kept: int) -> np.float32:
    """The magnitude from which on at least so many were counted."""
    above = np.cumsum(counts[::-1])
    number = len(counts) - 1 - int(np.searchsorted(above, kept))
    bits = min(np.uint32(max(0, number) << _REST), _INFINITE)
    return bits.view(np.float32)


@dataclasses.dataclass(frozen=True)
class Dare(Method):
    weights: float | tuple[float, ...]
    density: float
    key: bytes
    has_base: ClassVar[bool] = True

    def check(self, count: int) -> None:
        _check_weights(self.weights, count)

    def combine(
        self, blocks: Blocks, state: Any, start: tuple[int, ...], place: MergedLeaf
    ) -> np.ndarray:
        base, *trees = blocks
        positions = _positions(start, base.shape, place.shape)
        zero = base.dtype.type(0)
        tasks = []
        for number, tree in enumerate(trees):
            random = uniform(self.key, place.name, number, positions)
            kept = (tree - base) / base.dtype.type(self.density)
            tasks.append(np.where(random < self.density, kept, zero))
        return base + _sum(_each(self.weights, len(trees)), tasks)


def _positions(
    start: Sequence[int], shape: Sequence[int], whole: Sequence[int]
) -> np.ndarray:
    """The number of each element of a region in the whole array, in row-major order."""
    out = np.zeros((1,) * len(shape), np.uint64)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = np.arange(start[axis], start[axis] + shape[axis], dtype=np.uint64)
        along = along * np.uint64(stride)
        out = out + along.reshape(-1, *[1] * (len(shape) - 1 - axis))
        stride *= whole[axis]
    return np.broadcast_to(out, tuple(shape))


def uniform(key: bytes, name: str, number: int, positions: np.ndarray) -> np.ndarray:
    """A random number in [0, 1) for each position in a leaf of a tree: SplitMix64, of
    which the seed is a hash of the key, the leaf's name and the tree's number."""
    seed = xxhash.xxh3_64_intdigest(b"%b %d %b" % (key, number, name.encode()))
    x = positions * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) * 2.0**-53
