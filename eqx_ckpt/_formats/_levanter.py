"""Directories of levanter and of eformer: an array of Zarr for each leaf, at its path.

JAX's array serialisation writes the arrays for both of them: in directories (Zarr v2),
with all chunks, so that one that is missing is an error; or, for the levanter of today,
in a database (OCDBT, Zarr v3), where chunks of zeros are left out.
"""

import functools as ft
import itertools as it
import re
from typing import Any

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _schema
from .._kernel._format._template import Template
from .._kernel._load import _published
from .._kernel._load._source import Source
from .._zips._probe import Probe
from . import _database, _zarr
from ._foreign_index import (
    ForeignLeaf,
    kind_of,
    names_of_paths,
    natural_order,
    split_name,
)
from ._zarr import ArrayRow, ZarrArray


# What levanter writes last, and what eformer's arrays are listed in.
_METADATA, _INDEX = "metadata.json", "tensorstore_index.json"
_MORE = "checkpoint_metadata.json"
# So many directories down an array is looked for.
_DEEP = 32


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of a directory that levanter or eformer has written."""
    if probe.key is not None:
        return None
    if _INDEX in probe.names:
        return _eformer(probe)
    if _METADATA in probe.names:
        head, value = _published.read_json(probe.directory, _METADATA)
        # Many a file has this name.
        if type(value.get("step")) is int and type(value.get("timestamp")) is str:
            return _levanter(probe, head, value)
    _check_steps(probe)
    if _has_array(probe):
        raise ValueError(
            f"it has arrays, but no `{_METADATA}` of levanter, which is written last, "
            f"and no `{_INDEX}` of eformer. It is not finished, or a part of a "
            "checkpoint: open all of it, and select a part of that"
        )
    return None


def _check_steps(probe: Probe) -> None:
    steps = [n for n in probe.names if re.fullmatch(r"(step|run)-[0-9]{1,18}", n)]
    for name in sorted(steps, key=natural_order, reverse=True)[:100]:
        if probe.directory.has(f"{name}/{_METADATA}"):
            raise ValueError(f"it is a directory of steps: open one, such as `{name}`")


def _has_array(probe: Probe) -> bool:
    """Whether an array is found soon, in the first directories of directories."""
    directory, key = probe.directory, ""
    if directory.is_remote:
        return False
    for _ in range(_DEEP):
        tops = directory.below(key).list_top() or {}
        names = [name for name, is_directory in tops.items() if is_directory]
        if not names:
            return False
        key = f"{key}/{min(names)}" if key else min(names)
        if probe.directory.has(f"{key}/{_zarr.name_of(False)}"):
            return True
    return False


def _levanter(probe: Probe, head: bytes, metadata: dict[str, Any]) -> Source | None:
    arrays = _zarr.arrays(probe)
    is_ocdbt, keys = arrays.database is not None, arrays.listed
    if arrays.database is not None:
        encoded = arrays.database.entries.keys
        keys = [key.decode("utf-8", "surrogateescape") for key in encoded]
    elif arrays.size is None:
        keys = probe.directory.list_all()
    if keys is None:
        raise ValueError(
            "the arrays of this checkpoint of levanter have to be listed, which cannot "
            "be done over HTTP"
        )
    end = "/" + _zarr.name_of(is_ocdbt)
    paths = [_path(key.removesuffix(end)) for key in keys if key.endswith(end)]
    if not paths:
        return None
    paths.sort(key=lambda path: [natural_order(part) for part in path])
    arrays = arrays._replace(is_v3=is_ocdbt, is_full=not is_ocdbt)
    leaves = _leaves(arrays, paths)
    return arrays.source(probe, "levanter", [_METADATA], leaves, head, metadata)


def _eformer(probe: Probe) -> Source:
    arrays = _zarr.arrays(probe)._replace(database=None)
    head, value = _published.read_json(probe.directory, _INDEX)
    if value.get("format") != "tensorstore":
        raise ValueError(f"`{_INDEX}` is of the format {value.get('format')!r:.60}")
    lists, more = value.get("prefixes", {}), value.get("arrays", [])
    is_row = lambda row: type(row) is dict and type(row.get("path")) is str
    if not _schema.fits([lists, more], ({...: [is_row]}, [is_row])):
        raise ValueError(f"`{_INDEX}` has a malformed list of arrays")
    said: dict[tuple[str, ...], tuple[Any, Any]] = {}
    for row in it.chain(*lists.values(), more):
        path = tuple(_path(row["path"]))
        if path in said:
            raise ValueError(f"`{_INDEX}` has the array {row['path']!r:.60} twice")
        said[path] = row.get("shape"), row.get("dtype")
    files = [_INDEX]
    metadata = None  # What was given with the save, or else its step.
    for key in (_METADATA, _MORE):
        if key in probe.names or probe.directory.has(key):
            data, more = _published.read_json(probe.directory, key)
            files.append(key)
            head += data
            given = more.get("custom_metadata") if key == _MORE else more
            metadata = given or metadata
    paths = [list(path) for path in said]
    claims = list(said.values())
    leaves = _leaves(arrays, paths, claims)
    return arrays.source(probe, "eformer", files, leaves, head, metadata)


def _path(key: str) -> list[str]:
    """The parts of the path of an array. **Raises:** `ValueError` if it leads out."""
    if not key.isprintable() or _database.leads_out(key):
        raise ValueError(f"it has an array of the impossible name {key!r:.60}")
    return split_name(key, "/")


def _leaves(
    arrays: _zarr.ZarrArrays,
    paths: list[list[str]],
    claims: list[tuple[Any, Any]] | None = None,
) -> list[ForeignLeaf]:
    """The arrays at some paths. `claims`: the shapes and dtypes that an index has,
    which are to be true."""
    keys = ["/".join(path) for path in paths]
    makes = [ft.partial(_template, claim) for claim in claims or [None] * len(keys)]
    rows = zip(names_of_paths(paths), keys, makes)
    return arrays.read_leaves(
        [ArrayRow(*named, key, make) for named, key, make in rows]
    )


def _template(claim: tuple[Any, Any] | None, keys: str, array: ZarrArray) -> Template:
    fill = array.metadata["fill_value"]
    if np.any(fill) or (fill is not None and array.metadata["zarr_format"] == 2):
        raise ValueError(f"unknown fill_value {fill!r:.60}")
    if claim is not None and claim != (list(array.shape), array.dtype):
        raise ValueError(
            f"it is {array.dtype}{list(array.shape)}, and `{_INDEX}` has it as "
            f"{claim[1]!r:.30}, {claim[0]!r:.60}"
        )
    return _zarr.template(array, kind_of(array.dtype), keys)
