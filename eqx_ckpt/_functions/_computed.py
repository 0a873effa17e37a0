"""Lazy arrays that are computed from others when they are read.

The blocks of an array that is computed by blocks follow from its shape and from the
dtypes of its parts. So what is read of it has the same bits, whichever part of it is
asked for, and in how much memory.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._kernel._format import _grid, _template, _view
from .._kernel._format._leaves import LeafRecord
from .._kernel._format._view import View
from .._kernel._load import _lazy, _read_leaves
from .._kernel._load._lazy import LazyArray
from .._kernel._load._leaf_body import LeafBody, StoredLeaf
from .._kernel._load._reads import LeafRead, ReadResult, StoredRead
from .._kernel._runtime import _threads
from .._kernel._runtime._batching import batched
from .._kernel._storage import _arrays
from .._kernel._tree import _from_host, _leaf
from .._kernel._tree._target import Target


# Blocks of the part with the widest elements have about so many bytes.
_BLOCK = 4 * 2**20
# Arrays whose parts have up to so many bytes are read together.
_SMALL = 1 << 16
# Bytes of blocks that are in memory together, unless the caller says so.
_ROOM = 256 * 2**20

Operand = LazyArray | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """The computation of an array, of which a lazy array is all or a part.

    `make(blocks, state, start)` computes the block that begins at `start`, of the same
    block of each of the `parts`; these have its `shape`, or none. Without `blockwise`
    there is one block, and parts may have any shape. `state` is what `prepare` makes of
    all blocks of the parts, before the first is made.
    """

    name: str
    parts: tuple[Operand, ...]
    make: Callable[[Sequence[np.ndarray], Any, tuple[int, ...]], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype
    weak: bool = False
    blockwise: bool = False
    prepare: Callable[[Iterator[Sequence[np.ndarray]]], Any] | None = None
    # Results of one function of the same arrays are one array.
    key: Any = None

    def __reduce__(self) -> Any:
        fields = [getattr(self, x.name) for x in dataclasses.fields(self)]
        return Formula, (*fields[:-1], None)

    @ft.cached_property
    def template(self) -> _template.Template:
        return _leaf.array_template("jax", self.shape, self.dtype, None, self.weak)

    @ft.cached_property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a block, which is chosen as that of a chunk is."""
        widest = max((_width(x) for x in self.parts if x.shape), default=1)
        return _block(self.shape, widest)

    @ft.cached_property
    def largest_chunk(self) -> int:
        """The elements of the largest chunk of the parts; all, without blocks."""
        if not self.blockwise:
            return math.prod(self.shape)
        lazies = [x for x in self.parts if isinstance(x, LazyArray)]
        return max((_lazy.body_of(x).chunk_size for x in lazies), default=1)

    @ft.cached_property
    def is_at_once(self) -> bool:
        """Whether all of it is computed at once, and not block by block."""
        is_one_block = self.chunk == self.shape and 0 not in self.shape
        return is_one_block or not self.blockwise

    @property
    def is_small(self) -> bool:
        """Whether its parts are read together with those of others."""
        return self.nbytes <= _SMALL and self.is_at_once

    @ft.cached_property
    def nbytes(self) -> int:
        """The bytes of its parts."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.parts)

    @ft.cached_property
    def stored(self) -> list[StoredLeaf]:
        """The leaves of checkpoints that its parts are, or are computed of."""
        # A part that is not all there is refused as it is read.
        return [*_lazy.stored_in(x for x in self.parts if isinstance(x, LazyArray))]

    def compute(self, view: View | None, verify: bool, room: int) -> np.ndarray:
        """The array, or a view of it."""
        if self.is_at_once:
            (parts,) = _read_parts([self.parts], verify, room)
            return self.compute_at_once(view, parts)
        view = view or _view.whole(self.shape)
        state = self._state(room)
        ranges = view.ranges
        out = _arrays.aligned(tuple(map(len, ranges)), self.dtype)
        if out.size:
            numbers = _grid.touched(self.shape, self.chunk, view.picks)
            for region, blocks in self._blocks(numbers, verify, room):
                start = tuple(s.start for s in region)
                shape = tuple(s.stop - s.start for s in region)
                block = self._checked(self.make(blocks, state, start), shape)
                overlap = _view.overlaps(ranges, region)
                assert overlap is not None
                to, fro = overlap
                out[(*to, ...)] = block[(*fro, ...)]
        return view.arrange(out)

    def compute_at_once(
        self, view: View | None, parts: Sequence[np.ndarray]
    ) -> np.ndarray:
        """The array, or a view of it, of all of its parts."""
        state = self.prepare(iter([parts])) if self.prepare else None
        whole = self.make(parts, state, (0,) * len(self.shape))
        whole = self._checked(whole, self.shape)
        return whole if view is None else view.apply(whole)

    def _checked(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if block.shape != shape or block.dtype != self.dtype:
            raise AssertionError(
                f"A block of the leaf `{self.name}` was computed as {block.dtype}"
                f"{block.shape}, and not as {self.dtype}{shape}."
            )
        return block

    def _state(self, room: int) -> Any:
        if (prepare := self.prepare) is None:
            return None
        # Threads that come together read all of it once. The state is `known` then.
        lock, known = vars(self).setdefault("_known", (_threads.Lock(), []))

        def prepare_once() -> None:
            if not known:
                numbers = range(math.prod(_grid.grid(self.shape, self.chunk)))
                # Verified: later reads share the state, whatever they ask for.
                every = (blocks for _, blocks in self._blocks(numbers, True, room))
                known.append(prepare(every))

        lock.run(prepare_once)
        return known[0]

    def _blocks(
        self, numbers: Any, verify: bool, room: int
    ) -> Iterator[tuple[tuple[slice, ...], list[np.ndarray]]]:
        """The blocks of these numbers: their regions, and those of the parts."""
        # So many blocks as half of `room` has, with 8 bytes for an element of the
        # result; but all of a chunk, so that none is read again for each block.
        itemsize = sum(x.dtype.itemsize for x in self.parts) + 8
        block = math.prod(self.chunk)
        count = max(1, room // (2 * itemsize * block), -(-self.largest_chunk // block))
        regions = _grid.lay(self.shape, self.chunk, 1).regions
        for run in _grid.runs(numbers, self.shape, self.chunk, count):
            some = regions[run.start : run.stop]
            box = _grid.box(some)
            cut = [part[box] if part.shape else part for part in self.parts]
            (parts,) = _read_parts([cut], verify, room)
            for region in some:
                own = _grid.within(region, box)
                yield region, [x[own] if x.shape else x for x in parts]


def _width(part: Operand) -> int:
    """The bytes of an element of a part, as it is stored or as it is read."""
    if isinstance(part, LazyArray):
        return max(part.dtype.itemsize, _lazy.body_of(part).template.itemsize)
    return part.dtype.itemsize


@ft.lru_cache(maxsize=4096)
def _block(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return _grid.choose(shape, itemsize, _BLOCK)


def _read_parts(
    parts: Sequence[Sequence[Operand]], verify: bool, room: int
) -> list[list[np.ndarray]]:
    """The parts of some arrays, those of one checkpoint read together."""
    lazies = [x for own in parts for x in own if isinstance(x, LazyArray)]
    read = iter(_lazy.fetch(lazies, verify, room, as_numpy=True))
    return [
        [next(read) if isinstance(x, LazyArray) else x for x in own] for own in parts
    ]


@dataclasses.dataclass(eq=False, slots=True)
class ComputedLeaf(LeafBody):
    """A lazy array that is computed, or a view of one."""

    formula: Formula
    view: View | None
    target: Target

    @property
    def name(self) -> str:
        return self.formula.name

    @property
    def template(self) -> _template.Template:
        return self.formula.template

    @property
    def chunk(self) -> tuple[int, ...]:
        return self.formula.chunk if self.formula.blockwise else ()

    @property
    def chunk_size(self) -> int:
        return self.formula.largest_chunk

    def store(self) -> Any:
        raise ValueError(
            f"`{self.name}` is computed, and no array of TensorStore. Save it first."
        )

    url = store

    @property
    def stored(self) -> Sequence[StoredLeaf]:
        return self.formula.stored

    @property
    def identity(self) -> Any:
        # Equal for one computation.
        key = self.formula.key
        own = ("formula", id(self.formula)) if key is None else key
        return own, self.view, self.target

    def changed(self, view: View | None, target: Target) -> "ComputedLeaf":
        return ComputedLeaf(self.formula, view, target)

    @property
    def likeness(self) -> Any:
        is_whole = self.view is None
        return (id(self.template), id(self.target), self.chunk) if is_whole else None

    def _leaf_read(self) -> LeafRead:
        template = self.template
        if template.stored != template.dtype:
            # What is computed has its own dtype, and no other that it is stored as.
            template = template._replace(stored=template.dtype)
        return LeafRead(LeafRecord(self.name, 0, template), self.view, self.target)

    def _views(self) -> list[View | None]:
        """Views of its formula that are computed, each into memory of its own; None for
        all of it."""
        regions = _from_host.regions(self.target)
        if regions is None:
            return [self.view]
        view = self.view or _view.whole(self.formula.shape)
        return [view.take((*r, ...)) for r in regions]

    @staticmethod
    def read_all(
        wanted: Sequence["ComputedLeaf"], verify: bool, max_bytes: int | None
    ) -> list[Any]:
        """Reads computed arrays, the parts of small ones together."""
        room = _ROOM if max_bytes is None else max_bytes
        reads = [one._leaf_read() for one in wanted]
        leaves = _read_leaves.LeafBuilder(reads, room)
        done = 0
        for group in _groups(wanted, min(room // 4, _BLOCK)):
            formulas = [one.formula for one in group]
            if formulas[0].is_small:
                parts = _read_parts([x.parts for x in formulas], verify, room)
                arrays = [
                    [formula.compute_at_once(view, own) for view in one._views()]
                    for one, formula, own in zip(group, formulas, parts)
                ]
            else:
                views = group[0]._views()
                arrays = [[formulas[0].compute(view, verify, room) for view in views]]
            for i, own in enumerate(arrays, done):
                stored = StoredRead(reads[i].record, leaves=[i])
                leaves.add(stored, ReadResult(own, True))
            done += len(group)
        return leaves.finish("what is computed")


def _groups(wanted: Sequence[ComputedLeaf], most: int) -> Iterator[list[ComputedLeaf]]:
    """Small arrays, whose parts have at most so many bytes together, and others
    alone."""
    alone = most + 1
    size = lambda one: one.formula.nbytes if one.formula.is_small else alone
    return batched(wanted, size, most)


def computed(formula: Formula) -> LazyArray:
    """The array of a formula, lazily."""
    target = Target("jax", formula.dtype, formula.shape, formula.weak)
    return LazyArray(ComputedLeaf(formula, None, target))


def as_read(lazy: LazyArray) -> LazyArray:
    """The array that a lazy one is once it is read: a cast of it rounds what the casts
    before have rounded, as in NumPy."""
    key = "as read", _lazy.body_of(lazy).identity
    dtype = lazy.dtype.newbyteorder("=")
    formula = Formula(
        lazy.name, (lazy,), _first, lazy.shape, dtype, blockwise=True, key=key
    )
    return LazyArray(ComputedLeaf(formula, None, _lazy.body_of(lazy).target))


def _first(
    blocks: Sequence[np.ndarray], state: object, start: tuple[int, ...]
) -> np.ndarray:
    return blocks[0]
