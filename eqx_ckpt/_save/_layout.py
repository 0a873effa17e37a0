"""The two layouts: which files a save is made of, and the writing of them."""

import functools as ft
import itertools
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._format import _digests, _files, _grid, _index, _ocdbt, _template
from .._format._grid import Grid
from .._format._template import Template
from .._runtime import _threads
from .._runtime._progress import Advance
from .._storage import _arrays
from .._storage._backend import Backend, Sink
from .._tree import _leaf
from . import _assign
from ._assign import Owners
from ._options import Options


# Every leaf starts at a multiple of this in its file, which is what a memory-mapped
# read into aligned memory is fastest from.
_ALIGN = 64
# To an object store a file is sent whole, from memory, of which it takes twice as much.
_FAR_FILE, _FAR_COPIES = 64 * 2**20, 2
# Chunks of the layouts, in bytes: one block of digests, and few files.
_CHUNK = {"ocdbt": _grid.BLOCK, "zarr": 32 * 2**20}
# Leaves of fewer bytes are not compressed: they are read in runs, as they lie.
_MIN_COMPRESSED = 1 << 16

# Chunks that a thread may hold copies of: some on their way from a device, and the one
# that is written as it was, padded and compressed.
_COPIES = _leaf.PREFETCH + 4


class Leaf(NamedTuple):
    """A leaf to be written. `number` is that of its template among those of the save,
    `alias` the place of the leaf whose bytes it shares. `owners` are the processes that
    write its chunks; without them it is process 0."""

    name: str
    value: Any
    template: Template
    number: int
    alias: int | None
    owners: Owners | None = None


class Small(NamedTuple):
    """The value of a leaf of one block: its bytes, and their digest."""

    data: np.ndarray
    digest: bytes


_SMALL = 1 << 16


def prepare(leaf: Leaf) -> Leaf:
    """A leaf with most of the work of writing it done, if it is small."""
    t = leaf.template
    if t.chunk != t.shape or t.nbytes > _SMALL or leaf.owners is not None:
        return leaf
    if isinstance(leaf.value, _leaf.Unread):
        return leaf
    data = whole(leaf)
    return leaf._replace(value=Small(data, xxhash.xxh3_128_digest(data)))


class Written(NamedTuple):
    """Where the layout put the leaves: columns of the index, the digest of the file of
    digests, the digests of what else it wrote, and the files at the root that other
    readers need."""

    files: list[str]
    file: list[int]
    offset: list[int]
    splits: list[tuple[int, int, int, int]]
    sizes: dict[int, list[int]]
    digests: str
    others: dict[str, str]
    side: dict[str, bytes]


