"""Lazy arrays that are made of others once those have been read."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._functions import _computed
from .._functions._computed import ComputedLeaf, Formula
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._storage import _arrays
from .._kernel._tree import _folding


def later(
    items: Sequence[LazyArray],
    make: Callable[[list[np.ndarray]], np.ndarray],
    shape: Sequence[int],
    dtype: Any,
) -> LazyArray:
    """`make` of the arrays that `items` will be."""
    run = lambda arrays, *_: make(list(arrays))
    name = items[0].name if items else ""
    formula = Formula(name, tuple(items), run, tuple(shape), np.dtype(dtype))
    return _computed.computed(formula)


def flattened(x: object) -> Any:
    """Turns an array that is computed into a formula of stored arrays, which are read
    with all others. Anything else stays as it is."""
    if not isinstance(x, LazyArray):
        return x
    body = _lazy.body_of(x)
    if not isinstance(body, ComputedLeaf):
        return x
    formula, parts = body.formula, list(map(flattened, body.formula.parts))

    def compute(arrays: Sequence[np.ndarray], *_: Any) -> np.ndarray:
        rest = iter(arrays)
        own = tuple(_known(part, rest) for part in parts)
        # By the same blocks, and cast in the same way, as if it were read.
        known = dataclasses.replace(formula, parts=own)
        whole = LazyArray(dataclasses.replace(body, formula=known))
        return _lazy.fetch([whole], True, as_numpy=True)[0]

    stored = tuple(leaf for part in parts for leaf in parts_of(part))
    return Formula(x.name, stored, compute, x.shape, np.dtype(x.dtype))


def parts_of(x: object) -> Sequence[Any]:
    """The stored arrays that are read for something which is `flattened`."""
    if isinstance(x, Formula):
        return x.parts
    return [x] if isinstance(x, LazyArray) else []


def _known(part: Any, arrays: Iterator[np.ndarray]) -> Any:
    """A flattened part, of the next ones of all arrays that were read."""
    if isinstance(part, Formula):
        return part.make([next(arrays) for _ in part.parts], None, ())
    return next(arrays) if isinstance(part, LazyArray) else part


def axis_of(rank: int, axis: int) -> int:
    """**Raises:** `ValueError` if an array of this rank has no such axis."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of an array with {rank} axes")
    return axis % rank


def take_along(x: LazyArray, axis: int, key: Any) -> LazyArray:
    """**Raises:** `ValueError` if the array has no such axis."""
    return x[(*[slice(None)] * axis_of(len(x.shape), axis), key)]


def _kinds(items: Sequence[LazyArray]) -> str:
    kinds = [_folding.short_array(np.dtype(x.dtype).name, x.shape) for x in items]
    return ", ".join(dict.fromkeys(kinds))


def concatenate(items: Sequence[LazyArray], axis: int) -> LazyArray:
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


def stack(items: Sequence[LazyArray], axis: int) -> LazyArray:
    """**Raises:** `ValueError` if dtypes or shapes differ."""
    if len({tuple(x.shape) for x in items}) > 1:
        raise ValueError(f"{_kinds(items)} are not of one shape")
    axis = axis_of(len(items[0].shape) + 1, axis)
    return concatenate([x[(*[slice(None)] * axis, None)] for x in items], axis)
