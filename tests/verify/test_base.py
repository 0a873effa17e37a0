"""`base=`: what an adapter belongs to."""

import io
import json
import shutil

import flax.serialization
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from attacks import forge
from support.command import main
from support.helpers import new_orbax

import eqx_ckpt as ec


TREE = {"w": jnp.arange(6.0).reshape(2, 3)}
LORA = {"a": jnp.ones(2), "b": jnp.ones(3)}


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("kind", ["ckpt", "ckpt.zip", "w.safetensors", "w.npz"])
def test_a_base_is_known_again(tmp_path, monkeypatch, kind, layout):
    monkeypatch.chdir(tmp_path)
    write = {
        "w.safetensors": lambda path, tree: ec.export_safetensors(path, tree),
        "w.npz": lambda path, tree: np.savez(path, **tree),
    }.get(kind, ec.tree_serialise_leaves)
    write(kind, TREE)
    ec.tree_serialise_leaves("lora", LORA, base=kind, layout=layout)
    lora = ec.open("lora")
    assert lora.base.path == kind and lora.base.save_id == ec.open(kind).save_id
    assert lora.check_base(kind)["w"].read().tolist() == TREE["w"].tolist()
    lora.check_base(ec.open(tmp_path / kind))
    copy = shutil.copytree if kind == "ckpt" else shutil.copy
    copy(kind, f"copy-{kind}")
    lora.check_base(f"copy-{kind}")

    write(kind, {"w": TREE["w"] + 1})
    with pytest.raises(ValueError, match=f"save {lora.base.save_id} of `{kind}`"):
        lora.check_base(kind)
    with pytest.raises(ValueError, match="has no base: it was saved without `base="):
        ec.open(kind).check_base("lora")
    with pytest.raises(FileNotFoundError, match="none-here"):
        lora.check_base("none-here")


def _of_processes(path, w):
    path.mkdir()
    for i, part in enumerate(np.split(w, 2)):
        info = json.dumps({"w": {"saved_offsets": [i * len(part), 0]}})
        file = path / f"shard-0000{i + 1}-model-00001-of-00001.safetensors"
        safetensors.numpy.save_file({"w": part}, file, {"DCP_SHARDING_INFO": info})


