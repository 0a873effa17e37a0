"""Reads leaves in runs of chunks: what is compressed, is cut along several axes, or is
of another format; and parts of leaves that TensorStore reads with less work."""

import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import MissingError
from .._format import _digests, _grid, _template, _view
from .._format._view import Places
from .._storage import _arrays, _codecs
from . import _kept, _large_leaf, _reads, _source
from ._large_leaf import LargeLeaf
from ._reads import ReadState, StoredRead


# Stands for an array of TensorStore where that has no driver for the store: the chunks
# of each part are read into memory, and an array of them is opened there.
LATER = object()


class _WantedPart(NamedTuple):
    """The elements of a part that an array gets: their places there, and in the
    part."""

    array: np.ndarray
    to: tuple[Places, ...]
    fro: tuple[Places, ...]


class _ChunkPart(NamedTuple):
    """A run of chunks of a leaf, and the region that they are; of one that is read
    exactly (see `_reads_exactly`), what its view picks. It is read into memory of this
    `shape`: that of the array which wants just this, or new one, of which the arrays
    get what they want."""

    chunks: range
    region: tuple[Any, ...]
    shape: tuple[int, ...]
    wanted: list[_WantedPart]
    into: np.ndarray | None
    nbytes: int
    is_last: bool


class ChunkLeaf(LargeLeaf[_ChunkPart]):
    """A leaf that is read by the chunks that are touched.

    `is_read_by_tensorstore`: an array of TensorStore has to be given to `read_from`.
    """

    def __init__(self, state: ReadState, read: StoredRead):
        """**Raises:** as `Source.check`."""
        super().__init__(state, read)
        source, record = state.source, read.record
        self.template = t = source.template_as_read(record)
        # What is compressed may be as long, and TensorStore decodes it into memory of
        # its own.
        self.copies = 1 if t.codec is None else 3
        self._array: Any = None
        self._is_exact = _reads_exactly(state, read)
        # TensorStore decodes chunks of other formats. All others are bytes of files.
        self.is_read_by_tensorstore = self._is_exact or source.is_scattered(record)
        self.chunks = _kept.touched(t, read.views)
        source.check(record, self.chunks)

    def read_from(self, array: Any) -> None:
        """Has TensorStore read the chunks, from this array, or from `LATER`."""
        self._array = array

    def _parts(self) -> Iterator[_ChunkPart]:
        t, picks = self.template, [view.ranges for view in self.views]
        if self._is_exact:
            (view,), (array,) = self.views, self.arrays
            wanted = [_WantedPart(array.reshape(view.picked_shape), (), ())]
            yield self._part(range(0), view.slices(), view.picked_shape, wanted, True)
            return
        grid = _source.grid_of(t)
        most = min(_large_leaf.PART, self.state.budget // 4) // self.copies
        most = max(1, most // grid.full)
        source, record = self.state.source, self.read.record
        if source.is_scattered(record) and source.is_contiguous(record):
            most = 1  # Chunks that follow each other may lie anywhere.
        for run in _grid.runs(self.chunks, t.shape, t.chunk, most):
            region = _grid.box(grid.regions[run.start : run.stop])
            found = [_view.overlaps(pick, region) for pick in picks]
            wanted = [
                _WantedPart(array, overlap.to, overlap.fro)
                for array, overlap in zip(self.arrays, found)
                if overlap is not None
            ]
            shape = tuple(s.stop - s.start for s in region)
            is_last = run[-1] == self.chunks[-1]
            yield self._part(run, region, shape, wanted, is_last)

    def _part(
        self,
        chunks: range,
        region: tuple[Any, ...],
        shape: tuple[int, ...],
        wanted: list[_WantedPart],
        is_last: bool,
    ) -> _ChunkPart:
        into = None
        if self.read.conversion is None and len(wanted) == 1:
            array, to, fro = wanted[0]
            if all(isinstance(x, slice) and x.step in (None, 1) for x in (*to, *fro)):
                into = array[(*to, ...)]
                into = into if into.shape == shape else None
        nbytes = self.copies * math.prod(shape) * self.template.itemsize
        return _ChunkPart(chunks, region, shape, wanted, into, nbytes, is_last)

    def _reading(self, part: _ChunkPart) -> Callable[[], np.ndarray]:
        into = part.into
        if into is None:
            into = _arrays.aligned(part.shape, _template.dtype_of(self.template.stored))
        reading = self._reading_chunks if self._array is None else self._reading_array
        fill = reading(part, into)

        def read() -> np.ndarray:
            fill()
            return into

        return read

    def _reading_array(self, part: _ChunkPart, into: np.ndarray) -> Callable[[], None]:
        source, array = self.state.source, self._array
        wait = source.directory.wait
        if array is not LATER and not self._is_exact:
            return ft.partial(wait, _arrays.start_read(array, into, part.region))

        def read() -> None:  # It begins once a thread is free for it.
            opened = array
            if array is LATER:
                (opened,) = source.open([(self.read.record, part.chunks)])
            wait(_arrays.start_read(opened, into, part.region))

        return read

    def _reading_chunks(self, part: _ChunkPart, into: np.ndarray) -> Callable[[], None]:
        source, record = self.state.source, self.read.record
        t = record.template
        ranges = [source.chunk_range(record, number) for number in part.chunks]
        if source.root.is_remote:
            values = _reads.start_ranges(source.directory, ranges)
        else:
            most = _template.most_encoded(t.full)
            values = ft.partial(_read_ranges, self.state, ranges, most)

        def read() -> None:
            regions, decode = _source.grid_of(t).regions, _codecs.decoder(t)
            for number, data in zip(part.chunks, values(), strict=True):
                region = _grid.within(regions[number], part.region)
                decode(data, into[(*region, ...)])

        return read

    def _saved_digests(self, part: _ChunkPart) -> bytes:
        return self.state.source.digests_of(self.read.record, part.chunks)

    def _is_good(self, part: _ChunkPart, data: np.ndarray, digests: bytes) -> bool:
        regions = _source.grid_of(self.read.record.template).regions
        found = []
        for number in part.chunks:
            region = _grid.within(regions[number], part.region)
            found += _digests.block_digests(_digests.as_bytes(data[region]))
        return b"".join(found) == digests

    def _keep(self, part: _ChunkPart, data: np.ndarray) -> None:
        for array, to, fro in part.wanted if part.into is None else ():
            some, place = data[_view.mesh(fro, data.shape)], _view.mesh(to, array.shape)
            _reads.put(some, array, place, self.read.conversion, self.lost)


def _reads_exactly(state: ReadState, read: StoredRead) -> bool:
    """Whether TensorStore reads just the bytes of what is asked for."""
    source, record, views = state.source, read.record, read.views
    return (
        state.digests is None  # They are of whole chunks.
        and views is not None
        and len(views) == 1  # Several may share chunks.
        and not views[0].arrays  # Rows by their numbers.
        and source.template_as_read(record).codec is None
        and not source.is_contiguous(record)  # There are no chunks.
        # From a store, chunks of ours are read whole.
        and not (source.root.is_remote and source.has_digests)
        and source.directory.has_driver()
    )


def _read_ranges(
    state: ReadState, ranges: Sequence[tuple[str, int, int | None]], most: int
) -> Iterator[np.ndarray]:
    """The bytes of ranges of local files, of about so many at most, in memory that the
    next ones take."""
    for key, start, stop in ranges:
        if stop is None:
            raise MissingError("a chunk is missing")
        size = stop - start
        into = state.buffer(size, most)  # Chunks differ a little in length.
        if state.source.directory.read_into(key, start, into) < size:
            raise MissingError("a chunk is missing")
        yield into
