"""The parts of a near step as one tree.

A *part* is the checkpoint of one file that one process has saved: each has the names of
all leaves, and the shards of that process. (`Leaves.parts` are others: what there is of
single leaves.) A *region* is a place in a leaf: *held*, that of a shard in a part, or
*wanted*, one that a process needs. A *piece* is what one part has of a wanted region.

A process first reports what is in the parts on its disk. By the reports, `choose_parts`
says which parts each process reads, however many have saved them. `Parts` loads its
leaves from these: each leaf once all of its pieces have come.
"""

import contextlib
import dataclasses
import functools as ft
import json
import pathlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from jaxtyping import PyTree

from .._kernel._errors import DamagedError, ReplacedError
from .._kernel._format import _template, _view
from .._kernel._format._leaves import LeafRecord, Leaves, LocalShards, Region
from .._kernel._format._template import Template
from .._kernel._load import _checkpoint, _load_options
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._load_options import LoadOptions
from .._kernel._load._match import Match
from .._kernel._load._partial import Apart
from .._kernel._load._read_arrays import BUDGET, read_arrays
from .._kernel._load._read_leaves import LeafBuilder
from .._kernel._load._reads import LeafRead, ReadResult, StoredRead
from .._kernel._load._source import Source
from .._kernel._run import _own
from .._kernel._run._near_interface import LoadRequest
from .._kernel._runtime import _progress
from .._kernel._runtime._batching import batched
from .._kernel._storage import _backend
from .._kernel._tree import _from_host, _leaf, _sharding
from .._kernel._tree._target import Target


class PartReport(NamedTuple):
    """A report of a part: its bytes; digests of the regions that it holds, and of the
    names of the leaves that it has `whole`; and the processes that need some of the
    regions. The report of a part that cannot be read has none of these."""

    nbytes: int = 0
    regions: str = ""
    whole: str = ""
    readers: list[int] = []


def choose_parts(
    disks_of_part: Sequence[Sequence[int]],
    count: int,
    reports: Mapping[int, PartReport],
) -> list[list[int]]:
    """Chooses the parts that each of `count` processes reads, where each part is on the
    disks of some processes. Where as many processes have saved, a process reads its
    own."""
    has_own = len(reports) == count
    return [
        _parts_for(process, has_own, disks_of_part, reports) for process in range(count)
    ]


def _parts_for(
    process: int,
    has_own: bool,
    disks_of_part: Sequence[Sequence[int]],
    reports: Mapping[int, PartReport],
) -> list[int]:
    """The parts that a process reads: its own, if it has one, and one part of each
    other set of regions that it needs."""
    own = process if has_own else None
    # Parts that need not be moved come first; of equal ones, for each process another.
    preference = lambda part: (
        part != own,
        process not in disks_of_part[part],
        (part - process) % len(reports),
    )
    order = sorted(reports, key=preference)
    # Where parts differ in which leaves they have whole, all are read: such a leaf may
    # be nowhere else. One that could not be read for its report differs from others.
    if len({report.whole for report in reports.values()}) > 1:
        return order
    chosen: dict[str, int] = {}
    for part in order:
        if part == own or process in reports[part].readers:
            chosen.setdefault(reports[part].regions, part)
    # Without any the names of the leaves would be missing.
    return [*chosen.values()] or order[:1]


class _HeldRegion(NamedTuple):
    """A region that a part holds. In what the part stores, it begins at this row."""

    region: Region
    row: int


class _PartPiece(NamedTuple):
    """A piece of the wanted region of this number: its place in what a part stores, and
    in the region."""

    wanted: int
    stored: Region
    to: Region


