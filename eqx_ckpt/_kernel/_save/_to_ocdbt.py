"""`layout="ocdbt"`: the chunks of all leaves in a few files, and a database whose
values lie in them. See FORMAT.md.
"""

import collections
import dataclasses
import functools as ft
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._format import _index, _ocdbt, _placement, _template
from .._format._ocdbt import Entries
from .._format._placement import Placement
from .._runtime import _log, _threads
from .._storage import _arrays
from .._storage._backend import Backend
from . import _assign, _streams, _tree_spec, _writing
from ._payload import PlannedLeaf
from ._streams import Batch
from ._tree_spec import TreeSpec
from ._writing import (
    ChunkRun,
    DataFiles,
    Deal,
    Destination,
    Ends,
    RunsOfFiles,
    Sink,
    WriteTask,
    Written,
)


# What is linked from another save may be dealt out in another way: so many lanes,
# patterns and begins may come of it.
_LINKED = 256


def write(task: WriteTask, into: Destination[Sink]) -> RunsOfFiles:
    """Writes the data files of this process, one job for each, on a few threads. Each
    is named by its number."""
    spec, files = task.spec, task.files_of(task.process)
    batches: Sequence[Iterable[Batch]]
    if task.has_planned_places:
        batches = _batches_of_files(spec, task.deal, task.process)
    else:
        batches = [_streams.batches(spec, lay_runs(spec, runs)) for _, runs in files]
    # What is sent is held in memory.
    threads = task.threads(task.max_file_bytes if into.outbox is not None else 0)
    requests = task.requests // max(1, min(threads, len(files)))
    # Where a compressed chunk begins is known once the one before it is written.
    requests = 1 if spec.is_compressed else requests
    write_file = ft.partial(_streams.write_file, task.data, into)
    jobs = [
        ft.partial(write_file, f"{into.data_key}/{number}", own, requests)
        for (number, _), own in zip(files, batches)
    ]
    return _threads.gather(
        jobs,
        threads,
        # Chunks are encoded by threads of TensorStore, for which these wait.
        waiting=into.work.has_slow_writes or spec.is_compressed or task.requests > 1,
    )


@_tree_spec.remembered
def _batches_of_files(spec: TreeSpec, deal: Deal, process: int) -> list[list[Batch]]:
    """The batches of each file that a process writes. Nothing is compressed, so they
    are known before anything is written."""
    own = [runs for who, runs in deal.files if who == process]
    return [list(_streams.batches(spec, lay_runs(spec, runs))) for runs in own]


def lay_runs(
    spec: TreeSpec, runs: _assign.Runs, ends: Ends | None = None
) -> Iterator[ChunkRun]:
    """Where the runs of a file lie in it. A caller that takes a compressed run fills
    its `ends` before it takes the next one, which begins where they stop."""
    templates = [(t.full, t.codec is None) for t in spec.templates]
    at = 0
    for i, (leaf, chunks) in enumerate(runs):
        full, is_as_it_is = templates[spec.template_of[leaf]]
        # A run without bytes is not aligned: its padding might end the file.
        offset = _placement.aligned(at) if chunks else at
        if is_as_it_is:
            yield ChunkRun(leaf, chunks, offset, None)
            at = offset + len(chunks) * full
        else:
            own = [] if ends is None else ends[i]
            yield (run := ChunkRun(leaf, chunks, offset, own))
            at = run.stop(full)


@dataclasses.dataclass(frozen=True)
class PlainRuns:
    """The runs of a file in which nothing is compressed. There may be millions of them,
    so they are worked out anew whenever they are looked at."""

    spec: TreeSpec
    runs: _assign.Runs

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[ChunkRun]:
        return lay_runs(self.spec, self.runs)

    def __contains__(self, run: object) -> bool:
        return any(run == other for other in self)


def files_of_process(
    task: WriteTask, process: int, ends: Ends, into: Destination[Backend]
) -> RunsOfFiles:
    """The files that another process has written.

    **Raises:** `ValueError` unless they are there, and whole.
    """
    files: RunsOfFiles = []
    rest = iter(ends)
    for number, runs in task.files_of(process):
        own = list(itertools.islice(rest, len(runs)))
        if len(own) < len(runs):
            raise ValueError("it has written something else than was planned")
        if task.spec.is_compressed:
            files.append(list(lay_runs(task.spec, runs, own)))
        else:
            files.append(PlainRuns(task.spec, runs))
        if task.has_planned_places:
            stop = _stops(task.spec, task.deal)[number]
        else:
            stop = _stop(task.spec, files[-1])
        into.work.check_range(f"{into.data_key}/{number}", stop)
    return files


