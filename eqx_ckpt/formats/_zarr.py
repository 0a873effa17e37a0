"""Zarr arrays of other formats, v2 and v3: their metadata, checked.

Of the metadata a spec for TensorStore is made here, which has nothing but what is known
and has been checked.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _arrays, _json, _store, _template
from .._root import Root
from .._template import Template


MAX_FILES = 2**20
_MAX_METADATA = 2**16  # The bytes of the metadata of one array.
# What zstd makes of one byte at most.
_MAX_RATIO = 2**15
_COMPRESSORS = ("zstd", "gzip", "zlib", "blosc")


def survey(root: Root) -> tuple[list[str], int | None]:
    """The keys of the files below a local root, and how many bytes all of them have;
    none and None in a store.

    **Raises:** `ValueError` for links, what is not a file, and too many files.
    """
    sizes = _store.survey(root, MAX_FILES)
    return ([], None) if sizes is None else (list(sizes), sum(sizes.values()))


def name_of(is_v3: bool) -> str:
    """The name of the file that has the metadata of an array."""
    return "zarr.json" if is_v3 else ".zarray"


class Zarr(NamedTuple):
    """What the metadata of an array say."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]  # what is read at once
    stored: int  # the bytes of a chunk as it is stored
    metadata: dict[str, Any]  # made of nothing but what is known


class Arrays(NamedTuple):
    """Where arrays lie: in directories, or in the database at the root. `size` is that
    of all files, if it is known; `is_full`: whether no chunk was left out as zeros."""

    directory: Root
    is_v3: bool
    is_ocdbt: bool
    is_full: bool
    size: int | None

    def metadata(self, keys: Sequence[str]) -> list[bytes | None]:
        """The metadata of the arrays at some keys; None where there are none."""
        files = [f"{key}/{name_of(self.is_v3)}" for key in keys]
        return _store.read_keys(self.directory, files, self.is_ocdbt, _MAX_METADATA)

    def read(
        self,
        name: str,
        key: str,
        metadata: bytes | None,
        make: Callable[[Zarr], Template],
    ) -> tuple[Template, dict[str, Any]]:
        """The template of the array of a leaf, as it is made of its metadata; and what
        `_store.open_specs` opens it by.

        **Raises:** `ValueError` that names the leaf, if the array cannot be.
        """
        if metadata is None:
            raise ValueError(f"the metadata of the array `{name}` are missing")
        try:
            parse = _v3 if self.is_v3 else _v2
            what = parse(_json.parse(metadata, "its metadata"))
            if len(what.shape) != len(what.chunk):
                raise ValueError("impossible chunks")
            self._check_codec(what)
            t = make(what)
            _template.check_template(t)
            if t.chunk_count > _template.MAX_CHUNKS:
                raise ValueError(f"it has more than {_template.MAX_CHUNKS} chunks")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"the array `{name}` cannot be read: {e}") from e
        size = self.size
        is_thin = self.is_full and size is not None and t.nbytes > size * _MAX_RATIO
        if is_thin or max(t.full, what.stored) > _largest(size):
            raise ValueError(
                f"the array `{name}` is larger than what its files can hold, or than "
                "this machine"
            )
        spec = {
            "driver": "zarr3" if self.is_v3 else "zarr",
            "kvstore": {"key": key, "is_ocdbt": self.is_ocdbt},
            "metadata": what.metadata,
            # Where zeros were not written, what is missing are zeros.
            "fill_missing_data_reads": not self.is_full,
        }
        return t, spec

    def _check_codec(self, what: Zarr) -> None:
        compressor = what.metadata.get("compressor")
        if self.is_ocdbt and compressor and compressor["id"] == "blosc":
            # Its chunks are looked at before they are decoded.
            raise ValueError("unknown compressor 'blosc' in a database")


def template(what: Zarr, kind: str, keys: str) -> Template:
    chunk = tuple(min(c, max(1, n)) for c, n in zip(what.chunk, what.shape))
    return Template(keys, kind, what.dtype, what.shape, what.dtype, chunk)


