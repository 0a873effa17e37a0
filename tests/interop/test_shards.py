"""`export_safetensors` with `shard_bytes`: several files with an index."""

import errno
import json
import os
import threading
from concurrent import futures

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from support import inside, scripts
from support.processes import good, run_team_program

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


def _bad(path):
    """A leaf whose bytes are damaged."""
    ec.tree_serialise_leaves(path, {"z": jnp.arange(99.0)})
    bad = ec.open(path)["z"]
    data = max((path / "d").rglob("0"), key=os.path.getsize)
    data.write_bytes(bytes(os.path.getsize(data)))
    return bad


@pytest.mark.parametrize("shard_bytes", [9000, 5000])
def test_an_export_that_fails_leaves_what_was_there(tmp_path, shard_bytes):
    path = tmp_path / "out"
    tree = {**TREE, "z": _bad(tmp_path / "bad")}
    about = {"metadata": {"format": "pt"}}
    ec.export_safetensors(path, TREE, shard_bytes=9000, **about)
    before = {x.name: x.read_bytes() for x in path.iterdir()}
    with pytest.raises(ec.DamagedError):
        ec.export_safetensors(path, tree, shard_bytes=shard_bytes)
    assert before == {x.name: x.read_bytes() for x in path.iterdir()}
    _check(path)
    with pytest.raises(ec.DamagedError):
        ec.export_safetensors(tmp_path / "new", tree, shard_bytes=9000)
    assert not (tmp_path / "new").exists()
    store = f"memory://fails/{shard_bytes}"
    ec.export_safetensors(store, TREE, shard_bytes=9000)
    with pytest.raises(ec.DamagedError):
        ec.export_safetensors(store, tree, shard_bytes=shard_bytes)
    stored = ec.open(f"{store}/{INDEX}")
    assert np.array_equal(stored["layers.4.w"].read(), TREE["layers"][4]["w"])
    other = {"w": jnp.ones(3000)}
    ec.export_safetensors(store, other, shard_bytes=9000)
    assert ec.open(f"{store}/{INDEX}")["w"].read().tolist() == [1] * 3000


@pytest.mark.parametrize("change", ["write", "swap"])
def test_a_full_disk(tmp_path, monkeypatch, change):
    """There is no room for the index; or not even for a name."""
    path, about = tmp_path / "out", {"metadata": {"format": "pt"}}
    ec.export_safetensors(path, TREE, shard_bytes=9000, **about)

    def fill(now, key):
        if now == change and key.startswith(INDEX):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    other = {"layers": [{"w": jnp.ones((10, 100)) * i} for i in range(5)]}
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        inside.watch_store(patch, path, before=fill)
        ec.export_safetensors(path, other, shard_bytes=9000)
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    if change == "write":
        assert "the path is as it was before" in said
        _check(path)
    else:
        assert "There is no whole export" in said and not (path / INDEX).exists()
    ec.export_safetensors(path, other, shard_bytes=9000, **about)
    _check(path, other)
    assert not [*path.glob("*.part")]


def test_an_export_that_is_killed_leaves_what_was_there(tmp_path):
    """In the middle of its writes, when a file is whole already."""
    path = tmp_path / "out"
    ec.export_safetensors(path, TREE, shard_bytes=9000, metadata={"format": "pt"})
    program = scripts.program("export_that_is_killed")
    assert scripts.run(program, path).returncode == 9
    _check(path)


@pytest.mark.parametrize("overwrite", [True, False])
def test_two_exports_at_a_time(tmp_path, monkeypatch, overwrite):
    """One comes as the other puts its files in their places, and waits for that."""
    path, others = tmp_path / "out", []
    other = {"layers": [{"w": jnp.ones((10, 100)) * i} for i in range(5)]}

    def export(tree):
        how = {"metadata": {"format": "pt"}, "overwrite": overwrite}
        ec.export_safetensors(path, tree, shard_bytes=9000, **how)

    def begin_another(change, key):
        if change == "swap" and key.startswith("model-00002") and not others:
            done = futures.Future()
            others.append(done)

            def run():
                try:
                    done.set_result(export(other))
                except FileExistsError as e:
                    done.set_exception(e)

            threading.Thread(target=run).start()
            # Without a lock it would be through by then.
            futures.wait(others, 0.3)

    inside.watch_store(monkeypatch, path, before=begin_another)
    export(TREE)
    if overwrite:
        others[0].result()
        _check(path, other)
    else:
        with pytest.raises(FileExistsError, match="overwrite=False"):
            others[0].result()
        _check(path)


def test_files_of_no_index_stay(tmp_path):
    mine = tmp_path / "model-00007-of-00009.safetensors"
    mine.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="model-00007-of-00009.*overwrite=False"):
        ec.export_safetensors(tmp_path, TREE, shard_bytes=9000, overwrite=False)
    assert os.listdir(tmp_path) == [mine.name]
    for shard_bytes in (5000, 9000):
        about = {"metadata": {"format": "pt"}}
        ec.export_safetensors(tmp_path, TREE, shard_bytes=shard_bytes, **about)
        assert mine.read_bytes() == b"mine"
        _check(tmp_path)
    assert len(os.listdir(tmp_path)) == 1 + 1 + 3
    # An index may have been written by anyone.
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / "b.safetensors").write_bytes(b"mine")
    index["weight_map"] |= {"b": "b.safetensors", "c": "../c", "d": 3}
    (tmp_path / INDEX).write_text(json.dumps(index))
    ec.export_safetensors(tmp_path, TREE, shard_bytes=2**30)
    assert len(os.listdir(tmp_path)) == 2 + 2
    (tmp_path / INDEX).write_text("{")
    ec.export_safetensors(tmp_path, TREE, shard_bytes=2**30)
    assert len(os.listdir(tmp_path)) == 2 + 2


@pytest.mark.parametrize("name", [INDEX, "model-00001-of-00003.safetensors"])
@pytest.mark.parametrize("store", [False, True])
def test_no_export_to_where_it_reads_from(tmp_path, name, store):
    path = f"memory://itself/{tmp_path.name}" if store else str(tmp_path / "out")
    ec.export_safetensors(path, TREE, shard_bytes=9000)
    ckpt = ec.open(f"{path}/{name}")
    with pytest.raises(ValueError, match="reads leaves of what is at"):
        ec.export_safetensors(path, ckpt.tree, shard_bytes=700)
    assert len(ec.open(f"{path}/{INDEX}")) == 11
    # What is below, and no file of an export, is not replaced.
    ec.tree_serialise_leaves(f"{path}/ckpt", {"a": jnp.ones(3)})
    ec.export_safetensors(path, ec.open(f"{path}/ckpt").tree, shard_bytes=700)
    assert ec.open(f"{path}/{INDEX}")["a"].read().tolist() == [1, 1, 1]


def test_many_processes_write_their_own_parts(tmp_path):
    """Files that are the same as those of one process, and no array is gathered."""
    wrote = list(map(int, good(run_team_program(2, "team_that_exports", tmp_path))))
    big = np.arange(4 * 2**20, dtype=np.float32).reshape(2048, 2048)
    tree = {"rows": big, "columns": 2 * big, "copies": big[:4], "host": big[:2]}
    tree["step"] = np.int32(7)
    _check(tmp_path / "out", tree)
    for number in wrote:
        assert 16 * 2**20 <= number < 17 * 2**20, wrote
    one = {"shard_bytes": 20 * 2**20, "metadata": {"format": "pt"}}
    ec.export_safetensors(tmp_path / "one", tree, **one)
    assert {*os.listdir(tmp_path / "out")} == {*os.listdir(tmp_path / "one")}
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
