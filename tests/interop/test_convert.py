"""`convert`: from any format to one of ours, or to `.safetensors`."""

import ast
import errno
import functools as ft
import gc
import pathlib
import re

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from attacks import everything, skeleton, tree as all_kinds
from support import inside
from support.helpers import assert_alike, BytesRead, run_program, run_python

import eqx_ckpt as ec


FOREIGN = pathlib.Path(__file__).parents[1] / "foreign"


def _like():
    return {**skeleton(), "more": jnp.zeros((64, 32), jnp.bfloat16)}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "ckpt"
    tree = {**all_kinds(), "more": jnp.ones((64, 32), jnp.bfloat16)}
    chunks = lambda name, *_: (5, 7) if name == "more" else None
    ec.tree_serialise_leaves(path, tree, everything, metadata={"a": 1}, chunks=chunks)
    return path, tree


@pytest.mark.parametrize(
    ("target", "compression"),
    [("ocdbt", "zstd"), ("zarr", "lz4"), ("zarr", None), ("b.zip", None)],
)
def test_ours_to_ours(ours, tmp_path, target, compression):
    path, tree = ours
    layout = "zarr" if target == "zarr" else "ocdbt"
    to = tmp_path / target
    ec.convert(path, to, layout=layout, compression=compression, max_bytes=2**16)
    assert ec.verify(to) == []
    assert ec.open(to).metadata == {"a": 1}
    # Also what only our own format has: kinds, shared arrays, static fields.
    assert_alike(ec.tree_deserialise_leaves(to, _like(), everything), tree)
    other = eqx.tree_at(lambda t: t["net"].bias, _like(), jnp.zeros(4))
    with pytest.raises(RuntimeError, match="net.bias"):
        ec.tree_deserialise_leaves(to, other, everything)
    ec.convert(to, tmp_path / "back", chunks=1000)
    assert ec.verify(tmp_path / "back") == []
    back = ec.tree_deserialise_leaves(tmp_path / "back", _like(), everything)
    assert_alike(back, tree)


def _weights():
    rng = np.random.default_rng(0)
    out = {f"layers.{i}.w": rng.normal(size=(70, 30)).astype("f4") for i in range(12)}
    return {**out, "big": rng.normal(size=(2000, 1000)).astype("f4")}


def test_own_states_come_along(tmp_path):
    tree, own = {"w": jnp.ones(3)}, {"at": 5}
    with ec.CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, tree, own=own)
    ec.convert(manager.path(1), tmp_path / "b/1/default", layout="zarr")
    assert ec.CheckpointManager(tmp_path / "b").restore(tree, own={"at": 0})[1] == own


def test_the_log_says_what_a_safetensors_file_lacks(tmp_path, caplog):
    tree, own = {"w": jnp.ones(300)}, {"at": [5] * 10_000}
    with ec.CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, tree, own=own)
    ec.tree_serialise_leaves(tmp_path / "b", tree, base=manager.path(1))
    for source, lost in (
        (manager.path(1), "the own states of its processes"),
        (tmp_path / "b", "its base"),
    ):
        ckpt = ec.open(source)
        with BytesRead() as read:
            ec.convert(ckpt, tmp_path / "m.safetensors", metadata={"by": "me"})
        assert read.total < 5000  # Own states are not read for nothing.
        (line,) = (x.message for x in caplog.records if "lacks" in x.message)
        assert line.endswith(f"has: {lost}")
        caplog.clear()
    ec.convert(tmp_path / "m.safetensors", tmp_path / "n.safetensors")
    assert not any("lacks" in x.message for x in caplog.records)


def test_safetensors_there_and_back(tmp_path):
    source, back = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.numpy.save_file(_weights(), source, {"format": "pt"})
    for name in ("dir", "file.zip"):
        ec.convert(source, tmp_path / name)
        assert ec.verify(tmp_path / name) == []
        assert ec.open(tmp_path / name).tree.layers[3].w.shape == (70, 30)
        ec.convert(tmp_path / name, back)
        assert back.read_bytes() == source.read_bytes()


