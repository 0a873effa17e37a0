"""Arrays that are made of lazy ones once those have been read, and lazy array maths."""

import dataclasses
import itertools as it
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._functions import _computed
from .._functions._computed import ComputedLeaf, Formula
from .._kernel._format import _template
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._storage import _arrays
from .._kernel._tree import _folding, _leaf


Lazy = LazyArray | Formula


def parts_of(x: Lazy) -> list[LazyArray]:
    """The lazy arrays that have to be read for one."""
    parts = [x] if isinstance(x, LazyArray) else x.parts
    return [part for part in parts if isinstance(part, LazyArray)]


def made(x: Lazy, arrays: list[np.ndarray]) -> np.ndarray:
    """The array, of those that its parts are."""
    return arrays[0] if isinstance(x, LazyArray) else x.make(arrays, None, ())


def later(
    items: Sequence[Lazy],
    make: Callable[[list[np.ndarray]], np.ndarray],
    shape: Sequence[int],
    dtype: Any,
) -> Formula:
    """`make` of the arrays that `items` will be."""
    items = [without_computed(x) for x in items]
    counts = [len(parts_of(x)) for x in items]

    def make_all(arrays: Sequence[np.ndarray], *_: Any) -> np.ndarray:
        rest = iter(arrays)
        return make([made(x, list(it.islice(rest, n))) for x, n in zip(items, counts)])

    parts = tuple(part for x in items for part in parts_of(x))
    return Formula("", parts, make_all, tuple(shape), np.dtype(dtype))


def as_lazy_array(x: Lazy) -> LazyArray:
    """An array as what `ec.lazy` takes."""
    return x if isinstance(x, LazyArray) else _computed.computed(x)


def without_computed(x: object) -> Any:
    """Turns an array of `ec.lazy` into a formula of stored arrays, which are read with
    all others. Anything else stays as it is."""
    if not isinstance(x, LazyArray):
        return x
    body = _lazy.body_of(x)
    if not isinstance(body, ComputedLeaf):
        return x
    formula = body.formula
    parts = [without_computed(part) for part in formula.parts]

    def compute(arrays: list[np.ndarray]) -> np.ndarray:
        rest = iter(arrays)
        own = (next(rest) if isinstance(part, Lazy) else part for part in parts)
        # By the same blocks, and cast in the same way, as if it were read.
        known = dataclasses.replace(formula, parts=tuple(own))
        whole = LazyArray(dataclasses.replace(body, formula=known))
        return _lazy.fetch([whole], True, as_numpy=True)[0]

    lazies = [part for part in parts if isinstance(part, Lazy)]
    return later(lazies, compute, x.shape, x.dtype)


def _map(x: Formula, fn: Callable[[np.ndarray], np.ndarray]) -> Formula:
    # What `fn` makes of an array without memory has the shape that it will have.
    out = fn(np.broadcast_to(np.zeros((), x.dtype), x.shape))
    return later([x], lambda arrays: fn(arrays[0]), out.shape, out.dtype)


def take(x: Lazy, key: Any) -> Lazy:
    return x[key] if isinstance(x, LazyArray) else _map(x, lambda a: a[key])


def take_along(x: Lazy, axis: int, key: Any) -> Lazy:
    """**Raises:** `ValueError` if the array has no such axis."""
    return take(x, (*[slice(None)] * axis_of(len(x.shape), axis), key))


def transpose(x: Lazy, axes: Sequence[int]) -> Lazy:
    if isinstance(x, LazyArray):
        return x.transpose(*axes)
    return _map(x, lambda a: a.transpose(*axes))


def astype(x: Lazy, dtype: Any) -> Lazy:
    if isinstance(x, LazyArray):
        return x.astype(dtype)
    wanted = np.dtype(dtype)
    if _template.number_type(wanted) != _template.number_type(x.dtype):
        raise ValueError(
            f"{_kinds([x])} is not cast to {wanted}: floats become floats, ints ints"
        )
    return _map(x, lambda a: _leaf.cast(a, wanted))


def axis_of(rank: int, axis: int) -> int:
    """**Raises:** `ValueError` if an array of this rank has no such axis."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of an array with {rank} axes")
    return axis % rank


def _kinds(items: Sequence[Lazy]) -> str:
    kinds = [_folding.short_array(np.dtype(x.dtype).name, x.shape) for x in items]
    return ", ".join(dict.fromkeys(kinds))


def concatenate(items: Sequence[Lazy], axis: int) -> Formula:
    """**Raises:** `ValueError` if dtypes, or shapes but for the axis, differ."""
    axis = axis_of(len(items[0].shape), axis)
    others = {(*x.shape[:axis], -1, *x.shape[axis + 1 :]) for x in items}
    dtypes = {np.dtype(x.dtype) for x in items}
    if len(others) > 1 or len(dtypes) > 1:
        raise ValueError(f"{_kinds(items)} are not one array along axis {axis}")
    shape = list(items[0].shape)
    shape[axis] = sum(x.shape[axis] for x in items)
    dtype = dtypes.pop()

    def join(arrays: list[np.ndarray]) -> np.ndarray:
        # Aligned, so that JAX takes it as it is.
        out = _arrays.aligned(shape, dtype)
        return np.concatenate(arrays, axis, out=out)

    return later(items, join, shape, dtype)


def stack(items: Sequence[Lazy], axis: int) -> Formula:
    """**Raises:** `ValueError` if dtypes or shapes differ."""
    if len({tuple(x.shape) for x in items}) > 1:
        raise ValueError(f"{_kinds(items)} are not of one shape")
    axis = axis_of(len(items[0].shape) + 1, axis)
    key = (*[slice(None)] * axis, None)
    return concatenate([take(x, key) for x in items], axis)
