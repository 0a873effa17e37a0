"""NumPy's basic indexing as data: which elements of a stored array a view has."""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


EMPTY = -1


class View(NamedTuple):
    """`picks[i]` are the indices along stored axis `i` (an int drops the axis), and
    `axes` the stored axes in the order of the view's (None: a new axis of length 1;
    `EMPTY`: one of length 0)."""

    picks: tuple[range | int, ...]
    axes: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self._along(axis)) for axis in self.axes)

    def _along(self, axis: int | None) -> range:
        """The indices along one of the `axes`."""
        if axis is None or axis == EMPTY:
            return range(1 if axis is None else 0)
        pick = self.picks[axis]
        assert isinstance(pick, range)
        return pick

    @property
    def ranges(self) -> list[range]:
        """`picks`, with the axes that they drop."""
        return [range(p, p + 1) if isinstance(p, int) else p for p in self.picks]

    @property
    def picked(self) -> tuple[int, ...]:
        """The shape of `stored[picks]`."""
        return tuple(len(p) for p in self.picks if isinstance(p, range))

    def transpose(self, order: Sequence[int] | None = None) -> "View":
        """`array.transpose(order)`. **Raises:** `ValueError` for another number."""
        rank = len(self.axes)
        if order is None:
            return self._replace(axes=self.axes[::-1])
        axes = [axis + rank if axis < 0 else axis for axis in order]
        if sorted(axes) != list(range(rank)):
            raise ValueError(f"{tuple(order)} is no order of {rank} axes")
        return self._replace(axes=tuple(self.axes[axis] for axis in axes))

    def take(self, key: Any) -> "View":
        """The view that `array[key]` is. **Raises:** `IndexError` and `TypeError`."""
        keys = key if isinstance(key, tuple) else (key,)
        given = sum(k is not None and k is not Ellipsis for k in keys)
        dots = sum(k is Ellipsis for k in keys)
        if given > len(self.axes) or dots > 1:
            raise IndexError(f"too many indices for an array of {len(self.axes)} axes")
        rest = len(self.axes) - given
        if dots == 0:
            keys = (*keys, Ellipsis)
        picks, axes, old = list(self.picks), [], iter(self.axes)
        for k in keys:
            if k is Ellipsis:
                axes += [next(old) for _ in range(rest)]
            elif k is None:
                axes.append(None)
            else:
                axis = next(old)
                new = _pick(self._along(axis), k)
                if axis is None or axis == EMPTY:
                    if isinstance(new, range):
                        axes.append(None if new else EMPTY)
                    continue
                picks[axis] = new
                if isinstance(new, range):
                    axes.append(axis)
        return View(tuple(picks), tuple(axes))

    def slices(self) -> tuple[slice | int, ...]:
        """`picks` as NumPy and TensorStore take them."""
        return tuple(p if isinstance(p, int) else _slice(p) for p in self.picks)

    def arrange(self, array: np.ndarray) -> np.ndarray:
        """The axes of the view from those of `stored[picks]`."""
        kept = [i for i, pick in enumerate(self.picks) if isinstance(pick, range)]
        new = [axis is None or axis == EMPTY for axis in self.axes]
        order = [kept.index(axis) for axis in self.axes if axis in kept]
        array = array.transpose(order)
        if True not in new:
            return array
        array = array[tuple(None if is_new else slice(None) for is_new in new)]
        return array[tuple(slice(0 if a == EMPTY else None) for a in self.axes)]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The view of a stored array that is in memory."""
        # With `...`, so that one element is an array as well.
        return self.arrange(array[(*self.slices(), ...)])


def run(picks: Sequence[range | int], shape: Sequence[int]) -> range | None:
    """The numbers, in row-major order, of the elements that are picked, if they follow
    each other; else None. There must be some."""
    start, count, inner = 0, 1, math.prod(shape)
    open = False  # Whether more than one index of an axis before was picked.
    for pick, length in zip(picks, shape):
        inner //= length
        pick = range(pick, pick + 1) if isinstance(pick, int) else pick
        if (open and len(pick) < length) or (len(pick) > 1 and pick.step != 1):
            return None
        start += pick[0] * inner
        count *= len(pick)
        open = open or len(pick) > 1
    return range(start, start + count)


def overlap(pick: range, start: int, stop: int) -> tuple[slice, slice] | None:
    """The part of `pick` in `[start, stop)`: its places in `pick`, and the indices from
    `start` on. None if there is none."""
    step = pick.step
    if step > 0:
        first = max(0, -(-(start - pick.start) // step))
        last = min(len(pick), -(-(stop - pick.start) // step))
    else:
        first = max(0, -(-(stop - 1 - pick.start) // step))
        last = min(len(pick), (start - pick.start) // step + 1)
    if first >= last:
        return None
    inside = pick[first:last]
    inside = range(inside.start - start, inside.stop - start, step)
    return slice(first, last), _slice(inside)


def overlaps(
    picks: Sequence[range], region: Sequence[slice]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The same along each axis of a region."""
    found = [overlap(pick, s.start, s.stop) for pick, s in zip(picks, region)]
    some = [x for x in found if x is not None]
    if len(some) < len(found):
        return None
    return tuple(to for to, _ in some), tuple(fro for _, fro in some)


def whole(shape: Sequence[int]) -> View:
    return View(tuple(map(range, shape)), tuple(range(len(shape))))


def _pick(pick: range, key: Any) -> range | int:
    if isinstance(key, slice):
        return pick[key]
    if isinstance(key, (bool, np.bool_)):
        raise TypeError("lazy arrays take integers, slices, `...` and None as indices")
    try:
        return pick[operator.index(key)]
    except TypeError:
        raise TypeError(
            "lazy arrays take integers, slices, `...` and None as indices, not a "
            f"`{type(key).__name__}`: read the array to index it otherwise"
        ) from None
    except IndexError:
        raise IndexError(
            f"index {key} is out of bounds for an axis of length {len(pick)}"
        ) from None


def _slice(pick: range) -> slice:
    if len(pick) == 0:
        return slice(0, 0)
    stop = pick[-1] + pick.step
    if pick.step > 0:
        return slice(pick[0], pick[-1] + 1, pick.step)
    return slice(pick[0], stop if stop >= 0 else None, pick.step)
