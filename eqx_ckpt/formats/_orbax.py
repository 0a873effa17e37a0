"""Directories of Orbax, v0 and v1: Zarr arrays that TensorStore reads.

Orbax's own files are read for names and kinds, and the metadata of every array. Of it a
spec is made here, which has nothing but what is known and has been checked.
"""

import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _commit, _index, _names, _store
from .._index import Template
from .._read import Source
from .._store import Root
from . import _found
from ._found import Found, Leaf


_METADATA, _TOP, _MANIFEST = "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"
_ARRAYS, _STRINGS = "array_metadatas/process_0", "_strings.json"
# What marks a directory of Orbax that has its trees in directories below it.
_MARKS = frozenset({_TOP, "orbax.checkpoint", "default", "state", "pytree"})
_UNFINISHED = ".orbax-checkpoint-tmp"
_MAX_FILES = 2**20
_MAX_ARRAY = 2**16  # The bytes of the metadata of one array.
# What zstd makes of one byte at most.
_MAX_RATIO = 2**15
_COMPRESSORS = ("zstd", "gzip", "zlib")


def read(found: Found, like: Any) -> Source | None:
    """The source of a directory that Orbax has written, or of a step of its manager."""
    if found.key is not None:
        return None
    if _METADATA not in found.names:
        if not found.names & _MARKS and not _is_step_root(found):
            return None
        name = _item(found)
        if name is None:
            return None
        below = _below(found.directory, name)
        got = _commit.read_index(below)
        if got is not None:
            return Source(below, got[0])
        found = Found(found.root, below, None, b"", _found.names_in(below))
    elif _commit.saves(found.directory) or "eqx_ckpt.digests" in found.names:
        return None  # It is ours, without its index.
    if _UNFINISHED in found.root.url:
        raise ValueError("Orbax has not finished writing it")
    return _tree(found)


def _below(root: Root, name: str) -> Root:
    local = None if root.local is None else root.local / name
    return root._replace(url=f"{root.url}/{name}", local=local)


def _is_step_root(found: Found) -> bool:
    return any(name.isdecimal() for name in found.names)


def _item(found: Found) -> str | None:
    """The one directory with a tree in it. **Raises:** `ValueError` for several."""
    some = sorted(found.names)[:1000]
    some = [n for n in some if n.isprintable() and _is_directory(found.directory, n)]
    items = [n for n in some if _has(found, f"{n}/{_METADATA}")]
    if len(items) == 1 and not items[0].isdecimal():
        return items[0]
    if items:
        raise ValueError(f"it has several trees in it: open one, such as `{items[-1]}`")
    steps = [
        n
        for n in some
        if n.isdecimal()
        and any(_has(found, f"{n}/{mark}") for mark in (_TOP, "default/" + _METADATA))
    ]
    if steps:
        last = max(steps, key=int)
        raise ValueError(f"it is a directory of steps: open one, such as `{last}`")
    return None


def _is_directory(root: Root, name: str) -> bool:
    return root.local is None or (root.local / name).is_dir()


def _has(found: Found, key: str) -> bool:
    return _found.has(found.directory, key)


class _Array(NamedTuple):
    """What Orbax says of a leaf: its key path, what it was, and where it lies."""

    keys: list[tuple[str, int]]
    kind: str
    key: str


