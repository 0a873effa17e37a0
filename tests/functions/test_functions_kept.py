"""Where stored functions lie, and what edits and conversions make of them."""

import functools as ft
import pathlib
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import servers
from support.command import main

import eqx_ckpt as ec


pytest.importorskip("flatbuffers")

X = jnp.arange(6.0).reshape(2, 3)
# Exported once for all tests.
FORWARD = ec.function(
    lambda tree, x: jax.vmap(tree["model"])(x),
    jax.ShapeDtypeStruct("b, 3", jnp.float32),
    platforms=["cpu"],
)
FUNCTIONS = {"forward": FORWARD}


def _tree(value=1.0):
    model = eqx.nn.Linear(3, 2, key=jr.key(0))
    model = jax.tree.map(lambda w: value * w, model)
    return {"model": model, "opt": jnp.zeros(20_000), "step": 3}


def _check(path, value=1.0, tree=None):
    function = ec.open(path).functions["forward"]
    expected = jax.vmap((tree or _tree(value))["model"])(X)
    np.testing.assert_allclose(function(X), expected, rtol=1e-6)
    return function


@pytest.fixture
def ckpt(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", _tree(), functions=FUNCTIONS)
    return tmp_path / "c"


def test_every_place(tmp_path, ckpt):
    for path in (tmp_path / "c.zip", "memory://functions", tmp_path / "async"):
        handle = ec.async_tree_serialise_leaves(path, _tree(), functions=FUNCTIONS)
        handle.result()
        _check(path)
        assert ec.verify(path) == []
    ec.tree_serialise_leaves(
        tmp_path / "z", _tree(), layout="zarr", functions=FUNCTIONS
    )
    _check(tmp_path / "z")
    data = ec.to_bytes(_tree(), functions=FUNCTIONS)
    (tmp_path / "b.zip").write_bytes(data)
    _check(tmp_path / "b.zip")
    # Another save to the path takes them away.
    ec.tree_serialise_leaves(ckpt, _tree())
    assert not ec.open(ckpt).functions and not list(ckpt.glob("d/*/function-*"))


@pytest.mark.long
def test_http(tmp_path, ckpt):
    ec.convert(ckpt, tmp_path / "c.zip")
    with servers.static(tmp_path) as port:
        for name in ("c", "c.zip"):
            _check(f"http://127.0.0.1:{port}/{name}")


@pytest.mark.long
def test_object_stores(s3):
    path = "s3://bucket/functions"
    ec.tree_serialise_leaves(path, _tree(), functions=FUNCTIONS)
    _check(path)
    assert ec.verify(path) == []
    ec.tree_serialise_leaves(path + ".zip", _tree(), functions=FUNCTIONS)
    _check(path + ".zip")


def test_a_file_that_has_not_changed_is_shared(tmp_path, ckpt):
    ec.tree_serialise_leaves(
        tmp_path / "next", _tree(2.0), functions=FUNCTIONS, reuse=ckpt
    )
    (old,) = ckpt.glob("d/*/function-0")
    (new,) = (tmp_path / "next").glob("d/*/function-0")
    assert new.samefile(old)
    _check(tmp_path / "next", 2.0)
    shutil.rmtree(ckpt)
    _check(tmp_path / "next", 2.0)


def test_verify_and_leftovers(tmp_path, ckpt):
    (file,) = ckpt.glob("d/*/function-0")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"x")
    (problem,) = ec.verify(ckpt)
    assert problem.file == str(file.relative_to(ckpt)) and "damaged" in str(problem)
    file.unlink()
    (problem,) = ec.verify(ckpt)
    assert "missing" in str(problem)
    # What a killed save leaves.
    left = tmp_path / "left" / "d" / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "function-0").write_bytes(good)
    assert ec.clean(tmp_path) == [str(left)]


@pytest.mark.long
def test_a_run(tmp_path):
    with ec.CheckpointManager(tmp_path, keep=2) as manager:
        for step in range(3):
            tree = {**_tree(step + 1.0), "step": step}
            manager.save(step, tree, functions=FUNCTIONS)
    assert len(FORWARD.known) <= 4
    for step in (1, 2):
        _check(tmp_path / str(step) / "default", step + 1.0)


def test_a_wrong_function_of_a_state_that_is_not_due(tmp_path):
    """The state before it is the one saved at the end."""
    with ec.CheckpointManager(tmp_path, every=10) as manager:
        manager.save(10, _tree())
        assert not manager.save(21, _tree(2.0), functions=FUNCTIONS)
        with pytest.raises(TypeError, match="must be made by `ec.function`"):
            manager.save(23, _tree(), functions={"f": 3})
    assert manager.steps() == [10, 21]
    _check(tmp_path / "21" / "default", 2.0)


