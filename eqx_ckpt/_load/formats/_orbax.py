"""Directories of Orbax, v0 and v1: Zarr arrays that TensorStore reads.

Orbax's own files are read for names and kinds, and the metadata of every array.
"""

import functools as ft
import re
from typing import Any, NamedTuple

import numpy as np

from ..._format import _files, _names, _template
from ..._format._index import is_save_id
from ..._format._template import Template
from ..._storage._backend import Backend
from .. import _published
from .._source import Source
from . import _database, _found, _zarr
from ._found import Candidate, Contents, Located
from ._zarr import Zarr


_METADATA, _TOP = "_METADATA", "_CHECKPOINT_METADATA"
_ARRAYS, _STRINGS = "array_metadatas/process_0", "_strings.json"
# What every directory of v1 has, beside `_TOP`.
_V1 = "orbax.checkpoint"
# What marks a directory of Orbax that has its trees in directories below it.
_MARKS = frozenset({_TOP, _V1, "default", "state", "pytree"})
_UNFINISHED = ".orbax-checkpoint-tmp"
# The file that says that a step is finished, and what is None in `_TOP` before.
DONE, _TIME = "commit_success.txt", "commit_timestamp_nsecs"


def read(found: Candidate, like: Any) -> Source | None:
    """The source of a directory that Orbax has written, or of a step of its manager."""
    if found.key is not None:
        return None
    if _METADATA not in found.names:
        if not found.names & _MARKS and not _is_step_root(found):
            return None
        if _V1 in found.names and _TOP not in found.names:
            raise ValueError(f"Orbax has not finished it: it has no `{_TOP}`")
        if _TOP in found.names and not is_finished(found.directory):
            raise ValueError(f"Orbax has not finished it: it has no `{DONE}`")
        name = _item(found)
        if name is None:
            return None
        below = found.directory.below(name)
        got = _published.read_index(below)
        if got is not None:
            return Source(below, got[0])
        found = Candidate(found.root, below, None, b"", _found.names_in(below))
    elif _published.saves(found.directory) or _files.DIGESTS in found.names:
        return None  # It is ours, without its index.
    if _UNFINISHED in found.directory.url:
        raise ValueError("Orbax has not finished writing it")
    return _tree(found)


def is_finished(step: Backend) -> bool:
    """Whether Orbax has finished a directory with a step. Where it writes in place, it
    adds a file last; else the directory is renamed once the time is in its metadata.
    See `CommitFileTemporaryPath` and `AtomicRenameTemporaryPath` in Orbax."""
    if _found.has(step, DONE):
        return True
    try:
        _, value = _found.read_json(step, _TOP)
    except ValueError:
        return True  # Nothing says that it is not.
    return value.get(_TIME, 0) is not None


def _is_step_root(found: Candidate) -> bool:
    return any(name.isdecimal() for name in found.names)


def _item(found: Candidate) -> str | None:
    """The one directory with a tree in it. **Raises:** `ValueError` for several."""
    some = sorted(found.names)[:1000]
    some = [n for n in some if n.isprintable() and _found.is_directory(found, n)]
    items = [n for n in some if _found.has(found.directory, f"{n}/{_METADATA}")]
    if len(items) == 1 and not items[0].isdecimal():
        return items[0]
    if items:
        raise ValueError(f"it has several trees in it: open one, such as `{items[-1]}`")
    steps = [
        n
        for n in some
        if n.isdecimal()
        and any(
            _found.has(found.directory, f"{n}/{mark}")
            for mark in (_TOP, "default/" + _METADATA)
        )
    ]
    if steps:
        last = max(steps, key=int)
        raise ValueError(f"it is a directory of steps: open one, such as `{last}`")
    return None


class _OrbaxLeaf(NamedTuple):
    """Orbax's entry for a leaf: its key path, what it was, and where it lies."""

    keys: list[tuple[str, int]]
    kind: str
    key: str