def chunk_shape(
    name: str,
    template: Template,
    options: Options,
    shard: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The chunks of a leaf: as the `chunks` keyword says, else by size, and within its
    shards if it has some."""
    shape, itemsize = template.shape, template.itemsize
    chunks = options.chunks
    if not callable(chunks):
        least = -(-template.nbytes * 2 // _template.MAX_CHUNKS)
        target = (
            max(_CHUNK[options.layout], least) if chunks is None else _bytes(chunks)
        )
        if shard is None:
            chunk = _grid.choose(shape, itemsize, target)
        else:
            chunk = _grid.choose_sharded(shape, shard, itemsize, target)
        return _few(name, template, chunk)
    given = chunks(name, shape, _template.dtype_of(template.stored))
    if given is None:
        return chunk_shape(name, template, options._replace(chunks=None), shard)
    try:
        out = tuple(map(operator.index, given))
    except TypeError:
        out = (0,)
    if len(out) != len(shape) or any(n < 1 for n in out):
        raise ValueError(
            f"`chunks` gave {given!r} for the leaf `{name}` of shape {shape}: it must "
            "give one positive length for each axis, or None."
        )
    chunk = tuple(min(n, max(1, length)) for n, length in zip(out, shape))
    return _few(name, template, chunk)


def _bytes(chunks: Any) -> int:
    try:
        count = operator.index(chunks)
    except TypeError:
        raise TypeError(
            f"`chunks` must be a number of bytes, a function, or None, not {chunks!r}."
        ) from None
    if count < 1 or isinstance(chunks, bool):
        raise ValueError(f"`chunks` must be a positive number of bytes: {chunks}.")
    return count


def _few(name: str, template: Template, chunk: tuple[int, ...]) -> tuple[int, ...]:
    count = template._replace(chunk=chunk).chunk_count
    if count > _template.MAX_CHUNKS:
        raise ValueError(
            f"The leaf `{name}` would have {count} chunks of shape {chunk}, and at "
            f"most {_template.MAX_CHUNKS} can be read. Pass larger `chunks`."
        )
    return chunk


def codec_of(template: Template, compression: str | None) -> str | None:
    """The codec of a leaf, as the `compression` keyword says."""
    return compression if template.nbytes > _MIN_COMPRESSED else None


class _Data:
    """The bytes of the leaves of a save, chunk by chunk; it digests all that it gives.

    Chunks may be asked for in any order, and by several threads.
    """

    def __init__(self, leaves: Sequence[Leaf], advance: Advance):
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

    def threads(self, max_bytes: int, file: int = 0) -> int:
        """How many threads may write: each holds copies of a few chunks, where what is
        stored is not how the leaf lies in memory, and of `file` bytes of a file."""
        chunk = max(grid.full for grid in self.grids)
        return min(8, max(1, max_bytes // (_COPIES * chunk + _FAR_COPIES * file)))

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
        leaf, grid, first = self._leaves[place], self.grids[place], self._first[place]
        t = leaf.template
        encode = None if t.codec is None else _arrays.encoder(t)
        if t.chunk == t.shape:
            data = self.whole(place)
            yield data if encode is None else encode(data)
            return
        regions = grid.regions[numbers.start : numbers.stop]
        parts = _leaf.to_host_by_regions(leaf.value, t, regions)
        for number, part in zip(numbers, parts):
            data = _digests.as_bytes(part)
            self._digest(first + grid.blocks[number], data)
            if data.nbytes != grid.full:
                data = _padded(part, t.chunk)
            yield data if encode is None else encode(data)
            self._advance(part.nbytes, number + 1 == len(grid.keys))

    def whole(self, place: int) -> np.ndarray:
        """The bytes of a leaf of one chunk."""
        leaf = self._leaves[place]
        self._advance(self.grids[place].full, 1)
        if isinstance(leaf.value, Small):
            self._rows[self._first[place]] = leaf.value.digest
            return leaf.value.data
        data = whole(leaf)
        self._digest(self._first[place], data)
        return data

    def _digest(self, row: int, data: np.ndarray) -> None:
        for digest in _digests.block_digests(data):
            self._rows[row] = digest
            row += 1


def whole(leaf: Leaf) -> Any:
    """The bytes of a leaf."""
    if isinstance(leaf.value, Small):
        return leaf.value.data
    return _leaf.to_host(leaf.value, leaf.template).reshape(-1).view(np.uint8)


def _padded(part: np.ndarray, chunk: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(chunk, part.dtype)
    out[tuple(map(slice, part.shape))] = part
    return _digests.as_bytes(out)


# ---- layout="ocdbt".


class Piece(NamedTuple):
    """A run of chunks of a leaf, one after the other in a file from `offset` on. Where
    they are compressed, `ends` are their ends, as offsets from there."""

    place: int
    numbers: range
    offset: int
    ends: list[int] | None

    def find(self, number: int, full: int) -> tuple[int, int]:
        """The offset and the length of a chunk."""
        i = number - self.numbers.start
        if self.ends is None:
            return self.offset + i * full, full
        start = self.ends[i - 1] if i else 0
        return self.offset + start, self.ends[i] - start


class Kept(NamedTuple):
    """Data files of another save that are in this one too, as its first: the runs in
    each; the digests of those. And leaves that have not changed since that save."""

    files: list[list[Piece]]
    digests: list[tuple[int, range, bytes]]
    same: frozenset[int]


NOTHING = Kept([], [], frozenset())


class Part(NamedTuple):
    """What one process has written: the ends of compressed chunks in each of its runs,
    in the order of the deal, and the digests of its chunks."""

    ends: list[list[int] | None]
    digests: bytes

    def encode(self) -> bytes:
        return json.dumps([self.ends, self.digests.hex()]).encode()

    @staticmethod
    def decode(data: bytes) -> "Part":
        ends, digests = json.loads(data)
        return Part(ends, bytes.fromhex(digests))


class Save:
    """The writing of the leaves of one save: each process its own part of it."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        processes: int,
        most: int | None,
        advance: Advance,
        kept: Kept = NOTHING,
    ):
        self.most = most  # bytes in a file, where it is sent from memory
        self.leaves = leaves
        self.data = _Data(leaves, advance)
        self.kept = kept
        there: dict[int, list[range]] = {}
        for place, run, digests in kept.digests:
            there.setdefault(place, []).append(run)
            self.data.put_rows(place, run, digests)
            grid = self.data.grids[place]
            advance(len(run) * grid.full, run.stop == len(grid.keys))
        works = [
            self._work(leaf, grid, there.get(place))
            for place, (leaf, grid) in enumerate(zip(leaves, self.data.grids))
        ]
        limit = {} if most is None else {"most": most}
        self.deal = _assign.deal(works, processes, apart=kept.same, **limit)

    def _work(self, leaf: Leaf, grid: Grid, there: list[range] | None) -> _assign.Work:
        count = len(grid.keys)
        owners = leaf.owners or [(range(count), 0)]
        if leaf.alias is not None:
            owners = []
        elif there is not None:
            owners = [(run, 0) for run in _between(there, count)]
        return _assign.Work(count, grid.full, owners)

    def own(self, process: int) -> list[tuple[int, list[tuple[int, range]]]]:
        """The files that a process writes: their numbers, and the runs in each."""
        deal, first = self.deal, len(self.kept.files)
        return [
            (first + i, f) for i, f in enumerate(deal.files) if deal.owner[i] == process
        ]

    def part(self, process: int, ends: Mapping[tuple[int, int], list[int]]) -> Part:
        """What a process has written; `ends` by leaf and first chunk."""
        runs = [run for _, file in self.own(process) for run in file]
        digests = b"".join(self.data.rows(*run) for run in runs)
        return Part([ends.get((place, run.start)) for place, run in runs], digests)

    def take(self, process: int, part: Part) -> dict[tuple[int, int], list[int]]:
        """The inverse of `part`: the digests are put in their places.

        **Raises:** `ValueError` if it is not a part of this save.
        """
        runs = [run for _, file in self.own(process) for run in file]
        if len(part.ends) != len(runs):
            raise ValueError("it has written something else than was planned")
        digests = memoryview(part.digests)
        for place, run in runs:
            digests = self.data.put_rows(place, run, digests)
        if digests:
            raise ValueError("it has written something else than was planned")
        return {
            (place, run.start): ends
            for (place, run), ends in zip(runs, part.ends)
            if ends is not None
        }


