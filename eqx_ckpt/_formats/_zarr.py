"""Zarr arrays of other formats, v2 and v3: their metadata, checked.

Of the metadata a spec for TensorStore is made here, which has nothing but what is known
and has been checked.

A piece is what lies at one key of an array: a chunk, or a shard of Zarr v3
(`sharding_indexed`). A shard has several chunks, and a list of where each of them lies.
"""

import functools as ft
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._kernel._format import _grid, _json, _schema, _template
from .._kernel._format._leaves import Unreadable
from .._kernel._format._template import Template
from .._kernel._load._source import Source
from .._kernel._storage import _arrays, _store
from .._kernel._storage._backend import Backend
from .._zips._probe import Probe
from . import _database, _foreign_index
from ._database import Database
from ._foreign_index import ForeignLeaf, leaf_of
from ._foreign_source import ForeignArray


MAX_FILES = 2**20
_MAX_METADATA = 2**16  # The bytes of the metadata of one array.
# What zstd makes of one byte at most.
_MAX_RATIO = 2**15
# Chunks that are not there, as they are zeros: in all arrays, and for each file.
_MAX_EMPTY, _EMPTY = 2**16, 2**8
# In the list of the chunks in a piece: the bytes of each, and one that is not there.
_LISTED, _NONE = 16, 2**64 - 1
_COMPRESSORS = ("zstd", "gzip", "zlib", "blosc")


def name_of(is_v3: bool) -> str:
    """The name of the file that has the metadata of an array."""
    return "zarr.json" if is_v3 else ".zarray"