def _tree(found: Found) -> Source:
    directory = found.directory
    size = _store.survey(directory, _MAX_FILES)
    head, value = _json(directory, _METADATA)
    entries = value.get("tree_metadata")
    if type(entries) is not dict:
        raise ValueError(f"`{_METADATA}` has no `tree_metadata`")
    arrays = [x for x in (_entry(k, e) for k, e in entries.items()) if x is not None]
    strings = _optional(found, _STRINGS)
    impls = _impls(_optional(found, _ARRAYS))
    is_ocdbt = _MANIFEST in found.names
    zarr3 = value.get("use_zarr3") is True
    kept = value.get("store_array_data_equal_to_fill_value") is True
    name = "zarr.json" if zarr3 else ".zarray"
    stored = [x for x in arrays if x.kind != "string"]
    keys = [f"{x.key}/{name}" for x in stored]
    texts = dict(zip(keys, _store.read_keys(directory, keys, is_ocdbt, _MAX_ARRAY)))
    largest = _largest(size)
    leaves: list[Leaf] = []
    specs: dict[int, Any] = {}
    places: set[str] = set()
    for array in arrays:
        ours, kinds = _name(array)
        if array.key in places:
            raise ValueError(f"two leaves of it lie at one place, `{array.key}`")
        places.add(array.key)
        if array.kind == "string":
            text = strings.get(array.key)
            if type(text) is not str:
                raise ValueError(f"the string `{ours}` is missing")
            data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
            t = Template(kinds, "str", "str", data.shape, "uint8", (max(1, data.size),))
            specs[len(leaves)] = data
        else:
            text = texts[f"{array.key}/{name}"]
            if text is None:
                raise ValueError(f"the metadata of the array `{ours}` are missing")
            try:
                parse = _zarr3 if zarr3 else _zarr2
                what = parse(_index.parse(text))
                t = _template(array, what, kinds, impls.get(array.key))
                _index.check_template(t)
            except (ValueError, TypeError, KeyError, AttributeError) as e:
                raise ValueError(f"the array `{ours}` cannot be read: {e}") from e
            is_thin = kept and size is not None and t.nbytes > size * _MAX_RATIO
            if is_thin or max(t.full, what.stored) > largest:
                raise ValueError(
                    f"the array `{ours}` is larger than what its files can hold, or "
                    "than this machine"
                )
            specs[len(leaves)] = {
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": {"key": array.key, "is_ocdbt": is_ocdbt},
                "metadata": what.metadata,
                # Where zeros were not written, what is missing are zeros.
                "fill_missing_data_reads": not kept,
            }
        leaves.append(Leaf(ours, t, 0, 0))
    files = [_METADATA, *([_MANIFEST] if is_ocdbt else [])]
    metadata = value.get("custom_metadata") or None
    if metadata is None and found.directory != found.root:
        top = found._replace(directory=found.root, names=frozenset([_TOP]))
        metadata = _optional(top, _TOP).get("custom_metadata") or None
    return _found.source(found, "orbax", files, leaves, head, metadata, None, specs)


def _json(directory: Root, key: str) -> tuple[bytes, dict[str, Any]]:
    value = _store.read_file(directory, key, limit=_index.MAX_INDEX)
    if value is None:
        raise ValueError(f"`{key}` is missing")
    parsed = _index.parse(value.data)
    if type(parsed) is not dict:
        raise ValueError(f"`{key}` is not a JSON object")
    return value.data, parsed


def _optional(found: Found, key: str) -> dict[str, Any]:
    if key.partition("/")[0] not in found.names or not _has(found, key):
        return {}
    return _json(found.directory, key)[1]


def _impls(value: dict[str, Any]) -> dict[str, str]:
    """The PRNG implementations of typed keys."""
    out = {}
    for row in value.get("array_metadatas") or ():
        array = row.get("array_metadata") if type(row) is dict else None
        more = array.get("ext_metadata") if type(array) is dict else None
        if type(array) is dict and type(more) is dict:
            impl = more.get("random_key_impl")
            if type(impl) is str:
                out[array.get("param_name")] = impl
    return out


def _entry(name: str, entry: Any) -> _Array | None:
    """A leaf; None for an empty node, which has no array."""
    try:
        value = entry["value_metadata"]
        keys = [(x["key"], x["key_type"]) for x in entry["key_metadata"]]
        kind, skip = value["value_type"], value.get("skip_deserialize")
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"`{_METADATA}` has a malformed leaf, {name!r:.60}") from None
    if (
        not all(type(k) is str and t in (1, 2) for k, t in keys)
        or type(kind) is not str
    ):
        raise ValueError(f"`{_METADATA}` has a malformed leaf, {name!r:.60}")
    if skip:
        return None
    key = ".".join(key for key, _ in keys)
    # It becomes part of a path.
    if re.search(r"[/\\\0]", key) or key in ("", ".", ".."):
        raise ValueError(f"`{_METADATA}` has a leaf of the impossible name {key!r:.60}")
    return _Array(keys, kind, key)


