"""NumPy's indexing as data: which elements of a stored array a view has."""

import dataclasses
import functools as ft
import itertools as it
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


EMPTY = -1


@dataclasses.dataclass(frozen=True, eq=False)
class IndexArray:
    """Indices along an axis, none of them negative, in any order and as often as one
    likes. The axis becomes as many as the array has."""

    values: np.ndarray

    def __len__(self) -> int:
        return self.values.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexArray) and np.array_equal(
            self.values, other.values
        )

    def __hash__(self) -> int:
        return hash((self.values.shape, self.values.tobytes()))

    @ft.cached_property
    def ascending(self) -> np.ndarray:
        """All of them, the least first."""
        flat = self.values.reshape(-1)
        return flat if self.order is None else flat[self.order]

    @ft.cached_property
    def order(self) -> np.ndarray | None:
        """Which of them come first in `ascending`. None: they are so already."""
        flat = self.values.reshape(-1)
        if (flat[1:] >= flat[:-1]).all():
            return None
        return flat.argsort(kind="stable")


# Indices along one axis that are picked, in order.
Picks = range | IndexArray
# An axis of a view: a stored one; one of an index array along a stored axis; a new one,
# of length 1; `EMPTY`.
Axis = int | tuple[int, int] | None


class View(NamedTuple):
    """`picks[i]` are the indices along stored axis `i` (an int drops the axis), and
    `axes` the stored axes in the order of the view's (None: a new axis of length 1;
    `EMPTY`: one of length 0). Of an index array along axis `i`, each axis `d` of its
    own is `(i, d)`.

    Of an array of shape (5, 4, 3), `x[2, None, :, 1:].T` has the picks `2`, `range(4)`
    and `range(1, 3)`, and the axes `(2, 1, None)`.
    """

    picks: tuple[Picks | int, ...]
    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([self._length(axis) for axis in self.axes])

    def _length(self, axis: Axis) -> int:
        """The length of one of the `axes`."""
        if axis is None or axis == EMPTY:
            return 1 if axis is None else 0
        if isinstance(axis, tuple):
            pick = self.picks[axis[0]]
            assert isinstance(pick, IndexArray)
            return pick.values.shape[axis[1]]
        pick = self.picks[axis]
        assert isinstance(pick, range)
        return len(pick)

    @property
    def ranges(self) -> list[Picks]:
        """`picks`, with the axes that they drop."""
        return [range(p, p + 1) if isinstance(p, int) else p for p in self.picks]

    @property
    def _picked_axes(self) -> list[tuple[Axis, int]]:
        """The axes of `stored[picks]`, with their lengths."""
        out: list[tuple[Axis, int]] = []
        for i, pick in enumerate(self.picks):
            if isinstance(pick, range):
                out.append((i, len(pick)))
            elif isinstance(pick, IndexArray):
                out += [((i, d), n) for d, n in enumerate(pick.values.shape)]
        return out

    @property
    def picked_shape(self) -> tuple[int, ...]:
        """The shape of `stored[picks]`."""
        return tuple(length for _, length in self._picked_axes)

    @property
    def order(self) -> list[int | None]:
        """The numbers of the `axes` among those of `stored[picks]`; new ones stay."""
        number = {axis: i for i, (axis, _) in enumerate(self._picked_axes)}
        return [number.get(a, EMPTY if a == EMPTY else None) for a in self.axes]

    def transpose(self, order: Sequence[int] | None = None) -> "View":
        """`array.transpose(order)`. **Raises:** `ValueError` for another number."""
        rank = len(self.axes)
        if order is None:
            return self._replace(axes=self.axes[::-1])
        axes = [axis + rank if axis < 0 else axis for axis in order]
        if sorted(axes) != list(range(rank)):
            raise ValueError(f"{tuple(order)} is no order of {rank} axes")
        return self._replace(axes=tuple(self.axes[axis] for axis in axes))

    def take(self, key: object) -> "View":
        """The view that `array[key]` is. **Raises:** `IndexError` and `TypeError`."""
        keys = [_known(k) for k in (key if isinstance(key, tuple) else (key,))]
        given = sum([k is not None and k is not Ellipsis for k in keys])
        dots = sum([k is Ellipsis for k in keys])
        if given > len(self.axes) or dots > 1:
            raise IndexError(f"too many indices for an array of {len(self.axes)} axes")
        if sum([isinstance(k, np.ndarray) for k in keys]) > 1:
            raise TypeError(
                "lazy arrays take one index array at a time: read the array, or index "
                "again for the second one, which picks along its axis alone"
            )
        rest = len(self.axes) - given
        if dots == 0:
            keys.append(Ellipsis)
        picks, axes, old = list(self.picks), [], iter(self.axes)
        # What is taken along each axis of the index arrays that the view has already.
        inner: dict[tuple[int, int], Picks | int] = {}
        # NumPy puts the axes of an index array first if there are numbers too, and
        # something between them.
        numbers = [i for i, k in enumerate(keys) if _is_advanced(k)]
        is_first = len(numbers) > 0 and numbers[-1] - numbers[0] >= len(numbers)
        for k in keys:
            if k is Ellipsis:
                axes += [next(old) for _ in range(rest)]
                continue
            axis = None if k is None else next(old)
            if k is None:
                axes.append(None)
            elif axis is None or axis == EMPTY:
                new = _picked_by(range(self._length(axis)), k)
                if isinstance(new, IndexArray):
                    raise TypeError(
                        "lazy arrays take index arrays along axes that are stored, and "
                        "not along new ones: read the array to index it so"
                    )
                if isinstance(new, range):
                    axes.append(None if new else EMPTY)
            else:
                if isinstance(axis, tuple):
                    new = inner[axis] = _picked_by(range(self._length(axis)), k)
                else:
                    pick = picks[axis]
                    assert isinstance(pick, range)
                    new = picks[axis] = _picked_by(pick, k)
                is_array = isinstance(k, np.ndarray)
                if not isinstance(new, int):
                    axes.insert(0 if is_array and is_first else len(axes), axis)
        return View(tuple(picks), tuple(axes))._settled(inner)

    def _settled(self, inner: Mapping[tuple[int, int], Picks | int]) -> "View":
        """The view with its index arrays settled: `inner` has the selection along each
        axis `(i, d)` of the array at pick `i`. An array may lose axes, or get more."""
        picks, numbers = list(self.picks), {}
        for i, pick in enumerate(picks):
            if not isinstance(pick, IndexArray):
                continue
            values, at = pick.values, 0
            numbers[i] = [(i, d) for d in range(values.ndim)]  # If it is new.
            for d in range(values.ndim):
                own, before = inner.get((i, d), slice(None)), at
                if isinstance(own, range | slice):
                    own = own if isinstance(own, slice) else _slice(own)
                    values = values[(slice(None),) * at + (own,)]
                    at += 1
                elif isinstance(own, IndexArray):
                    values = values.take(own.values, at)
                    at += own.values.ndim
                else:
                    values = values.take(own, at)
                numbers[i, d] = [(i, new) for new in range(before, at)]
            picks[i] = IndexArray(values) if values.ndim else int(values)
        if not numbers:
            return self
        axes = [numbers.get(axis, [axis]) for axis in self.axes]
        return View(tuple(picks), tuple(it.chain.from_iterable(axes)))

    def slices(self) -> tuple[slice | int, ...]:
        """`picks` as NumPy and TensorStore take them; of axes that index arrays pick
        from, all."""
        whole = slice(None)
        return tuple(
            p if isinstance(p, int) else _slice(p) if isinstance(p, range) else whole
            for p in self.picks
        )

    @property
    def arrays(self) -> dict[int, np.ndarray]:
        """The index arrays, by the axes of what `slices` pick."""
        kept = [pick for pick in self.picks if not isinstance(pick, int)]
        found = enumerate(kept)
        return {at: x.values for at, x in found if isinstance(x, IndexArray)}

    def arrange(self, picked: np.ndarray) -> np.ndarray:
        """The view from the elements of `stored[picks]`, in their order."""
        axes = self._picked_axes
        array = picked.reshape([length for _, length in axes])
        if [axis for axis, _ in axes] == [*self.axes]:
            return array
        order = self.order
        new = [axis is None or axis == EMPTY for axis in order]
        kept = [axis for axis in order if axis is not None and axis != EMPTY]
        array = array.transpose(kept)
        if True not in new:
            return array
        array = array[tuple(None if is_new else slice(None) for is_new in new)]
        return array[tuple(slice(0 if a == EMPTY else None) for a in order)]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The view of a stored array that is in memory."""
        # With `...`, so that one element is an array as well.
        array = array[(*self.slices(), ...)]
        for axis, values in reversed(self.arrays.items()):
            array = array.take(values, axis)
        return self.arrange(array)


def as_range(picks: Sequence[Picks | int], shape: Sequence[int]) -> range | None:
    """The numbers, in row-major order, of the elements that are picked, if they follow
    each other; else None. There must be some."""
    start, count, inner = 0, 1, math.prod(shape)
    open = False  # Whether more than one index of an axis before was picked.
    for pick, length in zip(picks, shape):
        inner //= length
        if isinstance(pick, IndexArray):
            return None
        pick = range(pick, pick + 1) if isinstance(pick, int) else pick
        if (open and len(pick) < length) or (len(pick) > 1 and pick.step != 1):
            return None
        start += pick[0] * inner
        count *= len(pick)
        open = open or len(pick) > 1
    return range(start, start + count)


# A part of an axis.
Places = slice | np.ndarray


class Overlap(NamedTuple):
    """Elements that a pick and a range of indices share, along an axis: their places
    `to` which they go in the array of all that is picked, and `fro` in the range."""

    to: Places
    fro: Places


class RegionOverlap(NamedTuple):
    """An `Overlap` along each axis."""

    to: tuple[Places, ...]
    fro: tuple[Places, ...]


def overlap(pick: Picks, start: int, stop: int) -> Overlap | None:
    """The part of `pick` in `[start, stop)`. None if there is none."""
    if isinstance(pick, IndexArray):
        first, last = pick.ascending.searchsorted([start, stop]).tolist()
        if first >= last:
            return None
        places = slice(first, last) if pick.order is None else pick.order[first:last]
        return Overlap(places, pick.ascending[first:last] - start)
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
    return Overlap(slice(first, last), _slice(inside))


def overlaps(picks: Sequence[Picks], region: Sequence[slice]) -> RegionOverlap | None:
    """The part of a view in a region. None if there is none."""
    found = [overlap(pick, s.start, s.stop) for pick, s in zip(picks, region)]
    some = [x for x in found if x is not None]
    if len(some) < len(found):
        return None
    return RegionOverlap(tuple(x.to for x in some), tuple(x.fro for x in some))


def places(pick: Picks) -> Places:
    """The picked positions, as NumPy takes them along one axis."""
    return _slice(pick) if isinstance(pick, range) else pick.values.reshape(-1)


def numbers(pick: Picks) -> np.ndarray:
    """The indices that are picked."""
    if isinstance(pick, range):
        return np.arange(pick.start, pick.stop, pick.step)
    return pick.values.reshape(-1)


def mesh(places: Sequence[Places], shape: Sequence[int]) -> tuple[Any, ...]:
    """NumPy's index for these parts of the first axes of an array of this shape. Each
    of several index arrays goes along an axis of its own."""
    if sum(isinstance(x, np.ndarray) for x in places) < 2:
        return (*places, ...)
    parts = [
        np.arange(n)[x] if isinstance(x, slice) else x for x, n in zip(places, shape)
    ]
    return (*np.ix_(*parts), ...)


def whole(shape: Sequence[int]) -> View:
    return View(tuple(map(range, shape)), tuple(range(len(shape))))


def _known(key: object) -> Any:
    """A part of a key, with sequences of numbers as arrays."""
    is_array = getattr(key, "ndim", 0) > 0 and hasattr(key, "__array__")
    if not is_array and not isinstance(key, (list, tuple, range)):
        return key
    array = np.asarray(key)
    if array.size == 0 and not is_array:
        array = array.astype(np.intp)
    if array.dtype.kind not in "biu":
        raise _refused(f"an array of {array.dtype}")
    if array.dtype == bool and array.ndim != 1:
        raise TypeError(
            f"lazy arrays take masks of one axis, not of {array.ndim}: read the array "
            "to index it otherwise"
        )
    return array


def _is_advanced(key: object) -> bool:
    return key is not None and key is not Ellipsis and not isinstance(key, slice)


def _picked_by(pick: range, key: Any) -> Picks | int:
    if isinstance(key, slice):
        return pick[key]
    if isinstance(key, np.ndarray):
        return IndexArray(pick.start + pick.step * _indices(key, len(pick)))
    if isinstance(key, (bool, np.bool_)):
        raise _refused(f"a `{type(key).__name__}`")
    try:
        return pick[operator.index(key)]
    except TypeError:
        raise _refused(f"a `{type(key).__name__}`") from None
    except IndexError:
        raise _outside(key, len(pick)) from None


def _indices(key: np.ndarray, length: int) -> np.ndarray:
    """The positions that an index array or a mask picks on an axis of this length."""
    if key.dtype == bool:
        if key.size != length:
            raise IndexError(
                f"a mask of length {key.size} is none of an axis of length {length}"
            )
        return np.flatnonzero(key)
    bad = (key < -length) | (key >= length)
    if bad.any():
        raise _outside(key[bad][0], length)
    key = key.astype(np.int64)
    return np.where(key < 0, key + length, key)


def _refused(what: str) -> TypeError:
    return TypeError(
        "lazy arrays take integers, slices, `...`, None and index arrays, and not "
        f"{what}: read the array to index it otherwise"
    )


def _outside(index: object, length: int) -> IndexError:
    return IndexError(f"index {index} is out of bounds for an axis of length {length}")


def _slice(pick: range) -> slice:
    if len(pick) == 0:
        return slice(0, 0)
    stop = pick[-1] + pick.step
    if pick.step > 0:
        return slice(pick[0], pick[-1] + 1, pick.step)
    return slice(pick[0], stop if stop >= 0 else None, pick.step)
