"""Summaries of indices: what `decode` says, read in less time."""

import json
import pathlib

import jax.numpy as jnp
import pytest

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _index, _index_summary


EVIL = [
    None,
    3,
    "text",
    {"metrics": {"loss": 0.5}},
    {'"files":': '"aliases":', "files": ['"files":'], "a": '\\"files":[]'},
    {"templates": [{"files": {"aliases": []}}], "é": "\ud7ff\x1b"},
]


def _data(path):
    return pathlib.Path(path, "eqx_ckpt.json").read_bytes()


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_it_is_what_the_index_says(tmp_path, layout):
    heads = {}
    shared = jnp.ones(5)
    trees = [{"w": jnp.ones(3)}, {'"files":': shared, "b": shared, "c": 2}]
    for tree in [*trees, *trees]:
        for metadata in EVIL:
            path = tmp_path / "a"
            ec.tree_serialise_leaves(path, tree, metadata=metadata, layout=layout)
            index = _index.decode(_data(path))
            files = len(index.files) if layout == "ocdbt" else None
            count, nbytes = len(index.leaves.names), index.leaves.nbytes
            want = index.save, metadata, count, nbytes, files
            assert _index_summary.summarise(_data(path), heads) == want


def test_what_is_damaged_is_refused(tmp_path):
    heads = {}
    ec.tree_serialise_leaves(tmp_path, {"w": jnp.ones(3)}, metadata={"a": 1})
    data = _data(tmp_path)
    _index_summary.summarise(data, heads)
    for place in range(0, len(data), 7):
        bad = bytearray(data)
        bad[place] ^= 1
        with pytest.raises(ValueError):
            _index_summary.summarise(bytes(bad), heads)
    for bad in (b"", b"{}", data[:-1], data + b" "):
        with pytest.raises(ValueError):
            _index_summary.summarise(bad, heads)
    # Of a later format, with a right digest.
    text = data[:-45].replace(b'"version":1', b'"version":9', 1)
    later = text + b',"digest":"' + _index.digest(text).encode() + b'"}'
    assert json.loads(later)["version"] == 9
    with pytest.raises(_index.Newer):
        _index_summary.summarise(later, heads)
