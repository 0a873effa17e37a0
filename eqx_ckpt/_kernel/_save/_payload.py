"""The leaves of a save, and their bytes as they are stored, chunk by chunk."""

import contextlib
import functools as ft
import itertools as it
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format import _digests, _grid, _template
from .._format._index import StoredFunction
from .._format._template import Template
from .._runtime._progress import Advance
from .._storage import _codecs
from .._tree import _host_copy, _leaf
from .._tree._host_copy import Payload, StagedArray
from .._tree._leaf import UnheldError
from ._assign import Owners
from ._tree_spec import TreeSpec


# Chunks that a thread which writes may hold copies of, where what is stored is not how
# a leaf lies in memory: some on their way from a device, and the one that is written as
# it was, padded and compressed.
COPIES = _host_copy.PREFETCH + 4


class PlannedLeaf(NamedTuple):
    """A leaf to be written. `value` is the caller's, a copy of it, the parts of it
    (`Shards` in `_tree/_sharding.py`) or a `Payload`; or None once it is staged, if its
    bytes need not be written.
    `template_number` is that of its template among those of the save, and `alias` the
    index of the leaf whose bytes it shares. `owners` are the processes that write its
    chunks; without them it is process 0. `is_zero_copy`: the memory of the array that
    was described is stored as it is."""

    name: str
    value: Any
    template: Template
    template_number: int
    alias: int | None
    owners: Owners | None = None
    is_zero_copy: bool = False


def leaves_of_columns(*columns: Iterable[Any]) -> list[PlannedLeaf]:
    """Leaves of a column for each field of a `PlannedLeaf`, in the order of these."""
    # Their own constructor takes three times as long.
    make = ft.partial(tuple.__new__, PlannedLeaf)
    return list(map(make, zip(*columns, strict=True)))


class PlannedFunction(NamedTuple):
    """A function that a save writes: its entry in the index, and its bytes."""

    stored: StoredFunction
    data: bytes


# Leaves of up to so many bytes are made `StagedBytes`.
_SMALL = 1 << 16


class StagedBytes(tuple[np.ndarray], Payload):
    """A leaf of one block: its bytes. A tuple, as many are made at once."""

    __slots__ = ()

    @property
    def data(self) -> np.ndarray:
        return self[0]

    def read(self, regions: Iterable[tuple[slice, ...]]) -> Iterator[np.ndarray]:
        return iter([self.data])

    def digests(self, chunks: range) -> bytes:
        return _digests.block_digest(self.data)


