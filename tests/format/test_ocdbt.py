"""Databases that we write are TensorStore's own: its driver reads and writes them."""

import os

import jax.numpy as jnp
import pytest
import tensorstore as ts
from hypothesis import given, strategies as st
from support.helpers import examples, long

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _names, _ocdbt
from eqx_ckpt._kernel._format._ocdbt import Entries
from eqx_ckpt._kernel._limits import limits


def write(path, values, files=("0",), base=""):
    """Writes a database: the values in turn to the files. Returns what a reader should
    find."""
    directory = path / base
    directory.mkdir(parents=True, exist_ok=True)
    data = {name: bytearray(b"some padding") for name in files}
    entries = []
    for i, (key, value) in enumerate(values.items()):
        file = i % len(files)
        buffer = data[files[file]]
        entries.append((key, file, len(buffer), len(value)))
        buffer += value + b"\0" * (i % 3)
    expected = dict(values)
    head = b"what else is in the file"
    columns = map(list, zip(*sorted(entries))) if entries else ([], [], [], [])
    nodes, root = _ocdbt.tree(Entries(*columns), [*files, "tree"], "tree", len(head))
    data["tree"] = bytearray(head + nodes)
    for name, buffer in data.items():
        (directory / name).write_bytes(buffer)
    manifest = _ocdbt.manifest(root, "tree")
    if base:
        manifest = _ocdbt.moved(manifest, "tree", base)
    (path / "manifest.ocdbt").write_bytes(manifest)
    return expected, root


def open_database(path):
    # A context of its own: no cache.
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    return ts.KvStore.open(spec, context=ts.Context()).result()


def read(path):
    kv = open_database(path)
    keys = kv.list().result()
    assert len(keys) == len(set(keys))
    got = {key: kv.read(key).result() for key in keys}
    assert all(value.state == "value" for value in got.values())
    return {key: value.value for key, value in got.items()}


def dump(path):
    """What TensorStore itself makes of the manifest and the nodes."""
    return ts.ocdbt.dump(open_database(path).base).result()


keys = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.text("ab./", min_size=1, max_size=12).map(str.encode),
    st.integers(1, 500).map(lambda n: b"x" * n),
)