def test_edits_keep_them(tmp_path, ckpt, capsys):
    tree = ec.open(ckpt).tree
    # Pruned and renamed: the names that the function has are those of old.
    ec.tree_serialise_leaves(tmp_path / "small", {"net": tree.model}, reuse=ckpt)
    function = _check(tmp_path / "small")
    assert function.leaves == ("net.weight", "net.bias")
    assert function.names == ("model.weight", "model.bias") == tuple(function.read())
    # In place, of one that was renamed before.
    small = ec.open(tmp_path / "small")
    ec.tree_serialise_leaves(tmp_path / "small", {"n": small.tree.net})
    assert _check(tmp_path / "small").leaves == ("n.weight", "n.bias")
    # Computed of the leaves.
    half = ec.lazy(lambda w: w / 2, elementwise=True)
    model = jax.tree.map(half, tree.model)
    ec.tree_serialise_leaves(tmp_path / "half", {"model": model, "step": tree.step})
    _check(tmp_path / "half", 0.5)
    ec.tree_serialise_leaves(tmp_path / "top", model)
    _check(tmp_path / "top", 0.5)
    # Converted.
    ec.convert(ckpt, tmp_path / "c.zip")
    ec.convert(tmp_path / "c.zip", tmp_path / "z", layout="zarr")
    _check(tmp_path / "z")
    # By the command line.
    out = str(tmp_path / "cli")
    assert main(["edit", str(ckpt), out, "--keep", "model"]) == 0
    _check(out)
    capsys.readouterr()
    assert main(["info", out]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "forward: (float32[b,3],) -> float32[b,2], on cpu" in text


def test_what_cannot_be_kept(tmp_path, ckpt, capsys):
    opened = ec.open(ckpt)
    tree, functions = opened.tree, opened.functions
    target = tmp_path / "out"
    for bad, message in {
        "pruned": "needs the leaf `model.weight`, which is not saved",
        "cast": r"`model.weight` as f32\[2,3\], which is saved as bf16\[2,3\]",
    }.items():
        kept = {"opt": tree.opt} if bad == "pruned" else tree
        dtype = jnp.bfloat16 if bad == "cast" else None
        with pytest.raises(ValueError, match=message + "(?s:.)*Nothing was saved"):
            ec.tree_serialise_leaves(target, kept, dtype=dtype)
        ec.tree_serialise_leaves(target, kept, dtype=dtype, functions="drop")
        assert not ec.open(target).functions
    file, dropped = tmp_path / "c.safetensors", {"functions": "drop", "skip": ["step"]}
    doubled = jax.tree.map(ec.lazy(lambda x: 2 * x), tree.model)
    for write in (
        ft.partial(ec.convert, ckpt, file),
        ft.partial(ec.convert, ckpt, file, functions=functions),
        ft.partial(ec.export_safetensors, file, opened),
        ft.partial(ec.export_safetensors, file, tree),
        ft.partial(ec.export_safetensors, file, tree, shard_bytes=8),
        ft.partial(ec.export_safetensors, file, {"step": 3, "m": doubled}),
    ):
        with pytest.raises(ValueError, match="`.safetensors` file holds no"):
            write()
    assert not file.exists()
    ec.convert(ckpt, file, **dropped)
    data = file.read_bytes()
    ec.export_safetensors(file, tree, **dropped)
    assert file.read_bytes() == data
    export = ["export", str(ckpt), str(file), "--node=model", "--overwrite"]
    assert main(export) == 2
    assert "holds no functions" in capsys.readouterr().err
    assert main([*export, "--drop-functions"]) == 0
    assert main(["edit", str(ckpt), str(tmp_path / "o"), "--cast", "bfloat16"]) == 2
    assert "cannot be kept" in capsys.readouterr().err
    drop = ["--cast", "bfloat16", "--drop-functions"]
    assert main(["edit", str(ckpt), str(tmp_path / "o"), *drop]) == 0
    # Arrays bring none along, but may be given some.
    model = ec.materialise(tree.model)
    ec.tree_serialise_leaves(target, {"model": model})
    assert not ec.open(target).functions
    ec.tree_serialise_leaves(target, {"model": model}, functions={**functions})
    _check(target)
    with pytest.raises(TypeError, match="must be a dict.*or \"drop\", not 'no'"):
        ec.tree_serialise_leaves(target, model, functions="no")


def test_a_part_of_a_function_that_has_changed(tmp_path):
    scaled = ec.function(lambda t, x: t["scale"] * t["w"] * x, jnp.ones(3))
    tree = {"w": jnp.ones(3), "scale": 2.0}
    ec.tree_serialise_leaves(tmp_path / "c", tree, functions={"f": scaled})
    ckpt = ec.open(tmp_path / "c")
    target: pathlib.Path = tmp_path / "d"
    ec.tree_serialise_leaves(target, {"w": ckpt["w"], "scale": 2.0})
    assert ec.open(target).functions["f"](jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="needs the leaf `scale` with the value"):
        ec.tree_serialise_leaves(target, {"w": ckpt["w"], "scale": 3.0})
    # Nor may it, if it is computed of what it was, in a node that has moved.
    both = {"w": jnp.ones(3), "scale": np.full(3, 2, np.float32)}
    ec.tree_serialise_leaves(tmp_path / "m", both, functions={"f": scaled})
    node = ec.open(tmp_path / "m").tree
    half = ec.lazy(lambda x: x / 2, elementwise=True)
    new = {"w": half(node["w"]), "scale": half(node["scale"])}
    for moved in (new, {"new": new}, {"new": {**new, "w": node["w"]}}):
        with pytest.raises(ValueError, match="`scale` with the value"):
            ec.tree_serialise_leaves(target, moved)
    ec.tree_serialise_leaves(target, {"new": {**new, "scale": node["scale"]}})
    assert ec.open(target).functions["f"](jnp.ones(3)).tolist() == [1, 1, 1]
    # Another of that name is another function.
    ec.tree_serialise_leaves(tmp_path / "e", tree, functions={"f": ckpt.functions["f"]})
    twice = ec.function(lambda t, x: 2 * t["w"] * x, jnp.ones(3), platforms=["cpu"])
    ec.tree_serialise_leaves(tmp_path / "e", tree, functions={"f": twice})
    both = [ckpt["w"], ec.open(tmp_path / "e")["w"]]
    with pytest.raises(ValueError, match="checkpoints with different functions `f`"):
        ec.tree_serialise_leaves(target, both)


def _f(*names):
    """A function of some leaves at the top of a tree."""
    fn = lambda t, x: sum((i + 1) * t[n] * x for i, n in enumerate(names))
    return {"f": ec.function(fn, jnp.ones(3), platforms=["cpu"])}


def test_two_leaves_that_were_one(tmp_path):
    e = jnp.arange(3.0)
    path = tmp_path / "c"
    tied = {"embed": e, "head": e}
    ec.tree_serialise_leaves(path, tied, functions=_f("embed", "head"))
    t = ec.open(path).tree
    # Renamed, and tied as they were.
    ec.tree_serialise_leaves(tmp_path / "r", {"a": t.embed, "b": t.head})
    assert ec.open(tmp_path / "r").functions["f"].leaves == ("a", "b")
    with pytest.raises(ValueError, match="`head` besides `a`.*save it under two names"):
        ec.tree_serialise_leaves(tmp_path / "s", {"a": t.embed})
    with pytest.raises(
        ValueError, match="`embed`, which is another one now.* as `old`"
    ):
        ec.tree_serialise_leaves(path, {"embed": e, "head": e, "old": t.embed})
    assert ec.open(path).functions["f"](jnp.ones(3)).tolist() == [0, 3, 6]
    # No longer one, in place.
    ec.tree_serialise_leaves(path, {"embed": t.embed, "head": jnp.ones(3)})
    assert ec.open(path).functions["f"](jnp.ones(3)).tolist() == [2, 3, 4]
    # And one again.
    t = ec.open(path).tree
    ec.tree_serialise_leaves(path, {"embed": t.embed, "head": t.embed})
    assert ec.open(path).functions["f"](jnp.ones(3)).tolist() == [0, 3, 6]


def test_which_leaf_is_meant(tmp_path):
    path, out = tmp_path / "c", tmp_path / "out"
    tree = {"body": {"w": jnp.arange(3.0)}, "head": {"w": jnp.ones(3)}, "scale": 2.0}
    fn = lambda t, x: t["body"]["w"] * x + t["head"]["w"] * t["scale"]
    functions = {"f": ec.function(fn, jnp.ones(3), platforms=["cpu"])}
    ec.tree_serialise_leaves(path, tree, functions=functions)
    t = ec.open(path).tree
    half = ec.lazy(lambda w: w / 2, elementwise=True)
    both = ec.lazy(lambda v, w: v + w)(t.head.w, t.body.w)
    zeros = jnp.zeros(3)
    rest = {"body": t.body, "scale": 2.0}
    head = {**rest, "head": t.head}
    for bad, message in [
        ({**rest, "head": {"w": zeros}, "old": t.head}, "another one now.*`old.w`"),
        ({**rest, "head": t.body, "body": t.head}, "another one now, and what it was"),
        ({**rest, "norms": half(t.head.w)}, "`head.w`, which is not saved"),
        ({**rest, "norms": {"w": both}}, "`head.w`, which is not saved"),
        ({**rest, "a": {"w": half(t.head.w)}, "b": {"w": half(t.head.w)}}, "several"),
        (
            {"m": {**rest, "head": {"w": half(t.head.w)}}, "body": t.body},
            "is elsewhere",
        ),
        ({**head, "scale": 3.0, "old_scale": t.scale}, "`scale` with the value"),
        ({**head, "scale": np.float64(2.0)}, "`scale` with the value"),
        ({"m": {**head, "scale": 3.0}}, "`scale` with the value.*`m.scale` has an"),
        ({"m": {**head, "scale": 3.0}, "old": t.scale}, "`scale` with the value"),
    ]:
        with pytest.raises(ValueError, match=f"cannot be kept: .*{message}"):
            ec.tree_serialise_leaves(out, bad)
        assert not out.exists()
    for good, expected in [
        (head, [2, 3, 4]),
        ({"m": head}, [2, 3, 4]),
        ({"m": {"head": t.head, "body": t.body, "scale": t.scale}}, [2, 3, 4]),
        ({**rest, "head": {"w": both}}, [2, 5, 8]),
        ({**rest, "head": {"w": zeros}}, [0, 1, 2]),
        ({**rest, "top": t.head, "scale": t.scale}, [2, 3, 4]),
        ({"m": {"body": {"w": half(t.body.w)}, "head": t.head}}, [2, 2.5, 3]),
    ]:
        ec.tree_serialise_leaves(out, good)
        assert ec.open(out).functions["f"](jnp.ones(3)).tolist() == expected
        assert ec.verify(out) == []


def test_checkpoints_with_one_function(tmp_path):
    """It is that of the one whose leaves it uses."""
    functions = _f("w")
    for name, value in (("a", 1.0), ("b", 2.0)):
        tree = {"w": jnp.full(3, value), "opt": jnp.zeros(3)}
        ec.tree_serialise_leaves(tmp_path / name, tree, functions=functions)
    a, b = (ec.open(tmp_path / name).tree for name in "ab")
    out = tmp_path / "out"
    for tree in ({"opt": a.opt, "net": b.w}, {"net": b.w, "opt": a.opt}):
        ec.tree_serialise_leaves(out, tree)
        assert ec.open(out).functions["f"](jnp.ones(3)).tolist() == [2, 2, 2]
    mean = ec.merge([a, b], ec.merging.average())
    ec.tree_serialise_leaves(out, mean)
    assert ec.open(out).functions["f"](jnp.ones(3)).tolist() == [1.5, 1.5, 1.5]
    with pytest.raises(ValueError, match="or with one of different leaves"):
        ec.tree_serialise_leaves(out, {"x": a.w, "y": b.w})


@pytest.mark.parametrize("name", ["b", "descriptor"])
def test_a_node_that_moves_to_the_top(tmp_path, name):
    """Also if a child has the name of a file of checkpoints there."""
    for computed in ("w", name):
        _move_to_the_top(tmp_path / computed, name, computed)


def _move_to_the_top(tmp_path, name, computed):
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    f = ec.function(lambda tree, x: sum(tree["m"].values()) * x, x, platforms=["cpu"])
    tree = {"m": {"w": jnp.ones(3), name: jnp.full(3, 2.0)}}
    ec.tree_serialise_leaves(tmp_path / "a", tree, functions={"f": f})
    leaves = {x: ec.open(tmp_path / "a").tree["m"][x] for x in tree["m"]}
    leaves[computed] = ec.lazy(lambda w: w + 1, elementwise=True)(leaves[computed])
    ec.tree_serialise_leaves(tmp_path / "b", leaves)
    assert (ec.open(tmp_path / "b").functions["f"](jnp.ones(3)) == 4).all()