def finish(task: WriteTask, files: RunsOfFiles, into: Destination[Sink]) -> Written:
    """Writes the rest of a save whose data files are all there: the database, if it is
    to have one, and the digests."""
    spec = task.spec
    if task.has_planned_places:
        placed, pages, database = _place_by_spec(spec, task.deal)
    else:
        placed, pages, database = _place_runs(spec, [*task.linked.files, *files])
    others: dict[str, bytes] = {}
    manifest = b""
    if database is None:
        _log.say(
            _log.WARNING,
            f"A save has {spec.chunk_count} chunks, and so none of the files with "
            "which other libraries read it: it is read by this one",
        )
    else:
        others[f"{into.data_key}/tree"], top = database
        manifest = _ocdbt.manifest(top, "tree")
        others[f"{into.data_key}/manifest.ocdbt"] = manifest
    for key, value in others.items():
        into.write(key, [value])
    digests = [task.data.digest_table[page].tobytes() for page in pages]
    into.write(f"{into.data_key}/digests", digests)
    own = dict(zip(others, map(_index.digest, others.values())))
    text, is_planned = "".join(map(_index.digest, digests)), task.has_planned_places
    return Written(placed, text, own, manifest, has_planned_places=is_planned)


class _Placed(NamedTuple):
    """Where the leaves lie; for each data file, the numbers of its digests, which are a
    page of the file of digests; and the database, if there is one: its zarr.json files
    and nodes, and its root."""

    files: DataFiles
    pages: list[np.ndarray]
    database: tuple[bytes, _ocdbt.Subtree] | None


def _place_runs(spec: TreeSpec, files: RunsOfFiles) -> _Placed:
    names = list(map(str, range(len(files))))
    placed = DataFiles(names, placement_of(spec, files))
    pages = [_writing.digest_numbers(spec, runs) for runs in files]
    if not spec.has_database:
        return _Placed(placed, pages, None)
    entries, blobs = _entries(spec, files)
    nodes, top = _ocdbt.tree(entries, [*names, "tree"], "tree", len(blobs))
    return _Placed(placed, pages, (blobs + nodes, top))


@_tree_spec.remembered
def _place_by_spec(spec: TreeSpec, deal: Deal) -> _Placed:
    """Places runs as `_place_runs` does, for a save whose spec says where each chunk
    lies. The result is kept with the spec."""
    files: RunsOfFiles = [
        [run for batch in batches for run in batch.runs]
        for batches in _batches_of_files(spec, deal, 0)
    ]
    files += [PlainRuns(spec, runs) for who, runs in deal.files if who > 0]
    return _place_runs(spec, files)


@_tree_spec.remembered
def _stops(spec: TreeSpec, deal: Deal) -> list[int]:
    """The bytes of each file of a save in which nothing is compressed."""
    return [_stop(spec, PlainRuns(spec, runs)) for _, runs in deal.files]


def _stop(spec: TreeSpec, runs: Iterable[ChunkRun]) -> int:
    """The bytes of a file with these runs: where the last one ends."""
    (last,) = collections.deque(runs, maxlen=1)
    return last.stop(spec.grids[last.leaf].full)


def placement_of(spec: TreeSpec, files: RunsOfFiles) -> Placement:
    """The placement of the runs in these files: a rule that gives the place of each
    chunk, and takes less room in an index than a row for each."""
    # There may be millions of runs: objects are made of those of one file at a time.
    rows, sizes = [np.zeros((5, 0), np.int64)], []
    for runs in map(list, files):
        row = (
            [x.leaf for x in runs],
            [x.chunks.start for x in runs],
            [x.chunks.stop for x in runs],
            [x.offset for x in runs],
            [x.stop(spec.grids[x.leaf].full) - x.offset for x in runs],
        )
        rows.append(np.asarray(row, np.int64))
        ends = [x.ends for x in runs if x.ends]
        sizes += [stop - start for x in ends for stop, start in zip(x, [0, *x])]
    table, counts = np.concatenate(rows, 1).T, np.asarray(list(map(len, files)))
    return _placement.place(table, counts, len(spec.names), np.asarray(sizes, int))


