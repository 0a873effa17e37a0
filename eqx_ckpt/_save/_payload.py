"""The leaves of a save, and their bytes as they are stored, chunk by chunk."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._format import _digests, _grid
from .._format._functions import StoredFunction
from .._format._grid import Grid
from .._format._leaves import Part
from .._format._template import Template
from .._runtime._progress import Advance
from .._storage import _codecs
from .._tree import _host
from .._tree._host import Payload
from ._assign import Owners


# Chunks that a thread may hold copies of: some on their way from a device, and the one
# that is written as it was, padded and compressed.
_COPIES = _host.PREFETCH + 4


class PlannedLeaf(NamedTuple):
    """A leaf to be written. `value` is the caller's, a copy of it, or a `Payload`;
    `number` is that of its template among those of the save, and `alias` the place of
    the leaf whose bytes it shares. `owners` are the processes that write its chunks;
    without them it is process 0. `part` says what `value` is of it, if not all."""

    name: str
    value: Any
    template: Template
    number: int
    alias: int | None
    owners: Owners | None = None
    part: Part | None = None


class PlannedFunction(NamedTuple):
    """A function to write: its bytes, and what the index says of it, but for the places
    of its leaves, which are here by name."""

    data: bytes
    leaves: list[str]
    stored: StoredFunction


# Leaves of so many bytes are made `Small`.
_SMALL = 1 << 16


@dataclasses.dataclass(slots=True, eq=False)
class Small(Payload):
    """A leaf of one block: its bytes, and their digest."""

    data: np.ndarray
    digest: bytes

    def read(self, regions: Iterable[tuple[slice, ...]]) -> Iterator[np.ndarray]:
        return iter([self.data])

    def digests(self, blocks: slice) -> bytes:
        return self.digest


def copied_together(leaves: Sequence[PlannedLeaf]) -> dict[int, PlannedLeaf]:
    """Copies of small leaves that lie in the memory of the host, by their places: those
    of one template in one step, as each alone takes longer than its bytes."""
    small: dict[int, bool] = {}
    groups: dict[int, dict[int, np.ndarray]] = {}
    for place, (_, value, template, number, _, owners, _) in enumerate(leaves):
        if number not in small:
            small[number] = _is_small(template)
        if small[number] and owners is None:
            view = _host.view(value, template)
            if view is not None:
                groups.setdefault(number, {})[place] = view
    out: dict[int, PlannedLeaf] = {}
    for number, views in groups.items():
        copy = np.concatenate(list(views.values()), axis=None).view(np.uint8)
        for place, data in zip(views, copy.reshape(len(views), -1)):
            leaf = leaves[place]
            value = Small(data, _digests.block_digest(data))
            out[place] = PlannedLeaf(leaf.name, value, leaf.template, number, None)
    return out


def _is_small(t: Template) -> bool:
    """Whether a leaf is one block, of few bytes."""
    return t.chunk == t.shape and t.nbytes <= _SMALL


def prepare(leaf: PlannedLeaf) -> PlannedLeaf:
    """A leaf with most of the work of writing it done, if it is small."""
    if isinstance(leaf.value, Payload) or leaf.owners is not None:
        return leaf
    if not _is_small(leaf.template):
        return leaf
    data = whole(leaf)
    return leaf._replace(value=Small(data, _digests.block_digest(data)))


class Data:
    """The bytes of the leaves of a save, chunk by chunk; it digests all that it gives.

    Chunks may be asked for in any order, and by several threads.
    """

    def __init__(self, leaves: Sequence[PlannedLeaf], advance: Advance):
        self._leaves = leaves
        self._advance = advance
        grids: dict[int, Grid] = {}
        self.grids: list[Grid] = []  # of each leaf
        self._first: list[int] = []
        total = 0
        for leaf in leaves:
            grid = grids.get(leaf.number)
            if grid is None:
                t = leaf.template
                grid = _grid.lay(t.shape, t.chunk, t.itemsize)
                grids[leaf.number] = grid
            self.grids.append(grid)
            self._first.append(total)
            if leaf.alias is None:
                total += grid.blocks[-1]
        self._rows = [b""] * total

    @property
    def copies(self) -> int:
        """The most bytes of copies that a thread which writes chunks holds, where what
        is stored is not how the leaf lies in memory."""
        return _COPIES * max(grid.full for grid in self.grids)

    def digests(self) -> bytes:
        return b"".join(self._rows)

    def rows(self, place: int, numbers: range) -> bytes:
        """The digests of some chunks of a leaf."""
        first, blocks = self._first[place], self.grids[place].blocks
        rows = slice(first + blocks[numbers.start], first + blocks[numbers.stop])
        return b"".join(self._rows[rows])

    def put_rows(self, place: int, numbers: range, digests: Any) -> Any:
        """Takes the digests of some chunks from the front of many."""
        first, blocks = self._first[place], self.grids[place].blocks
        for row in range(first + blocks[numbers.start], first + blocks[numbers.stop]):
            self._rows[row] = bytes(digests[:16])
            digests = digests[16:]
        return digests

    def chunks(self, place: int, numbers: range) -> Iterator[Any]:
        """Some chunks of a leaf as they are stored: padded, and compressed if so."""
        t = self._leaves[place].template
        encode = None if t.codec is None else _codecs.encoder(t)
        if t.chunk != t.shape:
            return self._cut(place, numbers, encode)
        data = self._whole(place)
        return iter([data if encode is None else encode(data)])

    def _cut(
        self, place: int, numbers: range, encode: Callable[[np.ndarray], bytes] | None
    ) -> Iterator[Any]:
        leaf, grid, first = self._leaves[place], self.grids[place], self._first[place]
        t = leaf.template
        regions = grid.regions[numbers.start : numbers.stop]
        parts = _host.to_host_by_regions(leaf.value, t, regions)
        for number, part in zip(numbers, parts):
            data = _digests.as_bytes(part)
            self._digest(first + grid.blocks[number], data)
            if data.nbytes != grid.full:
                data = _padded(part, t.chunk)
            yield data if encode is None else encode(data)
            self._advance(part.nbytes, number + 1 == len(grid.keys))

    def _whole(self, place: int) -> np.ndarray:
        """The bytes of a leaf of one chunk."""
        leaf = self._leaves[place]
        self._advance(self.grids[place].full, 1)
        if isinstance(leaf.value, Small):
            self._rows[self._first[place]] = leaf.value.digest
            return leaf.value.data
        data = whole(leaf)
        self._digest(self._first[place], data)
        return data

    def _digest(self, row: int, data: Any) -> None:
        for digest in _digests.block_digests(data):
            self._rows[row] = digest
            row += 1


def whole(leaf: PlannedLeaf) -> Any:
    """The bytes of a leaf."""
    return _host.to_host(leaf.value, leaf.template).reshape(-1).view(np.uint8)


def _padded(part: np.ndarray, chunk: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(chunk, part.dtype)
    out[tuple(map(slice, part.shape))] = part
    return _digests.as_bytes(out)
