"""Stored arrays as TensorStore has them: their metadata; opened, viewed and read."""

import functools as ft
import json
import math
import types
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from .._format import _blosc, _ocdbt, _view
from .._format._template import dtype_of, number_type, Template
from .._runtime import _machine
from . import _context, _local_files
from ._backend import Backend
from ._local import LocalDirectory


_little = [{"name": "bytes", "configuration": {"endian": "little"}}]


_ZEROS = {"bool": False, "int": 0, "float": 0.0, "complex": [0.0, 0.0]}


@ft.lru_cache(maxsize=4096)
def zarr_json(template: Template) -> bytes:
    """The Zarr v3 metadata of a stored array, padded to a multiple of 64 bytes."""
    grid = {"name": "regular", "configuration": {"chunk_shape": template.chunk}}
    order = _little if template.itemsize > 1 else [{"name": "bytes"}]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": template.shape,
        "data_type": template.stored,
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _ZEROS[number_type(dtype_of(template.stored))],
        "codecs": [*order, *_compressors(template)],
        "attributes": {},
    }
    text = json.dumps(metadata, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 64)


def zarr_spec(template: Template, kvstore: dict[str, Any]) -> dict[str, Any]:
    """The spec of a stored array for TensorStore."""
    metadata = json.loads(zarr_json(template))
    del metadata["attributes"]
    return {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}


def _compressors(template: Template) -> list[dict[str, Any]]:
    codec = template.codec
    if codec is None:
        return []
    configuration = _blosc.configuration(codec, template.itemsize)
    return [{"name": "blosc", "configuration": configuration}]


# Where each chunk of an array lies: its key, the number of the file, offset, length.
Chunks = Sequence[tuple[str, int, int, int]]


def largest_chunk() -> int:
    """The most bytes that TensorStore is to decode together: where it cannot have them,
    it ends the process."""
    return _machine.memory() // 2


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
    root: Backend, files: Sequence[str] | None, arrays: Sequence[tuple[Template, Any]]
) -> list[ts.TensorStore]:
    """Stored arrays, opened without a read: each is its template and where it lies.

    `files` are the keys of the data files, in which its `Chunks` lie; None: it lies in
    a directory of the root, which has a key. TensorStore is given a database in memory
    that is made of `arrays`. It is not given the one that may be beside the data files,
    in which there may be anything. So it parses nothing of a checkpoint: it reads bytes
    of files.
    """
    _context.check_fork()
    context = context_of(root)
    if files is None:
        kvstores = [root.spec(key) for _, key in arrays]
    else:
        context = ts.Context({NODES: {}}, parent=context)
        chunks = [chunks for _, chunks in arrays]
        kvstores = databases(root.spec(), files, chunks, context)
    # A chunk that is missing must not read as zeros.
    how = {"fill_missing_data_reads": False}
    specs = [zarr_spec(t, kv) | how for kv, (t, _) in zip(kvstores, arrays)]
    return opened(specs, context)


def opened(
    specs: Sequence[dict[str, Any]], context: ts.Context
) -> list[ts.TensorStore]:
    """Arrays of these specs, opened together and without a read."""
    how = {"open": True, "read": True, "assume_metadata": True, "context": context}
    return [future.result() for future in [ts.open(spec, **how) for spec in specs]]


# The store in memory for the nodes of one database.
NODES = "memory_key_value_store#nodes"


def databases(
    data: dict[str, Any],
    files: Sequence[str],
    arrays: Sequence[Chunks],
    context: ts.Context,
    inline: bytes = b"",
) -> list[dict[str, Any]]:
    """Makes a database in memory that says where in the files the chunks of some arrays
    lie. It returns the spec of a directory in it for each array. The number after that
    of the last file stands for the bytes of `inline`."""
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
    memory = {"driver": "memory", "memory_key_value_store": NODES}
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


def array_url(root: Backend, database: str | None, key: str) -> str:
    """The URL by which TensorStore opens an array: in a database, or in its directory
    if that is None."""
    base = root.url if root.is_remote else "file://" + urllib.parse.quote(root.url)
    if database is None:
        return f"{base}/{urllib.parse.quote(key)}/|zarr3:"
    return f"{base}/{database}/|ocdbt:{urllib.parse.quote(key)}/|zarr3:"


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """A new array. Unless it is small, it starts at a multiple of 64 bytes, as JAX
    takes it uncopied."""
    size = math.prod(shape) * dtype.itemsize
    if size < _COPIED:
        return np.empty(shape, dtype)
    return aligned_bytes(size).view(dtype).reshape(shape)


# On CPU, JAX takes memory as it is where it begins at a multiple of so many bytes. To
# get such memory takes longer than to copy fewer than these.
ALIGNED, _COPIED = 64, 2**14


def aligned_bytes(size: int) -> np.ndarray:
    """New bytes that start at a multiple of `ALIGNED`."""
    buffer = np.empty(size + ALIGNED, np.uint8)
    start = -address(buffer) % ALIGNED
    return buffer[start : start + size]


def address(array: np.ndarray) -> int:
    """Where the memory of an array begins."""
    return array.__array_interface__["data"][0]


def start_read(store: Any, into: np.ndarray, picks: tuple[slice | int, ...]) -> Any:
    """Starts to read `store[picks]` into an array of its shape."""
    if not isinstance(store, ts.TensorStore):
        return store.start_read(into, picks)  # A room around the kernel has opened it.
    return ts.array(into).write(view(store, picks))


def view(
    store: ts.TensorStore,
    picks: tuple[slice | int, ...],
    arrays: Mapping[int, np.ndarray] = types.MappingProxyType({}),
) -> ts.TensorStore:
    """`store[picks]` as NumPy has it: every axis from 0 on. The `arrays` are then taken
    along axes of that."""
    if store.ndim:
        # Stored arrays could be resized. As long as their bounds are implicit, slices
        # with a negative step run over them: `[2::-2]` of 6 rows would give 3.
        store = store[ts.d[:].mark_bounds_implicit[False]]
    part = store[picks]
    part = part[ts.d[:].translate_to[0]] if part.ndim else part
    if not arrays:
        return part
    return part.oindex[tuple(arrays.get(i, slice(None)) for i in range(part.ndim))]


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
    """A view that casts as it is read."""
    return ts.cast(store, dtype)