def _largest(size: int | None) -> int:
    """The most bytes that a chunk can have, as all of them are made of the files."""
    memory = _arrays.largest_chunk()
    return memory if size is None else min(memory, size * _MAX_RATIO)


def _numbers(value: Any, least: int) -> tuple[int, ...]:
    if type(value) is not list or not all(
        type(n) is int and least <= n < 2**60 for n in value
    ):
        raise ValueError(f"impossible shape or chunks {value!r:.60}")
    return tuple(value)


def _only(value: dict[str, Any], **known: Any) -> None:
    """**Raises:** `ValueError` where a field is there and is not as it is known."""
    for field, good in known.items():
        if field in value and value[field] not in good:
            raise ValueError(f"unknown {field} {value[field]!r:.60}")


def _v2(value: dict[str, Any]) -> Zarr:
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
    return Zarr(dtype, shape, chunk, _size(chunk, dtype), metadata)


def _v3(value: dict[str, Any]) -> Zarr:
    _only(value, zarr_format=[3], node_type=["array"], storage_transformers=[[]])
    _only(value["chunk_grid"], name=["regular"])
    shape = _numbers(value["shape"], 0)
    outer = _numbers(value["chunk_grid"]["configuration"]["chunk_shape"], 1)
    dtype = value["data_type"]
    if type(dtype) is not str or dtype not in _template.STORED:
        raise ValueError(f"unknown dtype {dtype!r:.60}")
    encoding = value["chunk_key_encoding"]
    _only({"name": None, **encoding}, name=["default"])
    _only(encoding.get("configuration") or {}, separator=["/", "."])
    codecs = _codecs(value["codecs"], True)
    inner = outer
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            inner = tuple(codec["configuration"]["chunk_shape"])
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
        "chunk_key_encoding": encoding,
        "fill_value": fill,
        "codecs": codecs,
    }
    # The index of the chunks in a chunk is 16 bytes for each.
    stored = _size(inner, dtype) + 16 * math.prod(o // i for o, i in zip(outer, inner))
    return Zarr(dtype, shape, inner, stored, metadata)


def _check_fill(fill: Any, dtype: str) -> None:
    """**Raises:** `ValueError` for what is no value of the dtype, as Zarr has it."""
    kind = _template.number_type(_template.dtype_of(dtype))
    numbers = fill if kind == "complex" and type(fill) is list else [fill]
    known = {"bool": (bool,), "int": (int,)}.get(kind, (int, float))
    is_good = all(type(x) in known and abs(x) < 2**64 for x in numbers)
    if fill is not None and not (is_good and len(numbers) in (1, 2)):
        raise ValueError(f"unknown fill value {fill!r:.60}")


def _codecs(value: Any, outermost: bool) -> list[dict[str, Any]]:
    if type(value) is not list or len(value) > 4:
        raise ValueError("unknown codecs")
    out = []
    for codec in value:
        name, given = codec["name"], codec.get("configuration") or {}
        made: dict[str, Any] = {}
        if name == "bytes":
            _only(given, endian=["little"])
            made = {k: given[k] for k in ("endian",) if k in given}
        elif name in ("zstd", "gzip"):
            level = given.get("level", 1)
            if type(level) is not int:
                raise ValueError("unknown level of compression")
            made = {"level": level}
        elif name == "sharding_indexed" and outermost:
            _only(given, index_location=["start", "end"])
            made = {
                "chunk_shape": list(_numbers(given["chunk_shape"], 1)),
                "codecs": _codecs(given["codecs"], False),
                "index_codecs": _codecs(given["index_codecs"], False),
                "index_location": given.get("index_location", "end"),
            }
        elif name != "crc32c":
            raise ValueError(f"unknown codec {name!r:.60}")
        out.append({"name": name, **({"configuration": made} if made else {})})
    return out


def _size(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * _template.dtype_of(dtype).itemsize