def most_in_file(root: Backend, max_bytes: int) -> int | None:
    """How many bytes may be in a data file below a root (None: many)."""
    if not root.is_far:
        return None
    return min(_FAR_FILE, max_bytes // (2 * _FAR_COPIES))


def _between(runs: list[range], count: int) -> list[range]:
    """The runs of `count` chunks that are not among these."""
    starts = [0, *(run.stop for run in sorted(runs, key=lambda run: run.start))]
    stops = [*sorted(run.start for run in runs), count]
    return [range(a, b) for a, b in zip(starts, stops) if a < b]


Ends = dict[tuple[int, int], list[int]]


def write_ocdbt(
    save: Save, process: int, root: Sink, base: str, sync: bool, max_bytes: int
) -> Ends:
    """Writes the data files of a process below `d/<save>/`. See FORMAT.md,
    "layout="ocdbt""."""
    data, leaves = save.data, save.leaves
    found: Ends = {}

    def buffers(runs: list[tuple[int, range]]) -> Iterator[Any]:
        end = 0
        for place, numbers in runs:
            offset = _start(end, numbers)
            if offset != end:
                yield bytes(offset - end)
            t = leaves[place].template
            end = offset + len(numbers) * data.grids[place].full
            if t.codec is None and t.chunk == t.shape:
                yield data.whole(place)
            elif t.codec is None:
                yield from data.chunks(place, numbers)
            else:
                ends = found[place, numbers.start] = []
                end = offset
                for chunk in data.chunks(place, numbers):
                    yield chunk
                    end += len(chunk)
                    ends.append(end - offset)

    _threads.gather(
        [
            ft.partial(root.write, f"{base}/{number}", buffers(runs), sync)
            for number, runs in save.own(process)
        ],
        data.threads(max_bytes, save.most or 0),
        waiting=root.is_far,
    )
    return found


def longest(leaves: Sequence[Leaf], layout: str, processes: int) -> Written:
    """What takes as much of an index as what will be written of leaves, or more."""
    if layout == "zarr":
        return Written([], [], [], [], {}, "0" * 32, {}, {})
    own = [(i, x.template, x.owners) for i, x in enumerate(leaves) if x.alias is None]
    counts = [t.chunk_count for _, t, _ in own]
    total = sum(count * t.full + _ALIGN for count, (_, t, _) in zip(counts, own))
    files = min(_assign.most_files(total, processes, _FAR_FILE), sum(counts) + len(own))
    # Wherever one file ends and another begins, and one process and another.
    splits = files + sum(len(owners) - 1 for _, _, owners in own if owners)
    last = len(leaves), max(counts, default=0), files, total
    sizes = {
        place: [_template.most_encoded(t.full)] * count
        for count, (place, t, _) in zip(counts, own)
        if t.codec is not None
    }
    return Written(
        files=[str(number) for number in range(files)],
        file=[files] * len(leaves),
        offset=[total] * len(leaves),
        splits=[last] * min(splits, sum(counts)),
        sizes=sizes,
        digests="0" * 32,
        others={f"d/{'0' * 16}/{key}": "0" * 32 for key in ("tree", "manifest.ocdbt")},
        side={"manifest.ocdbt": b""},
    )


def finish_ocdbt(save: Save, ends: Ends, root: Sink, base: str, sync: bool) -> Written:
    """Writes the rest of a save whose data files are all there: a database of its own,
    whose values lie in them."""
    data, leaves = save.data, save.leaves
    new = [_pieces(runs, leaves, data.grids, ends) for runs in save.deal.files]
    packed = [*save.kept.files, *new]
    files = [str(number) for number in range(len(packed))]
    entries, blobs, file, offset = _entries(leaves, data.grids, packed)
    nodes, top = _ocdbt.tree(entries, [*files, "tree"], "tree", len(blobs))
    own = {
        f"{base}/tree": blobs + nodes,
        f"{base}/manifest.ocdbt": _ocdbt.manifest(top, "tree"),
    }
    for key, value in own.items():
        root.write(key, [value], sync)
    others = {key: _index.digest(value) for key, value in own.items()}
    digests = data.digests()
    root.write(f"{base}/digests", [digests], sync)
    splits = [
        (piece.place, piece.numbers.start, number, piece.offset)
        for number, pieces in enumerate(packed)
        for piece in pieces
        if piece.numbers.start > 0
    ]
    sizes: dict[int, list[int]] = {}
    for place, numbers, _, stops in sorted(itertools.chain(*packed), key=_by_chunk):
        if stops is not None:
            steps = zip(stops, [0, *stops])
            sizes.setdefault(place, []).extend(stop - start for stop, start in steps)
    # The same database from the root of the checkpoint.
    side = {"manifest.ocdbt": _ocdbt.manifest(top, "tree", base + "/")}
    digest = _index.digest(digests)
    return Written(files, file, offset, splits, sizes, digest, others, side)


def _pieces(
    runs: list[tuple[int, range]],
    leaves: Sequence[Leaf],
    grids: Sequence[Grid],
    ends: Ends,
) -> list[Piece]:
    """Where the runs of a file lie in it."""
    out = []
    end = 0
    for place, numbers in runs:
        offset = _start(end, numbers)
        own = None
        if leaves[place].template.codec is not None:
            own = ends[place, numbers.start]
        out.append(Piece(place, numbers, offset, own))
        end = offset + (own[-1] if own else len(numbers) * grids[place].full)
    return out


def _start(end: int, numbers: range) -> int:
    """Where a run starts that follows what ends at `end`. What has no bytes needs no
    padding, which nothing might follow."""
    return -(-end // _ALIGN) * _ALIGN if numbers else end


def _by_chunk(piece: Piece) -> tuple[int, int]:
    return piece.place, piece.numbers.start


def _entries(
    leaves: Sequence[Leaf], grids: Sequence[Grid], packed: list[list[Piece]]
) -> tuple[_ocdbt.Entries, bytes, list[int], list[int]]:
    """The keys of the database, the zarr.json files, and where each leaf starts."""
    runs: list[list[tuple[int, Piece]]] = [[] for _ in leaves]
    for number, pieces in enumerate(packed):
        for piece in pieces:
            runs[piece.place].append((number, piece))
    for run in runs:
        run.sort(key=lambda r: r[1].numbers.start)
    file, offset = [0] * len(leaves), [0] * len(leaves)
    for place, leaf in enumerate(leaves):
        if leaf.alias is not None:
            runs[place] = runs[leaf.alias]
        file[place], offset[place] = runs[place][0][0], runs[place][0][1].offset
    blobs: list[bytes] = []
    blob_of: dict[int, tuple[int, int]] = {}
    end = 0
    for leaf in leaves:
        if leaf.number not in blob_of:
            blob = _arrays.zarr_json(leaf.template)
            blob_of[leaf.number] = end, len(blob)
            blobs.append(blob)
            end += len(blob)
    # No name with a slash after it begins another one, so all keys of a leaf follow
    # each other, its chunks ("c...") before its zarr.json.
    names = [leaf.name.encode() + b"/" for leaf in leaves]
    suffixes = {id(g): [key.encode() for key in g.keys] for g in grids}
    tree = len(packed)
    entries = _ocdbt.Entries([], [], [], [])
    keys, files, offsets, lengths = entries
    for place in sorted(range(len(leaves)), key=names.__getitem__):
        name, grid, run = names[place], grids[place], runs[place]
        suffix = suffixes[id(grid)]
        number, piece = run[0]
        for i in grid.order:
            if i not in piece.numbers:
                number, piece = next(r for r in run if i in r[1].numbers)
            start, length = piece.find(i, grid.full)
            keys.append(name + suffix[i])
            files.append(number)
            offsets.append(start)
            lengths.append(length)
        keys.append(name + b"zarr.json")
        files.append(tree)
        start, length = blob_of[leaves[place].number]
        offsets.append(start)
        lengths.append(length)
    return entries, b"".join(blobs), file, offset


# ---- layout="zarr".


def write_zarr(
    save: Save, process: int, root: Backend, base: str, sync: bool, max_bytes: int
) -> Ends:
    """Writes the chunks of a process: a Zarr v3 array for each leaf, in a directory of
    its name."""
    data = save.data

    def write(place: int, numbers: range) -> None:
        parent = _files.directory(save.leaves[place].name)
        keys = [f"{parent}/{key}" for key in data.grids[place].keys]
        keys = keys[numbers.start : numbers.stop]
        parents = {key.rpartition("/")[0] for key in keys}
        root.make_directories(parents or [parent])
        for key, chunk in zip(keys, data.chunks(place, numbers)):
            root.write(key, [chunk], sync)
        if sync:
            # The directory of the leaf itself has more to come.
            below = {p[:at] for p in parents for at in _cuts(p)} - {parent}
            root.sync_directories(below)

    _threads.gather(
        [ft.partial(write, *run) for _, runs in save.own(process) for run in runs],
        data.threads(max_bytes),
        waiting=root.is_far,
    )
    return {}


def finish_zarr(
    save: Save, ends: Ends, root: Backend, base: str, sync: bool
) -> Written:
    """Writes the rest of a save whose chunks are all there."""

    def write(leaf: Leaf) -> None:
        parent = _files.directory(leaf.name)
        root.make_directories([parent])
        blob = _arrays.zarr_json(leaf.template)
        root.write(f"{parent}/zarr.json", [blob], sync)
        parents = set()
        if leaf.alias is not None:
            origin = _files.directory(save.leaves[leaf.alias].name)
            keys = save.data.grids[leaf.alias].keys
            parents = {f"{parent}/{key}".rpartition("/")[0] for key in keys}
            root.make_directories(parents)
            for key in keys:
                root.copy(f"{origin}/{key}", f"{parent}/{key}", sync)
        if sync:
            below = {p[:at] for p in parents for at in _cuts(p)} | {parent}
            root.sync_directories(below)

    jobs = [ft.partial(write, leaf) for leaf in save.leaves]
    _threads.gather(jobs, waiting=root.is_far)
    digests = save.data.digests()
    root.write(_files.DIGESTS, [digests], sync)
    return Written([], [], [], [], {}, _index.digest(digests), {}, {})


def check_files(
    save: Save, layout: str, process: int, ends: Ends, root: Backend, base: str
) -> None:
    """**Raises:** `ValueError` unless the files of a process are there, and whole."""
    grids = save.data.grids
    for number, runs in save.own(process):
        if layout == "ocdbt":
            last = _pieces(runs, save.leaves, grids, ends)[-1]
            start, length = last.find(last.numbers[-1], grids[last.place].full)
            root.check_range(f"{base}/{number}", start + length)
            continue
        for place, numbers in runs:
            parent = _files.directory(save.leaves[place].name)
            for key in grids[place].keys[numbers.start : numbers.stop]:
                root.check_range(f"{parent}/{key}", 1)


def _cuts(path: str) -> list[int]:
    """Where each of the directories that lead to `path` ends in it."""
    return [i for i, c in enumerate(path) if c == "/"] + [len(path)]


def check_case(names: Sequence[str], root: Backend) -> None:
    """**Raises:** `ValueError` if two directories would be one on this file system, or
    one cannot be."""
    seen: dict[str, str] = {}
    for name in names:
        if name.endswith(".__lock"):
            raise ValueError(
                f"The leaf `{name}` would have a directory that ends in `.__lock`, "
                'which TensorStore keeps for itself. Use `layout="ocdbt"`.'
            )
        other = seen.setdefault(_files.directory(name).casefold(), name)
        if other != name and root.folds_case():
            raise ValueError(
                f"The leaves `{other}` and `{name}` differ only by case, and the file "
                f'system of `{root}` takes them for one. Use `layout="ocdbt"`.'
            )