class ZarrArray(NamedTuple):
    """The metadata of an array."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]  # what is read as one
    prefix: str  # of the keys of its pieces
    separator: str
    is_encoded: bool
    metadata: dict[str, Any]  # made of nothing but what is known
    # The shape of a piece that holds chunks, and a list of where each of them lies;
    # where that list is; and the bytes after it.
    piece: tuple[int, ...] | None = None
    is_list_first: bool = False
    after_list: int = 0

    @property
    def full(self) -> int:
        return math.prod(self.chunk) * _template.dtype_of(self.dtype).itemsize

    @property
    def most(self) -> int:
        """The most bytes that a chunk is stored in."""
        return _template.most_encoded(self.full) if self.is_encoded else self.full

    @property
    def is_blosc(self) -> bool:
        return (self.metadata.get("compressor") or {}).get("id") == "blosc"

    @property
    def per_piece(self) -> tuple[int, ...]:
        """The number of chunks that a piece has along each axis."""
        if self.piece is None:
            return (1,) * len(self.chunk)
        return tuple(o // i for o, i in zip(self.piece, self.chunk))


class ArrayRow(NamedTuple):
    """A leaf, the kinds of its keys, and the key in the store that its array lies at.
    `template` makes its template of these kinds and the metadata of the array."""

    name: str
    keys: str
    key: str
    template: Callable[[str, ZarrArray], Template]


class ZarrArrays(NamedTuple):
    """Where arrays lie: in directories, or in the database at the root. `size` is that
    of all files, which are `listed`, if that takes no requests; `is_full`: whether no
    chunk was left out as zeros."""

    directory: Backend
    database: Database | None
    listed: list[str]
    size: int | None
    is_v3: bool = False
    is_full: bool = True

    def read_leaves(self, rows: Sequence[ArrayRow]) -> list[ForeignLeaf]:
        """The leaves that are such arrays.

        **Raises:** `ValueError` that names the leaf, if one has no metadata.
        """
        files = [f"{row.key}/{name_of(self.is_v3)}" for row in rows]
        metadata = _store.each(self.directory, self._small, files)
        return list(map(self._leaf, metadata, rows))

    def _small(self, key: str) -> bytes | None:
        """The bytes of a small file; None: there is none, or it is longer."""
        directory = self.directory
        if self.database is not None:
            place = self.database.locate(key)
            if place is None or place.nbytes > _MAX_METADATA:
                return None
            return self.database.read_range(directory, place, 0, place.nbytes)
        value = directory.read(key, None if directory.is_remote else _MAX_METADATA + 1)
        data = value and value.data
        return None if data is None or len(data) > _MAX_METADATA else data

    def _leaf(self, metadata: bytes | None, row: ArrayRow) -> ForeignLeaf:
        name, keys, key, make = row
        if metadata is None:
            raise ValueError(f"the metadata of the array `{name}` are missing")
        try:
            parse = _v3 if self.is_v3 else _v2
            array = parse(_json.parse(metadata, "its metadata"))
            if len(array.shape) != len(array.chunk):
                raise ValueError("impossible chunks")
            if self.database is not None and array.is_blosc:
                # Its chunks are looked at before they are decoded.
                raise ValueError("unknown compressor 'blosc' in a database")
            t = make(keys, array)
            _template.check_template(t)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            why = f"its metadata are not as they are read here: {e}"
            return leaf_of(name, keys, Unreadable("array", why, True))
        size = self.size
        is_thin = self.is_full and size is not None and t.nbytes > size * _MAX_RATIO
        # The list of the chunks in a piece is read whole.
        read = max(array.full, _LISTED * math.prod(array.per_piece))
        if is_thin or max(t.full, read) > _largest(size):
            why = "it is larger than what its files can hold, or than this machine"
            return leaf_of(name, keys, Unreadable(array.dtype, why, True))
        spec = {
            "driver": "zarr3" if self.is_v3 else "zarr",
            "metadata": array.metadata,
            # Where zeros were not written, what is missing are zeros.
            "fill_missing_data_reads": not self.is_full,
        }
        pieces = ft.partial(_pieces, array)
        check = ft.partial(self._check_pieces, array, key)
        head = ft.partial(self._head, array, key)
        return ForeignLeaf(name, t, value=ForeignArray(key, spec, pieces, check, head))

    def source(
        self,
        probe: Probe,
        format: str,
        files: list[str],
        leaves: Sequence[ForeignLeaf],
        head: bytes,
        metadata: object,
    ) -> Source:
        """The source of leaves that are such arrays.

        **Raises:** `ValueError` for many more chunks than are in files: to look for
        each takes time, and zeros that are not there can have any number of them.
        """
        chunks = sum(leaf.template.chunk_count for leaf in leaves)
        sharded = sum(leaf.template.chunk_count for leaf in leaves if _is_sharded(leaf))
        count = len(self.database.entries.keys if self.database else self.listed)
        if self.size is not None:
            # A shard lists its chunks.
            most = _MAX_EMPTY + _EMPTY * count + min(sharded, self.size // _LISTED)
            if chunks > most:
                raise ValueError(
                    f"its arrays have {chunks} chunks, most of which are none"
                )
        if self.database is not None:
            files = [*files, _database.MANIFEST]
        what = format, files, leaves, head, metadata
        return _foreign_index.source(probe, *what, database=self.database)

    def _head(self, array: ZarrArray, key: str, most: int) -> bytes:
        """The first bytes of the piece that the first chunk is in."""
        (piece,) = _pieces(array, [0])
        name = f"{key}/{piece}"
        if self.database is not None:
            most = min(most, self._size(name) or 0)
        return self._read_piece(name, 0, most)

    def _check_pieces(self, array: ZarrArray, key: str, numbers: Sequence[int]) -> None:
        """**Raises:** `ValueError` for a piece that is longer than any can be: all of
        it would be read."""
        most = array.most
        if array.piece is not None:
            most = math.prod(array.per_piece) * (most + _LISTED) + array.after_list
        for piece in _pieces(array, numbers):
            name = f"{key}/{piece}"
            size = self._size(name)
            if size is not None and size > most:
                raise ValueError(f"`{name}` is not a chunk of it")
            if array.is_blosc:
                # TensorStore would allocate what it says, up to 2 GiB.
                head = self._read_piece(name, 0, 16)
                if int.from_bytes(head[4:8], "little") > array.full:
                    raise ValueError(f"`{name}` is not a chunk of it")
            if size is not None and array.piece is not None:
                self._check_list(array, name, size)

    def _check_list(self, array: ZarrArray, name: str, size: int) -> None:
        count = _LISTED * math.prod(array.per_piece)
        start = 0 if array.is_list_first else size - count - array.after_list
        if start < 0:
            return  # It is too short, as whoever reads it will say.
        places = np.frombuffer(self._read_piece(name, start, count), "<u8")
        lengths = places[1::2][places[1::2] != _NONE]
        if (lengths > array.most).any():
            raise ValueError(f"`{name}` has something else than chunks of it")

    def _size(self, name: str) -> int | None:
        """The bytes of a piece; None if there is none, or it is not known."""
        if self.database is not None:
            place = self.database.locate(name)
            return place and place.nbytes
        return self.directory.size(name)

    def _read_piece(self, name: str, start: int, count: int) -> bytes:
        """Some bytes of a piece; none if there is no such piece."""
        into = np.zeros(count, np.uint8)
        try:
            if self.database is None:
                self.directory.read_into(name, start, into)
            elif (place := self.database.locate(name)) is not None:
                return self.database.read_range(self.directory, place, start, count)
        except FileNotFoundError:
            pass  # Whoever reads it will say so.
        return into.tobytes()


def arrays(probe: Probe) -> ZarrArrays:
    """The arrays in a directory, all full, or in the database that is there.

    **Raises:** `ValueError` for links, what is not a file, too many files, and a
    database that cannot be read.
    """
    sizes, database = probe.directory.survey(MAX_FILES), None
    size = None if sizes is None else sum(sizes.values())
    if _database.MANIFEST in probe.names:
        database = Database(probe.directory, MAX_FILES)
    return ZarrArrays(probe.directory, database, list(sizes or ()), size)


def _is_sharded(leaf: ForeignLeaf) -> bool:
    if not isinstance(leaf.value, ForeignArray):
        return False
    codecs = leaf.value.spec["metadata"].get("codecs", [{}])
    return codecs[0].get("name") == "sharding_indexed"


def _pieces(array: ZarrArray, numbers: Sequence[int]) -> list[str]:
    """The keys of the pieces that chunks of some numbers are in, each once."""
    counts = _grid.grid(array.shape, array.chunk)
    if not counts:
        return [array.prefix.rstrip("/.") or "0"] if numbers else []
    places = np.stack(np.unravel_index(np.asarray(numbers, np.int64), counts), 1)
    rows = dict.fromkeys(map(tuple, (places // array.per_piece).tolist()))
    return [array.prefix + array.separator.join(map(str, row)) for row in rows]


def template(array: ZarrArray, kind: str, keys: str) -> Template:
    chunk = tuple(min(c, max(1, n)) for c, n in zip(array.chunk, array.shape))
    return Template(keys, kind, array.dtype, array.shape, array.dtype, chunk)


def _largest(size: int | None) -> int:
    """The most bytes that a chunk can have, as all of them are made of the files."""
    memory = _arrays.largest_chunk()
    return memory if size is None else min(memory, size * _MAX_RATIO)


def _numbers(value: Any, least: int) -> tuple[int, ...]:
    is_right = _schema.fits(value, [range(least, 2**60)])
    if not is_right or len(numbers := tuple(value)) > _template.MAX_RANK:
        raise ValueError(f"impossible shape or chunks {value!r:.60}")
    return numbers


def _only(value: dict[str, Any], **known: Any) -> None:
    """**Raises:** `ValueError` where a field is there and is not as it is known."""
    for field, good in known.items():
        if field in value and value[field] not in good:
            raise ValueError(f"unknown {field} {value[field]!r:.60}")


def _v2(value: dict[str, Any]) -> ZarrArray:
    _only(value, zarr_format=[2], order=["C"], filters=[None, []])
    _only(value, dimension_separator=[".", "/"], fill_value=[None, 0, False])
    shape, chunk = _numbers(value["shape"], 0), _numbers(value["chunks"], 1)
    text = value["dtype"]
    if type(text) is not str:
        raise ValueError("unknown dtype")
    dtype = text
    if re.fullmatch(r"[<|][biufc][0-9]{1,2}", text):
        dtype = np.dtype(text).name
    if dtype not in _template.STORED:
        raise ValueError(f"unknown dtype {text!r:.60}")
    zero = False if dtype == "bool" else 0
    compressor = value.get("compressor")
    if compressor is not None:
        _only(compressor, id=_COMPRESSORS)
        # The level, and the codec within Blosc, are no matter of decoding.
        compressor = {"id": compressor["id"]}
    metadata = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": text,
        "order": "C",
        "compressor": compressor,
        "fill_value": None if value.get("fill_value") is None else zero,
        "filters": None,
        "dimension_separator": value.get("dimension_separator", "."),
    }
    separator = metadata["dimension_separator"]
    return ZarrArray(
        dtype, shape, chunk, "", separator, compressor is not None, metadata
    )


def _v3(value: dict[str, Any]) -> ZarrArray:
    _only(value, zarr_format=[3], node_type=["array"], storage_transformers=[[]])
    _only(value["chunk_grid"], name=["regular"])
    shape = _numbers(value["shape"], 0)
    outer = _numbers(value["chunk_grid"]["configuration"]["chunk_shape"], 1)
    dtype = value["data_type"]
    if type(dtype) is not str or dtype not in _template.STORED:
        raise ValueError(f"unknown dtype {dtype!r:.60}")
    encoding = {"name": None, **value["chunk_key_encoding"]}
    keys = encoding.get("configuration") or {}
    _only(encoding, name=["default"])
    _only(keys, separator=["/", "."])
    separator = keys.get("separator", "/")
    codecs = _codecs(value["codecs"], _OF_CHUNK | {"sharding_indexed"})
    inner, within, sharding = outer, codecs, None
    if codecs and codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        inner, within = tuple(sharding["chunk_shape"]), sharding["codecs"]
    if len(inner) != len(outer) or any(o % i for o, i in zip(outer, inner)):
        raise ValueError("impossible chunks in chunks")
    fill = value.get("fill_value")
    _check_fill(fill, dtype)
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(outer)},
        },
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": separator},
        },
        "fill_value": fill,
        "codecs": codecs,
    }
    is_encoded = len(within) > 1
    prefix = f"c{separator}"
    what = dtype, shape, inner, prefix, separator, is_encoded, metadata
    if sharding is None:
        return ZarrArray(*what)
    checksums = len(sharding["index_codecs"]) - 1
    return ZarrArray(*what, outer, sharding["index_location"] == "start", 4 * checksums)


def _check_fill(fill: Any, dtype: str) -> None:
    """**Raises:** `ValueError` for what is no number of the dtype's kind; also for the
    texts that Zarr has for some, such as "NaN". TensorStore refuses a number that an
    integer dtype does not hold, and a value of null, once the array is read."""
    kind = _template.number_type(_template.dtype_of(dtype))
    numbers = fill if kind == "complex" and type(fill) is list else [fill]
    known = {"bool": (bool,), "int": (int,)}.get(kind, (int, float))
    is_good = all(type(x) in known and -(2**63) <= x < 2**64 for x in numbers)
    if fill is not None and not (is_good and len(numbers) in (1, 2)):
        raise ValueError(f"unknown fill value {fill!r:.60}")


_OF_LIST = frozenset({"bytes", "crc32c"})
_OF_CHUNK = _OF_LIST | {"zstd", "gzip"}


def _codecs(value: object, known: frozenset[str]) -> list[dict[str, Any]]:
    """The codecs, all known ones: `bytes` is the first of them, or that of pieces."""
    if type(value) is not list or not 1 <= len(value) <= 4:
        raise ValueError("unknown codecs")
    out = []
    for place, codec in enumerate(value):
        name, given = codec["name"], codec.get("configuration") or {}
        made: dict[str, Any] = {}
        is_first = name in ("bytes", "sharding_indexed")
        if type(name) is not str or name not in known or is_first != (place == 0):
            raise ValueError(f"unknown codec {name!r:.60}")
        if name == "bytes":
            _only(given, endian=["little"])
            made = {k: given[k] for k in ("endian",) if k in given}
        elif name in ("zstd", "gzip"):
            made = {"level": 1}  # That it has is no matter of decoding.
        elif name == "sharding_indexed":
            if len(value) > 1:
                raise ValueError(f"unknown codec {value[1]!r:.60}")
            _only(given, index_location=["start", "end"])
            made = {
                "chunk_shape": list(_numbers(given["chunk_shape"], 1)),
                "codecs": _codecs(given["codecs"], _OF_CHUNK),
                "index_codecs": _codecs(given["index_codecs"], _OF_LIST),
                "index_location": given.get("index_location", "end"),
            }
        out.append({"name": name, **({"configuration": made} if made else {})})
    return out