def _name(array: _Array) -> tuple[str, str]:
    kinds = "".join("s" if kind == 1 else "k" for _, kind in array.keys)
    name = _names.join("", [_names.quote(key) for key, _ in array.keys])
    _names.keys_of(name, kinds)
    return name, kinds


def _largest(size: int | None) -> int:
    """The most bytes that a chunk can have, as all of them are made of the files."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return memory if size is None else min(memory, size * _MAX_RATIO)


# ---- Arrays.


class _Zarr(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]  # what is read at once
    stored: int  # the bytes of a chunk as it is stored
    metadata: dict[str, Any]  # made of nothing but what is known


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


def _zarr2(value: dict[str, Any]) -> _Zarr:
    _only(value, zarr_format=[2], order=["C"], filters=[None, []])
    _only(value, dimension_separator=[".", "/"], fill_value=[None, 0, False])
    shape, chunk = _numbers(value["shape"], 0), _numbers(value["chunks"], 1)
    text = value["dtype"]
    if type(text) is not str:
        raise ValueError("unknown dtype")
    dtype = text
    if re.fullmatch(r"[<|][biufc][0-9]{1,2}", text):
        dtype = np.dtype(text).name
    if dtype not in _index.STORED:
        raise ValueError(f"unknown dtype {text!r:.60}")
    compressor = value.get("compressor")
    if compressor is not None:
        _only(compressor, id=_COMPRESSORS)
        level = compressor.get("level", 1)
        if type(level) is not int:
            raise ValueError("unknown level of compression")
        compressor = {"id": compressor["id"], "level": level}
    metadata = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": text,
        "order": "C",
        "compressor": compressor,
        "fill_value": value.get("fill_value"),
        "filters": None,
        "dimension_separator": value.get("dimension_separator", "."),
    }
    return _Zarr(dtype, shape, chunk, _size(chunk, dtype), metadata)


def _zarr3(value: dict[str, Any]) -> _Zarr:
    _only(value, zarr_format=[3], node_type=["array"], storage_transformers=[[]])
    _only(value["chunk_grid"], name=["regular"])
    shape = _numbers(value["shape"], 0)
    outer = _numbers(value["chunk_grid"]["configuration"]["chunk_shape"], 1)
    dtype = value["data_type"]
    if type(dtype) is not str or dtype not in _index.STORED:
        raise ValueError(f"unknown dtype {dtype!r:.60}")
    encoding = value["chunk_key_encoding"]
    _only(encoding, name=["default"])
    _only(encoding.get("configuration") or {}, separator=["/", "."])
    codecs = _codecs(value["codecs"], True)
    inner = outer
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            inner = tuple(codec["configuration"]["chunk_shape"])
    if len(inner) != len(outer) or any(o % i for o, i in zip(outer, inner)):
        raise ValueError("impossible chunks in chunks")
    fill = value.get("fill_value")
    if type(fill) not in (bool, int, float, list) and fill is not None:
        raise ValueError("unknown fill value")
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
    return _Zarr(dtype, shape, inner, stored, metadata)


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
    return math.prod(shape) * _index.dtype_of(dtype).itemsize


def _template(array: _Array, what: _Zarr, keys: str, impl: str | None) -> Template:
    dtype, shape, chunk = what.dtype, what.shape, what.chunk
    kind = _found.kind_of(dtype)
    if array.kind == "np.ndarray":
        kind = "numpy"
    elif array.kind == "scalar" and shape == ():
        python = {dtype: kind for kind, dtype in _index.SCALAR_KINDS.items()}
        kind = python.get(dtype, "generic")
    elif array.kind not in ("jax.Array", "scalar"):
        raise ValueError(f"it is of the unknown type {array.kind!r:.60}")
    chunk = tuple(min(c, max(1, n)) for c, n in zip(chunk, shape))
    t = Template(keys, kind, dtype, shape, dtype, chunk)
    if impl is not None:
        t = t._replace(kind="key", dtype="key", impl=impl)
    if t.chunk_count > _index.MAX_CHUNKS:
        raise ValueError(f"it has more than {_index.MAX_CHUNKS} chunks")
    return t