@dataclasses.dataclass(eq=False)
class _PartedLeaf:
    """A leaf whose regions arrive, part by part, in `arrays`.

    `read` is the read of all of its regions. `to_come` are the reads of the parts that
    have not come yet, and `pieces` what comes of each part, in the order of its read.
    """

    read: StoredRead
    to_come: dict[int, StoredRead]
    pieces: dict[int, list[_PartPiece]]
    arrays: list[Any]
    owned: bool = True

    @property
    def is_whole(self) -> bool:
        return not self.to_come

    def take(self, part: int, result: ReadResult) -> None:
        """Takes the pieces of one part."""
        shapes = self.read.shapes
        for (wanted, _, to), array in zip(self.pieces[part], result.arrays):
            shape = shapes[wanted]
            if array.shape == shape:  # The piece is the region.
                self.arrays[wanted] = array
                self.owned &= result.owned
                continue
            if self.arrays[wanted] is None:
                self.arrays[wanted] = np.zeros(shape, array.dtype)
            self.arrays[wanted][to] = array
        del self.to_come[part]

    def result(self) -> ReadResult:
        """Gives away the regions, which have all come."""
        arrays, self.arrays = self.arrays, []
        return ReadResult(arrays, self.owned)


class Parts:
    """The parts that this process has opened, and what it loads of them.

    A part that cannot be opened or read is a `DamagedError`, and its number comes into
    `bad`.
    """

    def __init__(self, request: LoadRequest):
        options: Any = {**request.options, "processes": "own", "reshard": "auto"}
        self._like = request.like
        self._options = _load_options.check(LoadOptions(**options))
        self._opened: dict[int, Checkpoint] = {}
        self.bad: list[int] = []

    @contextlib.contextmanager
    def _reading(self, part: int) -> Iterator[None]:
        """**Raises:** `DamagedError` for an error of the part that is read inside."""
        try:
            yield
        except (OSError, ReplacedError, DamagedError) as e:
            if _backend.is_exhausted(e):
                raise
            self.bad.append(part)
            raise DamagedError(str(e)) from e

    def open(self, part: int, file: pathlib.Path) -> Checkpoint:
        if part not in self._opened:
            with self._reading(part):
                self._opened[part] = _opened(file)
        return self._opened[part]

    def own_state(self, part: int) -> bytes:
        """The own state in a part that was opened, as it is stored."""
        with self._reading(part):
            return _own.bytes_of(self._opened[part], 0)

    def _source(self, part: int) -> Source:
        return _checkpoint.source_of(self._opened[part])

    @ft.cached_property
    def _match(self) -> Match:
        """The leaves of `like` in the whole tree, by the names in the part that was
        opened first: each part has the names of all leaves."""
        source = self._source(next(iter(self._opened)))
        leaves = _as_whole(source.index.leaves)
        index = dataclasses.replace(source.index, leaves=leaves)
        whole = Checkpoint(dataclasses.replace(source, index=index))
        return _checkpoint.match_leaves(whole, self._like, self._options)

    def report(self, part: int, file: pathlib.Path, count: int) -> PartReport:
        """The report of a part on this disk, for `count` processes."""
        try:
            leaves = _checkpoint.source_of(self.open(part, file)).index.leaves
            with self._reading(part):
                nbytes = file.stat().st_size
            sharded = [leaves.record(i, known=True) for i in sorted(leaves.parts)]
        except DamagedError:
            return PartReport()
        # If `like` does not fit, this part has no readers: the load raises that error.
        readers: set[int] = set()
        with contextlib.suppress(Exception):
            readers = _readers(leaves, self._match.reads.values(), count)
        whole = [name for i, name in enumerate(leaves.names) if i not in leaves.parts]
        return PartReport(nbytes, _digest(sharded), _digest(whole), sorted(readers))

    def load(self, parts: Sequence[int]) -> PyTree:
        """The tree, of parts that were opened."""
        matched, options = self._match, self._options
        wanted = [*matched.reads.values()]
        sources = {part: self._source(part) for part in parts}
        budget = BUDGET if options.max_bytes is None else options.max_bytes
        leaves = [_parted(i, one, sources) for i, one in enumerate(wanted)]
        builder = LeafBuilder(wanted, budget)
        nbytes = sum(leaf.read.nbytes for leaf in leaves)
        # If pieces wait in memory for those in other parts, leaves come in batches.
        most = budget if len(sources) > 1 else nbytes
        batches = batched(leaves, lambda leaf: leaf.read.nbytes, most)
        with _progress.bar("load", nbytes, len(leaves), options.progress) as advance:
            for batch in batches:
                with contextlib.closing(self._completed(batch, parts)) as completed:
                    for leaf in completed:
                        builder.add(leaf.read, leaf.result())
                        advance(leaf.read.nbytes, 1)
        return matched.tree(builder.finish("the near step"))

    def _completed(
        self, leaves: Sequence[_PartedLeaf], parts: Sequence[int]
    ) -> Generator[_PartedLeaf, None, None]:
        """Reads some leaves, part by part. Gives each leaf once all of it has come."""
        yield from [leaf for leaf in leaves if leaf.is_whole]  # They have no elements.
        leaf_of = {i: leaf for leaf in leaves for i in leaf.read.leaves}
        verify, max_bytes = self._options.verify, self._options.max_bytes
        for part in parts:
            reads = [leaf.to_come[part] for leaf in leaves if part in leaf.to_come]
            found = read_arrays(self._source(part), reads, verify, max_bytes)
            with self._reading(part), contextlib.closing(found) as results:
                for read, result in results:
                    leaf = leaf_of[read.leaves[0]]
                    leaf.take(part, result)
                    if leaf.is_whole:
                        yield leaf  # Errors of the caller do not come in here.


