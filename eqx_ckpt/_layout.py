"""The two layouts: which files a save is made of, and the writing of them."""

import functools as ft
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from . import _chunks, _index, _leaf, _ocdbt, _store
from ._index import Template
from ._store import Root


# Every leaf starts at a multiple of this in its file, which is what a memory-mapped
# read into aligned memory is fastest from.
_ALIGN = 64
# Files are written side by side; more of them than this helps nobody.
_MIN_FILE, _MAX_FILE, _FILES = 64 * 2**20, 2 * 2**30, 32
# Chunks of the layouts, in bytes: one block of digests, and few files.
_CHUNK = {"ocdbt": _chunks.BLOCK, "zarr": 32 * 2**20}

Chunks = None | int | Callable[[str, tuple[int, ...], np.dtype], Any]


class Leaf(NamedTuple):
    """A leaf to be written. `alias` is the place of the leaf whose bytes it shares."""

    name: str
    value: Any
    template: Template
    alias: int | None


class Written(NamedTuple):
    """Where the layout put the leaves: columns of the index, the digest of the file of
    digests, and the files at the root that other readers need."""

    files: list[str]
    file: list[int]
    offset: list[int]
    splits: list[tuple[int, int, int, int]]
    digests: str
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


class _Digests:
    """The file of digests, filled in any order."""

    def __init__(self, leaves: Sequence[Leaf]):
        counts: dict[Template, int] = {}
        self._first = []
        total = 0
        for leaf in leaves:
            self._first.append(total)
            if leaf.alias is None:
                t = leaf.template
                if t not in counts:
                    counts[t] = _chunks.block_counts(t.shape, t.chunk, t.itemsize)
                total += counts[t]
        self._rows: list[bytes] = [b""] * total

    def first(self, place: int) -> int:
        return self._first[place]

    def add(self, row: int, data: np.ndarray) -> int:
        """Digests the blocks of a chunk, and returns the row after the last."""
        for digest in block_digests(data):
            self._rows[row] = digest
            row += 1
        return row

    def tobytes(self) -> bytes:
        return b"".join(self._rows)


def block_digests(data: Any) -> Iterator[bytes]:
    """The digest of each block of the bytes of a chunk: a buffer of bytes."""
    if data.nbytes <= _chunks.BLOCK:
        yield xxhash.xxh3_128_digest(data)
        return
    for start in range(0, data.nbytes, _chunks.BLOCK):
        yield xxhash.xxh3_128_digest(data[start : start + _chunks.BLOCK])


def chunk_bytes(array: np.ndarray, region: tuple[slice, ...]) -> np.ndarray:
    """The elements of a region in row-major order as bytes: a view if it can be."""
    part = array[region]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def _whole(leaf: Leaf, row: int, digests: _Digests) -> np.ndarray:
    """The bytes of a leaf of one chunk."""
    data = _leaf.to_host(leaf.value, leaf.template).reshape(-1).view(np.uint8)
    digests.add(row, data)
    return data


