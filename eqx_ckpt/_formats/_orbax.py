"""Directories of Orbax, v0 and v1: Zarr arrays that TensorStore reads.

Orbax's own files are read for names and kinds, and the metadata of every array.
"""

import collections
import functools as ft
from typing import Any

from .._format import _files, _names, _template
from .._format._index import is_save_id
from .._format._template import Template
from .._load import _published
from .._load._source import Source
from .._zips import _probe
from .._zips._probe import Probe
from . import _database, _zarr
from ._foreign_index import ForeignLeaf, kind_of, leaf_of
from ._zarr import Zarr


_METADATA, _TOP = "_METADATA", _published.TOP
_ARRAYS, _STRINGS = "array_metadatas/process_0", "_strings.json"
# What every directory of v1 has, beside `_TOP`.
_V1 = "orbax.checkpoint"
# What marks a directory of Orbax that has its trees in directories below it.
_MARKS = frozenset({_TOP, _V1, "default", "state", "pytree"})
_UNFINISHED = ".orbax-checkpoint-tmp"


def read(probe: Probe, like: Any) -> Source | None:
    """The source of a directory that Orbax has written, or of a step of its manager."""
    if probe.key is not None:
        return None
    if _METADATA not in probe.names:
        if not probe.names & _MARKS and not any(map(str.isdecimal, probe.names)):
            return None
        if _V1 in probe.names and _TOP not in probe.names:
            raise ValueError(f"Orbax has not finished it: it has no `{_TOP}`")
        if _TOP in probe.names and not _published.is_finished(probe.directory):
            raise ValueError(
                f"Orbax has not finished it: it has no `{_published.DONE}`"
            )
        name = _item(probe)
        if name is None:
            return None
        below = probe.directory.below(name)
        got = _published.read_index(below)
        if got is not None:
            return Source(below, got[0], below)
        probe = Probe(probe.root, below, None, b"", _probe.names_in(below))
    elif _published.saves(probe.directory) or _files.DIGESTS in probe.names:
        return None  # It is ours, without its index.
    if _UNFINISHED in probe.directory.url:
        raise ValueError("Orbax has not finished writing it")
    return _tree(probe)


def _item(probe: Probe) -> str | None:
    """The one directory with a tree in it. **Raises:** `ValueError` for several."""
    directory = probe.directory
    some = [
        name
        for name in sorted(probe.names)[:1000]
        if name.isprintable() and (directory.is_far or directory.is_directory(name))
    ]
    items = [n for n in some if probe.directory.has(f"{n}/{_METADATA}")]
    if len(items) == 1 and not items[0].isdecimal():
        return items[0]
    if items:
        raise ValueError(f"it has several trees in it: open one, such as `{items[-1]}`")
    steps = [
        n
        for n in some
        if n.isdecimal()
        and any(
            probe.directory.has(f"{n}/{mark}")
            for mark in (_TOP, "default/" + _METADATA)
        )
    ]
    if steps:
        last = max(steps, key=int)
        raise ValueError(f"it is a directory of steps: open one, such as `{last}`")
    return None


def _tree(probe: Probe) -> Source | None:
    directory = probe.directory
    zarr = _zarr.arrays(probe)
    head, value = _published.read_json(directory, _METADATA)
    entries = value.get("tree_metadata")
    if type(entries) is not dict:
        raise ValueError(f"`{_METADATA}` has no `tree_metadata`")
    arrays = [x for x in (_entry(k, e) for k, e in entries.items()) if x is not None]
    strings = _optional(probe, _STRINGS)
    impls = _impls(_optional(probe, _ARRAYS))
    zarr = zarr._replace(
        is_full=value.get("store_array_data_equal_to_fill_value") is True,
        is_v3=value.get("use_zarr3") is True,
    )
    files = [] if zarr.database is None else zarr.database.files
    if any(is_save_id(x.removeprefix("d/").partition("/")[0]) for x in files):
        return None  # It is ours, without its index.
    places = collections.Counter(key for *_, key in arrays)
    if twice := next((key for key, count in places.items() if count > 1), None):
        raise ValueError(f"two leaves of it lie at one place, `{twice}`")
    rows = [
        (ours, kinds, key, ft.partial(_template_of, kind, impls.get(key)))
        for ours, kinds, kind, key in arrays
        if kind != "string"
    ]
    stored = iter(zarr.read(rows))
    leaves: list[ForeignLeaf] = []
    for ours, kinds, kind, key in arrays:
        text = strings.get(key)
        if kind == "string" and type(text) is not str:
            raise ValueError(f"the string `{ours}` is missing")
        leaves.append(leaf_of(ours, kinds, text) if kind == "string" else next(stored))
    metadata = value.get("custom_metadata") or None
    if metadata is None and probe.directory != probe.root:
        top = probe._replace(directory=probe.root, names=frozenset([_TOP]))
        metadata = _optional(top, _TOP).get("custom_metadata") or None
    return zarr.source(probe, "orbax", [_METADATA], leaves, head, metadata)


def _optional(probe: Probe, key: str) -> dict[str, Any]:
    if key.partition("/")[0] not in probe.names or not probe.directory.has(key):
        return {}
    return _published.read_json(probe.directory, key)[1]


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


def _entry(name: str, entry: Any) -> tuple[str, str, str, str] | None:
    """A leaf: our name, the kinds of its keys, what it was, and where it lies; None for
    an empty node, which has no array."""
    try:
        value = entry["value_metadata"]
        keys = [(x["key"], x["key_type"]) for x in entry["key_metadata"]]
        kind, skip = value["value_type"], value.get("skip_deserialize")
        is_good = all(type(k) is str and t in (1, 2) for k, t in keys)
        if not is_good or type(kind) is not str:
            raise TypeError
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"`{_METADATA}` has a malformed leaf, {name!r:.60}") from None
    if skip:
        return None
    key = ".".join(key for key, _ in keys)
    if _database.leads_out(key):
        raise ValueError(f"`{_METADATA}` has a leaf of the impossible name {key!r:.60}")
    kinds = "".join("s" if t == 1 else "k" for _, t in keys)
    ours = _names.join(_names.quote(k) for k, _ in keys)
    _names.keys_of(ours, kinds)
    return ours, kinds, kind, key


def _template_of(was: str, impl: str | None, keys: str, what: Zarr) -> Template:
    kind = kind_of(what.dtype)
    if was == "np.ndarray":
        kind = "numpy"
    elif was == "scalar" and what.shape == ():
        python = {dtype: kind for kind, dtype in _template.SCALAR_KINDS.items()}
        kind = python.get(what.dtype, "generic")
    elif was not in ("jax.Array", "scalar"):
        raise ValueError(f"it is of the unknown type {was!r:.60}")
    t = _zarr.template(what, kind, keys)
    if impl is not None:
        t = t._replace(kind="key", dtype="key", impl=impl)
    return t
