"""Lazy arrays that are computed from others when they are read: `ec.lazy`.

An array that is computed by blocks has blocks that its shape and dtype fix. So what is
read of it has the same bits, whichever part is asked for, and in how much memory.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from .._format import _grid, _template, _view
from .._format._view import View
from .._runtime import _arguments
from .._storage import _arrays
from .._tree import _host, _identity, _leaf, _restore, _show
from .._tree._target import Target
from . import _lazy, _traced
from ._lazy import LazyArray
from ._source import Source
from ._traced import Traced


# Blocks of the part with the widest elements have about so many bytes.
_BLOCK = 4 * 2**20
# Bytes of blocks that are in memory together, unless the caller says so.
_ROOM = 256 * 2**20

Part = LazyArray | np.ndarray


@runtime_checkable
class Maker(Protocol):
    """The function that an array is computed with."""

    def __call__(
        self, blocks: Sequence[np.ndarray], state: Any, start: tuple[int, ...]
    ) -> np.ndarray:
        """The block at `start` from the blocks of the parts there, which may be read
        only; from whole parts if it is not computed by blocks."""
        ...


@runtime_checkable
class Prepare(Protocol):
    """A pass over all blocks before any is computed."""

    def __call__(self, blocks: Iterator[Sequence[np.ndarray]]) -> Any: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """How an array is computed: all of it but which part of it a lazy array is.

    `parts` have its `shape`, or none, if it is computed by blocks (`blockwise`).
    `state` is what `prepare` has made of them, once it has.
    """

    name: str
    parts: tuple[Part, ...]
    make: Maker
    shape: tuple[int, ...]
    dtype: np.dtype
    weak: bool = False
    blockwise: bool = False
    prepare: Prepare | None = None
    # Results of one function of the same arrays are one array.
    key: Any = None

    def __reduce__(self) -> Any:
        fields = [getattr(self, x.name) for x in dataclasses.fields(self)]
        return Formula, (*fields[:-1], None)

    @property
    def template(self) -> _template.Template:
        return _leaf.array_template("jax", self.shape, self.dtype, None, self.weak)

    @ft.cached_property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a block. Of most checkpoints it is a chunk."""
        widest = max((x.dtype.itemsize for x in self.parts if x.shape), default=1)
        return _grid.choose(self.shape, widest, _BLOCK)

    @ft.cached_property
    def largest(self) -> int:
        """The elements of the largest chunk of the parts; all, without blocks."""
        if not self.blockwise:
            return math.prod(self.shape)
        lazies = [x for x in self.parts if isinstance(x, LazyArray)]
        return max((x._chunk_size for x in lazies), default=1)

    def compute(self, view: View, verify: bool, room: int) -> np.ndarray:
        """The array, or a view of it."""
        state = self._state(room)
        if not self.blockwise:
            whole = self._read((), verify, room)
            zeros = (0,) * len(self.shape)
            return view.apply(self._checked(self.make(whole, state, zeros), self.shape))
        picks = [range(p, p + 1) if isinstance(p, int) else p for p in view.picks]
        out = _arrays.aligned(tuple(map(len, picks)), self.dtype)
        if out.size:
            numbers = _grid.touched(self.shape, self.chunk, view.picks)
            for region, blocks in self._blocks(numbers, verify, room):
                start = tuple(s.start for s in region)
                shape = tuple(s.stop - s.start for s in region)
                block = self._checked(self.make(blocks, state, start), shape)
                overlaps = [
                    _view.overlap(p, s.start, s.stop) for p, s in zip(picks, region)
                ]
                to, fro = zip(*overlaps) if overlaps else ((), ())  # pyright: ignore
                out[(*to, ...)] = block[(*fro, ...)]
        return view.arrange(out.reshape(view.picked))

    def _checked(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if block.shape != shape or block.dtype != self.dtype:
            raise AssertionError(
                f"A block of the leaf `{self.name}` was computed as {block.dtype}"
                f"{block.shape}, and not as {self.dtype}{shape}."
            )
        return block

    @ft.cached_property
    def _known(self) -> list[Any]:
        return []

    def _state(self, room: int) -> Any:
        if self.prepare is None:
            return None
        if not self._known:
            # Threads that come together make the same of it.
            numbers = range(math.prod(_grid.grid(self.shape, self.chunk)))
            every = (blocks for _, blocks in self._blocks(numbers, True, room))
            self._known.append(self.prepare(every))
        return self._known[0]

    def _blocks(
        self, numbers: Any, verify: bool, room: int
    ) -> Iterator[tuple[tuple[slice, ...], list[np.ndarray]]]:
        """The blocks of these numbers: their regions, and those of the parts."""
        itemsize = sum(x.dtype.itemsize for x in self.parts) + 8
        block = math.prod(self.chunk)
        count = max(1, room // (2 * itemsize * block), -(-self.largest // block))
        regions = _grid.lay(self.shape, self.chunk, 1).regions
        for run in _grid.runs(numbers, self.shape, self.chunk, count):
            first, last = regions[run[0]], regions[run[-1]]
            box = tuple(slice(a.start, b.stop) for a, b in zip(first, last))
            parts = self._read(box, verify, room)
            for region in map(regions.__getitem__, run):
                own = _grid.within(region, box)
                yield region, [x[own] if x.shape else x for x in parts]

    def _read(
        self, region: tuple[slice, ...], verify: bool, room: int
    ) -> list[np.ndarray]:
        """The parts in a region, those of one checkpoint read together."""
        cut = [
            part[region] if self.blockwise and part.shape else part
            for part in self.parts
        ]
        lazies = [_lazy.on_host(x) for x in cut if isinstance(x, LazyArray)]
        read = iter(_lazy.fetch(lazies, verify, room))
        return [next(read) if isinstance(x, LazyArray) else x for x in cut]


class Computed(LazyArray):
    """A lazy array that is computed, or a view of one."""

    __slots__ = ("_formula",)

    _formula: Formula

    def __init__(self, formula: Formula, view: View | None, target: Target):
        jax.ShapeDtypeStruct.__init__(
            self,
            target.shape,
            target.dtype,
            sharding=target.sharding,
            weak_type=target.weak,
        )
        object.__setattr__(self, "_formula", formula)
        object.__setattr__(self, "_view", view)
        object.__setattr__(self, "_target", target)

    @property
    def name(self) -> str:
        return self._formula.name

    @property
    def _template(self) -> _template.Template:
        return self._formula.template

    @property
    def _chunk_size(self) -> int:
        return self._formula.largest

    @property
    def store(self) -> Any:
        """**Raises:** `ValueError`."""
        raise ValueError(
            f"`{self.name}` is computed, and no array of TensorStore. Save it first."
        )

    url = store

    @property
    def _stored(self) -> list[LazyArray]:
        """The stored arrays that it is computed of."""
        out: list[LazyArray] = []
        for part in self._formula.parts:
            if isinstance(part, LazyArray):
                out += part._stored if isinstance(part, Computed) else [part]
        return out

    @property
    def _sources(self) -> tuple[Source, ...]:
        found = {id(part._source): part._source for part in self._stored}
        return tuple(found.values())

    @property
    def _is_readable(self) -> bool:
        return True

    def _check_whole(self) -> None:
        pass  # Each of its parts is looked at as it is read.

    def _again(self, view: View | None, target: Target) -> "Computed":
        return Computed(self._formula, view, target)

    def _fetched(self, verify: bool, max_bytes: int | None) -> Any:
        target, formula = self._target, self._formula
        view = self._view or _view.whole(formula.shape)
        regions = _restore.regions(target)
        views = [view] if regions is None else [view.take((*r, ...)) for r in regions]
        room = _ROOM if max_bytes is None else max_bytes
        arrays = [formula.compute(view, verify, room) for view in views]
        # What is computed has its own dtype, and no other one that it is stored as.
        template = formula.template._replace(stored=formula.template.dtype)
        return _restore.from_host(arrays, template, target, True)

    def __reduce__(self) -> Any:
        return Computed, (self._formula, self._view, self._target)


def computed(formula: Formula) -> Computed:
    """The array of a formula, lazily."""
    target = Target("jax", formula.dtype, formula.shape, formula.weak)
    return Computed(formula, None, target)


# ---- Functions of the user.


@_arguments.checked()
def lazy(
    fn: Callable[..., Any], *, elementwise: bool = False
) -> Callable[..., LazyArray]:
    """A function of lazy arrays that gives a lazy array: `fn` of them, once it is read.

    `fn` is traced by JAX, as in `jax.jit`, and nothing is read. What it gives can be
    read, sliced, saved and put into a tree as any other [`LazyArray`][].

    **Arguments:**

    - `fn`: takes arrays, and returns one. It may be any callable, such as a Module.
    - `elementwise`: whether each element of the result is made of those at the same
        place. Then it is computed block by block, and a slice reads and computes the
        blocks that it touches; its bits are those of the whole. This is checked, and
        all arrays have the shape of the result, or none. Otherwise a slice computes the
        whole.

    **Returns:** a function of [`LazyArray`][]s, arrays and numbers. It pickles if `fn`
    does. It is computed on a CPU, with the setting of x64 that it is called under.
    Arrays in memory that it is given, or that `fn` uses, are copied as it is called:
    changing them later changes nothing.

    **Raises:** the function that is returned raises `TypeError` for leaves that are no
    arrays, such as Python's numbers and PRNG keys, for dtypes of 64 bits that JAX would
    narrow, and for an `fn` that cannot be traced; `ValueError` for one that is not
    elementwise. Each names the leaf.

    !!! example

        ```python
        >>> import equinox as eqx, eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://halves", {"w": jnp.arange(4.)})
        >>> tree = ec.open("memory://halves").tree
        >>> half = ec.lazy(lambda w: w / 2, elementwise=True)
        >>> half(tree.w)[1:].read()
        Array([0.5, 1. , 1.5], dtype=float32)

        ```
    """
    return _Lazily(fn, elementwise)


@dataclasses.dataclass(frozen=True, eq=False)
class _Lazily:
    fn: Callable[..., Any]
    elementwise: bool

    def __call__(self, *args: Any) -> LazyArray:
        parts = tuple(_part(x) for x in args if not _is_number(x))
        numbers = tuple(x if _is_number(x) else _HERE for x in args)
        called = _Called(self.fn, numbers)
        names = [x.name for x in parts if isinstance(x, LazyArray)]
        structs = [_struct(x) for x in parts]
        given = ", ".join(map(_shown, parts))
        try:
            traced = _traced.trace(called, structs, self.elementwise)
        except ValueError as e:
            raise ValueError(
                f"The function given to `ec.lazy`, of {given}: {e}."
            ) from e
        except Exception as e:
            why = str(e).strip().split("\n")[0]
            raise TypeError(
                f"The function given to `ec.lazy` cannot be traced for {given}: {why}"
            ) from e
        label = f"{getattr(self.fn, '__name__', 'fn')}({', '.join(names)})"
        formula = Formula(
            label,
            parts,
            _Make(traced),
            traced.shape,
            traced.dtype,
            traced.weak,
            self.elementwise,
            key=_key(called, traced, parts),
        )
        return computed(formula)


def _key(called: "_Called", traced: Traced, parts: Sequence[Part]) -> Any:
    """Of what is computed: None if nothing is known to be the same."""
    try:
        return "lazy", _identity.key(called), traced.settings, *map(identity, parts)
    except _identity.Unknown:
        return None


@dataclasses.dataclass(frozen=True)
class _Here:
    """Stands for an array among the arguments of a function."""


_HERE = _Here()


# JAX keeps what it has traced of a callable by its equality.
@dataclasses.dataclass(frozen=True, eq=False)
class _Called:
    """A function of the arrays among its arguments: the others are known."""

    fn: Callable[..., Any]
    given: tuple[Any, ...]

    def __call__(self, *arrays: Any) -> Any:
        rest = iter(arrays)
        return self.fn(*(next(rest) if isinstance(x, _Here) else x for x in self.given))


@dataclasses.dataclass(frozen=True)
class _Make:
    traced: Traced

    def __call__(
        self, blocks: Sequence[np.ndarray], state: Any, start: tuple[int, ...]
    ) -> np.ndarray:
        return self.traced(blocks)


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def _part(x: Any) -> Part:
    if isinstance(x, LazyArray):
        what = f"The leaf `{x.name}`"
        if x._target.kind not in _template.ARRAY_KINDS:
            raise TypeError(
                f"{what} is a {x._target.kind}, and `ec.lazy` takes arrays: read it, "
                "or leave it out."
            )
        dtype = x.dtype
    elif isinstance(x, (jax.Array, np.ndarray, np.generic)):
        what, dtype = "An array", x.dtype
        if _leaf.is_key(x):
            raise TypeError("A PRNG key is no array that `ec.lazy` takes.")
    else:
        raise TypeError(
            f"`ec.lazy` takes lazy arrays, arrays and numbers, not a "
            f"`{type(x).__name__}`. For all leaves of a tree: `jax.tree.map`."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{what} is {np.dtype(dtype)}, which JAX would narrow to "
            f"{jax.dtypes.canonicalize_dtype(dtype)}. Enable x64 (`jax_enable_x64`), "
            "or cast it first (`.astype`)."
        )
    return x if isinstance(x, LazyArray) else _host.owned(x)


def _shown(x: Part) -> str:
    array = _show.short_array(x.dtype.name, x.shape)
    return f"the leaf `{x.name}` ({array})" if isinstance(x, LazyArray) else array


def _struct(x: Part) -> jax.ShapeDtypeStruct:
    weak = x.weak_type if isinstance(x, LazyArray) else False
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def identity(x: Any) -> Any:
    """What is equal for lazies, and only those, that are one array when they are read:
    the same of one stored array, or of one computation; and for arrays of the same
    bits that these are computed of."""
    if isinstance(x, Computed):
        key = x._formula.key
        own = ("formula", id(x._formula)) if key is None else key
        return (own, x._view, x._target)
    if isinstance(x, LazyArray):
        source, place = x._source, x._record.place
        place = source.index.leaves.aliases.get(place, place)
        own = source.root.url, source.index.save, place
        return (own, x._view, x._target)
    return "array", _identity.key(x)