def test_eqx_and_msgpack(tmp_path, getkey):
    model = eqx.nn.MLP(2, 2, 300, 2, key=getkey())
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", [model, 3])
    with pytest.raises(ValueError, match="Pass `like=`"):
        ec.convert(tmp_path / "m.eqx", tmp_path / "a")
    ec.convert(tmp_path / "m.eqx", tmp_path / "a", like=[model, 0])
    got = ec.tree_deserialise_leaves(tmp_path / "a", [model, 0])
    assert eqx.tree_equal(got, [model, 3])
    tree = {"w": np.arange(6.0).reshape(2, 3), "step": 3, "text": "é", "b": b"\0"}
    (tmp_path / "f").write_bytes(flax.serialization.to_bytes(tree))
    ec.convert(tmp_path / "f", tmp_path / "b")
    assert_alike(ec.materialise(ec.open(tmp_path / "b").tree), tree)


def test_one_rule_for_what_safetensors_cannot_hold(ours, tmp_path):
    """A tree, its checkpoint, a node of that and `convert` refuse the same leaves; with
    the `skip` that the error shows they write the same file."""
    path, tree = ours
    routes = {
        "tree": ft.partial(ec.export_safetensors, pytree=tree, filter_spec=everything),
        "checkpoint": ft.partial(ec.export_safetensors, pytree=ec.open(path)),
        "node": ft.partial(ec.export_safetensors, pytree=ec.open(path).tree),
        "convert": lambda path_, **kwargs: ec.convert(path, path_, **kwargs),
    }
    texts, files = set(), set()
    for name, write in routes.items():
        to = tmp_path / f"{name}.safetensors"
        with pytest.raises(TypeError, match="It cannot hold:") as info:
            write(to, metadata={})
        assert not to.exists()
        texts.add(str(info.value))
        skip = ast.literal_eval(re.search(r"skip=(\[.*?\])`", str(info.value))[1])
        write(to, metadata={}, skip=skip)
        files.add(to.read_bytes())
    assert len(texts) == len(files) == 1
    listed = texts.pop().splitlines()[1:-1]
    here = ec.open(to)
    # Nothing else is left out, and nothing that can be held is listed.
    out = [x for x in ec.open(path) if x not in here]
    assert len(out) + len(here) == len(ec.open(path))
    kinds = [row.split()[-1] for row in listed]
    assert {"(int)", "(float)", "(key)", "(str)"} <= set(kinds)
    assert not {"float32", "bfloat16", "int64", "bool"} & set(kinds)
    with pytest.raises(ValueError, match="`skip` has 'nothing', which is the name of"):
        ec.export_safetensors(to, tree, everything, skip=["nothing"])
    with pytest.raises(TypeError, match="must be a list of names"):
        ec.export_safetensors(to, tree, everything, skip="step")


def test_an_export_of_a_path(ours, tmp_path):
    for path in (ours[0], str(ours[0])):
        with pytest.raises(TypeError, match=r"`pytree` is .*pass it as `ec.open\(path"):
            ec.export_safetensors(tmp_path / "x.safetensors", path)
    assert not (tmp_path / "x.safetensors").exists()
    # In a process without the type checks of the tests.
    code = 'import eqx_ckpt as ec\nec.export_safetensors({"x": 1.0}, "x.safetensors")'
    with pytest.raises(AssertionError, match="exchange 'x.safetensors' and the `dict`"):
        run_python(code)


def test_an_error_that_comes_after_a_file_is_there(tmp_path, monkeypatch):
    """It is told of a file, and not of a checkpoint."""

    def fail(path):
        raise OSError(errno.EIO, "bad")

    ec.tree_serialise_leaves(tmp_path / "small", {"w": np.ones(3)})
    path = tmp_path / "a.safetensors"
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        inside.replace(patch, "sync a directory", fail)
        ec.convert(tmp_path / "small", path)
    assert caught.value.__notes__[0].startswith(f"`{path}` is saved and whole")
    assert list(safetensors.numpy.load_file(path)) == ["w"]


