"""Stored arrays as TensorStore has them: their metadata; opened, viewed and read."""

import functools as ft
import json
import math
import os
import types
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from .._errors import MissingError
from .._format import _blosc, _grid, _ocdbt, _view
from .._format._ocdbt import Database
from .._format._template import Template
from . import _context, _local_files, _store
from ._backend import Backend
from ._local import LocalDirectory


_little = [{"name": "bytes", "configuration": {"endian": "little"}}]
# As checkpoints of version 1 are compressed.
_zstd = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}


@ft.lru_cache(maxsize=4096)
def zarr_json(template: Template) -> bytes:
    """The Zarr v3 metadata of a stored array, padded to 64 bytes."""
    dtype = template.stored
    fill: Any = 0
    if dtype == "bool":
        fill = False
    elif dtype.startswith(("float", "bfloat")):
        fill = 0.0
    elif dtype.startswith("complex"):
        fill = [0.0, 0.0]
    text = json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": template.shape,
            "data_type": dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": template.chunk},
            },
            "chunk_key_encoding": {"name": "default"},
            "fill_value": fill,
            "codecs": [
                *(_little if template.itemsize > 1 else [{"name": "bytes"}]),
                *_compressors(template),
            ],
            "attributes": {},
        },
        separators=(",", ":"),
    ).encode()
    return text + b" " * (-len(text) % 64)


def zarr_spec(template: Template, kvstore: dict[str, Any]) -> dict[str, Any]:
    """The spec of a stored array for TensorStore."""
    metadata = json.loads(zarr_json(template))
    del metadata["attributes"]
    return {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}


def _compressors(template: Template) -> list[dict[str, Any]]:
    codec = template.codec
    if codec not in _blosc.CODECS:
        return [] if codec is None else [_zstd]
    configuration = _blosc.configuration(codec, template.itemsize)
    return [{"name": "blosc", "configuration": configuration}]


# Where each chunk of an array lies: its key, the number of the file, offset, length.
Chunks = Sequence[tuple[str, int, int, int]]


class ArrayPlace(NamedTuple):
    """Where a stored array lies: `key` is the directory of its chunks (`zarr`), or else
    `chunks` says where each is."""

    template: Template
    key: str
    chunks: Chunks = ()


class ForeignArray(NamedTuple):
    """An array of another format: what TensorStore opens, and below which key it lies.

    `pieces` gives the keys, below that one, that chunks of some numbers lie at; `check`
    raises `ValueError` if what is there is no piece of it.
    """

    key: str
    spec: dict[str, Any]
    pieces: Callable[[Sequence[int]], list[str]]
    check: Callable[[Sequence[int]], None]


