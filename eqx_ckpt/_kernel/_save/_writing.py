"""The step between the plan of a save and its bytes, which both layouts share: chunks
are dealt out to processes and files, and records say what was written.

The module of a layout, `_to_ocdbt` or `_to_zarr`, has the functions of `LayoutWriter`.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, runtime_checkable, TypeVar

import numpy as np

from .._format import _digests
from .._format._placement import Placement
from .._runtime._processes import Processes
from .._storage._backend import Backend
from . import _assign, _payload, _tree_spec
from ._payload import LeafBytes, PlannedLeaf
from ._sending import UploadQueue
from ._tree_spec import TreeSpec


# To an object store a file is sent whole, from memory, of which it takes twice as much.
FAR_FILE, _FAR_COPIES = 64 * 2**20, 2


@runtime_checkable
class Sink(Protocol):
    """A place to write files to, each of them once and whole: a store, or a zip. If it
    `has_slow_writes`, threads that write to it spend their time waiting."""

    @property
    def has_slow_writes(self) -> bool: ...

    def write(
        self, key: str, buffers: Iterable[Any], sync: bool = False, /
    ) -> None: ...


S = TypeVar("S", bound=Sink, covariant=True)


@dataclasses.dataclass(frozen=True)
class Destination(Generic[S]):
    """Where the files of a save are written: `data_key` is the directory of this save
    in `work`, `d/<save id>`. With layout `"zarr"`, leaves lie beside `d`. `sync`:
    whether each is synced as it is written. `sync_all` syncs them together, once they
    are written. `outbox`: sends them to an object store."""

    work: S
    data_key: str
    sync: bool
    sync_all: Callable[[], None] | None = None
    outbox: UploadQueue | None = None

    @property
    def save_id(self) -> str:
        return self.data_key.rpartition("/")[2]

    def make_directory(self) -> None:
        """Makes the directory of the save: one of layout `"zarr"` begins without."""
        if isinstance(self.work, Backend):
            self.work.make_directories([self.data_key])

    def write(self, key: str, buffers: Iterable[Any]) -> None:
        """Writes a file, which is there at the latest after `settle`."""
        if self.outbox is None:
            self.work.write(key, buffers, self.sync)
        else:
            self.outbox.send(key, buffers)

    def settle(self) -> None:
        """Waits until all that was written is there, and durable if it is to be, but
        for names: the step that commits sees to them."""
        if self.outbox is not None:
            self.outbox.wait()
        if self.sync_all is not None:
            self.sync_all()


class ChunkRun(NamedTuple):
    """Chunks of a leaf, by their numbers, which lie one after the other in a file from
    `offset` on. Where they are compressed, `ends` are their ends, as offsets from
    there."""

    leaf: int
    chunks: range
    offset: int
    ends: list[int] | None

    def extent(self, number: int, full: int) -> tuple[int, int]:
        """The offset and the length of a chunk, which is of `full` bytes as it is."""
        i = number - self.chunks.start
        if self.ends is None:
            return self.offset + i * full, full
        start = self.ends[i - 1] if i else 0
        return self.offset + start, self.ends[i] - start

    def stop(self, full: int) -> int:
        """Where it ends in the file."""
        if self.ends is None:
            return self.offset + len(self.chunks) * full
        return self.offset + (self.ends[-1] if self.ends else 0)


# For each file its runs.
RunsOfFiles = list[Collection[ChunkRun]]
# For each run of chunks that a process has written, the ends of compressed ones.
Ends = list[list[int] | None]


class LinkedFiles(NamedTuple):
    """Data files of another save that are in this one too, as its first; the digests of
    their runs; and leaves that have not changed since that save."""

    files: Sequence[Collection[ChunkRun]]
    digests: list[tuple[int, range, bytes]]
    same: frozenset[int]


NOTHING = LinkedFiles([], [], frozenset())


def largest_sent(max_bytes: int) -> int:
    """The most bytes of a file that is sent from memory."""
    return min(FAR_FILE, max_bytes // (2 * _FAR_COPIES))


@dataclasses.dataclass(frozen=True, eq=False)
class Deal:
    """The files to which the chunks of a save are dealt out: of each, its process and
    its runs. Unlike a list it can be hashed, by its identity, as a key of what is
    `remembered`."""

    files: list[tuple[int, _assign.Runs]]


# Of a deal to many processes with more runs nothing is kept for the next save.
_KEPT_RUNS = 2**20


class WriteTask:
    """The chunks that this process writes in a save: the bytes of the leaves (`data`),
    and the files to which chunks are dealt out (`deal`). A `LayoutWriter` does it.

    Writing takes at most `max_bytes` of memory. A file has at most `max_file_bytes`,
    unless one chunk has more. So many `requests` read parts of lazy leaves at a time.
    `has_planned_places`: the spec and the deal alone say where each chunk lies, and
    that is kept for the next save.
    """

    def __init__(
        self,
        data: LeafBytes,
        processes: Processes,
        max_bytes: int,
        max_file_bytes: int = _assign.MAX_FILE,
        linked: LinkedFiles = NOTHING,
        requests: int = 1,
    ):
        self.data, self.leaves, self.spec = data, data.leaves, data.spec
        self.linked = linked
        self.process, self.count = processes.index, processes.count
        self.max_bytes, self.max_file_bytes = max_bytes, max_file_bytes
        self.requests = requests
        there: dict[int, list[range]] = {}
        for leaf_index, run, digests in linked.digests:
            there.setdefault(leaf_index, []).append(run)
            self.data.put_digests(leaf_index, run, digests)
            grid = self.data.grids[leaf_index]
            data.advance(len(run) * grid.full, run.stop == len(grid.keys))
        count = processes.count
        if there or linked.same:
            owners = [leaf.owners for leaf in data.leaves]
            some = _dealt_leaves(self.spec, owners, there)
            self.deal = Deal(_assign.deal(some, count, max_file_bytes, linked.same))
            self.has_planned_places = False
        else:
            owners = _owners_of(data.leaves) if count > 1 else ((), ())
            self.deal = deal = deal_by_spec(self.spec, owners, count, max_file_bytes)
            # Where compressed chunks lie follows from their bytes.
            is_kept = count == 1 or sum(len(x) for _, x in deal.files) <= _KEPT_RUNS
            self.has_planned_places = is_kept and not self.spec.is_compressed

    def threads(self, file: int = 0) -> int:
        """Number of threads that may write, each of which holds a file of so many
        bytes."""
        copies = _payload.COPIES * self.spec.largest_chunk + _FAR_COPIES * file
        # The other half is for files that are on their way.
        max_bytes = self.max_bytes // 2 if file else self.max_bytes
        return min(8, max(1, max_bytes // copies))

    def files_of(self, process: int) -> list[tuple[int, _assign.Runs]]:
        """The files that a process writes: their numbers, and the runs in each."""
        files = enumerate(self.deal.files, len(self.linked.files))
        return [(number, runs) for number, (who, runs) in files if who == process]

    def account(self, files: RunsOfFiles) -> bytes:
        """An account of what this process has written, for process 0: its note, as
        `_notes` writes it."""
        ends = [run.ends for file in files for run in file]
        digests = self.data.digest_table[self._digests_of(self.process)].tobytes()
        return json.dumps([ends, digests.hex()]).encode()

    def take(self, process: int, account: bytes) -> Ends:
        """Reads the `account` of another process: puts the digests in their places, and
        returns the ends of its compressed chunks.

        **Raises:** `ValueError` if it is not of this save.
        """
        ends, text = json.loads(account)
        digests = np.frombuffer(bytes.fromhex(text), np.uint8)
        numbers = self._digests_of(process)
        if digests.size != len(numbers) * _digests.SIZE:
            raise ValueError("it has written something else than was planned")
        self.data.digest_table[numbers] = digests.reshape(-1, _digests.SIZE)
        return ends

    def _digests_of(self, process: int) -> np.ndarray:
        """The numbers of the digests of what a process writes."""
        if not self.has_planned_places:
            runs = [run for _, file in self.files_of(process) for run in file]
            return digest_numbers(self.spec, runs)
        # Process 0 takes those of all others.
        which = range(self.count) if self.process == 0 else range(process, process + 1)
        return _digests_of_deal(self.spec, self.deal, which)[process - which.start]


# For each leaf the number of its list of owners, or -1 if process 0 writes it; and the
# lists, each once.
_OwnersOfLeaves = tuple[tuple[int, ...], tuple[tuple[tuple[range, int], ...], ...]]


def _owners_of(leaves: Iterable[PlannedLeaf]) -> _OwnersOfLeaves:
    own = [leaf.owners for leaf in leaves]
    # Leaves that are alike share one list.
    some = {id(x): x for x in own if x is not None}
    numbers = dict(zip(some, range(len(some))))
    of_leaves = tuple(numbers.get(id(x), -1) for x in own)
    return of_leaves, tuple(map(tuple, some.values()))


@_tree_spec.remembered
def deal_by_spec(
    spec: TreeSpec, owners: _OwnersOfLeaves, count: int, max_file_bytes: int
) -> Deal:
    """The files that so many processes write of all leaves."""
    of_leaves, some = owners
    known = [*map(list, some), None]  # -1 is the last of these.
    own = map(known.__getitem__, of_leaves)
    return Deal(_assign.deal(_dealt_leaves(spec, own, {}), count, max_file_bytes))


@_tree_spec.remembered
def _digests_of_deal(spec: TreeSpec, deal: Deal, which: range) -> list[np.ndarray]:
    """The numbers of the digests of what each of some processes writes."""
    own: list[_assign.Runs] = [[] for _ in which]
    for process, runs in deal.files:
        if process in which:
            own[process - which.start] += runs
    return [digest_numbers(spec, runs) for runs in own]


def digest_numbers(spec: TreeSpec, runs: Iterable[Any]) -> np.ndarray:
    """The numbers of the digests of runs, each of a leaf and chunks of it."""
    firsts, grids = spec.first_digests, spec.grids
    out: list[int] = []
    for leaf_index, run, *_ in runs:
        first, blocks = firsts[leaf_index], grids[leaf_index].blocks
        out += range(first + blocks[run.start], first + blocks[run.stop])
    return np.asarray(out, np.int64)


def _dealt_leaves(
    spec: TreeSpec,
    owners: Iterable[_assign.Owners | None],
    there: Mapping[int, list[range]],
) -> list[_assign.DealtLeaf]:
    """The leaves to be written, but for the runs of chunks that are `there`."""
    # Those of most leaves are of their template.
    kinds = [
        _assign.DealtLeaf(len(grid.keys), grid.full, [(range(len(grid.keys)), 0)])
        for grid in spec.template_grids
    ]
    leaves = list(map(kinds.__getitem__, spec.template_of))
    rest: dict[int, _assign.Owners] = {p: own for p, own in enumerate(owners) if own}
    for leaf_index, runs in there.items():
        between = _between(runs, leaves[leaf_index].chunks)
        rest[leaf_index] = [(run, 0) for run in between]
    rest |= dict.fromkeys(dict(spec.aliases), [])
    for leaf_index, own in rest.items():
        leaves[leaf_index] = leaves[leaf_index]._replace(owners=own)
    return leaves


def _between(runs: list[range], count: int) -> list[range]:
    """The runs of `count` chunks that are not among these."""
    starts = [0, *(run.stop for run in sorted(runs, key=lambda run: run.start))]
    stops = [*sorted(run.start for run in runs), count]
    return [range(a, b) for a, b in zip(starts, stops) if a < b]


@dataclasses.dataclass(frozen=True, eq=False)
class DataFiles:
    """The data files of a save, and where its leaves lie in them."""

    files: list[str]
    placement: Placement


class Written(NamedTuple):
    """Where the layout put the leaves, the digests of the pages of the file of digests,
    and those of what else it wrote. `manifest` is that of the database, and `side` are
    files at the root for other readers. `has_planned_places`: whether each save of the
    spec puts the leaves there."""

    placed: DataFiles
    digests: str
    others: dict[str, str]
    manifest: bytes = b""
    side: dict[str, bytes] = {}
    has_planned_places: bool = False


@runtime_checkable
class LayoutWriter(Protocol):
    """The functions that write a layout: those of `_to_ocdbt` and `_to_zarr`."""

    def write(self, task: WriteTask, into: Destination[Any], /) -> RunsOfFiles:
        """Writes the chunks of this process."""
        ...

    def files_of_process(
        self, task: WriteTask, process: int, ends: Ends, into: Destination[Any], /
    ) -> RunsOfFiles:
        """In process 0: the files that another process has written."""
        ...

    def finish(
        self, task: WriteTask, files: RunsOfFiles, into: Destination[Any], /
    ) -> Written:
        """In process 0: writes what belongs to no process, such as the digests."""
        ...

    def upper_bound(
        self,
        leaves: Sequence[PlannedLeaf],
        spec: TreeSpec,
        processes: int,
        is_linked: bool,
        /,
    ) -> Written:
        """At least as large in an index as that of the save will be."""
        ...