def _orbax(path, w):
    """In chunks that are compressed."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as saver:
        saver.save(path, args=ocp.args.PyTreeSave({"w": jnp.asarray(w)}))


@pytest.mark.parametrize(
    "write", [_of_processes, pytest.param(_orbax, marks=new_orbax)]
)
def test_a_base_in_pieces_is_known_by_its_values(tmp_path, write):
    w = np.arange(4096, dtype="f4").reshape(2048, 2)
    write(tmp_path / "base", w)
    write(tmp_path / "other", w + 1)
    assert np.array_equal(ec.open(tmp_path / "base")["w"].read(), w)
    ec.tree_serialise_leaves(tmp_path / "lora", LORA, base=tmp_path / "base")
    lora = ec.open(tmp_path / "lora")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    lora.check_base(tmp_path / "copy")
    with pytest.raises(ValueError, match="has another one"):
        lora.check_base(tmp_path / "other")


def _orbax_with(is_ocdbt):
    def write(path, tree):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=is_ocdbt)) as saver:
            saver.save(path, args=ocp.args.PyTreeSave(tree))

    return write


def _npz(path, tree):
    with path.open("wb") as file:
        np.savez(file, **tree)


_packed = flax.serialization.to_bytes

MANY = {
    "safetensors": (300, lambda path, tree: safetensors.numpy.save_file(tree, path)),
    "npz": (300, _npz),
    "msgpack": (300, lambda path, tree: path.write_bytes(_packed(tree))),
}
CHUNKED = {"directories": (40, _orbax_with(False)), "database": (40, _orbax_with(True))}


@pytest.mark.parametrize(
    "count, write",
    [*MANY.values(), *(pytest.param(*x, marks=new_orbax) for x in CHUNKED.values())],
    ids=[*MANY, *CHUNKED],
)
def test_another_value_of_any_leaf_is_another_base(tmp_path, count, write):
    """As after a fine-tuning of the head alone."""
    tree = {f"w{i:03}": np.full((8, 4), i, "f4") for i in range(count)}
    write(tmp_path / "base", tree)
    ec.tree_serialise_leaves(tmp_path / "lora", LORA, base=tmp_path / "base")
    lora = ec.open(tmp_path / "lora")
    write(tmp_path / "same", tree)
    lora.check_base(tmp_path / "same")
    for i in (1, 2, 5, count - 2, count - 1):
        write(tmp_path / f"{i}", tree | {f"w{i:03}": tree[f"w{i:03}"] + 1})
        with pytest.raises(ValueError, match="has another one"):
            lora.check_base(tmp_path / f"{i}")


def test_what_cannot_be_a_base(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.empty((0, 3)))
    with pytest.raises(ValueError, match="no leaf whose values could be compared"):
        ec.tree_serialise_leaves(tmp_path / "lora", LORA, base=tmp_path / "a.npz")
    ckpt = ec.open(io.BytesIO(ec.to_bytes(TREE)))
    with pytest.raises(ValueError, match="`base` was opened from a file object"):
        ec.tree_serialise_leaves(tmp_path / "lora", LORA, base=ckpt)
    assert not (tmp_path / "lora").exists()


def test_all_saves_take_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ec.tree_serialise_leaves("base", TREE)
    base = ec.open("base")
    ec.async_tree_serialise_leaves("async", LORA, base=base).result()
    ec.convert("async", "converted.zip")
    ec.convert("base", "derived", base="base")
    (tmp_path / "bytes.zip").write_bytes(ec.to_bytes(LORA, base=base))
    with ec.CheckpointManager("run", base="base") as manager:
        manager.save(1, LORA)
        manager.wait()
        # It is of the base that was there when the run began.
        ec.tree_serialise_leaves("base", TREE)
        manager.save(2, LORA)
    made = ["async", "converted.zip", "derived", "bytes.zip", "run/1", "run/2"]
    for path in made:
        assert ec.open(path).base[1:] == ec.open("async").base[1:]
        assert ec.open(path).base.save_id == base.save_id
    ec.tree_serialise_leaves("again", LORA, base=ec.open("run/2").base)
    assert ec.open("again").base == ec.open("run/2").base
    assert base.base is None
    with pytest.raises(ValueError, match="`base` is for a checkpoint"):
        ec.convert("base", "x.safetensors", base="base")


def test_nothing_is_saved_without_its_base(tmp_path):
    with pytest.raises(FileNotFoundError, match="none-here"):
        ec.tree_serialise_leaves(tmp_path / "a", LORA, base=tmp_path / "none-here")
    with pytest.raises(FileNotFoundError, match="none-here"):
        ec.CheckpointManager(tmp_path / "a", base=tmp_path / "none-here")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "wrong", [0, [], ["p", "x", "y"], ["p", "0" * 16], {"path": 1}]
)
def test_a_base_that_is_none(tmp_path, wrong):
    ec.tree_serialise_leaves(tmp_path / "base", TREE)
    ec.tree_serialise_leaves(tmp_path / "a", LORA, base=tmp_path / "base")
    say = lambda base: forge(tmp_path / "a", lambda value: value.update(base=base))
    good = ["/etc/passwd", "0" * 16, "0" * 32]
    say(good)
    assert ec.open(tmp_path / "a").base == tuple(good)
    with pytest.raises(ValueError, match="`/etc/passwd`"):
        ec.open(tmp_path / "a").check_base(tmp_path / "base")
    say(wrong)
    with pytest.raises(ec.DamagedError, match="no 'base' of the right type"):
        ec.open(tmp_path / "a")


def test_where_a_base_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ec.tree_serialise_leaves("base", TREE)
    ec.tree_serialise_leaves("lora", LORA, base="base")
    said = f"base, save {ec.open('base').save_id}"
    for command in ("info", "ls"):
        main([command, "lora"])
        assert said in capsys.readouterr().out
        main([command, "lora", "--json"])
        assert json.loads(capsys.readouterr().out)["base"]["path"] == "base"
        main([command, "base", "--json"])
        assert json.loads(capsys.readouterr().out)["base"] is None
