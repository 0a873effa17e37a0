"""The parts of a near step as one tree. A part is the checkpoint of one file that one
process has saved: each has the names of all leaves, and its own shards.

Here is which parts a process needs, however many processes have saved them, and how it
loads its leaves from these.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from jaxtyping import PyTree

from .._kernel._errors import DamagedError, ReplacedError
from .._kernel._format import _template, _view
from .._kernel._format._leaves import LeafRecord, Leaves, LocalShards, Region
from .._kernel._load import _checkpoint, _load_options, _read
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._fetch import LeafBuilder
from .._kernel._load._leaf_read import LeafRead
from .._kernel._load._load_options import LoadOptions
from .._kernel._load._match import Match
from .._kernel._load._partial import Apart
from .._kernel._load._reader import ReadResult, Results, StoredRead
from .._kernel._load._source import Source
from .._kernel._run import _own
from .._kernel._run._near_interface import LoadRequest
from .._kernel._runtime import _progress
from .._kernel._runtime._batching import batched
from .._kernel._tree import _from_host, _leaf, _sharding
from .._kernel._tree._target import Target


class PartReport(NamedTuple):
    """A report of a part: its bytes; digests of the regions that it has, and of the
    names of the leaves of which it has all; and the processes that need one of the
    regions. That of a part that cannot be read has none of these."""

    nbytes: int = 0
    regions: str = ""
    whole: str = ""
    readers: list[int] = []


def choose_parts(
    sources: Sequence[Sequence[int]], count: int, reports: Mapping[int, PartReport]
) -> list[list[int]]:
    """Chooses the parts that each of `count` processes reads, if part `i` is on the
    disks of the processes `sources[i]`: as few as have all that it needs. Where as many
    processes have saved, its own is one of them."""
    # A leaf that is whole in some parts only may be nowhere else.
    is_alike = len({report.whole for report in reports.values()}) == 1
    out = []
    for to in range(count):
        own = [to] if len(reports) == count else []
        # What needs not be moved is preferred; else not all take the same.
        preference = lambda i: (
            i not in own,
            to not in sources[i],
            (i - to) % len(reports),
        )
        order = sorted(reports, key=preference)
        seen: set[str] = set()
        parts = []
        for i in order:
            is_needed = to in reports[i].readers or not is_alike
            is_new = reports[i].regions not in seen or not is_alike
            if i in own or (is_needed and is_new):
                parts.append(i)
                seen.add(reports[i].regions)
        out.append(parts or order[:1])
    return out


class PartPiece(NamedTuple):
    """A piece of a leaf that a part has: the number of its region, and its place in the
    stored part and in the region."""

    number: int
    stored: Region
    to: Region


def _held_regions(record: LeafRecord) -> list[tuple[Region, int]]:
    """The regions of a leaf that a part has, each with its first row in what is stored.
    What was saved whole is one."""
    shape = record.template.shape
    if not isinstance(record.part, LocalShards):
        return [(_padded((), shape), 0)]
    starts = record.part.starts
    size = shape[0] // len(starts), *shape[1:]
    return [
        (tuple(slice(s, s + n) for s, n in zip(start, size)), k * size[0])
        for k, start in enumerate(starts)
    ]


def pieces(
    regions: Sequence[Region], parts: Mapping[int, LeafRecord]
) -> dict[int, list[PartPiece]] | None:
    """The pieces of some regions of a leaf that each part has, and of what several have
    those of the first; None if they do not have it all."""
    there: dict[Any, tuple[Region, int, int]] = {}
    for number, record in parts.items():
        for box, row in _held_regions(record):
            there.setdefault(tuple((s.start, s.stop) for s in box), (box, row, number))
        if record.part is None:
            box, row = _held_regions(record)[0]
            there = {(): (box, row, number)}
            break
    boxes = [box for box, _, _ in there.values()]
    origins = [origin for _, *origin in there.values()]
    out: dict[int, list[PartPiece]] = {}
    for i, region in enumerate(regions):
        try:
            found = _sharding.pieces(boxes, region)
        except ValueError:
            return None
        for box, stored, to in found:
            row, number = origins[box]
            rows = tuple(slice(s.start + row, s.stop + row) for s in stored[:1])
            out.setdefault(number, []).append(PartPiece(i, (*rows, *stored[1:]), to))
    return out


@dataclasses.dataclass(eq=False)
class _PartedLeaf:
    """A leaf whose regions arrive: the read of them all; the reads of parts that are
    still to come; and the pieces that come of each part."""

    read: StoredRead
    parts: dict[int, StoredRead]
    pieces: dict[int, list[PartPiece]]
    arrays: list[Any]
    owned: bool = True

    def take(self, part: int, result: ReadResult) -> None:
        """Takes the pieces of one part."""
        shapes = self.read.shapes
        for (region, _, to), array in zip(self.pieces[part], result.arrays):
            shape = shapes[region]
            if array.shape == shape:
                self.arrays[region] = array
                self.owned &= result.owned
                continue
            if self.arrays[region] is None:
                self.arrays[region] = np.zeros(shape, array.dtype)
            self.arrays[region][to] = array
        del self.parts[part]


class Parts:
    """The parts that this process has opened, and what it loads of them.

    An error of one of them is a `DamagedError`; `bad` has its number then.
    """

    def __init__(self, request: LoadRequest):
        options: Any = {**request.options, "processes": "own", "reshard": "auto"}
        self._like = request.like
        self._options = _load_options.check(LoadOptions(**options))
        self._opened: dict[int, Checkpoint] = {}
        self._matches: dict[int, Match] = {}
        self.bad: list[int] = []

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ReplacedError, DamagedError) as e:
            self.bad.append(number)
            raise DamagedError(str(e)) from e

    def open(self, number: int, file: pathlib.Path) -> Checkpoint:
        if number not in self._opened:
            with self._reading(number):
                try:
                    self._opened[number] = _checkpoint.open(file)
                except ValueError as e:
                    raise DamagedError(str(e)) from e
        return self._opened[number]

    def own(self, number: int) -> bytes:
        """The own state in a part that was opened, as it is stored."""
        with self._reading(number):
            return _own.bytes_of(self._opened[number], 0)

    def _source(self, number: int) -> Source:
        return _checkpoint.source_of(self._opened[number])

    def _match(self, number: int) -> Match:
        """By the names in one part: each has those of all leaves."""
        if number not in self._matches:
            source = self._source(number)
            leaves = _whole(source.index.leaves)
            index = dataclasses.replace(source.index, leaves=leaves)
            whole = Checkpoint(dataclasses.replace(source, index=index))
            found = _checkpoint.match_leaves(whole, self._like, self._options)
            self._matches[number] = found
        return self._matches[number]

    def report(self, number: int, file: pathlib.Path, count: int) -> PartReport:
        """The report of a part on this disk, for `count` processes."""
        try:
            nbytes = file.stat().st_size
            leaves = _checkpoint.source_of(self.open(number, file)).index.leaves
        except (OSError, DamagedError):
            return PartReport()
        # What does not fit `like` is an error of the load.
        readers: set[int] = set()
        with contextlib.suppress(Exception):
            wanted = [*self._match(next(iter(self._opened))).reads.values()]
            readers = _readers(leaves, wanted, count)
        regions = [
            leaves.record(leaf_index, True) for leaf_index in sorted(leaves.parts)
        ]
        whole = [
            x
            for leaf_index, x in enumerate(leaves.names)
            if leaf_index not in leaves.parts
        ]
        return PartReport(nbytes, _digest(regions), _digest(whole), sorted(readers))

    def _read_part(self, number: int, reads: Sequence[StoredRead]) -> Results:
        source, options = self._source(number), self._options
        with self._reading(number):
            yield from _read.read_arrays(
                source, reads, options.verify, options.max_bytes
            )

    def load(self, numbers: Sequence[int]) -> PyTree:
        """The tree, of parts that were opened."""
        matched, options = self._match(numbers[0]), self._options
        wanted = [*matched.reads.values()]
        sources = {number: self._source(number) for number in numbers}
        budget = _read.BUDGET if options.max_bytes is None else options.max_bytes
        leaves = [_parted(i, one, sources) for i, one in enumerate(wanted)]
        builder = LeafBuilder(wanted, budget)
        nbytes = sum(leaf.read.nbytes for leaf in leaves)
        with _progress.bar("load", nbytes, len(leaves), options.progress) as advance:

            def finish(i: int) -> None:
                leaf = leaves[i]
                builder.add(leaf.read, ReadResult(leaf.arrays, leaf.owned))
                advance(leaf.read.nbytes, 1)
                leaf.arrays = []

            # What has come of a leaf waits for the rest, if that is in another part.
            most = budget if len(sources) > 1 else nbytes
            size = lambda i: leaves[i].read.nbytes
            for batch in batched(range(len(leaves)), size, most):
                for i in batch:
                    if not leaves[i].parts:
                        finish(i)
                for number in sources:
                    there = [leaves[i].parts.get(number) for i in batch]
                    reads = [read for read in there if read is not None]
                    with contextlib.closing(self._read_part(number, reads)) as results:
                        for one, result in results:
                            (i,) = one.leaves
                            leaves[i].take(number, result)
                            if not leaves[i].parts:
                                finish(i)
        return matched.tree(builder.finish("the near step"))


def _whole(leaves: Leaves) -> Leaves:
    """The leaves of a part, as if it had all of each."""
    templates, numbers = list(leaves.templates), list(leaves.template_of)
    known: dict[Any, int] = {}
    for leaf_index, part in leaves.parts.items():
        assert isinstance(part, LocalShards)
        chunk = tuple(max(1, n) for n in part.shape)
        was = templates[numbers[leaf_index]]
        whole = was._replace(shape=part.shape, chunk=chunk, codec=None)
        if whole not in known:
            known[whole] = len(templates)
            templates.append(whole)
        numbers[leaf_index] = known[whole]
    return dataclasses.replace(
        leaves, templates=templates, template_of=numbers, parts={}
    )


def _record(source: Source, wanted: LeafRead) -> LeafRecord | None:
    """The part of a leaf that a part has, if it is of the same array."""
    leaves = source.index.leaves
    leaf_index = leaves.leaf_indices.get(wanted.record.name)
    if leaf_index is None:
        return None
    found = leaves.record(leaf_index, True)
    return found if found.whole.shape == wanted.record.template.shape else None


def _parted(i: int, wanted: LeafRead, sources: Mapping[int, Source]) -> _PartedLeaf:
    """The leaf of number `i`, of which nothing has come.

    **Raises:** `Apart` for a leaf of which this process needs more than is there."""
    shape = wanted.record.template.shape
    regions = _from_host.regions(wanted.target)
    wanted_regions = [_padded(r, shape) for r in ([()] if regions is None else regions)]
    held = ((number, _record(source, wanted)) for number, source in sources.items())
    records = {number: record for number, record in held if record is not None}
    cut = pieces(wanted_regions, records)
    if cut is None:
        raise Apart(
            f"parts {', '.join(map(str, sources))} do not have all of the leaf "
            f"`{wanted.record.name}` that the devices of this process need"
        )
    read = _read_of(i, wanted.record, wanted_regions)
    parts = {
        number: _read_of(i, records[number], [stored for _, stored, _ in some])
        for number, some in cut.items()
    }
    dtype = _template.dtype_of(wanted.record.template.stored)
    # Regions without elements have no pieces.
    arrays = [np.zeros(s, dtype) if 0 in s else None for s in read.shapes]
    return _PartedLeaf(read, parts, cut, arrays)


def _read_of(i: int, record: LeafRecord, regions: Sequence[Region]) -> StoredRead:
    """The read of some regions of a stored array, for the leaf of number `i`."""
    whole = _view.whole(record.template.shape)
    views = tuple(whole.take((*region, ...)) for region in regions)
    return StoredRead(record, views, None, [i])


def _readers(leaves: Leaves, wanted: Sequence[LeafRead], count: int) -> set[int]:
    """The processes whose devices need some of the regions that a part has."""
    found: set[int] = set()
    seen = set()
    for one in wanted:
        leaf_index = leaves.leaf_indices.get(one.record.name)
        part = None if leaf_index is None else leaves.parts.get(leaf_index)
        key = part, id(one.target)
        if leaf_index is None or part is None or key in seen:
            continue
        seen.add(key)
        boxes = [box for box, _ in _held_regions(leaves.record(leaf_index, True))]
        for region, processes in _holders(one.target, count):
            if not found.issuperset(processes) and any(
                all(a.start < b.stop and b.start < a.stop for a, b in zip(region, box))
                for box in boxes
            ):
                found.update(processes)
    return found


def _holders(target: Target, count: int) -> _sharding.Holders:
    """The regions of a leaf that processes need."""
    sharding = target.sharding
    if sharding is None or _leaf.is_local(sharding):
        return (((), tuple(range(count))),)
    return _sharding.holders(sharding, target.shape)


def _padded(region: Region, shape: Sequence[int]) -> Region:
    """A region with all of the axes that it lacks, such as the words of a key."""
    return (*region, *_sharding.whole(shape[len(region) :]))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())