class Piece(NamedTuple):
    """A part of an array that is one run of bytes: the key of its file, from which byte
    on, its first element, and its shape; or elements of one, that lie so many elements
    apart along each axis."""

    key: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class PiecedArray(NamedTuple):
    """An array that lies in pieces, each element in one of them; with `is_packed` two
    elements have a byte. `root` has the files, once it is open."""

    template: Template
    pieces: list[Piece]
    is_packed: bool = False
    root: Backend | None = None

    def stop(self, piece: Piece) -> int:
        """The byte that a piece ends at."""
        nbytes = math.prod(piece.shape) * self.template.itemsize
        return piece.offset + (nbytes // 2 if self.is_packed else nbytes)


def largest_chunk() -> int:
    """The most bytes that TensorStore is to decode together: where it cannot have them,
    it ends the process."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def context(root: Backend) -> ts.Context:
    """The context in which the arrays of a store are read."""
    # A link in it may lead anywhere.
    if isinstance(root, LocalDirectory) and not root.follow:
        if _local_files.is_on_this_machine(root.path):
            return _context.mmap_context()
    return _context.context()


def context_of(root: Backend) -> ts.Context:
    """For reads of the arrays of one checkpoint, which another may replace."""
    return _context.with_nodes(context(root))


def open_arrays(
    root: Backend, files: Sequence[str] | None, places: Sequence[ArrayPlace]
) -> list[ts.TensorStore]:
    """Stored arrays, opened without a read.

    `files` are the keys of the data files; None: the arrays lie in directories of the
    root. TensorStore is not given the database that may be beside the data files, as
    whoever wrote it may have written anything, but one in memory that is made of
    `places`. So it parses nothing of a checkpoint: it reads bytes of files.
    """
    _context.check_fork()
    context = context_of(root)
    if files is None:
        kvstores = [root.spec(place.key) for place in places]
    else:
        context = ts.Context({_nodes: {}}, parent=context)
        chunks = [place.chunks for place in places]
        kvstores = _databases(root.spec(), files, chunks, context)
    # A chunk that is missing must not read as zeros.
    how = {"fill_missing_data_reads": False}
    specs = [zarr_spec(x.template, kv) | how for kv, x in zip(kvstores, places)]
    return _opened(specs, context)


def _opened(
    specs: Sequence[dict[str, Any]], context: ts.Context
) -> list[ts.TensorStore]:
    how = {"open": True, "read": True, "assume_metadata": True, "context": context}
    return [future.result() for future in [ts.open(spec, **how) for spec in specs]]


# What an array of another format is read from.
Stored = ForeignArray | PiecedArray | np.ndarray


def open_stored(
    root: Backend,
    wanted: Sequence[tuple[Stored, Sequence[int]]],
    database: Database | None,
) -> list[Any]:
    """Arrays of other formats, opened without a read, for chunks of some numbers; or
    what has been read before. They lie in directories of the root, or in a database."""
    _context.check_fork()
    context = context_of(root)
    stored = [(x, n) for x, n in wanted if isinstance(x, ForeignArray)]
    if not root.has_driver():
        context = ts.Context({_nodes: {}}, parent=context)
        kvstores = _copies(root, stored, database, context)
    elif database is None:
        kvstores = [root.spec(x.key) for x, _ in stored]
    else:
        context = ts.Context({_nodes: {}}, parent=context)
        find, files = database.find, database.files
        chunks = [
            [(key, *at) for key in x.pieces(n) if (at := find(f"{x.key}/{key}"))]
            for x, n in stored
        ]
        data = root.spec()
        kvstores = _databases(data, files, chunks, context, database.inline)
    specs = [{**x.spec, "kvstore": kv} for (x, _), kv in zip(stored, kvstores)]
    opened = iter(_opened(specs, context))
    out: list[Any] = []
    for x, _ in wanted:
        if isinstance(x, PiecedArray):
            out.append(x._replace(root=root))
        else:
            out.append(next(opened) if isinstance(x, ForeignArray) else ts.array(x))
    return out


# The store in memory for the nodes of one database.
_nodes = "memory_key_value_store#nodes"


def _databases(
    data: dict[str, Any],
    files: Sequence[str],
    arrays: Sequence[Chunks],
    context: ts.Context,
    inline: bytes = b"",
) -> list[dict[str, Any]]:
    """Directories for some arrays in a database in memory, which says where in the
    files their chunks lie, or in `inline`: the file after the last."""
    rows = sorted(
        (f"{number}/{key}".encode(), *at)
        for number, chunks in enumerate(arrays)
        for key, *at in chunks
    )
    columns = map(list, zip(*rows)) if rows else ([], [], [], [])
    entries = _ocdbt.Entries(*columns)
    # Files may have any name, also those of the nodes.
    names = [*(f"data/{file}" for file in files), "inline", "tree"]
    nodes, top = _ocdbt.tree(entries, names, "tree", 0)
    own = {"manifest.ocdbt": _ocdbt.manifest(top, "tree"), "tree": nodes}
    if inline:
        own["inline"] = inline
    layers: list[dict[str, Any]] = [{"base": data, "prefix": "data/"}]
    memory = {"driver": "memory", "memory_key_value_store": _nodes}
    kv = ts.KvStore.open(memory, context=context).result()
    for name, value in own.items():
        kv.write(name, value).result()
        layers.append({"base": {**memory, "path": name}, "exact": name})
    base = {
        "driver": "ocdbt",
        "base": {"driver": "kvstack", "layers": layers},
        "cache_pool": "cache_pool#nodes",
    }
    return [{**base, "path": f"{number}/"} for number in range(len(arrays))]


def _copies(
    root: Backend,
    stored: Sequence[tuple[ForeignArray, Sequence[int]]],
    database: Database | None,
    context: ts.Context,
) -> list[dict[str, Any]]:
    """Directories in memory with chunks of some arrays, which are read now."""
    memory = {"driver": "memory", "memory_key_value_store": _nodes}
    kv = ts.KvStore.open(memory, context=context).result()
    reading = []
    for number, (array, numbers) in enumerate(stored):
        for piece in array.pieces(numbers):
            key, start, stop = f"{array.key}/{piece}", 0, None
            if database is not None:
                at = database.find(key)
                if at is None:
                    continue
                file, start, size = at
                stop = start + size
                if file == len(database.files):
                    kv.write(f"{number}/{piece}", database.inline[start:stop]).result()
                    continue
                key = database.files[file]
            future = root.start_read(key, start, stop)
            reading.append((f"{number}/{piece}", key, future))
    for name, key, future in reading:
        got = _store.read_answer(root, key, future)
        if got.state == "value":
            kv.write(name, got.value).result()
    return [{**memory, "path": f"{number}/"} for number in range(len(stored))]


def array_url(root: Backend, database: str | None, key: str) -> str:
    base = root.url if root.is_far else "file://" + urllib.parse.quote(root.url)
    if database is None:
        return f"{base}/{urllib.parse.quote(key)}/|zarr3:"
    return f"{base}/{database}/|ocdbt:{urllib.parse.quote(key)}/|zarr3:"


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """A new array that starts at a multiple of 64 bytes, as JAX takes it uncopied."""
    return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def aligned_bytes(size: int) -> np.ndarray:
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size]


# Of a piece so many bytes are read together.
_TOGETHER = 2**22


def _read_pieces(
    array: PiecedArray, into: np.ndarray, picks: tuple[slice | int, ...]
) -> None:
    """Reads `array[picks]`: of each piece all from the first of its elements that are
    picked to the last, and not much more of it at a time."""
    t = array.template
    axes = [
        range(n)[p] if isinstance(p, slice) else range(p, p + 1)
        for n, p in zip(t.shape, picks)
    ]
    into = into.reshape([len(axis) for axis in axes])
    for piece in array.pieces:
        # The numbers of the picks that are in this piece, and the picks in it.
        there = [
            [i for i, x in enumerate(axis) if a <= x < a + n]
            if axis.step != 1
            else range(
                min(max(a - axis.start, 0), len(axis)),
                max(min(a + n - axis.start, len(axis)), 0),
            )
            for axis, a, n in zip(axes, piece.start, piece.shape)
        ]
        if not all(there):
            continue
        to = into[tuple(slice(x[0], x[-1] + 1) for x in there)]
        first = [axis[x[0]] - a for axis, x, a in zip(axes, there, piece.start)]
        steps = [axis.step for axis in axes]
        _read_piece(array, piece, first, steps, to)


def _read_piece(
    array: PiecedArray,
    piece: Piece,
    first: Sequence[int],
    steps: Sequence[int],
    into: np.ndarray,
) -> None:
    """Reads the elements of a piece from `first` on, in these steps along each axis."""
    strides = piece.strides or _strides_of(piece.shape)
    # From the lowest element on, as NumPy would have it after `flip`.
    down = tuple(axis for axis, step in enumerate(steps) if step < 0)
    lowest = [
        a + min(0, (n - 1) * step) for a, n, step in zip(first, into.shape, steps)
    ]
    apart = [abs(step) * stride for step, stride in zip(steps, strides)]
    into = np.flip(into, down)
    block = _grid.choose_strided(into.shape, apart, into.itemsize, _TOGETHER)
    for index in _grid.indices(into.shape, block):
        part = _grid.region(into.shape, block, index)
        begin = sum(
            (low + s.start * abs(step)) * stride
            for low, s, step, stride in zip(lowest, part, steps, strides)
        )
        _read_run(array, piece, begin, apart, into[part])


def _strides_of(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _read_run(
    array: PiecedArray,
    piece: Piece,
    first: int,
    strides: Sequence[int],
    into: np.ndarray,
) -> None:
    """Reads all that lies from the first element to the last, of elements so many
    apart. Of two that have a byte, the lower half is the first."""
    root, key, start = array.root, piece.key, piece.offset
    assert root is not None
    count = _grid.span(into.shape, strides)
    if array.is_packed:
        stop = start + (first + count + 1) // 2
        data = _store.read_bytes(root, key, start + first // 2, stop)
        both = np.frombuffer(data, np.uint8)[:, None] >> np.array([0, 4], np.uint8) & 15
        whole = both.reshape(-1)[first % 2 :][:count].view(into.dtype)
    else:
        whole = np.empty(count, into.dtype)
        start += first * into.itemsize
        if root.read_into(key, start, whole.view(np.uint8)) < whole.nbytes:
            raise MissingError(f"the end of `{key}` is missing")
    steps = [stride * into.itemsize for stride in strides]
    into[...] = np.lib.stride_tricks.as_strided(
        whole, into.shape, steps, writeable=False
    )


def open_pieces(array: PiecedArray) -> ts.TensorStore:
    """A view of all pieces, opened without a read; or what they are, if TensorStore
    cannot read them."""
    assert array.root is not None
    if array.is_packed:
        t = array.template
        whole = np.empty(t.shape, np.uint8)
        _read_pieces(array, whole, (slice(None),) * len(t.shape))
        return ts.array(whole)
    places, files = [], []
    for piece in array.pieces:
        shape = piece.shape
        if piece.strides is not None:
            shape = (_grid.span(shape, piece.strides),)
        chunk = tuple(max(1, n) for n in shape)
        t = array.template._replace(shape=shape, chunk=chunk)
        size = math.prod(shape) * t.itemsize
        row = _grid.key((0,) * len(chunk)), len(files), piece.offset, size
        places.append(ArrayPlace(t, "", [row]))
        files.append(piece.key)
    stores = []
    for store, piece in zip(open_arrays(array.root, files, places), array.pieces):
        if piece.strides is not None:
            axes = np.ix_(*map(np.arange, piece.shape))
            at = sum(axis * stride for axis, stride in zip(axes, piece.strides))
            whole = (slice(None),) * len(piece.shape)
            store = view(store[np.broadcast_to(at, piece.shape)], whole)
        store = store[ts.d[:].mark_bounds_implicit[False]]
        stores.append(store[ts.d[:].translate_to[piece.start]])
    return stores[0] if len(stores) == 1 else ts.overlay(stores)


def start_read(
    store: ts.TensorStore | PiecedArray,
    into: np.ndarray,
    picks: tuple[slice | int, ...],
) -> Any:
    """Starts to read `store[picks]` into an array of its shape."""
    if isinstance(store, PiecedArray):
        # It is done when its result is asked for.
        result = ft.partial(_read_pieces, store, into, picks)
        return types.SimpleNamespace(result=result)
    return ts.array(into).write(view(store, picks))


def view(store: ts.TensorStore, picks: tuple[slice | int, ...]) -> ts.TensorStore:
    """`store[picks]` as NumPy has it: every axis from 0 on."""
    if store.ndim:
        # Stored arrays could be resized. As long as their bounds are implicit, slices
        # with a negative step run over them: `[2::-2]` of 6 rows would give 3.
        store = store[ts.d[:].mark_bounds_implicit[False]]
    part = store[picks]
    return part[ts.d[:].translate_to[0]] if part.ndim else part


def transposed(store: ts.TensorStore, axes: Sequence[int | None]) -> ts.TensorStore:
    """A view with the axes in this order, and new ones as in a `View`."""
    is_new = lambda axis: axis is None or axis == _view.EMPTY
    order = [axis for axis in axes if axis is not None and not is_new(axis)]
    store = store[ts.d[order].transpose[:]] if order else store
    for at, axis in enumerate(axes):
        if is_new(axis):
            store = store[(*[slice(None)] * at, ts.newaxis)]
        if axis == _view.EMPTY:
            store = store[(*[slice(None)] * at, slice(0, 0))]
    return store


def cast(store: ts.TensorStore, dtype: np.dtype) -> ts.TensorStore:
    return ts.cast(store, dtype)