def _opened(file: pathlib.Path) -> Checkpoint:
    """**Raises:** `DamagedError` unless it is a checkpoint whose leaves can be."""
    try:
        ckpt = _checkpoint.open(file)
        index = _checkpoint.source_of(ckpt).index
        index.check_leaves()
        _ = index.leaves.leaf_indices  # No name is there twice.
    except ValueError as e:
        raise DamagedError(str(e)) from e
    return ckpt


def _as_whole(leaves: Leaves) -> Leaves:
    """The leaves of a part, as if it had all of each."""
    templates, template_of = list(leaves.templates), list(leaves.template_of)
    number_of: dict[Template, int] = {}  # Of the templates that are added here.
    for leaf_index, shards in leaves.parts.items():
        assert isinstance(shards, LocalShards)
        chunk = tuple(max(1, n) for n in shards.shape)
        stored = templates[template_of[leaf_index]]
        whole = stored._replace(shape=shards.shape, chunk=chunk, codec=None)
        if whole not in number_of:
            number_of[whole] = len(templates)
            templates.append(whole)
        template_of[leaf_index] = number_of[whole]
    return dataclasses.replace(
        leaves, templates=templates, template_of=template_of, parts={}
    )


def _parted(i: int, wanted: LeafRead, sources: Mapping[int, Source]) -> _PartedLeaf:
    """The leaf of number `i`, of which nothing has come.

    **Raises:** `Apart` for a leaf of which this process needs more than is there."""
    shape = wanted.record.template.shape
    needed = _from_host.regions(wanted.target)
    if needed is None:  # All of it.
        needed = [()]
    regions = [_padded(region, shape) for region in needed]
    found = {part: _record(source, wanted) for part, source in sources.items()}
    records = {part: record for part, record in found.items() if record is not None}
    by_part = _pieces(regions, records)
    if by_part is None:
        raise Apart(
            f"parts {', '.join(map(str, sources))} do not have all of the leaf "
            f"`{wanted.record.name}` that the devices of this process need"
        )
    read = _read_of(i, wanted.record, regions)
    to_come = {
        part: _read_of(i, records[part], [piece.stored for piece in pieces])
        for part, pieces in by_part.items()
    }
    dtype = _template.dtype_of(wanted.record.template.stored)
    # Regions without elements have no pieces.
    arrays = [np.zeros(s, dtype) if 0 in s else None for s in read.shapes]
    return _PartedLeaf(read, to_come, by_part, arrays)


