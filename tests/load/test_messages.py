"""Errors as a user reads them: what is wrong, where, what was lost, what to do."""

import copy
import errno
import inspect
import io
import os
import pickle
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support import inside
from support.helpers import locked, run_program

import eqx_ckpt as ec


TREE = {"a": jnp.ones((3, 4)), "b": 1}


def _run(path):
    with ec.CheckpointManager(path) as manager:
        manager.save(1, TREE)


def _calls(path):
    """Every call that takes a path, with a path for its first argument."""
    return {
        "save": lambda: ec.tree_serialise_leaves(path, TREE),
        "save zarr": lambda: ec.tree_serialise_leaves(path, TREE, layout="zarr"),
        "async": lambda: ec.async_tree_serialise_leaves(path, TREE).result(),
        "manager": lambda: _run(path),
        "convert": lambda: ec.convert("good", path),
        "export": lambda: ec.export_safetensors(path, {"a": TREE["a"]}),
        "load": lambda: ec.tree_deserialise_leaves(path, TREE),
        "open": lambda: ec.open(path),
        "verify": lambda: ec.verify(path),
        "exists": lambda: ec.exists(path),
        "delete": lambda: ec.delete(path),
        "clean": lambda: ec.clean(path),
    }


@pytest.mark.parametrize("name", _calls(""))
@pytest.mark.parametrize("path", ["n" * 256, "x/" + "ä" * 128, "x/" * 2050])
def test_paths_that_are_too_long(tmp_path, monkeypatch, name, path):
    monkeypatch.chdir(tmp_path)
    ec.tree_serialise_leaves("good", TREE)
    with pytest.raises(ValueError, match="too long.*Choose a shorter one"):
        _calls(path)[name]()
    assert os.listdir() == ["good"]


@pytest.mark.parametrize("name", _calls(""))
def test_paths_below_a_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    ec.tree_serialise_leaves("good", TREE)
    (tmp_path / "file").write_text("text")
    call = _calls("file/sub")[name]
    if name == "exists":
        assert not call()
    elif name in ("load", "open", "verify", "delete", "clean"):
        with pytest.raises(FileNotFoundError, match="There is no .* at `"):
            call()
    else:
        with pytest.raises(NotADirectoryError, match="/file` is a file, .* at `/"):
            call()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("name", ["n" * 255, "n" * 230, "n" * 229, "ä" * 127])
@pytest.mark.parametrize("layout", ["ocdbt", "zarr", "zip"])
def test_the_longest_names(tmp_path, name, layout):
    zipped = layout == "zip"
    if zipped:
        name = name.encode()[:250].decode(errors="ignore") + ".zip"
    options = {} if zipped else {"layout": layout}
    path = tmp_path / name
    for value in (1, 2):
        ec.tree_serialise_leaves(path, {"v": value}, **options)
        assert ec.tree_deserialise_leaves(path, {"v": 0}) == {"v": value}
    ec.delete(path)
    assert os.listdir(tmp_path) == []
    # The next save deletes what a killed one has left beside such a path, as far as
    # nobody has its lock.
    for save in ("0" * 16, "1" * 16):
        os.makedirs(f"{inside.leftover(path, save)}/d")
    with locked(inside.leftover(path, "1" * 16)):
        ec.tree_serialise_leaves(path, {"v": 3}, **options)
        assert ec.clean(tmp_path) == [] and len(os.listdir(tmp_path)) == 2
    ec.tree_serialise_leaves(path, {"v": 4}, **options)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small file system")
