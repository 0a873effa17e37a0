"""Counts and sums of the elements of an array, some at a time, in float64.

Elements come as they are stored. Sums are of `(count, mean, sum of squares about it)`,
joined as by Chan, Golub and LeVeque. They have an exponent of their own, so that
squares of numbers of 64 bits do not overflow.
"""

import functools as ft
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._kernel._format import _template
from .._kernel._format._template import Template
from .._kernel._tree import _leaf


# So many elements are looked at together: they fit into the caches.
MANY = 2**16


def runs(arrays: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Arrays of one shape in parts of so many elements, each of one axis."""
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, MANY):
        yield [array[start : start + MANY] for array in flat]


def is_number(t: Template) -> bool:
    return t.dtype not in _leaf.NOT_ARRAYS


# ---- Bits.


@ft.lru_cache
def mask_of(t: Template) -> int | None:
    """The bits that count of a number of less than a byte; None if all of them do."""
    bits = _template.bits(_template.dtype_of(t.dtype)) if is_number(t) else 0
    return 2**bits - 1 if 0 < bits < 8 else None


def is_same(a: np.ndarray, b: np.ndarray, t: Template) -> bool:
    """Whether elements, as they are stored, have the same bits."""
    if a.shape != b.shape:
        return False
    mask = mask_of(t)
    words = np.dtype(f"u{min(8, a.dtype.itemsize)}")
    for x, y in runs([a, b]):
        x, y = x.view(words), y.view(words)
        if mask is not None:
            x, y = x & mask, y & mask
        if not np.array_equal(x, y):
            return False
    return True


# ---- Numbers.


def numbers(stored: np.ndarray, t: Template) -> np.ndarray:
    """The numbers of an array: integers as they are, others in float64 or complex128.

    A bool is 0 or 1.
    """
    array = stored
    if t.stored != t.dtype:
        array = stored.view(_template.dtype_of(t.dtype))
    kind = _template.number_type(array.dtype)
    if kind == "int" and array.dtype.itemsize == 8:
        return array
    wide = {"bool": np.int64, "int": np.int64, "complex": np.complex128}
    return _leaf.astype(array, np.dtype(wide.get(kind, np.float64)))


def as_floats(x: np.ndarray) -> np.ndarray:
    """Numbers as float64, with a last axis: of one, or of the two of a complex one."""
    if x.dtype.kind == "c":
        return np.ascontiguousarray(x).view(np.float64).reshape(*x.shape, 2)
    return x.astype(np.float64)[..., None]


class Sums(NamedTuple):
    """Statistics of `count` rows, times `2**-exponent`: the mean, and the sum of the
    squares of what they differ from it."""

    exponent: int
    count: int
    mean: np.ndarray
    squares: float

    @property
    def norm(self) -> float:
        """The root of the sum of all squares."""
        about_zero = self.squares + self.count * sum(x * x for x in self.mean.tolist())
        return _scaled(math.sqrt(about_zero), self.exponent)

    @property
    def deviation(self) -> float:
        if self.count == 0:
            return math.nan
        return _scaled(math.sqrt(self.squares / self.count), self.exponent)

    @property
    def means(self) -> list[float]:
        return [_scaled(float(x), self.exponent) for x in self.mean]


def _scaled(x: float, exponent: int) -> float:
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)


NO_SUMS = Sums(0, 0, np.zeros(1), 0.0)

# Squares of powers of two up to `_SAFE`, and sums of very many of them, are float64. So
# are powers up to `_MOST`.
_SAFE, _MOST = 400, 1000


def sums(x: np.ndarray) -> Sums:
    """Statistics of rows of finite numbers."""
    return sums_of_each(x[None])[0]


def sums_of_each(x: np.ndarray) -> list[Sums]:
    """The `sums` of each of several arrays of one shape."""
    many, count, _ = x.shape
    if count == 0:
        return [NO_SUMS] * many
    exponents = np.frexp(np.max(np.abs(x), axis=(1, 2)))[1]
    is_safe = np.abs(exponents) < _SAFE
    exponents = np.where(is_safe, 0, np.clip(exponents, -_MOST, _MOST))
    if exponents.any():
        x = x * np.ldexp(1.0, -exponents)[:, None, None]
    means = np.mean(x, axis=1)
    squares = np.sum((x - means[:, None]) ** 2, axis=(1, 2))
    rows = zip(exponents.tolist(), means, squares.tolist(), strict=True)
    return [Sums(exponent, count, *row) for exponent, *row in rows]


def join(a: Sums, b: Sums) -> Sums:
    if a.count == 0 or b.count == 0:
        return b if a.count == 0 else a
    exponent = max(a.exponent, b.exponent)
    a, b = _at(a, exponent), _at(b, exponent)
    count = a.count + b.count
    step = b.mean - a.mean
    mean = a.mean + step * (b.count / count)
    between = float(np.sum(step**2)) * (a.count * b.count / count)
    return Sums(exponent, count, mean, a.squares + b.squares + between)


def _at(a: Sums, exponent: int) -> Sums:
    down = a.exponent - exponent
    mean = np.ldexp(a.mean, down)
    return Sums(exponent, a.count, mean, math.ldexp(a.squares, 2 * down))


# ---- The distance of two arrays.


def _gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`|b - a|` of `numbers`, without an overflow of integers."""
    if a.dtype.kind == b.dtype.kind == "i" or a.dtype == b.dtype == np.uint64:
        x, y = a.astype(np.uint64), b.astype(np.uint64)
        return np.where(b >= a, y - x, x - y)
    with np.errstate(all="ignore"):
        out = np.abs(b - a)
        # One NaN is like another here, and an infinity like itself.
        return np.where((a == b) | ((a != a) & (b != b)), 0.0, out)


class Distance:
    """Distance of the numbers of two arrays of one shape from each other."""

    def __init__(self, t: Template, u: Template):
        self._templates = t, u
        self.largest = 0.0
        self._difference = self._norm = NO_SUMS

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        t, u = self._templates
        for part in runs([a, b]):
            x, y = numbers(part[0], t), numbers(part[1], u)
            gaps = _gaps(x, y).astype(np.float64)
            largest = float(gaps.max())
            if math.isnan(largest) or largest > self.largest:  # A NaN stays.
                self.largest = largest
            if math.isfinite(self.largest):
                self._difference = join(self._difference, sums(as_floats(gaps)))
                self._norm = join(self._norm, sums(as_floats(x[np.isfinite(x)])))

    @property
    def relative(self) -> float:
        """The L2 norm of the differences, over that of what is finite of the first."""
        if not math.isfinite(self.largest):
            return self.largest
        norm, difference = self._norm.norm, self._difference.norm
        if norm == 0:
            return math.inf if difference else 0.0
        return difference / norm
