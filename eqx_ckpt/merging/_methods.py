"""The maths of `merging`: pure functions of blocks of a leaf, the same of each tree.

A method computes an element from the elements of its sources at the same place, from
that place, and from a state. It made the state when it looked at the whole leaf. So
what it gives does not depend on how the leaf is read.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._kernel._format import _names
from .._kernel._tree import _compare, _leaf


Blocks = Sequence[np.ndarray]


class Sides(NamedTuple):
    """Blocks of the trees, and of the base if there is one."""

    trees: Blocks
    base: Any


@dataclasses.dataclass(frozen=True)
class MergedLeaf:
    """A leaf that is merged, as `merging.Method` describes it to its functions."""

    name: str
    shape: tuple[int, ...]
    count: int
    options: Mapping[str, Any]
    start: tuple[int, ...]
    state: Any = None

    def each(self, option: str) -> tuple[Any, ...]:
        """An option for each of the trees."""
        value = self.options[option]
        return value if isinstance(value, tuple) else (value,) * self.count


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to merge leaves: a function of blocks of NumPy arrays, and what it needs.

    Floating leaves go through it block by block as they are read, in float32, or in
    float64 if the leaf is. The result gets the dtype of the leaf. All else that
    [`merge`][eqx_ckpt.merge] does is the same for every method.

    **Arguments:**

    - `name`: for errors.
    - `combine`: `combine(trees, base, leaf)` gives a block of the merged leaf. `trees`
        has the block of each tree, and `base` that of the base, or None. They are of
        one shape, of at least one axis, and not to be written to. `leaf` has the `name`
        and the `shape` of the whole leaf, its `options`, and the `count` of trees. It
        also has the `state`, and `start`, the index at which the block begins.
    - `look`: `look(blocks, leaf)` gives that `state`. It goes once over all blocks of
        the leaf, in row-major order, as pairs of `trees` and `base`; a leaf is read
        twice then.
    - `options`: numbers by their names. For one each leaf may have its own: a mapping
        of patterns to numbers, of which the first that matches counts; or a list that
        is spread over the layers; or a tuple with one of all these for each tree. What
        is none of these is passed as it is. `leaf.options` has the numbers for the
        leaf, and `leaf.each(option)` a tuple of them, one for each tree.
    - `base`: whether it takes a base.
    - `least`, `most`: how many trees it merges; with None any number.
    - `whole`: whether a block has to be a whole leaf. Then so much is in memory.

    A pattern is the name of a leaf or of a node above it; `*` stands for any text. A
    layer is the first number in a name in which others differ, as in `blocks.3.weight`.
    The first number of a list is for the first layer and for what comes before it. The
    last is for the last layer and for what comes after; others lie evenly between them.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, numpy as np
        >>> def furthest(trees, base, leaf):
        ...     tasks = np.stack(trees) - base
        ...     index = np.abs(tasks).argmax(0)[None]
        ...     found = np.take_along_axis(tasks, index, 0)[0]
        ...     return base + leaf.options["scale"] * found
        >>> options = {"scale": {"w": 1, "*": 0.5}}
        >>> method = ec.merging.Method("furthest", furthest, options=options, base=True)
        >>> trees = [{"w": jnp.array([1., -3.]), "b": jnp.array([x])} for x in (4., 8.)]
        >>> ec.materialise(ec.merge(trees, method, base=trees[0]))
        {'b': Array([6.], dtype=float32), 'w': Array([ 1., -3.], dtype=float32)}

        ```
    """

    name: str
    combine: Callable[[Blocks, Any, MergedLeaf], np.ndarray]
    look: Callable[[Iterable[Sides], MergedLeaf], Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    base: bool = False
    least: int = 1
    most: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if not callable(self.combine) or not callable(self.look or self.combine):
            raise TypeError(f"`{self.name}`: `combine` and `look` must be functions.")

    def leaves(
        self, shapes: Mapping[str, tuple[int, ...]], count: int
    ) -> dict[str, MergedLeaf]:
        """The leaves of these names, with their options, of so many trees.

        **Raises:** `ValueError` for options that do not fit them.
        """
        if count < self.least or count > (self.most or count):
            more = " or more" if self.most is None else f" to {self.most}"
            wants = f"{self.least}{more if self.least != self.most else ''}"
            raise ValueError(f"`{self.name}` merges {wants} trees, not {count}.")
        positions = ft.cache(lambda: dict(zip(shapes, _along_layers(list(shapes)))))
        unused: set[tuple[str, int, str]] = set()
        for option, value in self.options.items():
            unused |= {(option, *x) for x in _patterns(option, value, count)}

        def number(option: str, value: object, name: str, tree: int = -1) -> Any:
            if isinstance(value, tuple):
                _check_each(option, value, count, tree)
                return tuple(number(option, x, name, i) for i, x in enumerate(value))
            if isinstance(value, list):
                at = positions()[name] * (len(value) - 1)
                return float(np.interp(at, range(len(value)), value))
            if not isinstance(value, Mapping):
                return value
            for pattern, x in value.items():
                if _compare.selects(pattern, name):
                    unused.discard((option, tree, pattern))
                    return number(option, x, name, tree)
            raise ValueError(
                f"`{option}` has no pattern of the leaf `{name}`. End it with "
                '`"*": ...`, for the rest.'
            )

        out = {
            name: MergedLeaf(
                name,
                shape or (1,),
                count,
                {key: number(key, x, name) for key, x in self.options.items()},
                (0,) * max(1, len(shape)),
            )
            for name, shape in shapes.items()
        }
        for option, _, pattern in sorted(unused):
            if pattern != "*":
                raise ValueError(f"`{option}` has {pattern!r}, which names no leaf.")
        return out


def _patterns(
    option: str, value: object, count: int, tree: int = -1
) -> Iterator[tuple[int, str]]:
    """The patterns of an option, each with the number of the tree that it is for."""
    if isinstance(value, tuple):
        _check_each(option, value, count, tree)
        for i, x in enumerate(value):
            yield from _patterns(option, x, count, i)
    elif isinstance(value, Mapping):
        yield from ((tree, pattern) for pattern in value)


def _check_each(option: str, value: tuple[Any, ...], count: int, tree: int) -> None:
    if tree >= 0:
        raise ValueError(f"`{option}` of tree {tree} has one more for each tree.")
    if len(value) != count:
        raise ValueError(f"There are {len(value)} {option} for {count} trees.")


def _along_layers(names: Sequence[str]) -> Iterator[float]:
    """Where each leaf is on the way from the first layer (0) to the last (1)."""
    layers: dict[str, set[int]] = {}
    numbered: list[list[tuple[str, int]]] = []
    for name in names:
        parts = name.split(".")
        numbers = enumerate(map(_names.number_of, parts))
        numbered.append([(".".join(parts[:i]), x) for i, x in numbers if x is not None])
        for above, number in numbered[-1]:
            layers.setdefault(above, set()).add(number)
    places = {
        above: dict(zip(sorted(some), np.linspace(0, 1, len(some))))
        for above, some in layers.items()
        if len(some) > 1
    }
    position = 0.0
    for own in numbered:
        some = [places[above][number] for above, number in own if above in places]
        position = some[0] if some else position
        yield position


def look(
    method: Method, leaf: MergedLeaf, dtype: np.dtype, blocks: Iterable[Blocks]
) -> Any:
    """The state of a method for a leaf of this dtype. The blocks have to be cut in one
    way whenever it is computed, as it may have sums of them."""
    assert method.look is not None
    with np.errstate(all="ignore"):
        return method.look((_sides(method, dtype, x) for x in blocks), leaf)


def combine(
    method: Method,
    leaf: MergedLeaf,
    dtype: np.dtype,
    blocks: Blocks,
    state: object,
    start: tuple[int, ...],
) -> np.ndarray:
    """A block of the leaf that a method merges, of blocks of its own dtype: that of the
    base is the first, if there is one."""
    shape = blocks[0].shape
    if state is not None or any(start):
        leaf = dataclasses.replace(leaf, start=start or (0,), state=state)
    with np.errstate(all="ignore"):
        out = np.asarray(method.combine(*_sides(method, dtype, blocks), leaf))
    if out.shape != (shape or (1,)):
        raise ValueError(
            f"Leaf `{leaf.name}`: `{method.name}` gave {list(out.shape)} for a block "
            f"of {list(shape or (1,))}."
        )
    if out.dtype.kind == "c":  # No leaf that is merged is complex.
        raise ValueError(
            f"Leaf `{leaf.name}`: `{method.name}` gave complex numbers for {dtype}."
        )
    return _cast(out, dtype).reshape(shape)


_FLOAT32 = np.dtype(np.float32)


def _sides(method: Method, dtype: np.dtype, blocks: Blocks) -> Sides:
    wide = dtype if dtype == np.float64 else _FLOAT32
    # What NumPy computes of arrays without axes are no arrays.
    every = [_cast(x if x.ndim else x.reshape(1), wide) for x in blocks]
    return Sides(every[1:], every[0]) if method.base else Sides(every, None)


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x if x.dtype == dtype else _leaf.astype(x, dtype)


def _sum(weights: Iterable[float], blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of blocks times weights, in their order."""
    out: np.ndarray | None = None
    for weight, block in zip(weights, blocks, strict=True):
        if out is None:
            out = block * block.dtype.type(weight)
        else:
            out += block if weight == 1 else block * block.dtype.type(weight)
    assert out is not None
    return out


# ---- Averages.


def average(trees: Blocks, base: None, leaf: MergedLeaf) -> np.ndarray:
    weights, whole = _scaled(leaf.each("weights"))
    if not whole:
        raise ValueError(f"Leaf `{leaf.name}`: the sum of its weights is 0.")
    out = _sum(weights, trees)
    out /= out.dtype.type(whole)
    return out


@ft.lru_cache
def _scaled(weights: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    """Weights times a power of two, and their sum. It changes no digit, and keeps them
    in the range of the dtype."""
    power = 1 - math.frexp(max(map(abs, weights)))[1]
    weights = tuple(math.ldexp(weight, power) for weight in weights)
    return weights, math.fsum(weights)


def ema(trees: Blocks, base: None, leaf: MergedLeaf) -> np.ndarray:
    decay, number = leaf.options["decay"], trees[0].dtype.type
    out = trees[0].copy()
    for block in trees[1:]:
        out *= number(decay)
        out += block * number(1 - decay)
    return out


# Elements that are multiplied and added in float32, before their sum is in float64.
_RUN = 8192


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """The product of two vectors."""
    cut = a.size // _RUN * _RUN
    out = float(np.vecdot(a[cut:], b[cut:]))
    if cut:
        runs = np.vecdot(a[:cut].reshape(-1, _RUN), b[:cut].reshape(-1, _RUN))
        out += float(np.sum(runs, dtype=float))
    if 1e-30 < abs(out) < 1e30:
        return out
    return float(np.sum(np.multiply(a, b, dtype=float)))


def _products(vectors: Iterable[Blocks], count: int) -> np.ndarray:
    """The products of all pairs of so many vectors, which come in blocks."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]
    sums = [0.0] * len(pairs)
    for blocks in vectors:
        flat = [x.reshape(-1) for x in blocks]
        sums = [s + _dot(flat[i], flat[j]) for s, (i, j) in zip(sums, pairs)]
    out = np.zeros((count, count))
    for (i, j), s in zip(pairs, sums):
        out[i, j] = out[j, i] = s
    return out


# Of the angle between two leaves: beyond it they are on one line.
_LINE = 0.9995


def look_at_angle(blocks: Iterable[Sides], leaf: MergedLeaf) -> tuple[float, float]:
    """Factors that the two are multiplied by in `slerp`."""
    products, t = _products((trees for trees, _ in blocks), 2), leaf.options["t"]
    lengths = math.sqrt(products[0, 0]) * math.sqrt(products[1, 1])
    cosine = products[0, 1] / lengths if lengths else 1.0
    if not abs(cosine) <= _LINE:
        return 1 - t, t
    angle = math.acos(cosine)
    sine = math.sin(angle)
    return math.sin((1 - t) * angle) / sine, math.sin(t * angle) / sine


def by_state(trees: Blocks, base: np.ndarray | None, leaf: MergedLeaf) -> np.ndarray:
    """The sum of all, times the factors that are the state."""
    return _sum(leaf.state, trees if base is None else [base, *trees])


def look_at_stock(blocks: Iterable[Sides], leaf: MergedLeaf) -> list[float]:
    """Factors of the base and the trees in `model_stock`."""
    tasks = ([tree - base for tree in trees] for trees, base in blocks)
    count, products = leaf.count, _products(tasks, leaf.count)
    lengths = np.sqrt(np.diag(products))
    pairs = np.tril_indices(count, -1)
    within = np.outer(lengths, lengths)[pairs]
    cosines = np.divide(
        products[pairs], within, np.zeros_like(within), where=within != 0
    )
    cosine = float(np.mean(np.clip(cosines, -1, 1)))
    whole = 1 + (count - 1) * cosine
    ratio = count * cosine / whole if abs(whole) > 1e-6 else 0.0
    return [1 - ratio, *[ratio / count] * count]


# ---- Sums of task vectors: of what each tree differs from the base.


def _added(base: np.ndarray, tasks: Iterable[np.ndarray], leaf: MergedLeaf) -> Any:
    """The base, and the weighted sum of the task vectors."""
    weights = leaf.each("weights")
    divisors = {"count": leaf.count, "weights": math.fsum(weights)}
    divisor = divisors.get(leaf.options["normalize"]) or 1
    out = _sum(weights, tasks)
    if divisor != 1:
        out /= out.dtype.type(divisor)
    if leaf.options["lambda_"] != 1:
        out *= out.dtype.type(leaf.options["lambda_"])
    out += base
    return out


def _elected(base: np.ndarray, tasks: Iterable[np.ndarray], leaf: MergedLeaf) -> Any:
    """The base, and the sum of those elements that have the sign of the sum of all."""
    number, weights = base.dtype.type, leaf.each("weights")
    by = leaf.options["normalize"]
    parts = [
        x if w == 1 else x * number(w) for w, x in zip(weights, tasks, strict=True)
    ]
    mass = ft.reduce(np.add, parts)
    sign = np.sign(mass)
    total, divisor = np.zeros_like(base), np.zeros_like(base)
    for part, weight in zip(parts, weights):
        agrees = part * sign > 0
        total += np.where(agrees, part, number(0))
        if by is not None:
            divisor += agrees if by == "count" else agrees * number(weight)
    if by is not None:
        divisor[divisor == 0] = 1
        total /= divisor
    total *= number(leaf.options["lambda_"])
    total += base
    np.copyto(total, mass, where=np.isnan(mass))
    return total


def task_arithmetic(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> np.ndarray:
    return _added(base, (tree - base for tree in trees), leaf)


# Magnitudes in leaves of many blocks are counted by the first bits of them in float32:
# all of the exponent, and 12 of the mantissa.
_BITS = 20
_REST = 31 - _BITS
_INFINITE = np.uint32(0x7F800000)


def magnitudes(x: np.ndarray) -> np.ndarray:
    """The absolute values in float32."""
    return np.abs(x).astype(np.float32, copy=False)


class KeptMagnitudes(NamedTuple):
    """The least magnitude of a tree that is kept, and the least one above those that
    are: NaN, if there is none."""

    least: np.float32
    above: np.float32


def look_at_magnitudes(
    blocks: Iterable[Sides], leaf: MergedLeaf
) -> list[KeptMagnitudes]:
    size = math.prod(leaf.shape)
    tops = [int(x * size) for x in leaf.each("gamma")]
    kept = [max(1, round(x * size)) for x in leaf.each("density")]
    counts: list[np.ndarray] = []
    for trees, base in blocks:
        for number, tree in enumerate(trees):
            bits = magnitudes(tree - base).reshape(-1).view(np.uint32)
            if bits.size == size:
                counts.append(bits)
                continue
            found = np.bincount(bits >> _REST, minlength=2**_BITS)
            if number == len(counts):
                counts.append(found)
            else:
                counts[number] += found
    return [
        KeptMagnitudes(
            _least(x, size, top + some),
            _least(x, size, top) if top else np.float32("nan"),
        )
        for x, top, some in zip(counts, tops, kept)
    ]


def _least(counts: np.ndarray, size: int, wanted: int) -> np.float32:
    """The least of so many of the largest magnitudes, of their bits or their counts."""
    wanted = min(wanted, size)
    if counts.dtype == np.uint32:
        bits = np.partition(counts, size - wanted)[size - wanted]
    else:
        above = np.cumsum(counts[::-1])
        number = len(counts) - 1 - int(np.searchsorted(above, wanted))
        bits = np.uint32(max(0, number) << _REST)
    return min(bits, _INFINITE).view(np.float32)


def _trimmed(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> Iterator[np.ndarray]:
    for tree, (least, above) in zip(trees, leaf.state):
        task = tree - base
        sizes = magnitudes(task)
        is_trimmed = sizes < least  # A NaN is not.
        if not np.isnan(above):
            is_trimmed |= sizes >= above
        task[is_trimmed] = 0
        yield task


def ties(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> np.ndarray:
    return _elected(base, _trimmed(trees, base, leaf), leaf)


def breadcrumbs(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> np.ndarray:
    return _added(base, _trimmed(trees, base, leaf), leaf)


def _dropped(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> Iterator[np.ndarray]:
    """Task vectors of which elements are dropped at random: all with the chance that
    `density` is, or with `epsilon` the larger ones of a row with a smaller chance."""
    positions = _positions(leaf.start, base.shape, leaf.shape)
    key, rescale = leaf.options["key"], leaf.options["rescale"]
    widths = leaf.each("epsilon")
    for number, tree in enumerate(trees):
        task, chance = tree - base, leaf.each("density")[number]
        if widths[number]:
            chance = chance + widths[number] * (_ranks(task) - 0.5)
        is_dropped = uniform(key, leaf.name, number, positions) >= chance
        if rescale:
            task /= np.asarray(chance, task.dtype)
        task[is_dropped] = 0
        yield task


def _ranks(task: np.ndarray) -> np.ndarray:
    """The rank of each magnitude in its row: 0 of the least, and 1 of the largest."""
    rows = np.abs(task).reshape(len(task) if task.ndim > 1 else 1, -1)
    order, count = np.argsort(rows, axis=1, kind="stable"), rows.shape[1]
    out = np.empty(rows.shape)
    np.put_along_axis(out, order, np.linspace(0, 1, count)[None], axis=1)
    return out.reshape(task.shape)


def dare(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> np.ndarray:
    return _added(base, _dropped(trees, base, leaf), leaf)


def dare_ties(trees: Blocks, base: np.ndarray, leaf: MergedLeaf) -> np.ndarray:
    return _elected(base, _dropped(trees, base, leaf), leaf)


def _positions(
    start: Sequence[int], shape: Sequence[int], whole: Sequence[int]
) -> np.ndarray:
    """The number of each element of a region in the whole array, in row-major order."""
    out = np.zeros((), np.uint64)
    for first, count, length in zip(start, shape, whole):
        along = np.arange(first, first + count, dtype=np.uint64)
        out = (out * np.uint64(length))[..., None] + along
    return out


def uniform(key: bytes, name: str, number: int, positions: np.ndarray) -> np.ndarray:
    """A random number in [0, 1) for each position in a leaf of a tree: SplitMix64, of
    which the seed is a hash of the key, the leaf's name and the tree's number."""
    seed = xxhash.xxh3_64_intdigest(b"%b %d %b" % (key, number, name.encode()))
    x = positions * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) * 2.0**-53