def test_a_disk_that_is_full_and_a_mount_point(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount")
    try:
        run_program("save_on_a_small_disk", tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_delete_that_cannot_be_finished_has_deleted(tmp_path, monkeypatch):
    path = tmp_path / "ckpt"
    ec.tree_serialise_leaves(path, TREE)
    unlink = os.unlink

    def fail(name, **options):
        if name == "tree":
            raise OSError(errno.EIO, "Input/output error")
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with pytest.warns(match="cannot be deleted.*Input/output error"):
            ec.delete(path)
    assert not ec.exists(path)
    assert len(ec.clean(tmp_path)) == 1 and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "where",
    [
        lambda t: jnp.sum(t["a"]),
        lambda t: jnp.asarray(t["a"]),
        lambda t: np.sum(t["a"]),
        lambda t: t["a"] + 1,
        lambda t: t["a"][0],
        lambda t: jax.jit(lambda x: x)(t["a"]),
    ],
)
def test_a_where_that_computes(tmp_path, where):
    path = tmp_path / "ckpt"
    with pytest.raises(TypeError, match="`where` .* may only pick nodes"):
        ec.tree_serialise_leaves(path, TREE, where=where)
    ec.tree_serialise_leaves(path, TREE)
    with pytest.raises(TypeError, match="`where` .* may only pick nodes"):
        ec.tree_deserialise_leaves(path, TREE, where=where)


def test_a_where_of_two_arguments(tmp_path):
    where = lambda model, state: model
    with pytest.raises(TypeError, match="of one argument, the tree: .*'state'"):
        ec.tree_serialise_leaves(tmp_path / "ckpt", TREE, where=where)


@pytest.mark.parametrize("dtype", ["nope", object(), jnp.int32, bool, "datetime64[s]"])
def test_a_dtype_that_is_none(tmp_path, dtype):
    with pytest.raises((TypeError, ValueError), match="`dtype` must be a floating"):
        ec.tree_serialise_leaves(tmp_path / "ckpt", TREE, dtype=dtype)


@pytest.mark.parametrize(
    "rule, error",
    [
        ((".*", P("x", "y")), ValueError),
        (("(", P("x")), ValueError),
        ((".*", "x"), TypeError),
        ((".*", None), TypeError),
    ],
)
def test_partition_rules_that_fit_no_mesh(rule, error):
    mesh = jax.make_mesh((4,), ("x",))
    unchecked = inspect.unwrap(ec.partition_rules)
    with pytest.raises(error) as caught:
        unchecked(mesh, [(".*w", P("x")), rule])
    assert repr(rule[0]) in str(caught.value)


def test_a_partition_rule_with_too_many_axes():
    mesh = jax.make_mesh((4,), ("x",))
    rules = ec.partition_rules(mesh, [(".*", P(None, None, "x"))])
    with pytest.raises(ValueError, match="3 axes, and the leaf `a`.*f32.3,4"):
        ec.skeleton(lambda: TREE, sharding=rules)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs JAX 0.7")
def test_arrays_that_are_not_reduced(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    one = jnp.ones((4, 4))
    with jax.set_mesh(mesh):
        array = jax.jit(
            lambda a, b: jnp.dot(a, b, out_sharding=P(unreduced={"x"})),
        )(
            jax.device_put(one, NamedSharding(mesh, P(None, "x"))),
            jax.device_put(one, NamedSharding(mesh, P("x", None))),
        )
    path = tmp_path / "ckpt"
    with pytest.raises(ValueError, match="`u` .*not reduced .*'x'.*reshard"):
        ec.tree_serialise_leaves(path, {"u": array})
    ec.tree_serialise_leaves(path, {"u": one})
    for like in (array, jax.ShapeDtypeStruct((4, 4), "f4", sharding=array.sharding)):
        with pytest.raises(TypeError, match="`u`.* not reduced .*'x'"):
            ec.tree_deserialise_leaves(path, {"u": like})


def test_copies_of_what_was_opened_are_itself(tmp_path):
    file = io.BytesIO()
    ec.tree_serialise_leaves(file, TREE)
    file.seek(0)
    ckpt = ec.open(file)
    for copied in (copy.copy(ckpt), copy.deepcopy(ckpt), copy.deepcopy([ckpt])[0]):
        assert copied is ckpt
    copied = copy.deepcopy({"ckpt": ckpt})["ckpt"]
    del ckpt
    assert copied["b"].read() == 1


def test_an_eqx_file_does_not_pickle(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", TREE)
    ckpt = ec.open(tmp_path / "model.eqx", like=TREE)
    assert copy.deepcopy(ckpt)["b"].read() == 1
    for opened in (ckpt, ckpt["a"]):
        with pytest.raises(TypeError, match="model.eqx` cannot be pickled.*`like`"):
            pickle.dumps(opened)


def test_an_error_with_very_long_names_is_bounded(tmp_path):
    def named(letter):
        return {letter * 900 + str(i): {"x": np.ones(i + 1)} for i in range(60)}

    path = tmp_path / "ckpt"
    ec.tree_serialise_leaves(path, named("a"))
    with pytest.raises(RuntimeError) as caught:
        ec.tree_deserialise_leaves(path, named("b"))
    assert len(str(caught.value)) < 2**14 + 2000
    assert "60 missing, 60 unexpected" in str(caught.value)
    assert str(caught.value).endswith(" more")


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_chunk_that_is_more_than_memory_is_not_damaged(tmp_path, layout, monkeypatch):
    tree = {"x": np.arange(2.0**16), "y": 1}
    ec.tree_serialise_leaves(tmp_path / "a", tree, layout=layout, compression="lz4")
    inside.replace(monkeypatch, "largest chunk", lambda: 2**18)
    calls = ec.tree_deserialise_leaves, lambda path, _: ec.verify(path)
    said = "leaf `x` has 524288 .* is 262144, "
    for call in calls:
        with pytest.raises(MemoryError, match=said):
            call(tmp_path / "a", tree)
    assert ec.open(tmp_path / "a")["y"].read() == 1
