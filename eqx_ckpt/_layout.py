"""The two layouts: which files a save is made of, and the writing of them."""

import functools as ft
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from . import _chunks, _index, _leaf, _ocdbt, _store
from ._chunks import Grid
from ._index import Template
from ._progress import Advance
from ._store import Root


# Every leaf starts at a multiple of this in its file, which is what a memory-mapped
# read into aligned memory is fastest from.
_ALIGN = 64
# Files are written side by side; more of them than this helps nobody.
_MIN_FILE, _MAX_FILE, _FILES = 64 * 2**20, 2 * 2**30, 32
# Chunks of the layouts, in bytes: one block of digests, and few files.
_CHUNK = {"ocdbt": _chunks.BLOCK, "zarr": 32 * 2**20}
# Leaves of fewer bytes are not compressed: they are read in runs, as they lie.
_MIN_COMPRESSED = 1 << 16

# Chunks that a thread may hold copies of: some on their way from a device, and the one
# that is written as it was, padded and compressed.
_COPIES = _leaf.PREFETCH + 4

Chunks = None | int | Callable[[str, tuple[int, ...], np.dtype], Any]


class Leaf(NamedTuple):
    """A leaf to be written. `number` is that of its template among those of the save,
    `alias` the place of the leaf whose bytes it shares."""

    name: str
    value: Any
    template: Template
    number: int
    alias: int | None


class Small(NamedTuple):
    """The value of a leaf of one block: its bytes, and their digest."""

    data: np.ndarray
    digest: bytes


_SMALL = 1 << 16


