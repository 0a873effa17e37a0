"""Arrays that are made of lazy ones once those have been read, and lazy array maths."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._format import _template
from .._load._lazy import LazyArray
from .._storage import _arrays
from .._tree import _folding, _from_host


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredArray:
    """An array that `make` gives for the arrays that `parts` are."""

    parts: tuple[LazyArray, ...]
    make: Callable[[list[np.ndarray]], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype


Lazy = LazyArray | DeferredArray


def later(
    items: Sequence[Lazy],
    make: Callable[[list[np.ndarray]], np.ndarray],
    shape: Sequence[int],
    dtype: Any,
) -> DeferredArray:
    """`make` of the arrays that `items` will be."""
    own = [x.parts if isinstance(x, DeferredArray) else (x,) for x in items]

    def make_all(arrays: list[np.ndarray]) -> np.ndarray:
        rest = iter(arrays)
        given = []
        for item, parts in zip(items, own):
            mine = [next(rest) for _ in parts]
            given.append(
                item.make(mine) if isinstance(item, DeferredArray) else mine[0]
            )
        return make(given)

    parts = tuple(part for parts in own for part in parts)
    return DeferredArray(parts, make_all, tuple(shape), np.dtype(dtype))


def _map(x: DeferredArray, fn: Callable[[np.ndarray], np.ndarray]) -> DeferredArray:
    # What `fn` makes of an array without memory has the shape that it will have.
    out = fn(np.broadcast_to(np.zeros((), x.dtype), x.shape))
    return later([x], lambda arrays: fn(arrays[0]), out.shape, out.dtype)


def take(x: Lazy, key: Any) -> Lazy:
    return x[key] if isinstance(x, LazyArray) else _map(x, lambda a: a[key])


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
    return _map(x, lambda a: _from_host.cast(a, wanted))


def axis_of(rank: int, axis: int) -> int:
    """**Raises:** `ValueError` if an array of this rank has no such axis."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of an array with {rank} axes")
    return axis % rank


def _kinds(items: Sequence[Lazy]) -> str:
    kinds = [_folding.short_array(np.dtype(x.dtype).name, x.shape) for x in items]
    return ", ".join(dict.fromkeys(kinds))


def concatenate(items: Sequence[Lazy], axis: int) -> DeferredArray:
    """**Raises:** `ValueError` if dtypes, or shapes but for the axis, differ."""
    axis = axis_of(len(items[0].shape), axis)
    others = {(*x.shape[:axis], -1, *x.shape[axis + 1 :]) for x in items}
    dtypes = {np.dtype(x.dtype) for x in items}
    if len(others) > 1 or len(dtypes) > 1:
        raise ValueError(f"{_kinds(items)} are not one array along axis {axis}")
    shape = list(items[0].shape)
    shape[axis] = sum(x.shape[axis] for x in items)
    dtype = dtypes.pop()

    def make(arrays: list[np.ndarray]) -> np.ndarray:
        # Aligned, so that JAX takes it as it is.
        out = _arrays.aligned(shape, dtype)
        return np.concatenate(arrays, axis, out=out)

    return later(items, make, shape, dtype)


def stack(items: Sequence[Lazy], axis: int) -> DeferredArray:
    """**Raises:** `ValueError` if dtypes or shapes differ."""
    if len({tuple(x.shape) for x in items}) > 1:
        raise ValueError(f"{_kinds(items)} are not of one shape")
    axis = axis_of(len(items[0].shape) + 1, axis)
    key = (*[slice(None)] * axis, None)
    return concatenate([take(x, key) for x in items], axis)