def _entries(spec: TreeSpec, files: RunsOfFiles) -> tuple[Entries, bytes]:
    """The entries of the database, by their keys; and the zarr.json files, one of each
    template, which lie in a file after the data files."""
    blobs = [_arrays.zarr_json(t._replace(keys="")) for t in spec.templates]
    sizes = list(map(len, blobs))
    starts = list(itertools.accumulate(sizes, initial=0))
    names = [name.encode() + b"/" for name in spec.names]
    chunks = [[key.encode() for key in grid.keys] for grid in spec.template_grids]
    of, rows = spec.template_of, list[tuple[bytes, int, int, int]]()
    for name, number in zip(names, of):
        rows.append((name + b"zarr.json", len(files), starts[number], sizes[number]))
    # Of each leaf whose bytes are stored, those that share them.
    sharing: dict[int, list[int]] = {}
    for leaf, origin in spec.aliases:
        sharing.setdefault(origin, []).append(leaf)
    for file, runs in enumerate(files):
        for run in runs:
            full, keys = spec.template_grids[of[run.leaf]].full, chunks[of[run.leaf]]
            for leaf in (run.leaf, *sharing.get(run.leaf, ())):
                for number in run.chunks:
                    start, size = run.extent(number, full)
                    rows.append((names[leaf] + keys[number], file, start, size))
    columns = map(list, zip(*sorted(rows)))
    return Entries(*columns), b"".join(blobs)


def upper_bound(
    leaves: Sequence[PlannedLeaf], spec: TreeSpec, processes: int, is_linked: bool
) -> Written:
    """**Raises:** `ValueError` for more runs of chunks than are read."""
    own = zip(spec.templates, spec.counts)
    total = sum((t.chunk_count * t.full + _placement.ALIGN) * n for t, n in own)
    files = _assign.most_files(total, processes, _writing.FAR_FILE)
    names = [str(n) for n in range(min(files, spec.chunk_count + len(leaves)))]
    lanes = processes + _LINKED if is_linked or processes > 1 else 1
    base = f"d/{'0' * 16}"
    keys = (f"{base}/tree", f"{base}/manifest.ocdbt") if spec.has_database else ()
    return Written(
        placed=DataFiles(names, _longest(leaves, len(names), total, lanes)),
        digests="0" * 32 * len(names),
        others=dict.fromkeys(keys, "0" * 32),
    )


def _longest(
    leaves: Sequence[PlannedLeaf], files: int, total: int, lanes: int
) -> Placement:
    """The largest placement that a save of these leaves may have, in so many `files`
    and `lanes`, of `total` bytes. **Raises:** `ValueError` for too many runs."""
    distinct: dict[int, _assign.Owners] = {}
    runs, sizes, nobody = 0, [], [(range(0), 0)]
    for leaf in leaves:
        if leaf.alias is None:
            owners = leaf.owners or nobody
            distinct[id(owners)] = owners
            runs += len(owners)
            if leaf.template.codec:
                most = _template.most_encoded(leaf.template.full)
                sizes += [most] * leaf.template.chunk_count
    if runs > _placement.MAX_RUNS:
        raise ValueError(
            f"it has {runs} runs of chunks that different processes write, and "
            f"{_placement.MAX_RUNS} are read at most"
        )
    rows = [[(len(run), who) for run, who in owners] for owners in distinct.values()]
    known = dict.fromkeys(map(tuple, rows))
    more = _LINKED if lanes > 1 else 0
    rows = [*itertools.chain(*known), *[(_template.MAX_CHUNKS, lanes)] * more]
    # The largest lane, leaf, chunk, file and place of a run.
    last = total - total % _placement.ALIGN
    begin = lanes, len(leaves), _template.MAX_CHUNKS, files, last
    return Placement(
        patterns=np.asarray(rows),
        # Of one pattern nothing is said.
        pattern=np.full(len(leaves) if more else 0, len(known) + more),
        begins=np.tile(np.asarray(begin), (files + more, 1)),
        sizes=np.asarray(sizes, np.int64),
    )