def prepare(leaf: Leaf) -> Leaf:
    """A leaf with most of the work of writing it done, if it is small."""
    t = leaf.template
    if t.chunk != t.shape or t.nbytes > _SMALL:
        return leaf
    data = _whole(leaf)
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
    name: str, template: Template, layout: str, chunks: Chunks
) -> tuple[int, ...]:
    """The chunks of a leaf: as the `chunks` keyword says, else by size."""
    shape, itemsize = template.shape, template.itemsize
    if chunks is None or isinstance(chunks, int):
        least = -(-template.nbytes * 2 // _index.MAX_CHUNKS)
        target = max(_CHUNK[layout], least) if chunks is None else chunks
        if target < 1:
            raise ValueError(f"`chunks` must be a positive number of bytes: {chunks}.")
        chunk = _chunks.choose(shape, itemsize, target)
        return _few(name, template, chunk)
    given = chunks(name, shape, _index.dtype_of(template.stored))
    if given is None:
        return chunk_shape(name, template, layout, None)
    out = tuple(int(n) for n in given)
    if len(out) != len(shape) or any(n < 1 for n in out):
        raise ValueError(
            f"`chunks` gave {given!r} for the leaf `{name}` of shape {shape}: it must "
            "give one positive length for each axis, or None."
        )
    chunk = tuple(min(n, max(1, length)) for n, length in zip(out, shape))
    return _few(name, template, chunk)


def _few(name: str, template: Template, chunk: tuple[int, ...]) -> tuple[int, ...]:
    count = template._replace(chunk=chunk).chunk_count
    if count > _index.MAX_CHUNKS:
        raise ValueError(
            f"The leaf `{name}` would have {count} chunks of shape {chunk}, and at "
            f"most {_index.MAX_CHUNKS} can be read. Pass larger `chunks`."
        )
    return chunk


def block_digests(data: Any) -> Iterator[bytes]:
    """The digest of each block of the bytes of a chunk."""
    if data.nbytes <= _chunks.BLOCK:
        yield xxhash.xxh3_128_digest(data)
        return
    for start in range(0, data.nbytes, _chunks.BLOCK):
        yield xxhash.xxh3_128_digest(data[start : start + _chunks.BLOCK])


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The elements of an array in row-major order as bytes: a view if it can be."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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
                grid = _chunks.lay(t.shape, t.chunk, t.itemsize)
                grids[leaf.number] = grid
            self.grids.append(grid)
            self._first.append(total)
            if leaf.alias is None:
                total += grid.blocks[-1]
        self._rows = [b""] * total

    def threads(self, max_bytes: int) -> int:
        """How many threads may write: each holds copies of a few chunks, where what is
        stored is not how the leaf lies in memory."""
        chunk = max(grid.full for grid in self.grids)
        return min(8, max(1, max_bytes // (_COPIES * chunk)))

    def digests(self) -> bytes:
        return b"".join(self._rows)

    def chunks(self, place: int, numbers: range) -> Iterator[Any]:
        """Some chunks of a leaf as they are stored: padded, and compressed if so."""
        leaf, grid, first = self._leaves[place], self.grids[place], self._first[place]
        t = leaf.template
        encode = None if t.codec is None else _store.encoder(t)
        if t.chunk == t.shape:
            data = self.whole(place)
            yield data if encode is None else encode(data)
            return
        regions = grid.regions[numbers.start : numbers.stop]
        parts = _leaf.to_host_by_regions(leaf.value, t, regions)
        for number, part in zip(numbers, parts):
            data = as_bytes(part)
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
        data = _whole(leaf)
        self._digest(self._first[place], data)
        return data

    def _digest(self, row: int, data: np.ndarray) -> None:
        for digest in block_digests(data):
            self._rows[row] = digest
            row += 1


def _whole(leaf: Leaf) -> Any:
    return _leaf.to_host(leaf.value, leaf.template).reshape(-1).view(np.uint8)


def _padded(part: np.ndarray, chunk: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(chunk, part.dtype)
    out[tuple(map(slice, part.shape))] = part
    return as_bytes(out)


# ---- layout="ocdbt".


class _Piece(NamedTuple):
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


def _pack(
    leaves: Sequence[Leaf], grids: Sequence[Grid]
) -> list[list[tuple[int, range]]]:
    """Deals runs of chunks out to files of about one size, in the order of the tree."""
    sizes = [
        len(grid.keys) * grid.full if leaf.alias is None else 0
        for leaf, grid in zip(leaves, grids)
    ]
    target = min(max(sum(sizes) // _FILES, _MIN_FILE), _MAX_FILE)
    files: list[list[tuple[int, range]]] = [[]]
    end = 0
    for place, size in enumerate(sizes):
        if leaves[place].alias is not None:
            continue
        grid = grids[place]
        count = len(grid.keys)
        if end + size <= target or size == 0:
            files[-1].append((place, range(count)))
            end += size
            continue
        done = 0
        while done < count:
            room = (target - end) // grid.full
            if room < 1 and files[-1]:
                files.append([])
                end = 0
                continue
            take = max(1, min(count - done, room))
            files[-1].append((place, range(done, done + take)))
            end += take * grid.full
            done += take
    return files


def write_ocdbt(
    root: Root,
    save: str,
    leaves: Sequence[Leaf],
    sync: bool,
    max_bytes: int,
    advance: Advance,
) -> Written:
    """Writes the leaves below `d/<save>/`: a database of its own, whose values lie in
    a few data files. See FORMAT.md, "layout="ocdbt""."""
    base = f"d/{save}"
    data = _Data(leaves, advance)
    dealt = _pack(leaves, data.grids)
    files = [str(number) for number in range(len(dealt))]
    packed: list[list[_Piece]] = [[] for _ in files]

    def buffers(number: int) -> Iterator[Any]:
        end = 0
        for place, numbers in dealt[number]:
            offset = -(-end // _ALIGN) * _ALIGN
            if offset != end:
                yield bytes(offset - end)
            t = leaves[place].template
            ends = None
            end = offset + len(numbers) * data.grids[place].full
            if t.codec is None and t.chunk == t.shape:
                yield data.whole(place)
            elif t.codec is None:
                yield from data.chunks(place, numbers)
            else:
                ends = []
                end = offset
                for chunk in data.chunks(place, numbers):
                    yield chunk
                    end += len(chunk)
                    ends.append(end - offset)
            packed[number].append(_Piece(place, numbers, offset, ends))

    _store.gather(
        [
            ft.partial(_store.write_file, root, f"{base}/{key}", buffers(number), sync)
            for number, key in enumerate(files)
        ],
        data.threads(max_bytes),
    )
    entries, blobs, file, offset = _entries(leaves, data.grids, packed)
    nodes, top = _ocdbt.tree(entries, [*files, "tree"], "tree", len(blobs))
    own = {
        f"{base}/tree": blobs + nodes,
        f"{base}/manifest.ocdbt": _ocdbt.manifest(top, "tree"),
    }
    for key, value in own.items():
        _store.write_file(root, key, [value], sync)
    others = {key: _index.digest(value) for key, value in own.items()}
    digests = data.digests()
    _store.write_file(root, f"{base}/digests", [digests], sync)
    splits = [
        (piece.place, piece.numbers.start, number, piece.offset)
        for number, pieces in enumerate(packed)
        for piece in pieces
        if piece.numbers.start > 0
    ]
    sizes: dict[int, list[int]] = {}
    for place, numbers, _, ends in sorted(itertools.chain(*packed), key=_by_chunk):
        if ends is not None:
            steps = zip(ends, [0, *ends])
            sizes.setdefault(place, []).extend(end - start for end, start in steps)
    # The same database from the root of the checkpoint.
    side = {"manifest.ocdbt": _ocdbt.manifest(top, "tree", base + "/")}
    digest = _index.digest(digests)
    return Written(files, file, offset, splits, sizes, digest, others, side)


def _by_chunk(piece: _Piece) -> tuple[int, int]:
    return piece.place, piece.numbers.start


def _entries(
    leaves: Sequence[Leaf], grids: Sequence[Grid], packed: list[list[_Piece]]
) -> tuple[_ocdbt.Entries, bytes, list[int], list[int]]:
    """The keys of the database, the zarr.json files, and where each leaf starts."""
    runs: list[list[tuple[int, _Piece]]] = [[] for _ in leaves]
    for number, pieces in enumerate(packed):
        for piece in pieces:
            runs[piece.place].append((number, piece))
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
            blob = _store.zarr_json(leaf.template)
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

_MAX_NAME = 200


def directory(name: str) -> str:
    """The directory of a leaf: its name, the end of a long one replaced by a digest."""
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:160]}%~{xxhash.xxh3_128_hexdigest(name.encode())}"


def write_zarr(
    root: Root,
    leaves: Sequence[Leaf],
    sync: bool,
    max_bytes: int,
    advance: Advance,
) -> Written:
    """Writes a Zarr v3 array for each leaf, in a directory of its name."""
    data = _Data(leaves, advance)

    def write(place: int) -> None:
        leaf = leaves[place]
        base = directory(leaf.name)
        keys = data.grids[place].keys
        parents = {f"{base}/{key}".rpartition("/")[0] for key in keys}
        _store.make_directories(root, parents or [base])
        blob = _store.zarr_json(leaf.template)
        _store.write_file(root, f"{base}/zarr.json", [blob], sync)
        if leaf.alias is not None:
            origin = directory(leaves[leaf.alias].name)
            for key in keys:
                _store.link_file(root, f"{origin}/{key}", f"{base}/{key}", sync)
        else:
            for key, chunk in zip(keys, data.chunks(place, range(len(keys)))):
                _store.write_file(root, f"{base}/{key}", [chunk], sync)
        if sync:
            below = {p[:at] for p in parents for at in _cuts(p)} | {base}
            _store.sync_directories(root, below)

    # A linked leaf comes after the one it is linked to.
    for aliased in (False, True):
        _store.gather(
            [
                ft.partial(write, place)
                for place, leaf in enumerate(leaves)
                if (leaf.alias is not None) == aliased
            ],
            data.threads(max_bytes),
        )
    digests = data.digests()
    _store.write_file(root, "eqx_ckpt.digests", [digests], sync)
    return Written([], [], [], [], {}, _index.digest(digests), {}, {})


def _cuts(path: str) -> list[int]:
    """Where each of the directories that lead to `path` ends in it."""
    return [i for i, c in enumerate(path) if c == "/"] + [len(path)]


def check_case(names: Sequence[str], root: Root) -> None:
    """**Raises:** `ValueError` if two directories would be one on this file system."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(directory(name).casefold(), name)
        if other != name and root.local is not None and _folds_case(root.local):
            raise ValueError(
                f"The leaves `{other}` and `{name}` differ only by case, and the file "
                f'system of `{root}` takes them for one. Use `layout="ocdbt"`.'
            )


def _folds_case(directory: os.PathLike[str]) -> bool:
    place = os.fspath(directory)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    swapped = place.swapcase()
    return swapped != place and os.path.exists(swapped)