def test_leaves_out_what_is_skipped(ours, tmp_path):
    """Also of a target that holds all. The rest is as it was."""
    path, tree = ours
    names = [name for name in ec.open(path) if name != "more"]
    ec.convert(path, tmp_path / "b.zip", skip=[names[0], names[-1]])
    got = ec.open(tmp_path / "b.zip")
    assert [name for name in got if name != "more"] == names[1:-1]
    assert ec.verify(tmp_path / "b.zip") == []
    assert np.array_equal(got["more"].read(), tree["more"])


@pytest.mark.parametrize("target", ["out", "out.zip", "out.safetensors"])
def test_what_cannot_be_read_is_listed_at_once(tmp_path, target):
    """With the `skip` that the error shows, the rest is written."""
    source = FOREIGN / "torch" / "ddp.pt"
    with pytest.raises(ValueError, match="cannot be read:") as info:
        ec.convert(source, tmp_path / target, metadata={})
    text = str(info.value)
    assert "  args  argparse.Namespace (unreadable): it is an object of" in text
    assert "  best  numpy._core.multiarray.scalar (unreadable): it is" in text
    skip = ast.literal_eval(re.search(r"skip=(\[.*?\])`", text)[1])
    ec.convert(source, tmp_path / target, metadata={}, skip=skip)
    got = ec.open(tmp_path / target)
    assert np.array_equal(
        got["model.module.weight"].read(), ec.open(source)["model.module.weight"].read()
    )
    assert {"args", "best"}.isdisjoint(got)


def test_what_the_target_cannot_hold(ours, tmp_path):
    to = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="a dict of strings"):
        ec.convert(ours[0], to)
    with pytest.raises(TypeError, match="It cannot hold:"):
        ec.convert(ours[0], to, metadata={})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError):
        ec.convert(ours[0], tmp_path / "mine")


def test_damage_is_not_converted(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.ones(10**6)})
    (data,) = (tmp_path / "a").glob("d/*/0")
    data.write_bytes(bytes(data.stat().st_size))
    for name in ("b", "b.zip"):
        with pytest.raises(RuntimeError, match="w: its bytes are not those"):
            ec.convert(tmp_path / "a", tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_memory_is_bounded(tmp_path):
    safetensors.numpy.save_file(
        {"w": np.ones((2**14, 2**12), np.float32)}, tmp_path / "a.safetensors"
    )
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "small.safetensors")
    peak = run_program("peak_of_convert", tmp_path)
    # Of 256 MiB: some chunks of 16 MiB for each thread.
    assert int(peak) < 160 * 1024
    assert float(ec.open(tmp_path / "b")["w"][-1].read().sum()) == 2**12


def test_keys_and_devices(tmp_path):
    tree = {"key": jax.random.split(jax.random.key(1), 3)}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    ec.convert(tmp_path / "a", tmp_path / "b")
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "b", tree), tree)


@pytest.mark.parametrize("target", ["b", "b.zip", "b.safetensors"])
def test_many_leaves_are_converted_without_looks_for_cycles(tmp_path, target):
    tree = {f"w{i}": np.full(4, i, np.float32) for i in range(3000)}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    ckpt = ec.open(tmp_path / "a")
    gc.collect()
    before = sum(x["collections"] for x in gc.get_stats())
    ec.convert(ckpt, tmp_path / target, durable=False)
    assert sum(x["collections"] for x in gc.get_stats()) - before <= 2
    ec.export_safetensors(tmp_path / "c.safetensors", ckpt, durable=False)
    assert sum(x["collections"] for x in gc.get_stats()) - before <= 4
