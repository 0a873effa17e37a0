"""`export_safetensors` with `shard_bytes`: several files with an index."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from support.processes import good, run_team

import eqx_ckpt as ec


INDEX = "model.safetensors.index.json"
TREE = {
    "layers": [
        {"w": jnp.arange(1000.0).reshape(10, 100) * i, "b": np.arange(3) + i}
        for i in range(5)
    ],
    "n": jnp.ones(3, jnp.float16),
}


def _by_index(path):
    """As `transformers` loads them: by the index, each file by the library."""
    index = json.loads((path / INDEX).read_text())
    out = {}
    for file in set(index["weight_map"].values()):
        with safetensors.safe_open(path / file, "numpy") as opened:
            names = [name for name, x in index["weight_map"].items() if x == file]
            assert sorted(opened.keys()) == sorted(names)
            assert opened.metadata() == {"format": "pt"}
            out |= {name: opened.get_tensor(name) for name in names}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in out.values())
    return out


def _check(path, tree=TREE):
    loaded = _by_index(path)
    ckpt = ec.open(path)
    assert set(loaded) == set(ckpt)
    for name, value in ec.open(path).items():
        node = tree
        for key in name.split("."):
            node = node[int(key) if key.isdigit() else key]
        assert np.array_equal(loaded[name], np.asarray(node))
        assert np.array_equal(np.asarray(value.read()), np.asarray(node))
    assert ckpt.metadata == {"format": "pt"}


def test_files_with_an_index(tmp_path):
    path = tmp_path / "out"
    about = {"metadata": {"format": "pt"}}
    ec.export_safetensors(path, TREE, shard_bytes=9000, **about)
    files = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert {x.name for x in path.iterdir()} == {INDEX, *files}
    sizes = [os.path.getsize(path / file) for file in files]
    assert max(sizes) < 9000 + 2000
    _check(path)
    # In the place of others, beside what is not of them; a large tensor has its own.
    (path / "config.json").write_text("{}")
    ec.export_safetensors(path, TREE, shard_bytes=1, **about)
    assert len(list(path.iterdir())) == 11 + 2
    _check(path)
    ec.export_safetensors(path, TREE, shard_bytes=2**30, **about)
    one = "model-00001-of-00001.safetensors"
    assert {x.name for x in path.iterdir()} == {INDEX, one, "config.json"}
    _check(path)
    # From a checkpoint, into a store.
    ec.tree_serialise_leaves(tmp_path / "ckpt", TREE)
    ec.export_safetensors(
        "memory://shards/a", ec.open(tmp_path / "ckpt"), shard_bytes=5000
    )
    stored = ec.open(f"memory://shards/a/{INDEX}")
    assert np.array_equal(stored["layers.4.w"].read(), TREE["layers"][4]["w"])


def test_where_no_files_may_go(tmp_path):
    path = tmp_path / "out"
    write = lambda **more: ec.export_safetensors(path, TREE, shard_bytes=9, **more)
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="There is a file at .*shard_bytes"):
        write()
    path.unlink()
    ec.tree_serialise_leaves(path, TREE)
    with pytest.raises(FileExistsError, match="`eqx_ckpt.json` in"):
        write()
    ec.delete(path)
    path.mkdir()
    ec.export_safetensors(path / "model.safetensors", TREE)
    with pytest.raises(FileExistsError, match="`model.safetensors` in"):
        write()
    (path / "model.safetensors").unlink()
    write()
    before = {x.name: x.read_bytes() for x in path.iterdir()}
    with pytest.raises(FileExistsError, match="overwrite=False"):
        write(overwrite=False)
    with pytest.raises(TypeError, match="cannot hold"):
        ec.export_safetensors(path, {"n": 3}, shard_bytes=9)
    with pytest.raises(ValueError, match="reads leaves of what is at"):
        ec.export_safetensors(path, ec.open(path), shard_bytes=9)
    assert before == {x.name: x.read_bytes() for x in path.iterdir()}


def test_half_an_export_is_none(tmp_path):
    """Its index is there only with all of its files."""
    path = tmp_path / "out"
    about = {"metadata": {"format": "pt"}}
    ec.export_safetensors(path, TREE, shard_bytes=9000, **about)
    ec.tree_serialise_leaves(tmp_path / "bad", {"z": jnp.arange(99.0)})
    bad = ec.open(tmp_path / "bad")["z"]
    data = max((tmp_path / "bad" / "d").rglob("0"), key=os.path.getsize)
    data.write_bytes(bytes(os.path.getsize(data)))
    with pytest.raises(ec.DamagedError):
        ec.export_safetensors(path, {**TREE, "z": bad}, shard_bytes=9000)
    assert not (path / INDEX).exists()
    with pytest.raises(ValueError, match="one of several files|files in it that end"):
        ec.open(path)
    ec.export_safetensors(path, TREE, shard_bytes=9000, **about)
    _check(path)


def test_many_processes_write_their_own_parts(tmp_path):
    """Files that are the same as those of one process, and no array is gathered."""
    code = """
big = np.arange(4 * 2**20, dtype=np.float32).reshape(2048, 2048)
tree = {
    "rows": spread(big, rows), "columns": spread(2 * big, columns),
    "copies": spread(big[:4], copies), "host": big[:2], "step": np.int32(7),
}
wrote = lambda: int(open("/proc/self/io").read().split("wchar: ")[1].split()[0])
before = wrote()
ec.export_safetensors(
    path / "out", tree, shard_bytes=20 * 2**20, metadata={"format": "pt"}
)
print(wrote() - before)
try:
    other = {**tree, "host": big[: 1 + rank]}
    ec.export_safetensors(path / "bad", other, shard_bytes=99)
except RuntimeError as e:
    assert "disagree" in str(e), e
else:
    raise AssertionError
assert not (path / "bad").exists()
"""
    wrote = list(map(int, good(run_team(2, code, tmp_path))))
    big = np.arange(4 * 2**20, dtype=np.float32).reshape(2048, 2048)
    tree = {"rows": big, "columns": 2 * big, "copies": big[:4], "host": big[:2]}
    tree["step"] = np.int32(7)
    _check(tmp_path / "out", tree)
    for number in wrote:
        assert 16 * 2**20 <= number < 17 * 2**20, wrote
    one = {"shard_bytes": 20 * 2**20, "metadata": {"format": "pt"}}
    ec.export_safetensors(tmp_path / "one", tree, **one)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
