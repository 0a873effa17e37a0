"""Orders in which libraries store the rows and axes of one layer, as lazy arrays."""

import numpy as np
from jaxtyping import PyTree

from .._kernel._load._lazy import LazyArray
from . import _deferred


def moved(x: LazyArray, is_last: bool) -> LazyArray:
    """The two axes of channels from the end to the front, in the other order; or back.
    A bias, which has one axis, stays as it is."""
    axes = [*range(len(x.shape))]
    if len(axes) < 2:
        return x
    order = [*axes[:-3:-1], *axes[:-2]] if is_last else [*axes[2:], 1, 0]
    return x.transpose(*order)


def with_axes_of(x: LazyArray, like: PyTree) -> LazyArray:
    """**Raises:** `ValueError` if not only axes of one element differ."""
    some, wanted = ([n for n in y.shape if n != 1] for y in (x, like))
    if some != wanted:
        raise ValueError(
            f"{list(x.shape)} and {list(like.shape)} do not differ in axes of one "
            "element alone"
        )
    x = x[tuple(0 if n == 1 else slice(None) for n in x.shape)]
    return x[tuple(None if n == 1 else slice(None) for n in like.shape)]


def conv_transpose(x: LazyArray, groups: int) -> LazyArray:
    """Inputs and outputs exchanged within each group, and the kernel turned round."""
    rank = len(x.shape)
    if rank < 3:
        return x
    turned = (slice(None), slice(None), *[slice(None, None, -1)] * (rank - 2))
    if groups == 1:
        return x.transpose(1, 0, *range(2, rank))[turned]
    first, second, *kernel = x.shape
    if first % groups:
        raise ValueError(f"{first} channels are not of {groups} groups")
    shape = (groups * second, first // groups, *kernel)

    def transpose(arrays: list[np.ndarray]) -> np.ndarray:
        parts = arrays[0].reshape(groups, first // groups, second, *kernel)
        return parts.swapaxes(1, 2).reshape(shape)[turned]

    return _deferred.later([x], transpose, shape, x.dtype)


def rows_of(x: LazyArray, parts: int, axis: int, what: str) -> int:
    """The number of rows of each part.

    **Raises:** `ValueError` if they are not as many.
    """
    count = x.shape[_deferred.axis_of(len(x.shape), axis)]
    if count % parts:
        raise ValueError(f"{count} along axis {axis} are not of {parts} {what}")
    return count // parts


def blocks(heads: int, kv_heads: int, rows: int) -> np.ndarray:
    """The order that turns rows by groups (queries, then their key and value) into all
    queries, then all keys, then all values."""
    queries = heads // kv_heads
    places = np.arange(kv_heads * (queries + 2) * rows)
    places = places.reshape(kv_heads, queries + 2, rows)
    ends = (slice(queries), slice(queries, queries + 1), slice(queries + 1, None))
    return np.concatenate([places[:, end].ravel() for end in ends])


def halves(heads: int, rows: int, size: int) -> np.ndarray:
    """The order that turns pairs of a head into all firsts, then all seconds."""
    places = np.arange(heads * rows).reshape(heads, rows)
    turned = [places[:, :size:2], places[:, 1:size:2], places[:, size:]]
    return np.concatenate(turned, 1).ravel()


def gates(saved: str, wanted: str, rows: int) -> np.ndarray:
    places = np.arange(len(saved) * rows).reshape(len(saved), rows)
    return places[[saved.index(x) for x in wanted]].ravel()