def small_by_template(
    leaves: Sequence[PlannedLeaf], leaf_indices: Iterable[int]
) -> Iterator[list[int]]:
    """Batches of the indices whose leaves are small, for work on several at once. A
    batch has one template, and few leaves: more take memory that is new to the
    system."""
    number = [leaf.template_number for leaf in leaves].__getitem__
    for _, group in it.groupby(sorted(leaf_indices, key=number), number):
        alike = list(group)
        template = leaves[alike[0]].template
        most = max(1, _PIECE // max(1, template.nbytes))
        for start in range(0, len(alike), most) if is_small(template) else ():
            yield alike[start : start + most]


def copied_together(leaves: Sequence[PlannedLeaf], but: Set[int]) -> dict[int, Any]:
    """Copies of small leaves, `but` some, by their indices. Copies from a device have
    been started. Leaves of one template are copied in one step, as each alone takes
    longer than its bytes."""
    # Of leaves that have owners, this process may write only some chunks.
    leaf_indices = [
        leaf_index
        for leaf_index, leaf in enumerate(leaves)
        if leaf.owners is None and leaf_index not in but
    ]
    out: dict[int, Any] = {}
    for some in small_by_template(leaves, leaf_indices):
        alike = [leaves[leaf_index] for leaf_index in some]
        copies = _copies(alike)
        if copies is not None:
            out.update(zip(some, map(StagedBytes, zip(copies))))
            continue
        values = [leaf.value for leaf in alike]
        sent = _host_copy.send_together(values, alike[0].template)
        out.update(zip(some, sent or ()))
    return out


def _copies(leaves: Sequence[PlannedLeaf]) -> np.ndarray | None:
    """The bytes of small leaves of one template, a row for each, if they can be copied
    together."""
    values = [leaf.value for leaf in leaves]
    if all(map(operator.attrgetter("is_zero_copy"), leaves)):
        if all(map(is_array_type, {*map(type, values)})):
            # Their memory is what is stored, unless its axes are in another order.
            with contextlib.suppress(TypeError):
                whole = np.frombuffer(b"".join(values), np.uint8)
                return whole.reshape(len(leaves), -1)
    return _host_copy.rows(values, leaves[0].template)


def is_small(t: Template) -> bool:
    """Whether a leaf is one block, of few bytes."""
    return t.chunk == t.shape and t.nbytes <= _SMALL


def small_bytes(leaves: Sequence[PlannedLeaf]) -> list[np.ndarray]:
    """The bytes of small leaves of one template, in one step: alone each takes longer
    than its bytes."""
    values = [leaf.value for leaf in leaves]
    if {*map(type, values)} == {StagedBytes}:
        return [value.data for value in values]
    template = leaves[0].template
    rows = _host_copy.rows(values, template)
    if rows is not None:
        return list(rows)
    sent = _host_copy.send_together(values, template)
    if sent is not None:
        arrived = map(_host_copy.collect, sent)
        leaves = [leaf._replace(value=x) for leaf, x in zip(leaves, arrived)]
    return list(map(whole, leaves))


def prepare(leaf: PlannedLeaf) -> PlannedLeaf:
    """A leaf with most of the work of writing it done, if it is small."""
    is_done = isinstance(leaf.value, Payload) or leaf.owners is not None
    if is_done or not is_small(leaf.template):
        return leaf
    return leaf._replace(value=StagedBytes((whole(leaf),)))


def small_chunk(t: Template) -> int:
    """The bytes of a chunk of a leaf that is stored as it is, if they are few; else 0.
    A chunk that is padded does not count."""
    is_cut_evenly = lambda: not any(map(operator.mod, t.shape, t.chunk))
    is_even = t.chunk == t.shape or (0 not in t.shape and is_cut_evenly())
    return t.full if t.codec is None and t.full <= _SMALL and is_even else 0


class SmallBatch(NamedTuple):
    """Small chunks that lie one after the other in a file. Of each: the index of its
    leaf, its number there (`chunks`), and the number of its digest; where it is, from
    the first on (`slices`); the padding that follows it (`gaps`). `ended`: how many are
    the last of their leaf."""

    leaf_indices: Sequence[int]
    chunks: Sequence[int]
    digest_numbers: list[int]
    slices: list[slice]
    gaps: list[bytes]
    ended: int


def small_batch(
    leaf_indices: Sequence[int],
    numbers: Sequence[int],
    starts: Sequence[int],
    spec: TreeSpec,
) -> SmallBatch:
    """Chunks of these numbers of leaves of these indices, each of which begins in a
    file where this says."""
    firsts, grids = spec.first_digests, spec.grids
    rows = [firsts[p] + grids[p].blocks[n] for p, n in zip(leaf_indices, numbers)]
    ended = sum(n + 1 == len(grids[p].keys) for p, n in zip(leaf_indices, numbers))
    sizes = [grid.full for grid in spec.template_grids]
    stops = [a + sizes[spec.template_of[p]] for a, p in zip(starts, leaf_indices)]
    own = [slice(a - starts[0], b - starts[0]) for a, b in zip(starts, stops)]
    gaps = [bytes(b - a) for a, b in zip(stops, [*starts[1:], stops[-1]])]
    return SmallBatch(leaf_indices, numbers, rows, own, gaps, ended)


@ft.cache
def is_array_type(cls: type) -> bool:
    return issubclass(cls, jax.Array)


class LeafBytes:
    """The bytes of the leaves of a save, chunk by chunk; it digests all that it gives.

    Chunks may be asked for in any order, and by several threads.
    """

    def __init__(self, leaves: Sequence[PlannedLeaf], spec: TreeSpec, advance: Advance):
        self.leaves, self.spec, self.advance = leaves, spec, advance
        self.grids = spec.grids
        self._first = spec.first_digests
        self.digests = bytearray(_digests.SIZE * self._first[-1])

    @ft.cached_property
    def digest_table(self) -> np.ndarray:
        """The digests, a row each, in the same memory."""
        return np.frombuffer(self.digests, np.uint8).reshape(-1, _digests.SIZE)

    def put_digests(self, leaf_index: int, numbers: range, digests: bytes) -> None:
        """Takes the digests of some chunks."""
        row = self._first[leaf_index] + self.grids[leaf_index].blocks[numbers.start]
        start = _digests.SIZE * row
        self.digests[start : start + len(digests)] = digests

    def _digest(self, row: int, data: object) -> None:
        """Takes the digests of a chunk, of which the first has the number `row`."""
        digests, start = _digests.block_digests(data), _digests.SIZE * row
        self.digests[start : start + _digests.SIZE * len(digests)] = b"".join(digests)

    def chunks(self, leaf_index: int, numbers: range) -> Iterator[Iterable[Any]]:
        """Some chunks of a leaf as they are stored: padded, and compressed if so. Each
        comes in pieces, of which all are drawn before the next chunk is."""
        leaf, grid = self.leaves[leaf_index], self.grids[leaf_index]
        t, value, first = leaf.template, leaf.value, self._first[leaf_index]
        encode = None if t.codec is None else _codecs.encoder(t)
        if isinstance(value, StagedBytes):
            parts = iter([value.data])
        elif t.chunk == t.shape:
            parts = iter([_host_copy.to_host(value, t)])
        else:
            regions = grid.regions[numbers.start : numbers.stop]
            parts = _host_copy.to_host_by_regions(value, t, regions)
        for number, part in zip(numbers, parts):
            self.advance(part.nbytes, number + 1 == len(grid.keys))
            yield self._pieces(first + grid.blocks[number], value, t, part, encode)

    def _pieces(
        self,
        row: int,
        value: Any,
        t: Template,
        part: np.ndarray,
        encode: Callable[[np.ndarray], bytes] | None,
    ) -> Iterator[Any]:
        """The pieces of a chunk, whose first digest has the number `row`. Nothing of it
        is held any more once all are drawn."""
        is_live = _may_change(value, part)
        if is_live and encode is None and part.nbytes == t.full:
            yield from self._copied(row, _digests.as_bytes(part))
            return
        part = part.copy() if is_live else part
        data = _digests.as_bytes(part)
        self._digest(row, data)
        if data.nbytes != t.full:
            data = _padded(part, t.chunk)
        yield data if encode is None else encode(data)

    def join_batch(self, batch: SmallBatch) -> bytes:
        """The bytes of small chunks that are not compressed, with their padding, as
        they lie in a file. Those of most leaves are joined without a call for each."""
        leaf_indices, numbers, rows, slices, gaps, ended = batch
        leaves = list(map(self.leaves.__getitem__, leaf_indices))
        pieces: list[Any] = list(map(operator.attrgetter("value"), leaves))
        # Places in the batch whose memory is not what is stored, by template.
        unlike: dict[int, list[int]] = {}
        array_types = {*filter(is_array_type, {*map(type, pieces)})}
        for place, leaf in enumerate(leaves):
            if not (leaf.is_zero_copy and type(leaf.value) in array_types):
                unlike.setdefault(leaf.template_number, []).append(place)
        for places in unlike.values():
            t = leaves[places[0]].template
            if t.chunk == t.shape:
                copies = small_bytes([leaves[place] for place in places])
            else:
                which = [(leaf_indices[place], numbers[place]) for place in places]
                copies = list(it.starmap(self._own_chunk, which))
            for place, copy in zip(places, copies):
                pieces[place] = copy
        try:
            data = b"".join(it.chain.from_iterable(zip(pieces, gaps)))
        except TypeError:  # Some lie in another order of their axes.
            both = zip(pieces, leaves)
            pieces = [whole(leaf) if x is leaf.value else x for x, leaf in both]
            data = b"".join(it.chain.from_iterable(zip(pieces, gaps)))
        parts = map(memoryview(data).__getitem__, slices)
        digests = b"".join(map(_digests.block_digest, parts))
        size = _digests.SIZE
        if rows[-1] - rows[0] + 1 == len(leaves):
            self.digests[size * rows[0] : size * (rows[-1] + 1)] = digests
        else:  # Others lie elsewhere.
            table = np.frombuffer(digests, np.uint8).reshape(-1, size)
            self.digest_table[rows] = table
        self.advance(len(data) - sum(map(len, gaps)), ended)
        return data

    def _own_chunk(self, leaf_index: int, number: int) -> np.ndarray:
        """The bytes of a chunk of a leaf of which other processes have others."""
        leaf = self.leaves[leaf_index]
        t, value = leaf.template, leaf.value
        part = _host_copy.only_part(value, t)
        if part is None:
            region = self.grids[leaf_index].regions[number]
            (part,) = _host_copy.to_host_by_regions(value, t, [region])
        return _digests.as_bytes(part)

    def _copied(self, row: int, data: np.ndarray) -> Iterator[np.ndarray]:
        """The bytes of a chunk, copied: what is digested is then what is written, also
        if a thread of the program writes to the memory meanwhile."""
        for start in range(0, max(1, data.nbytes), _grid.BLOCK):
            block, digest = data[start : start + _grid.BLOCK], _digests.Stream()
            for at in range(0, block.nbytes, _PIECE):
                piece = block[at : at + _PIECE].copy()
                digest.update(piece.data)
                yield piece
            own = slice(_digests.SIZE * row, _digests.SIZE * (row + 1))
            self.digests[own] = digest.digest()
            row += 1


class ArrayBytes(LeafBytes):
    """The bytes of leaves as files of other libraries have them: without padding, and
    without digests."""

    def _pieces(
        self, row: int, value: object, t: Template, part: np.ndarray, encode: object
    ) -> Iterator[Any]:
        yield _digests.as_bytes(part)


# So many bytes are copied at a time, which the caches of a core hold.
_PIECE = 2**18


def _may_change(value: object, part: np.ndarray) -> bool:
    """Whether the program may write to the memory of a part of a leaf: to that of an
    array of NumPy, unless the part is a copy, or all of it was staged."""
    if not isinstance(value, np.ndarray) or isinstance(value, StagedArray):
        return False
    return part is value or not part.flags.owndata


@contextlib.contextmanager
def errors_of_casts(leaves: Sequence[PlannedLeaf], spec: TreeSpec) -> Iterator[None]:
    """Around what casts leaves to the `dtype` of a save.

    **Raises:** one `ValueError` for all leaves with numbers that it does not hold.
    """
    try:
        yield
    except UnheldError:
        lines = [
            f"  {leaf.name}: {_leaf.told(errors, math.prod(leaf.template.shape))}"
            for leaf, grid in zip(leaves, spec.grids)
            if (errors := list(_unheld(leaf, grid.regions)))
        ]
        raise ValueError(
            "Values of the tree do not survive the cast to `dtype`; nothing was saved:"
            "\n" + "\n".join(lines) + "\nPass a `dtype` that holds them, or cast these "
            "leaves yourself before: `astype` of JAX takes any value."
        ) from None


def _unheld(
    leaf: PlannedLeaf, regions: Iterable[tuple[slice, ...]]
) -> Iterator[UnheldError]:
    """The errors of the regions that this process has of a leaf."""
    # Without one it is a number of Python's, or need not be written.
    dtype: Any = getattr(leaf.value, "dtype", None)
    is_cast = dtype is not None and _template.is_floating(dtype)
    for region in regions if is_cast and leaf.alias is None else ():
        try:
            list(_host_copy.to_host_by_regions(leaf.value, leaf.template, [region]))
        except UnheldError as e:
            yield e
        except ValueError:
            pass  # Another process has this one.


def whole(leaf: PlannedLeaf) -> Any:
    """The bytes of a leaf."""
    return _host_copy.to_host(leaf.value, leaf.template).reshape(-1).view(np.uint8)


def _padded(part: np.ndarray, chunk: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(chunk, part.dtype)
    out[tuple(map(slice, part.shape))] = part
    return _digests.as_bytes(out)