def _chunk_buffers(
    leaf: Leaf, numbers: range, row: int, digests: _Digests
) -> Iterator[Any]:
    """The bytes of some of the chunks of a leaf, padded to whole chunks."""
    t = leaf.template
    array = _leaf.to_host(leaf.value, t)
    full = math.prod(t.chunk) * t.itemsize
    for number, index in enumerate(_chunks.indices(t.shape, t.chunk)):
        if number >= numbers.stop:
            break
        region = _chunks.region(t.shape, t.chunk, index)
        if number < numbers.start:
            size = math.prod(s.stop - s.start for s in region) * t.itemsize
            row += max(1, -(-size // _chunks.BLOCK))
            continue
        data = chunk_bytes(array, region)
        row = digests.add(row, data)
        if data.nbytes == full:
            yield data
        else:
            yield _padded(array, region, t)


def _padded(
    array: np.ndarray, region: tuple[slice, ...], template: Template
) -> np.ndarray:
    out = np.zeros(template.chunk, array.dtype)
    part = array[region]
    out[tuple(map(slice, part.shape))] = part
    return out.reshape(-1).view(np.uint8)


# ---- layout="ocdbt".


class _Size(NamedTuple):
    """What all leaves of a template have in common."""

    count: int  # of chunks
    full: int  # bytes of a chunk
    keys: list[bytes]  # of the chunks, in row-major order


def _sizes(leaves: Sequence[Leaf]) -> dict[Template, _Size]:
    out = {}
    for t in {leaf.template for leaf in leaves}:
        keys = [_chunks.key(i).encode() for i in _chunks.indices(t.shape, t.chunk)]
        out[t] = _Size(len(keys), math.prod(t.chunk) * t.itemsize, keys)
    return out


class _Piece(NamedTuple):
    place: int
    numbers: range
    offset: int


def _pack(leaves: Sequence[Leaf], sizes: dict[Template, _Size]) -> list[list[_Piece]]:
    """Puts runs of chunks into files of about one size, in the order of the tree."""
    total = 0
    for leaf in leaves:
        if leaf.alias is None:
            count, size, _ = sizes[leaf.template]
            total += count * size
    target = min(max(total // _FILES, _MIN_FILE), _MAX_FILE)
    files: list[list[_Piece]] = [[]]
    end = 0
    for place, leaf in enumerate(leaves):
        if leaf.alias is not None:
            continue
        count, size, _ = sizes[leaf.template]
        done = 0
        while done < max(1, count):
            offset = -(-end // _ALIGN) * _ALIGN
            room = (target - offset) // size
            if room < 1 and files[-1]:
                files.append([])
                end = 0
                continue
            take = max(1, min(count - done, room))
            chunks = range(done, min(done + take, count))
            files[-1].append(_Piece(place, chunks, offset))
            end = offset + len(chunks) * size
            done += take
    return files


def write_ocdbt(root: Root, save: str, leaves: Sequence[Leaf], sync: bool) -> Written:
    """Writes the leaves below `d/<save>/`: a database of its own, whose values lie in
    a few data files. See FORMAT.md, "layout="ocdbt""."""
    base = f"d/{save}"
    digests = _Digests(leaves)
    sizes = _sizes(leaves)
    packed = _pack(leaves, sizes)
    files = [str(number) for number in range(len(packed))]

    def buffers(pieces: list[_Piece]) -> Iterator[Any]:
        end = 0
        for place, numbers, offset in pieces:
            if offset != end:
                yield bytes(offset - end)
            leaf = leaves[place]
            t = leaf.template
            if t.chunk == t.shape:
                yield _whole(leaf, digests.first(place), digests)
            else:
                yield from _chunk_buffers(leaf, numbers, digests.first(place), digests)
            end = offset + len(numbers) * sizes[t].full

    _store.gather(
        [
            ft.partial(_store.write_file, root, f"{base}/{key}", buffers(pieces), sync)
            for key, pieces in zip(files, packed)
        ]
    )
    entries, blobs, file, offset = _entries(leaves, packed, sizes, len(files))
    nodes, top = _ocdbt.tree(entries, [*files, "tree"], "tree", len(blobs))
    _store.write_file(root, f"{base}/tree", [blobs, nodes], sync)
    manifest = _ocdbt.manifest(top, "tree")
    _store.write_file(root, f"{base}/manifest.ocdbt", [manifest], sync)
    data = digests.tobytes()
    _store.write_file(root, f"{base}/digests", [data], sync)
    # The same database from the root of the checkpoint.
    splits = [
        (place, numbers.start, number, start)
        for number, pieces in enumerate(packed)
        for place, numbers, start in pieces
        if numbers.start > 0
    ]
    side = {"manifest.ocdbt": _ocdbt.manifest(top, "tree", base + "/")}
    return Written(files, file, offset, splits, _index.digest(data), side)


def _entries(
    leaves: Sequence[Leaf],
    packed: list[list[_Piece]],
    sizes: dict[Template, _Size],
    tree: int,
) -> tuple[list[_ocdbt.Entry], bytes, list[int], list[int]]:
    """The keys of the database, the zarr.json files, and where each leaf starts."""
    file, offset = [0] * len(leaves), [0] * len(leaves)
    of_leaf: dict[int, list[tuple[int, _Piece]]] = {}
    for number, pieces in enumerate(packed):
        for piece in pieces:
            if piece.numbers.start == 0:
                file[piece.place], offset[piece.place] = number, piece.offset
            of_leaf.setdefault(piece.place, []).append((number, piece))
    blobs: list[bytes] = []
    blob_of: dict[Template, tuple[int, int]] = {}
    end = 0
    for t in sizes:
        blob = _store.zarr_json(t)
        blob_of[t] = end, len(blob)
        blobs.append(blob)
        end += len(blob)
    entries: list[_ocdbt.Entry] = []
    for place, leaf in enumerate(leaves):
        origin = place if leaf.alias is None else leaf.alias
        file[place], offset[place] = file[origin], offset[origin]
        _, full, keys = sizes[leaf.template]
        name = leaf.name.encode() + b"/"
        entries.append(_ocdbt.Entry(name + b"zarr.json", tree, *blob_of[leaf.template]))
        for number, (_, numbers, start) in of_leaf[origin]:
            for i in numbers:
                at = start + (i - numbers.start) * full
                entries.append(_ocdbt.Entry(name + keys[i], number, at, full))
    return entries, b"".join(blobs), file, offset


# ---- layout="zarr".

_MAX_NAME = 200


def directory(name: str) -> str:
    """The directory of a leaf: its name, the end of a long one replaced by a digest."""
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:160]}%~{xxhash.xxh3_128_hexdigest(name.encode())}"


def write_zarr(root: Root, leaves: Sequence[Leaf], sync: bool) -> Written:
    """Writes a Zarr v3 array for each leaf, in a directory of its name."""
    digests = _Digests(leaves)

    def write(place: int) -> None:
        leaf = leaves[place]
        t = leaf.template
        base = directory(leaf.name)
        indices = list(_chunks.indices(t.shape, t.chunk))
        parents = {f"{base}/{_chunks.key(i)}".rpartition("/")[0] for i in indices}
        _store.make_directories(root, parents or [base])
        blob = _store.zarr_json(t)
        _store.write_file(root, f"{base}/zarr.json", [blob], sync)
        if leaf.alias is not None:
            origin = directory(leaves[leaf.alias].name)
            for i in indices:
                key = _chunks.key(i)
                _store.link_file(root, f"{origin}/{key}", f"{base}/{key}", sync)
        else:
            row = digests.first(place)
            chunks = _chunk_buffers(leaf, range(len(indices)), row, digests)
            for i, data in zip(indices, chunks):
                _store.write_file(root, f"{base}/{_chunks.key(i)}", [data], sync)
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
            ]
        )
    data = digests.tobytes()
    _store.write_file(root, "eqx_ckpt.digests", [data], sync)
    return Written([], [], [], [], _index.digest(data), {})


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