@examples(60)
@given(
    values=st.dictionaries(keys, st.binary(max_size=200), max_size=12),
    files=st.integers(1, 3),
    base=st.sampled_from(["", "d/0123456789abcdef/"]),
    entries=st.sampled_from([2, 3, 2048]),
)
def test_what_is_written_is_read(tmp_path_factory, values, files, base, entries):
    path = tmp_path_factory.mktemp("ocdbt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "node_entries", entries)
        expected, root = write(path, values, [str(i) for i in range(files)], base)
    assert read(path) == expected
    assert root.keys == len(values)
    assert root.value_bytes == sum(map(len, values.values()))


def test_an_empty_database(tmp_path):
    write(tmp_path, {})
    assert read(tmp_path) == {}
    kv = open_database(tmp_path)
    assert kv.read(b"a").result().state == "missing"
    kv[b"a"] = b"1"
    assert read(tmp_path) == {b"a": b"1"}


def test_empty_values(tmp_path):
    values = {b"a": b"", b"b": b"b", b"c": b""}
    write(tmp_path, values)
    assert read(tmp_path) == values


@pytest.mark.parametrize("per_node, height", [(None, 1), (40, 2), (8, 3)])
@pytest.mark.parametrize("base", [*long(""), "d/0123456789abcdef/"])
def test_thousands_of_keys(tmp_path, monkeypatch, per_node, height, base):
    if per_node is not None:
        monkeypatch.setattr(limits, "node_entries", per_node)
    values = {f"layers.{i}.w/c/0".encode(): str(i).encode() for i in range(2100)}
    expected, root = write(tmp_path, values, ["0", "1"], base)
    assert root.height == height
    assert read(tmp_path) == expected
    kv = open_database(tmp_path)
    below = kv.list(ts.KvStore.KeyRange(b"layers.12", b"layers.13")).result()
    assert set(below) == {key for key in values if key.startswith(b"layers.12")}
    assert kv.read(b"layers.5000.w/c/0").result().state == "missing"
    assert kv.read(b"layers.7.w/c/0", byte_range=slice(0, 1)).result().value == b"7"


def test_statistics_and_node_sizes_are_what_tensorstore_says(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "node_entries", 5)
    values = {f"{i:03}".encode(): b"v" * i for i in range(60)}
    _, root = write(tmp_path, values)
    manifest = dump(tmp_path)
    (version,) = manifest["versions"]
    assert version["generation_number"] == 1
    assert version["root_height"] == root.height == 2
    statistics = version["root"]["statistics"]
    tree = (tmp_path / "tree").read_bytes()
    assert statistics == {
        "num_keys": 60,
        "num_tree_bytes": len(tree) - len(b"what else is in the file"),
        "num_indirect_value_bytes": sum(range(60)),
    }
    config = manifest["config"]
    assert config["compression"] is None or config["compression"] == {"id": "none"}
    assert len(config["uuid"]) == 32


@pytest.mark.parametrize("per_node, count", [(2048, 3), (2048, 2100), (6, 300)])
@pytest.mark.parametrize("base", [*long(""), "d/0123456789abcdef/"])
def test_tensorstore_writes_into_the_database(
    tmp_path, monkeypatch, per_node, count, base
):
    monkeypatch.setattr(limits, "node_entries", per_node)
    values = {f"k{i:05}".encode(): f"old {i}".encode() for i in range(count)}
    values, _ = write(tmp_path, values, ["0", "1", "2"], base)
    before = {name: (tmp_path / base / name).read_bytes() for name in "012"}
    changes = {b"k00001": b"new", b"a": b"first" * 100, b"z": b"", b"k00000x": b"mid"}
    kv = open_database(tmp_path)
    for key, value in changes.items():
        kv.write(key, value).result()
    kv.delete_range(ts.KvStore.KeyRange(b"k00002", b"k00003")).result()
    values.update(changes)
    del values[b"k00002"]
    assert read(tmp_path) == values
    # Several at once.
    with ts.Transaction(atomic=True) as transaction:
        for i in range(20):
            kv.with_transaction(transaction)[f"t{i}"] = b"t" * i
    values.update({f"t{i}".encode(): b"t" * i for i in range(20)})
    assert read(tmp_path) == values
    # The save's files are as they were; the old version can still be read.
    assert before == {name: (tmp_path / base / name).read_bytes() for name in "012"}
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "version": 1}
    old = ts.KvStore.open(spec).result()
    assert old.read(b"k00001").result().value == b"old 1"
    assert old.read(b"k00002").result().value == b"old 2"


def test_a_long_key(tmp_path):
    values = {b"x" * (_names.MAX_NAME + 700): b"1", b"x" * _names.MAX_NAME: b"2"}
    write(tmp_path, values)
    assert read(tmp_path) == values


def test_damaged_nodes_and_manifests_are_noticed(tmp_path):
    write(tmp_path, {b"a": b"1", b"b": b"2"})
    start = len(b"what else is in the file")
    for name, begin in (("manifest.ocdbt", 0), ("tree", start)):
        good = (tmp_path / name).read_bytes()
        for at in range(begin, len(good), 3):
            bad = bytearray(good)
            bad[at] ^= 0x10
            (tmp_path / name).write_bytes(bad)
            with pytest.raises(ValueError):
                open_database(tmp_path).read(b"a").result()
        (tmp_path / name).write_bytes(good)
    assert read(tmp_path) == {b"a": b"1", b"b": b"2"}


def test_a_save_is_such_a_database_from_two_places(tmp_path, getkey):
    x = jnp.arange(3.0)
    tree = {"x": x, "y": x, "e": jnp.zeros((0, 2))}
    ec.tree_serialise_leaves(tmp_path / "a", tree, orbax=True)
    (save,) = os.listdir(tmp_path / "a" / "d")
    contents = read(tmp_path / "a")
    assert contents == read(tmp_path / "a" / "d" / save)
    assert sorted(contents) == [
        b"e/zarr.json",
        b"x/c/0",
        b"x/zarr.json",
        b"y/c/0",
        b"y/zarr.json",
    ]
    # Values start where a memory-mapped read is fast.
    assert contents[b"x/c/0"] == contents[b"y/c/0"] == x.tobytes()
    assert len(contents[b"x/zarr.json"]) % 64 == 0
