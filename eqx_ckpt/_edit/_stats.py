"""`stats`: what the numbers of each leaf are like."""

import itertools as it
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _text
from .._kernel._format._template import Template
from .._kernel._load import _lazy, _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._load._load_options import LoadOptions
from .._kernel._runtime import _arguments, _gc
from .._kernel._tree import _folding
from .._show import _tables, _terminal
from .._show._tables import Column
from . import _elements, _numbers
from ._elements import Leaf
from ._numbers import Sums


class LeafStats(NamedTuple):
    """Statistics of the numbers of one leaf: see [`stats`][]."""

    array: str
    size: int
    min: int | float | None = None
    max: int | float | None = None
    mean: float | complex | None = None
    std: float | None = None
    norm: float | None = None
    nan: int | None = None
    inf: int | None = None
    zero: int | None = None


class Stats(dict[str, LeafStats]):
    """Result of [`stats`][]: a mapping from names, which prints as a table."""

    def __init__(self, shown: str, rows: Mapping[str, LeafStats]):
        super().__init__(rows)
        self._shown = shown

    def __repr__(self) -> str:
        count = len(self)
        head = f"Stats of {self._shown}: {count} {'leaf' if count == 1 else 'leaves'}"
        columns = [Column(""), Column(""), *(Column(x, True) for x in NUMBERS)]
        rows = [
            [_text.bounded(name, 100), row.array, *map(short, row[2:])]
            for name, row in it.islice(self.items(), _LINES)
        ]
        table = _terminal.table(_tables.table(columns, rows))
        lines = [_text.escape(head), *map(_terminal.plain, table)]
        if count > _LINES:
            lines.append(f"  ... and {count - _LINES} more")
        return "\n".join(lines)


NUMBERS = LeafStats._fields[2:]
_LINES = 200


def short(x: object) -> str:
    if x is None:
        return ""
    if isinstance(x, int) and abs(x) < 10**12:
        return str(x)
    is_too_large = isinstance(x, int) and abs(x) >= 10**300  # To be a float.
    return "..." if is_too_large else f"{x:.4g}"


