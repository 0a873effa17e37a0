"""Arrays of other formats, in directories, databases or pieces of files, and the source
that has them.
"""

import dataclasses
import functools as ft
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
import xxhash

from .._kernel._errors import MissingError
from .._kernel._format import _grid
from .._kernel._format._leaves import LeafRecord
from .._kernel._format._template import Template
from .._kernel._load._source import Source
from .._kernel._storage import _arrays, _context, _store
from .._kernel._storage._backend import Backend
from ._database import Database


# In what parts leaves are read that are one run of bytes, where a view wants some.
_CUT = 4 * 2**20
# And in how many of them at most.
_MANY = 2**12
# Of a piece so many bytes are read together.
_TOGETHER = 2**22


class ForeignArray(NamedTuple):
    """An array of another format: what TensorStore opens, and below which key it lies.

    `pieces` gives the keys, below that one, that chunks of some numbers lie at; `check`
    raises `ValueError` if what is there is no piece of it. `head` gives the first so
    many bytes of its first piece, as they are stored.
    """

    key: str
    spec: dict[str, Any]
    pieces: Callable[[Sequence[int]], list[str]]
    check: Callable[[Sequence[int]], None]
    head: Callable[[int], bytes]


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
        count = span(piece.shape, piece.strides or strides_of(piece.shape))
        nbytes = count * self.template.itemsize
        return piece.offset + (nbytes // 2 if self.is_packed else nbytes)

    def start_read(self, into: np.ndarray, picks: tuple[slice | int, ...]) -> Any:
        """The read of `self[picks]` into an array of its shape: it is done when its
        result is asked for."""
        # Read by whoever waits for it.
        read = ft.partial(self.read, into, picks)
        return types.SimpleNamespace(done=lambda: True, result=read)

    def read(self, into: np.ndarray, picks: tuple[slice | int, ...]) -> None:
        """Reads `self[picks]`: of each piece all from the first of its elements that
        are picked to the last, and not much more of it at a time."""
        axes = [
            range(n)[p] if isinstance(p, slice) else range(p, p + 1)
            for n, p in zip(self.template.shape, picks)
        ]
        into = into.reshape([len(axis) for axis in axes])
        for piece in self.pieces:
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
            self._read_piece(piece, first, [axis.step for axis in axes], to)

    def _read_piece(
        self, piece: Piece, first: Sequence[int], steps: Sequence[int], into: np.ndarray
    ) -> None:
        """Reads the elements of a piece from `first` on, in these steps along each
        axis."""
        strides = piece.strides or strides_of(piece.shape)
        # From the lowest element on, as NumPy would have it after `flip`.
        down = tuple(axis for axis, step in enumerate(steps) if step < 0)
        lowest = [
            a + min(0, (n - 1) * step) for a, n, step in zip(first, into.shape, steps)
        ]
        apart = [abs(step) * stride for step, stride in zip(steps, strides)]
        into = np.flip(into, down)
        block = choose_strided(into.shape, apart, into.itemsize, _TOGETHER)
        for index in _grid.indices(into.shape, block):
            part = _grid.region(into.shape, block, index)
            begin = sum(
                (low + s.start * abs(step)) * stride
                for low, s, step, stride in zip(lowest, part, steps, strides)
            )
            self._read_run(piece, begin, apart, into[part])

    def _read_run(
        self, piece: Piece, first: int, strides: Sequence[int], into: np.ndarray
    ) -> None:
        """Reads all that lies from the first element to the last, of elements so many
        apart. Of two that have a byte, the lower half is the first."""
        root, key, start = self.root, piece.key, piece.offset
        assert root is not None
        count = span(into.shape, strides)
        if self.is_packed:
            stop = start + (first + count + 1) // 2
            data = _store.read_bytes(root, key, start + first // 2, stop)
            both = np.frombuffer(data, np.uint8)[:, None]
            both = both >> np.array([0, 4], np.uint8) & 15
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

    def open(self) -> ts.TensorStore:
        """A view of all pieces, opened without a read; of packed ones each has a
        byte."""

        def read(domain: ts.IndexDomain, chunk: np.ndarray, _: object) -> None:
            part = np.empty(domain.shape, chunk.dtype)
            picks = [slice(x.inclusive_min, x.exclusive_max) for x in domain]
            self.read(part, tuple(picks))
            chunk[...] = part

        t = self.template
        dtype = ts.dtype("uint8" if self.is_packed else t.stored)
        layout = ts.ChunkLayout(read_chunk_shape=t.chunk)
        return ts.virtual_chunked(read, dtype=dtype, shape=t.shape, chunk_layout=layout)


# What an array of another format is read from.
Stored = ForeignArray | PiecedArray | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignSource(Source):
    """A source of another format. Each leaf is one run of bytes in one of the files of
    the index; or what `stored` has for its index, in directories or in the database of
    `nodes`; or is there already. The elements of leaves that `strides` has lie so many
    elements apart along each axis. `head` is what the files say of them: with the
    stamps of the files it makes the id of the save."""

    head: bytes
    stored: Mapping[int, Stored]
    nodes: Database | None
    strides: Mapping[int, tuple[int, ...]]

    has_digests = False
    is_ours = False

    def is_in(self, directory: Backend) -> bool:
        return save_of(directory, self.index.files, self.head) == self.index.save

    def _without_spec(self, record: LeafRecord) -> str:
        return f"it is of another format, {self.index.layout}"

    def is_stored(self, record: LeafRecord) -> bool:
        return record.leaf_index in self.stored

    def is_contiguous(self, record: LeafRecord) -> bool:
        return not self.is_stored(record)

    def head_of(self, record: LeafRecord, most: int) -> bytes:
        array = self.stored.get(record.leaf_index)
        if isinstance(array, ForeignArray):
            return array.head(most)
        if isinstance(array, np.ndarray):
            return array.reshape(-1)[:most].tobytes()[:most]
        if array is None:
            key, start, _ = self.chunk_range(record, 0)
            stop = start + record.template.nbytes
        else:
            piece = min(array.pieces, key=lambda piece: piece.start)
            key, start, stop = piece.key, piece.offset, array.stop(piece)
        return _store.read_bytes(self.directory, key, start, min(stop, start + most))

    def is_scattered(self, record: LeafRecord) -> bool:
        return self.is_stored(record) or record.leaf_index in self.strides

    def _origin(self, record: LeafRecord, file: int, offset: int) -> Stored:
        """The array that a leaf is read from, which begins there if it is a run."""
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
        if not self.is_scattered(wanted[0][0]):
            return super().open(wanted, unpinned)
        starts = self.index.extents.starts(r.leaf_index for r, _ in wanted)
        stored = [(self._origin(r, *at), n) for (r, n), at in zip(wanted, starts)]
        opened = self._open_stored(stored)
        if unpinned is None:
            return opened
        return [
            x._replace(root=unpinned).open() if isinstance(x, PiecedArray) else x
            for x in opened
        ]

    def _open_stored(self, wanted: Sequence[tuple[Stored, Sequence[int]]]) -> list[Any]:
        """Arrays of other formats, opened without a read, for chunks of some numbers;
        or what has been read before. They lie in directories, or in the database."""
        root, database = self.directory, self.nodes
        _context.check_fork()
        context = _arrays.context_of(root)
        stored = [(x, n) for x, n in wanted if isinstance(x, ForeignArray)]
        if not root.has_driver():
            context = ts.Context({_arrays.NODES: {}}, parent=context)
            kvstores = self._copies(stored, context)
        elif database is None:
            kvstores = [root.spec(x.key) for x, _ in stored]
        else:
            context = ts.Context({_arrays.NODES: {}}, parent=context)
            find, files = database.locate, database.files
            chunks = [
                [
                    (key, at.file, at.offset, at.nbytes)
                    for key in x.pieces(n)
                    if (at := find(f"{x.key}/{key}"))
                ]
                for x, n in stored
            ]
            data = root.spec()
            kvstores = _arrays.databases(data, files, chunks, context, database.inline)
        specs = [{**x.spec, "kvstore": kv} for (x, _), kv in zip(stored, kvstores)]
        opened = iter(_arrays.opened(specs, context))
        out: list[Any] = []
        for x, _ in wanted:
            if isinstance(x, PiecedArray):
                out.append(x._replace(root=root))
            else:
                out.append(next(opened) if isinstance(x, ForeignArray) else ts.array(x))
        return out

    def _copies(
        self, stored: Sequence[tuple[ForeignArray, Sequence[int]]], context: ts.Context
    ) -> list[dict[str, Any]]:
        """Directories in memory with chunks of some arrays, which are read now."""
        root, database = self.directory, self.nodes
        memory = {"driver": "memory", "memory_key_value_store": _arrays.NODES}
        kv = ts.KvStore.open(memory, context=context).result()
        reading = []
        for number, (array, numbers) in enumerate(stored):
            for piece in array.pieces(numbers):
                key, start, stop = f"{array.key}/{piece}", 0, None
                name = f"{number}/{piece}"
                if database is not None:
                    at = database.locate(key)
                    if at is None:
                        continue
                    file, start, size = at
                    stop = start + size
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
        if self.is_stored(record):
            return t
        if strides is None:
            return t._replace(chunk=_grid.choose(t.shape, t.itemsize, _CUT))
        target = max(_CUT, span(t.shape, strides) * t.itemsize // _MANY)
        chunk = choose_strided(t.shape, strides, t.itemsize, target)
        return t._replace(chunk=chunk)

    def check(self, record: LeafRecord, numbers: Sequence[int]) -> None:
        if not self.is_scattered(record):
            super().check(record, range(record.template.chunk_count))
            return
        (at,) = self.index.extents.starts([record.leaf_index])
        stored = self._origin(record, *at)
        if isinstance(stored, ForeignArray):
            stored.check(numbers)
        elif isinstance(stored, PiecedArray) and not self.root.is_remote:
            for piece in stored.pieces:
                self.directory.check_range(piece.key, stored.stop(piece))


def save_of(directory: Backend, files: Sequence[str], head: bytes) -> str:
    """The id of what files of another format hold, by their stamps, and by what they
    say of it."""
    parts = _store.each(directory, directory.stamp, files)
    return xxhash.xxh3_64_hexdigest("/".join(parts).encode() + head)


# ---- Steps along the axes of arrays.


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last one of an array that has
    them so many elements apart along each axis."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))


def choose_strided(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, target: int
) -> tuple[int, ...]:
    """The shape of chunks of an array that does not lie row after row: chunks that have
    about `target` bytes, and lie within as many. Axes are cut from that of the longest
    steps on."""
    chunk = [max(1, n) for n in shape]
    target //= itemsize
    for axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        if max(span(chunk, strides), math.prod(chunk)) <= target:
            break
        chunk[axis] = 1
        rest, size = span(chunk, strides), math.prod(chunk)
        most = min(1 + (target - rest) // max(1, strides[axis]), target // size)
        chunk[axis] = max(1, min(shape[axis], most))
    return tuple(chunk)


def strides_of(shape: Sequence[int]) -> list[int]:
    """The steps along each axis, in elements, of an array that lies row after row."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
