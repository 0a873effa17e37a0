"""Large leaves: read in parts, which threads verify as they arrive.

A leaf whose bytes lie row after row is a `RowLeaf` (`_row_leaf`): its parts are runs of
rows. Any other one, such as a compressed one, is a `_LargeLeaf`: its parts are runs of
chunks.
"""

import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import MissingError
from .._format import _digests, _grid, _template, _view
from .._format._view import Places
from .._storage import _arrays, _codecs
from . import _kept, _reader, _row_leaf, _source
from ._reader import Job, Reader, ReadResult, Results, StoredRead
from ._row_leaf import RowLeaf


# In place of a `_LargeLeaf.array`: where TensorStore has no driver, each part is read
# into memory first, and opened from there.
_LATER = object()


class _DecodedPart(NamedTuple):
    """A run of chunks of a leaf, the region that they are, and the memory that it is
    read into; of an exact leaf, what its view picks. The `keeps` then take what is
    wanted, where that memory is not what was asked for."""

    chunks: range
    region: tuple[Any, ...]
    into: np.ndarray
    keeps: list[Callable[[], None]]
    is_last: bool


class _LargeLeaf:
    """A leaf that is read: the chunks of it that are touched, and the `array` that
    TensorStore reads them from, if it takes part.

    `is_exact`: of the one view no more than its bytes are read, which are not verified.
    `lost` says which values the conversion could not keep.
    """

    def __init__(self, reader: Reader, read: StoredRead):
        """**Raises:** `ValueError` unless the files hold what is read."""
        source, record = reader.source, read.record
        self.reader, self.read, self.lost = reader, read, []
        self.template = t = source.cut(record)
        self.views = read.all_views
        # TensorStore decodes chunks of other formats. All others are bytes of files.
        self.array: Any = None
        self.is_decoded = source.is_scattered(record)
        self.is_exact = (
            reader.digests is None
            and read.views is not None
            and len(self.views) == 1
            and not self.views[0].arrays
            and t.codec is None
            and not source.is_contiguous(record)
            and not (source.root.is_remote and source.has_digests)
            and source.directory.has_driver()
        )
        self.chunks = _kept.touched(t, read.views)
        source.check(record, self.chunks)

    def jobs(self) -> Iterator[Job["_LargeLeaf | None"]]:
        """Its parts, of which the last gives the leaf: the others have arrived then."""
        codec = self.read.record.template.codec
        for part in self._parts():
            # What is compressed may be as long again.
            held = part.into.nbytes * (1 if codec is None else 2)
            yield held, ft.partial(self._start, part)

    def _parts(self) -> Iterator[_DecodedPart]:
        t, conversion = self.template, self.read.conversion
        dtype = _template.dtype_of(t.stored) if conversion is None else conversion.dtype
        picks = [view.ranges for view in self.views]
        self.arrays = [_arrays.aligned(tuple(map(len, x)), dtype) for x in picks]
        if self.is_exact:
            (view,), (array,) = self.views, self.arrays
            wanted = [(array.reshape(view.picked_shape), (), ())]
            yield self._part(range(0), view.slices(), view.picked_shape, wanted, True)
            return
        regions, full = _source.grid_of(t).regions, _source.grid_of(t).full
        most = max(1, min(_row_leaf.PART, self.reader.budget // 4) // full)
        source, record = self.reader.source, self.read.record
        if source.is_scattered(record) and not source.is_stored(record):
            most = 1  # Chunks that follow each other may lie anywhere.
        for run in _grid.runs(self.chunks, t.shape, t.chunk, most):
            region = _grid.box(regions[run.start : run.stop])
            found = [_view.overlaps(pick, region) for pick in picks]
            wanted = [
                (array, overlap.to, overlap.fro)
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
        wanted: list[tuple[np.ndarray, tuple[Places, ...], tuple[Places, ...]]],
        is_last: bool,
    ) -> _DecodedPart:
        """A part, of which some arrays get, at some places, these elements."""
        if self.read.conversion is None and len(wanted) == 1:
            array, to, fro = wanted[0]
            if all(isinstance(x, slice) and x.step in (None, 1) for x in (*to, *fro)):
                into = array[(*to, ...)]
                if into.shape == shape:
                    return _DecodedPart(chunks, region, into, [], is_last)
        into = _arrays.aligned(shape, _template.dtype_of(self.template.stored))
        keeps = [ft.partial(self._keep, into, *one) for one in wanted]
        return _DecodedPart(chunks, region, into, keeps, is_last)

    def _keep(
        self,
        part: np.ndarray,
        array: np.ndarray,
        to: tuple[Places, ...],
        fro: tuple[Places, ...],
    ) -> None:
        conversion, some = self.read.conversion, part[_view.mesh(fro, part.shape)]
        try:
            kept = some if conversion is None else conversion.convert(some)
            array[_view.mesh(to, array.shape)] = kept
        except ValueError as e:
            self.lost.append(e)

    def _start(self, part: _DecodedPart) -> Callable[[], "_LargeLeaf | None"]:
        return ft.partial(self._finish, part, self._start_read(part))

    def _start_read(self, part: _DecodedPart) -> Callable[[], None]:
        """Starts to read a part: what then waits until it has arrived."""
        source, record, array = self.reader.source, self.read.record, self.array
        wait = source.directory.wait

        def read() -> None:
            opened = array
            if array is _LATER:
                (opened,) = source.open([(record, part.chunks)])
            wait(_arrays.start_read(opened, part.into, part.region))

        if array is _LATER or array is not None and self.is_exact:
            return read  # As threads are free for it.
        if array is not None:
            reading = _arrays.start_read(array, part.into, part.region)
            return ft.partial(wait, reading)
        return self._start_chunks(part)

    def _start_chunks(self, part: _DecodedPart) -> Callable[[], None]:
        source, t = self.reader.source, self.read.record.template
        ranges = [
            source.chunk_range(self.read.record, number) for number in part.chunks
        ]
        if source.root.is_remote:
            values = _reader.start_ranges(source.directory, ranges)
        else:
            most = _template.most_encoded(t.full)
            values = ft.partial(_read_ranges, self.reader, ranges, most)

        def arrived() -> None:
            regions = _source.grid_of(t).regions
            keep = _codecs.decoder(t)
            for number, data in zip(part.chunks, values(), strict=True):
                region = _grid.within(regions[number], part.region)
                keep(data, part.into[(*region, ...)])

        return arrived

    def _finish(
        self, part: _DecodedPart, arrived: Callable[[], None]
    ) -> "_LargeLeaf | None":
        reader, record, digests = self.reader, self.read.record, None
        if reader.digests is not None:
            digests = reader.source.digests_of(record, part.chunks)
        try:
            arrived()
            if digests is None or self._digests(part) == digests:
                for keep in part.keeps:
                    keep()
            else:
                reader.problems.setdefault(record.name, _reader.CHANGED)
        except Exception as e:
            reader.problems.setdefault(record.name, reader.explain(e))
        return self if part.is_last else None

    def _digests(self, part: _DecodedPart) -> bytes:
        regions = _source.grid_of(self.read.record.template).regions
        found = []
        for number in part.chunks:
            region = _grid.within(regions[number], part.region)
            found += _digests.block_digests(_digests.as_bytes(part.into[region]))
        return b"".join(found)

    def result(self) -> ReadResult:
        return _reader.arranged(self.views, self.arrays, self.lost)


def read_parts(reader: Reader, reads: list[StoredRead]) -> Results:
    """Reads leaves in their order, and gives those without problems."""
    jobs = (job for leaf in _leaves(reader, reads) for job in leaf.jobs())
    # Chunks are decoded by threads of TensorStore, for which these wait.
    is_waiting = any(one.record.template.codec is not None for one in reads)
    per_core = 2 if is_waiting else 1
    for leaf in _reader.in_order(jobs, reader.budget, per_core=per_core):
        if leaf is not None and leaf.read.record.name not in reader.problems:
            yield leaf.read, leaf.result()


def _leaves(reader: Reader, reads: list[StoredRead]) -> list[RowLeaf | _LargeLeaf]:
    """The leaves that can be read; the arrays that TensorStore reads are opened
    together. Their files are known to hold them then."""
    leaves: list[RowLeaf | _LargeLeaf] = []
    for one in reads:
        try:
            leaf = _row_leaf.row_leaf(reader, one)
            leaves.append(_LargeLeaf(reader, one) if leaf is None else leaf)
        except Exception as e:
            reader.problems[one.record.name] = reader.explain(e)
    source = reader.source
    large = [x for x in leaves if isinstance(x, _LargeLeaf)]
    own = [x for x in large if x.is_exact or x.is_decoded]
    arrays = None
    if own and source.directory.has_driver():
        arrays = source.open([(x.read.record, x.chunks) for x in own])
    for i, leaf in enumerate(own):
        leaf.array = _LATER if arrays is None else arrays[i]
    return leaves


def _read_ranges(
    reader: Reader, ranges: Sequence[tuple[str, int, int | None]], most: int
) -> Iterator[np.ndarray]:
    """The bytes of ranges of local files, of about so many at most, in memory that the
    next ones take."""
    for key, start, stop in ranges:
        if stop is None:
            raise MissingError("a chunk is missing")
        size = stop - start
        into = reader.buffer(size, most)  # Chunks differ a little in length.
        if reader.source.directory.read_into(key, start, into) < size:
            raise MissingError("a chunk is missing")
        yield into