@_arguments.checked()
@_open.retried_if_replaced(0, "tree")
@_gc.paused()
def stats(
    tree: PyTree | str | os.PathLike[str] | Checkpoint,
    *,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Stats:
    """Measures the numbers of each leaf: a look for NaNs, dead or huge weights.

    Leaves are read some at a time. No more memory is taken than
    `max_bytes`, but at least a chunk.

    **Arguments:**

    - `tree`: a path, an open [`Checkpoint`][], a node of its tree, or any tree, of lazy
        leaves and of values.
    - `verify`: whether to check the digests of what is read.
    - `max_bytes`: how much memory to use, 256 MiB by default.
    - `progress`: whether to show a progress bar. This needs `eqx_ckpt[progress]`.

    **Returns:** a mapping from the name of each leaf to a record of

    - `array`, what it is, such as `f32[64,64]`, and `size`, how many elements it has;
    - `nan`, `inf` and `zero`, how many of these are NaN, infinite and zero (of either
        sign). A complex number with a NaN in one of its parts counts as a NaN, and else
        as infinite if it has an infinity;
    - `min` and `max` of the elements that are finite, exactly. Of complex numbers those
        of the absolute values;
    - `mean` and `std`, the mean of the finite elements, and the root of the mean of the
        squares of what they differ from it; `norm`, the root of the sum of the squares
        of the finite elements. They are computed in float64, whatever the dtype.

    `min`, `max`, `mean` and `std` are NaN where no element is finite. A bool is 0 or 1,
    and a scalar of Python an array of one element. Of PRNG keys, str and bytes all are
    None.

    **Raises:** [`DamagedError`][] that lists every leaf whose bytes are damaged;
    `ValueError` or `TypeError` that names a leaf without a value.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://stats", {"w": jnp.array([3., 0., -4.])})
        >>> ec.stats("memory://stats")["w"].norm
        5.0
        >>> ec.stats({"w": jnp.array([1, jnp.nan, jnp.inf])})
        Stats of a tree: 1 leaf
                     min  max  mean  std  norm  nan  inf  zero
          w  f32[3]    1    1     1    0     1    1    1     0

        ```
    """
    side = _elements.look(tree)
    rows: dict[str, LeafStats] = {}
    todo: list[Leaf] = []
    # Of one array once.
    numbers: dict[Any, int] = {}
    places: dict[str, int] = {}
    for leaf in side.leaves.values():
        t = leaf.template
        size = math.prod(t.logical_shape)
        if isinstance(leaf.value, LazyArray) and _lazy.body_of(leaf.value).unreadable:
            rows[leaf.name] = LeafStats(_lazy.shown(leaf.value), 0)
            continue
        rows[leaf.name] = LeafStats(_folding.show(t), size)
        if _numbers.is_number(t) or t.dtype == "int":
            number = numbers.setdefault((leaf.identity, t), len(todo))
            places[leaf.name] = number
            if number == len(todo):
                todo.append(leaf)
    found = [_Found(leaf.template) for leaf in todo]
    leaves = [[leaf] for leaf in todo]
    reading = LoadOptions(verify=verify, max_bytes=max_bytes, progress=progress)
    waiting: list[tuple[_Found, np.ndarray]] = []
    size = 0
    for number, (array,) in _elements.stream("stats", leaves, reading):
        # A small one may be a view of all that was read with it.
        is_small = array.size < _numbers.MANY
        waiting.append((found[number], array.copy() if is_small else array))
        size += array.size
        if size >= _numbers.MANY:
            _measure(waiting)
            waiting, size = [], 0
    _measure(waiting)
    for name, number in places.items():
        rows[name] = found[number].row(rows[name])
    return Stats(side.shown, rows)


def _measure(arrays: Sequence[tuple["_Found", np.ndarray]]) -> None:
    """Adds arrays to what was found of their leaves: those that are alike at once."""
    alike: dict[Any, list[tuple[_Found, np.ndarray]]] = {}
    for found, stored in arrays:
        if found.template.dtype == "int":
            found.add_integer(stored)
        else:
            alike.setdefault((found.template, stored.size), []).append((found, stored))
    for (t, size), group in alike.items():
        founds = [found for found, _ in group]
        parts = [np.ascontiguousarray(stored).reshape(1, -1) for _, stored in group]
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        for start in range(0, size, _numbers.MANY):
            x = _numbers.numbers(rows[:, start : start + _numbers.MANY], t)
            if np.isfinite(x).all():
                _add(founds, x)
            else:  # What each leaf lacks differs.
                for found, row in zip(founds, x, strict=True):
                    _add([found], found.finite(row)[None])


def _add(founds: Sequence["_Found"], x: np.ndarray) -> None:
    """Adds a row of finite numbers to each."""
    sums = _numbers.sums_of_each(_numbers.as_floats(x))
    zeros = np.count_nonzero(x == 0, axis=1).tolist()
    is_complex = x.dtype.kind == "c"
    ends: Sequence[Any] = [()] * len(x)
    if x.size:
        with np.errstate(over="ignore"):
            sizes = np.abs(x) if is_complex else x
        ends = np.stack([sizes.min(axis=1), sizes.max(axis=1)], axis=1).tolist()
    for found, own, zero, two in zip(founds, sums, zeros, ends, strict=True):
        found.add(is_complex, own, zero, two)


class _Found:
    """Statistics of a leaf so far."""

    def __init__(self, template: Template):
        self.template = template
        self._sums = _numbers.NO_SUMS
        self._ends: list[Any] = []  # The least and the greatest of each part.
        self._nan = self._inf = self._zero = 0
        self._is_complex = False

    def add_integer(self, stored: np.ndarray) -> None:
        """Adds an integer of Python, of any size."""
        value = int.from_bytes(stored.tobytes(), "little", signed=True)
        self._ends = [value]
        try:
            self._sums = _numbers.sums(np.array([[float(value)]]))
        except OverflowError:
            about = math.inf if value > 0 else -math.inf
            self._sums = Sums(0, 1, np.array([about]), 0.0)

    def finite(self, x: np.ndarray) -> np.ndarray:
        """Picks the finite elements, and counts the others."""
        good = np.isfinite(x)
        nans = int(np.count_nonzero(np.isnan(x)))
        self._nan += nans
        self._inf += x.size - int(np.count_nonzero(good)) - nans
        return x[good]

    def add(self, is_complex: bool, sums: Sums, zero: int, ends: Sequence[Any]) -> None:
        self._is_complex = is_complex
        self._sums = _numbers.join(self._sums, sums)
        self._zero += zero
        self._ends += ends

    def row(self, row: LeafStats) -> LeafStats:
        sums = self._sums
        means = sums.means if sums.count else [math.nan]
        return row._replace(
            min=min(self._ends, default=math.nan),
            max=max(self._ends, default=math.nan),
            mean=complex(*means) if self._is_complex else means[0],
            std=sums.deviation,
            norm=sums.norm,
            nan=self._nan,
            inf=self._inf,
            zero=self._zero,
        )