def _tree(found: Candidate) -> Source | None:
    directory = found.directory
    listed, size = _zarr.survey(directory)
    head, value = _found.read_json(directory, _METADATA)
    entries = value.get("tree_metadata")
    if type(entries) is not dict:
        raise ValueError(f"`{_METADATA}` has no `tree_metadata`")
    arrays = [x for x in (_entry(k, e) for k, e in entries.items()) if x is not None]
    strings = _optional(found, _STRINGS)
    impls = _impls(_optional(found, _ARRAYS))
    database = None
    if _database.MANIFEST in found.names:
        database = _database.read(directory, _zarr.MAX_FILES)
        saves = [file.removeprefix("d/").partition("/")[0] for file in database.files]
        if any(map(is_save_id, saves)):
            return None  # It is ours, without its index.
    count = len(database.entries.keys if database else listed)
    is_full = value.get("store_array_data_equal_to_fill_value") is True
    is_v3 = value.get("use_zarr3") is True
    zarr = _zarr.ZarrArrays(directory, is_v3, database, is_full, size, count)
    keys = [x.key for x in arrays if x.kind != "string"]
    texts = dict(zip(keys, zarr.metadata(keys)))
    leaves: list[Located] = []
    stored: dict[int, Any] = {}
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
            stored[len(leaves)] = data
        else:
            make = ft.partial(_template_of, array, impls.get(array.key))
            metadata = texts[array.key]
            got = zarr.read(ours, array.key, metadata, make, kinds)
            stored[len(leaves)], t = got
        leaves.append(Located(ours, t, 0, 0))
    files = [_METADATA, *([_database.MANIFEST] if database else [])]
    metadata = value.get("custom_metadata") or None
    if metadata is None and found.directory != found.root:
        top = found._replace(directory=found.root, names=frozenset([_TOP]))
        metadata = _optional(top, _TOP).get("custom_metadata") or None
    contents = Contents("orbax", files, leaves, head, metadata, stored=stored)
    return zarr.source(found, contents)


def _optional(found: Candidate, key: str) -> dict[str, Any]:
    if key.partition("/")[0] not in found.names or not _found.has(found.directory, key):
        return {}
    return _found.read_json(found.directory, key)[1]


def _impls(value: dict[str, Any]) -> dict[str, str]:
    """The PRNG implementations of typed keys."""
    out = {}
    rows = value.get("array_metadatas")
    for row in rows if type(rows) is list else ():
        array = row.get("array_metadata") if type(row) is dict else None
        more = array.get("ext_metadata") if type(array) is dict else None
        if type(array) is dict and type(more) is dict:
            impl, name = more.get("random_key_impl"), array.get("param_name")
            if type(impl) is type(name) is str:
                out[name] = impl
    return out


def _entry(name: str, entry: Any) -> _OrbaxLeaf | None:
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
    # It becomes a path.
    parts = key.split("/")
    if re.search(r"[\\\0]", key) or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"`{_METADATA}` has a leaf of the impossible name {key!r:.60}")
    return _OrbaxLeaf(keys, kind, key)


def _name(array: _OrbaxLeaf) -> tuple[str, str]:
    kinds = "".join("s" if kind == 1 else "k" for _, kind in array.keys)
    name = _names.join("", [_names.quote(key) for key, _ in array.keys])
    _names.keys_of(name, kinds)
    return name, kinds


def _template_of(
    array: _OrbaxLeaf, impl: str | None, keys: str, what: Zarr
) -> Template:
    kind = _found.kind_of(what.dtype)
    if array.kind == "np.ndarray":
        kind = "numpy"
    elif array.kind == "scalar" and what.shape == ():
        python = {dtype: kind for kind, dtype in _template.SCALAR_KINDS.items()}
        kind = python.get(what.dtype, "generic")
    elif array.kind not in ("jax.Array", "scalar"):
        raise ValueError(f"it is of the unknown type {array.kind!r:.60}")
    t = _zarr.template(what, kind, keys)
    if impl is not None:
        t = t._replace(kind="key", dtype="key", impl=impl)
    return t
