"""The source of another format, and those of its arrays that TensorStore opens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
import xxhash

from .._kernel._format import _grid
from .._kernel._format._leaves import LeafRecord
from .._kernel._format._template import Template
from .._kernel._load._source import Source
from .._kernel._storage import _arrays, _context, _store
from .._kernel._storage._backend import Backend
from . import _pieces
from ._database import Database
from ._pieces import OpenedPieces, Piece, PiecedArray


# A leaf counts as cut into parts of about `_PART_BYTES`, for those who share its reads.
# One whose elements lie apart has at most about `_MAX_PARTS` parts.
_PART_BYTES, _MAX_PARTS = 4 * 2**20, 2**12


class ForeignArray(NamedTuple):
    """An array of another format: what TensorStore opens, and below which key it lies.

    `chunk_keys` gives the keys, below that one, at which chunks of some numbers lie;
    `check` raises `ValueError` if what is there is no chunk of it. `head` gives at most
    so many of the first bytes, as they are stored.
    """

    key: str
    spec: dict[str, Any]
    chunk_keys: Callable[[Sequence[int]], list[str]]
    check: Callable[[Sequence[int]], None]
    head: Callable[[int], bytes]


# What an array of another format is read from.
ArrayOrigin = ForeignArray | PiecedArray | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignSource(Source):
    """A source of another format. A leaf is one run of bytes in one of `index.files`,
    unless `stored` has something else at its `leaf_index`: an array in a directory or
    in the database of `nodes`, pieces of files, or an array that has been read already.
    The elements of leaves that `strides` has lie so many apart along each axis.
    `headers`: what the files say of their leaves. With the stamps of the files it makes
    the id of the save."""

    headers: bytes
    stored: Mapping[int, ArrayOrigin]
    nodes: Database | None
    strides: Mapping[int, tuple[int, ...]]

    has_digests = False
    is_ours = False

    def is_in(self, directory: Backend) -> bool:
        files, headers = self.index.files, self.headers
        return save_id_of(directory, files, headers) == self.index.save

    def _without_spec(self, record: LeafRecord) -> str:
        return f"it is of another format, {self.index.layout}"

    def is_contiguous(self, record: LeafRecord) -> bool:
        return record.leaf_index not in self.stored

    def head_of(self, record: LeafRecord, most: int) -> bytes:
        array = self.stored.get(record.leaf_index)
        if isinstance(array, ForeignArray):
            return array.head(most)
        if isinstance(array, np.ndarray):
            return array.reshape(-1)[:most].tobytes()[:most]
        if array is None:
            key, start, _ = self.chunk_range(record, 0)
            t, strides = record.template, self.strides.get(record.leaf_index)
            nbytes = t.nbytes
            if strides is not None:  # With strides of 0 elements repeat.
                nbytes = min(nbytes, _pieces.span(t.shape, strides) * t.itemsize)
            stop = start + nbytes
        else:
            piece = min(array.pieces, key=lambda piece: piece.start)
            key, start, stop = piece.key, piece.offset, array.stop(piece)
        return _store.read_bytes(self.directory, key, start, min(stop, start + most))

    def is_scattered(self, record: LeafRecord) -> bool:
        # One with strides is a run of bytes, but its elements are in no order there.
        return not self.is_contiguous(record) or record.leaf_index in self.strides

    def _origin(self, record: LeafRecord, file: int, offset: int) -> ArrayOrigin:
        """The array that a scattered leaf is read from. One with `strides` is one
        piece, from `offset` of the `file` on."""
        if record.leaf_index in self.stored:
            return self.stored[record.leaf_index]
        t, strides = record.template, self.strides.get(record.leaf_index)
        first = (0,) * len(t.shape)
        piece = Piece(self.index.files[file], offset, first, t.shape, strides)
        return PiecedArray(t, [piece])

    def open(
        self,
        wanted: Sequence[tuple[LeafRecord, Sequence[int]]],
        unpinned: Backend | None = None,
    ) -> list[Any]:
        # All of them are scattered, or there is one leaf, a run of bytes.
        if not self.is_scattered(wanted[0][0]):
            return super().open(wanted, unpinned)
        starts = self.index.extents.starts(r.leaf_index for r, _ in wanted)
        stored = [(self._origin(r, *at), n) for (r, n), at in zip(wanted, starts)]
        opened = self._open_stored(stored)
        if unpinned is None:
            return opened
        return [
            _view(x._replace(root=unpinned)) if isinstance(x, OpenedPieces) else x
            for x in opened
        ]

    def _open_stored(
        self, wanted: Sequence[tuple[ArrayOrigin, Sequence[int]]]
    ) -> list[Any]:
        """Arrays of other formats, opened for chunks of some numbers: without a read,
        unless TensorStore has no driver for the root. What has been read before is
        given as it is."""
        _context.check_fork()
        arrays = [(x, n) for x, n in wanted if isinstance(x, ForeignArray)]
        opened = iter(self._open_arrays(arrays))
        out: list[Any] = []
        for x, _ in wanted:
            if isinstance(x, PiecedArray):
                out.append(OpenedPieces(x, self.directory))
            else:
                out.append(next(opened) if isinstance(x, ForeignArray) else ts.array(x))
        return out

    def _open_arrays(
        self, stored: Sequence[tuple[ForeignArray, Sequence[int]]]
    ) -> list[ts.TensorStore]:
        """Opens arrays that lie in directories, or in the database."""
        root = self.directory
        context = _arrays.context_of(root)
        if root.has_driver() and self.nodes is None:
            kvstores = [root.spec(x.key) for x, _ in stored]
        else:
            context = ts.Context({_arrays.NODES: {}}, parent=context)
            has_driver = root.has_driver()
            make_stores = self._make_database if has_driver else self._copy_to_memory
            kvstores = make_stores(stored, context)
        specs = [{**x.spec, "kvstore": kv} for (x, _), kv in zip(stored, kvstores)]
        return _arrays.opened(specs, context)

    def _make_database(
        self, stored: Sequence[tuple[ForeignArray, Sequence[int]]], context: ts.Context
    ) -> list[dict[str, Any]]:
        """Makes a database in memory that says where chunks of some arrays lie in the
        files of `nodes`. Returns the spec of a directory in it for each array."""
        assert self.nodes is not None
        find, files, inline = self.nodes.locate, self.nodes.files, self.nodes.inline
        chunks = [
            [
                (key, at.file, at.offset, at.nbytes)
                for key in x.chunk_keys(n)
                if (at := find(f"{x.key}/{key}"))
            ]
            for x, n in stored
        ]
        return _arrays.databases(self.directory.spec(), files, chunks, context, inline)

    def _copy_to_memory(
        self, stored: Sequence[tuple[ForeignArray, Sequence[int]]], context: ts.Context
    ) -> list[dict[str, Any]]:
        """Reads chunks of some arrays into memory: a directory there for each array."""
        root, database = self.directory, self.nodes
        memory = {"driver": "memory", "memory_key_value_store": _arrays.NODES}
        kv = ts.KvStore.open(memory, context=context).result()
        reading = []
        for number, (array, numbers) in enumerate(stored):
            for chunk_key in array.chunk_keys(numbers):
                key, start, stop = f"{array.key}/{chunk_key}", 0, None
                name = f"{number}/{chunk_key}"
                if database is not None:
                    at = database.locate(key)
                    if at is None:
                        continue
                    file, start, size = at
                    stop = start + size
                    # The number after that of the last file is for what lies in nodes.
                    if file == len(database.files):
                        kv.write(name, database.inline[start:stop]).result()
                        continue
                    key = database.files[file]
                reading.append((name, key, root.start_read(key, start, stop)))
        for name, key, future in reading:
            got = _store.read_answer(root, key, future)
            if got.state == "value":
                kv.write(name, got.value).result()
        return [{**memory, "path": f"{number}/"} for number in range(len(stored))]

    def template_as_read(self, record: LeafRecord) -> Template:
        t, strides = record.template, self.strides.get(record.leaf_index)
        if not self.is_contiguous(record):
            return t
        if strides is None:
            return t._replace(chunk=_grid.choose(t.shape, t.itemsize, _PART_BYTES))
        nbytes = _pieces.span(t.shape, strides) * t.itemsize
        target = max(_PART_BYTES, nbytes // _MAX_PARTS)
        chunk = _pieces.choose_strided(t.shape, strides, t.itemsize, target)
        return t._replace(chunk=chunk)

    def check(self, record: LeafRecord, numbers: Sequence[int]) -> None:
        if not self.is_scattered(record):
            # The `numbers` are of `template_as_read`. In the index it is one chunk.
            super().check(record, range(record.template.chunk_count))
            return
        (at,) = self.index.extents.starts([record.leaf_index])
        stored = self._origin(record, *at)
        if isinstance(stored, ForeignArray):
            stored.check(numbers)
        elif isinstance(stored, PiecedArray) and not self.root.is_remote:
            for piece in stored.pieces:
                self.directory.check_range(piece.key, stored.stop(piece))


def _view(pieces: OpenedPieces) -> ts.TensorStore:
    """A view of an array in pieces, made without a read; of packed elements each has a
    byte."""

    def read(domain: ts.IndexDomain, chunk: np.ndarray, _: object) -> None:
        part = np.empty(domain.shape, chunk.dtype)
        picks = [slice(x.inclusive_min, x.exclusive_max) for x in domain]
        pieces.read(part, tuple(picks))
        chunk[...] = part

    t = pieces.array.template
    dtype = ts.dtype("uint8" if pieces.array.is_packed else t.stored)
    layout = ts.ChunkLayout(read_chunk_shape=t.chunk)
    return ts.virtual_chunked(read, dtype=dtype, shape=t.shape, chunk_layout=layout)


def save_id_of(directory: Backend, files: Sequence[str], headers: bytes) -> str:
    """The id of a save of another format: of the stamps of its files and of `headers`,
    which are what the files say of their leaves."""
    parts = _store.each(directory, directory.stamp, files)
    return xxhash.xxh3_64_hexdigest("/".join(parts).encode() + headers)