def _record(source: Source, wanted: LeafRead) -> LeafRecord | None:
    """The record of a leaf in one part, if it is of the same array."""
    leaves = source.index.leaves
    leaf_index = leaves.leaf_indices.get(wanted.record.name)
    if leaf_index is None:
        return None
    found = leaves.record(leaf_index, known=True)
    return found if found.whole.shape == wanted.record.template.shape else None


def _pieces(
    wanted: Sequence[Region], records: Mapping[int, LeafRecord]
) -> dict[int, list[_PartPiece]] | None:
    """The pieces of the `wanted` regions of a leaf, by the parts that they are read
    from; None if the parts do not have them all. `records`: of the leaf in each part.
    """
    # If the leaf is whole in a part, that part is enough.
    whole = [part for part, record in records.items() if record.part is None]
    # Of several parts that hold a region, the first is read.
    firsts: dict[Any, tuple[int, _HeldRegion]] = {}
    for part in whole[:1] or records:
        for held in _held_regions(records[part]):
            ends = tuple((s.start, s.stop) for s in held.region)
            firsts.setdefault(ends, (part, held))
    there = list(firsts.values())
    out: dict[int, list[_PartPiece]] = {}
    for number, region in enumerate(wanted):
        try:
            found = _sharding.pieces([held.region for _, held in there], region)
        except ValueError:
            return None
        for place, inside, to in found:
            part, (_, row) = there[place]
            # A scalar has no rows.
            rows = tuple(slice(s.start + row, s.stop + row) for s in inside[:1])
            piece = _PartPiece(number, (*rows, *inside[1:]), to)
            out.setdefault(part, []).append(piece)
    return out


def _held_regions(record: LeafRecord) -> list[_HeldRegion]:
    """The regions of a leaf that a part holds, by its record there. A leaf that was
    saved whole is one."""
    shape = record.template.shape
    if not isinstance(record.part, LocalShards):
        return [_HeldRegion(_padded((), shape), 0)]
    starts = record.part.starts
    # Shards of one size are stored one below the other.
    rows = shape[0] // len(starts)
    size = rows, *shape[1:]
    regions = [tuple(slice(s, s + n) for s, n in zip(start, size)) for start in starts]
    return [_HeldRegion(region, i * rows) for i, region in enumerate(regions)]


def _read_of(i: int, record: LeafRecord, regions: Sequence[Region]) -> StoredRead:
    """The read of some regions of a stored array, for the leaf of number `i`."""
    whole = _view.whole(record.template.shape)
    views = tuple(whole.take((*region, ...)) for region in regions)
    return StoredRead(record, views, None, [i])


def _readers(leaves: Leaves, wanted: Iterable[LeafRead], count: int) -> set[int]:
    """The processes whose devices need some of the regions that a part holds. Leaves
    that it has whole do not count: all parts have them whole, or all are read."""
    found: set[int] = set()
    # Of leaves with the same shards, for the same target, one is looked at.
    seen = set()
    for one in wanted:
        leaf_index = leaves.leaf_indices.get(one.record.name)
        if leaf_index is None or leaf_index not in leaves.parts:
            continue
        key = leaves.parts[leaf_index], id(one.target)
        if key in seen:
            continue
        seen.add(key)
        held = _held_regions(leaves.record(leaf_index, known=True))
        for region, processes in _holders(one.target, count):
            if not found.issuperset(processes):
                if any(_overlap(region, x.region) for x in held):
                    found.update(processes)
    return found


def _overlap(a: Region, b: Region) -> bool:
    return all(x.start < y.stop and y.start < x.stop for x, y in zip(a, b))


def _holders(target: Target, count: int) -> _sharding.Holders:
    """The regions of a leaf that processes need, each with those processes."""
    sharding = target.sharding
    if sharding is None or _leaf.is_local(sharding):
        return (((), tuple(range(count))),)
    return _sharding.holders(sharding, target.shape)


def _padded(region: Region, shape: Sequence[int]) -> Region:
    """A region with all of the axes that it lacks, such as the words of a key."""
    return (*region, *_sharding.whole(shape[len(region) :]))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())
