"""Directories of Orbax, v0 and v1: Zarr arrays that TensorStore reads.

Orbax's own files are read for names and kinds, and the metadata of every array. Until
version 0.11 leaves could be aggregated: their values are in a file of msgpack, which
also says what there is where there are no metadata, as before version 0.4.
"""

import collections
import functools as ft
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._kernel._format import _files, _names, _template
from .._kernel._format._index import is_save_id
from .._kernel._format._leaves import Unreadable
from .._kernel._format._template import Template
from .._kernel._load import _published, _source
from .._kernel._load._source import Source
from .._kernel._storage._backend import Backend
from .._zips import _probe
from .._zips._probe import Probe
from . import _database, _msgpack, _zarr
from ._foreign_index import ForeignLeaf, kind_of, leaf_of, names_of_paths, natural_order
from ._zarr import ArrayRow, ZarrArray


_METADATA, _TOP = "_METADATA", _published.TOP
# The file with the values of aggregated leaves, and what it has for each other leaf:
# one of these words, and the key of its array.
_AGGREGATE = "checkpoint"
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
# The types of nodes that are empty.
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_ARRAYS, _STRINGS = "array_metadatas/process_0", "_strings.json"
# What every directory of v1 has, beside `_TOP`.
_V1 = "orbax.checkpoint"
# What marks a directory of Orbax that has its trees in directories below it.
_MARKS = frozenset({_TOP, _V1, "default", "state", "pytree"})
_UNFINISHED = ".orbax-checkpoint-tmp"


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of a directory that Orbax has written, or of a step of its manager."""
    if probe.key is not None:
        return None
    if not _has_leaves(probe):
        if not probe.names & _MARKS and not any(map(_step.fullmatch, probe.names)):
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
        if (ours := _source.ours_at(below)) is not None:
            return ours
        probe = Probe(probe.root, below, None, b"", _probe.names_in(below))
    elif _published.saves(probe.directory) or _files.DIGESTS in probe.names:
        return None  # It is ours, without its index.
    if _UNFINISHED in probe.directory.url:
        raise ValueError("Orbax has not finished writing it")
    return _tree(probe)


def _is_aggregate(directory: Backend, key: str) -> bool:
    """Whether a file has values of leaves, in msgpack."""
    try:
        return _msgpack.is_map(_probe.first_bytes(directory, key, 1))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False


def _has_leaves(probe: Probe) -> bool:
    if _METADATA in probe.names:
        return True
    return _AGGREGATE in probe.names and _is_aggregate(probe.directory, _AGGREGATE)


def _has_tree(directory: Backend, name: str) -> bool:
    """Whether there is a tree in a directory that may be there."""
    if not (directory.is_remote or directory.is_directory(name)):
        return False
    if directory.has(f"{name}/{_METADATA}"):
        return True
    below = f"{name}/{_AGGREGATE}"
    return not directory.is_remote and _is_aggregate(directory, below)


def _item(probe: Probe) -> str | None:
    """The directory with a tree in it: the only one, or `default`. **Raises:**
    `ValueError` for several others, and for a directory of steps."""
    directory = probe.directory
    names = [name for name in sorted(probe.names) if name.isprintable()][:_MANY]
    is_run = not probe.names & _MARKS
    steps = [n for n in names if n.isdecimal() or is_run and _step.fullmatch(n)]
    for name in sorted(steps, key=natural_order, reverse=True):
        if (there := _within(directory, name)) is not None:
            raise ValueError(f"it is a directory of steps: open one, such as `{there}`")
    items = [n for n in names if _has_tree(directory, n)]
    if "default" in items:
        return "default"
    if len(items) > 1:
        raise ValueError(f"it has several trees in it: open one, such as `{items[-1]}`")
    return items[0] if items else None


# So many names of a directory are looked at.
_MANY = 1000
# What Orbax calls a step, and what flax does, which may be a file.
_step = re.compile(r"(?:.*_)?[0-9]{1,18}", re.DOTALL)


def _within(directory: Backend, name: str) -> str | None:
    """The path of a tree in what may be a step."""
    below = directory.below(name)
    if directory.is_remote or directory.is_directory(name):
        if _has_tree(directory, name) or directory.has(f"{name}/default/{_METADATA}"):
            return name
        items = sorted(_probe.names_in(below))[:_MANY]
        trees = [n for n in items if n.isprintable() and _has_tree(below, n)]
        if len(trees) == 1 or not trees and directory.has(f"{name}/{_TOP}"):
            return name
        return f"{name}/{trees[-1]}" if trees else None
    return None if name.isdecimal() or not _is_aggregate(directory, name) else name


class _Row(NamedTuple):
    """A leaf: the keys that lead to it, our name of it and the kinds of its keys, what
    it was, and the key that its array lies at; None: its value was aggregated."""

    path: tuple[str, ...]
    name: str
    keys: str
    was: str
    key: str | None


def _tree(probe: Probe) -> Source | None:
    directory = probe.directory
    zarr = _zarr.arrays(probe)
    head, value, files = b"", {}, []
    if _METADATA in probe.names:
        head, value = _published.read_json(directory, _METADATA)
        files.append(_METADATA)
    values: dict[tuple[str, ...], ForeignLeaf] = {}
    elsewhere: dict[tuple[str, ...], str] = {}
    if _AGGREGATE in probe.names and _is_aggregate(directory, _AGGREGATE):
        values, elsewhere = _aggregated(directory, len(files))
        files.append(_AGGREGATE)
    if _METADATA in files:
        rows = _rows(value, values)
    else:
        paths = [*values, *elsewhere]
        named = names_of_paths(list(map(list, paths)))
        rows = [
            _Row(path, *name, "jax.Array", elsewhere.get(path))
            for path, name in zip(paths, named)
        ]
    strings = _optional(probe, _STRINGS)
    impls = _impls(_optional(probe, _ARRAYS))
    zarr = zarr._replace(
        is_full=value.get("store_array_data_equal_to_fill_value") is True,
        is_v3=value.get("use_zarr3") is True,
    )
    there = [] if zarr.database is None else zarr.database.files
    if any(is_save_id(x.removeprefix("d/").partition("/")[0]) for x in there):
        return None  # It is ours, without its index.
    places = collections.Counter(row.key for row in rows if row.key is not None)
    if twice := next((key for key, count in places.items() if count > 1), None):
        raise ValueError(f"two leaves of it lie at one place, `{twice}`")
    arrays = [
        ArrayRow(
            x.name, x.keys, x.key, ft.partial(_template_of, x.was, impls.get(x.key))
        )
        for x in rows
        if x.key is not None and x.was != "string"
    ]
    stored = iter(zarr.read_leaves(arrays))
    leaves: list[ForeignLeaf] = []
    for row in rows:
        if row.key is None:
            leaves.append(_valued(row, values.get(row.path)))
        elif row.was != "string":
            leaves.append(next(stored))
        else:
            text = strings.get(row.key)
            if type(text) is not str:
                raise ValueError(f"the string `{row.name}` is missing")
            leaves.append(leaf_of(row.name, row.keys, text))
    metadata = value.get("custom_metadata") or None
    if metadata is None and probe.directory != probe.root:
        top = probe._replace(directory=probe.root, names=frozenset([_TOP]))
        metadata = _optional(top, _TOP).get("custom_metadata") or None
    return zarr.source(probe, "orbax", files, leaves, head, metadata)


def _aggregated(
    directory: Backend, file: int
) -> tuple[dict[tuple[str, ...], ForeignLeaf], dict[tuple[str, ...], str]]:
    """The leaves in a file of msgpack, by the keys that lead to them: their values, or
    the keys at which their arrays lie."""
    values: dict[tuple[str, ...], ForeignLeaf] = {}
    elsewhere: dict[tuple[str, ...], str] = {}
    for path, leaf in _msgpack.leaves_of(directory, _AGGREGATE, file):
        text = ""
        if leaf.template.kind == "str":
            text = leaf.value.tobytes().decode("utf-8", "surrogatepass")
        start = next(filter(text.startswith, _PLACEHOLDERS), None)
        if start is None:
            values[tuple(path)] = leaf
            continue
        key = text.removeprefix(start)
        if _database.leads_out(key):
            raise ValueError(f"`{_AGGREGATE}` has the impossible name {key!r:.60}")
        elsewhere[tuple(path)] = key
    return values, elsewhere


def _rows(
    metadata_json: dict[str, Any], aggregated: Mapping[tuple[str, ...], ForeignLeaf]
) -> list[_Row]:
    """The leaves that the metadata name, and those that were aggregated beside."""
    entries = metadata_json.get("tree_metadata")
    if type(entries) is not dict:
        raise ValueError(f"`{_METADATA}` has no `tree_metadata`")
    rows = [_entry(name, entry) for name, entry in entries.items()]
    rows = [
        row
        for row in rows
        if row.key is not None or row.was not in _EMPTY or row.path in aggregated
    ]
    known = {row.path for row in rows}
    rest = [path for path in aggregated if path not in known]
    names = [_names.name_of_texts(path) for path in rest]
    return rows + [
        _Row(path, name, "k" * len(path), "jax.Array", None)
        for path, name in zip(rest, names)
    ]


def _valued(row: _Row, leaf: ForeignLeaf | None) -> ForeignLeaf:
    """The leaf of an aggregated value."""
    if leaf is None:
        why = (
            f"it was aggregated, as `{_METADATA}` says, and `{_AGGREGATE}` beside that "
            "does not have its value"
        )
        return leaf_of(row.name, row.keys, Unreadable(row.was, why, True))
    t = leaf.template._replace(keys=row.keys)
    if row.was == "np.ndarray" and t.kind == "jax":
        t = t._replace(kind="numpy")
    return leaf._replace(name=row.name, template=t)


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


def _entry(name: str, entry: Any) -> _Row:
    try:
        value = entry["value_metadata"]
        keys = [(x["key"], x["key_type"]) for x in entry["key_metadata"]]
        was, skip = value["value_type"], value.get("skip_deserialize")
        is_good = all(type(k) is str and t in (1, 2) for k, t in keys)
        if not is_good or type(was) is not str:
            raise TypeError
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"`{_METADATA}` has a malformed leaf, {name!r:.60}") from None
    path = tuple(key for key, _ in keys)
    key = ".".join(path)
    if not skip and _database.leads_out(key):
        raise ValueError(f"`{_METADATA}` has a leaf of the impossible name {key!r:.60}")
    kinds = "".join("s" if t == 1 else "k" for _, t in keys)
    ours = _names.name_of_texts(path)
    if not skip or was not in _EMPTY:
        _names.keys_of(ours, kinds)
    return _Row(path, ours, kinds, was, None if skip else key)


def _template_of(was: str, impl: str | None, keys: str, array: ZarrArray) -> Template:
    kind = kind_of(array.dtype)
    if was == "np.ndarray":
        kind = "numpy"
    elif was == "scalar" and array.shape == ():
        python = {dtype: kind for kind, dtype in _template.SCALAR_KINDS.items()}
        kind = python.get(array.dtype, "generic")
    elif was not in ("jax.Array", "scalar"):
        raise ValueError(f"it is of the unknown type {was!r:.60}")
    t = _zarr.template(array, kind, keys)
    if impl is not None:
        t = t._replace(kind="key", dtype="key", impl=impl)
    return t
