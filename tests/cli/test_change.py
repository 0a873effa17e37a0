"""`edit`, `average`, `merge`, `convert` and `export`."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees

import eqx_ckpt as ec


def _values(path):
    ckpt = ec.open(path)
    return {name: np.asarray(ckpt[name]) for name in ckpt if name != "key"}


def _inodes(path):
    return {f.stat().st_ino for f in (path / "d").rglob("*") if f.is_file()}


def test_edit(ckpt, tmp_path, run):
    target = tmp_path / "b"
    options = ["--keep", "model", "--drop", "*.3.*", "--rename", "^model[.]=net."]
    options += ["--cast", "bfloat16", "--metadata", "note=best", "--metadata", "n=[1]"]
    code, out, err = run("edit", ckpt, target, *options)
    assert (code, err) == (0, "") and "6 leaves" in out
    made = ec.open(target)
    expected = [f"net.layers.{i}.{x}" for i in range(3) for x in ("weight", "bias")]
    assert list(made) == expected
    assert made["net.layers.0.bias"].dtype == jnp.bfloat16
    assert made.metadata == {"width": 64, "data": {"a": 1}, "note": "best", "n": [1]}
    # Static fields have moved with their Modules.
    assert made.tree.net.layers[1].in_features == 64
    assert made.tree.net.width_size == 64 and ec.verify(target) == []
    like = {"net": eqx.nn.MLP(2, 2, 64, 3, key=jax.random.key(0))}
    loaded = ec.tree_deserialise_leaves(
        target, like, where=lambda t: t["net"].layers[:3], cast=True
    )
    assert loaded["net"].layers[0].weight.shape == (64, 2)


def test_edit_in_place_writes_no_array(ckpt, run):
    before, inodes = _values(ckpt), _inodes(ckpt)
    assert run("edit", ckpt, ckpt, "--rename", "^model=net")[0] == 0
    after = _values(ckpt)
    assert list(after) == [name.replace("model", "net") for name in before]
    assert all(np.array_equal(a, b) for a, b in zip(before.values(), after.values()))
    assert len(inodes & _inodes(ckpt)) >= 1 and ec.verify(ckpt) == []


def test_what_is_edited_keeps_its_base(ckpt, tmp_path, run):
    adapter = tmp_path / "adapter"
    ec.tree_serialise_leaves(adapter, {"a": jnp.ones((4, 1))}, base=ckpt)
    before = ec.open(adapter).base
    for target in (adapter, tmp_path / "other"):
        assert run("edit", adapter, target, "--metadata", "note=x")[0] == 0
        assert ec.open(target).base == before


def test_a_step_that_is_edited_keeps_own_states(tmp_path, run):
    like = {"w": jnp.ones(3)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, like, own={"at": 5, "file": "a"})
    assert run("edit", tmp_path / "1", tmp_path / "1", "--metadata", "note=x")[0] == 0
    again = ec.CheckpointManager(tmp_path)
    assert again.restore(like, own={"at": 0, "file": ""})[1] == {"at": 5, "file": "a"}
    assert ec.verify(tmp_path) == []


def test_adapters_that_are_merged_keep_their_base(ckpt, tmp_path, run):
    for name, base in [("a", ckpt), ("b", ckpt), ("c", None)]:
        ec.tree_serialise_leaves(tmp_path / name, {"a": jnp.ones((4, 1))}, base=base)
    base, to = ec.open(tmp_path / "a").base, tmp_path / "to"
    for others, found in ((["b"], base), (["b", "c"], None)):
        paths = [tmp_path / "a", *map(tmp_path.joinpath, others)]
        for command in (["average"], ["merge", "--method", "average"]):
            assert run(*command, *paths, "--to", to, "--overwrite")[0] == 0
            assert ec.open(to).base == found


def test_metadata_that_are_alike(tmp_path, run):
    """Numbers that Python takes for equal are not, nor is null what is not there."""
    some = [{"a": 1, "b": None, "c": [0]}, {"a": True, "c": [0]}]
    for i, metadata in enumerate(some):
        ec.tree_serialise_leaves(
            tmp_path / f"{i}", {"w": jnp.ones(2)}, metadata=metadata
        )
    assert (
        run("average", tmp_path / "0", tmp_path / "1", "--to", tmp_path / "c")[0] == 0
    )
    assert ec.open(tmp_path / "c").metadata == {"c": [0]}


def test_an_export_keeps_texts(tmp_path, run):
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ec.export_safetensors(source, {"w": jnp.ones(2)}, metadata={"format": "pt"})
    assert run("export", source, target, "--metadata", "by=me")[0] == 0
    assert ec.open(target).metadata == {"format": "pt", "by": "me"}


@pytest.mark.parametrize("metadata", [None, {"a": "b"}, {"lr": 0.5}])
def test_an_export_says_which_metadata_it_lacks(tmp_path, run, metadata):
    source, target = tmp_path / "a", tmp_path / "b.safetensors"
    ec.tree_serialise_leaves(source, {"w": jnp.ones(2)}, metadata=metadata)
    code, out, err = run("export", source, target)
    assert (code, err) == (0, "")
    is_lost = ec.open(target).metadata != metadata
    assert is_lost == (metadata == {"lr": 0.5})
    assert ("without the metadata of the source" in out) == is_lost
    code, out, _ = run("export", source, target, "--overwrite", "--json")
    assert ("lost" in json.loads(out)) == is_lost


class _Norms(eqx.Module):
    a: eqx.nn.BatchNorm
    b: eqx.nn.BatchNorm

    def __init__(self):
        self.a = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.b = eqx.nn.BatchNorm(2, "batch", mode="ema")


def test_statistics_go_with_layers_that_are_exchanged(tmp_path, run):
    model, state = eqx.nn.make_with_state(_Norms)()
    weights = jnp.zeros(2), jnp.ones(2)
    model = eqx.tree_at(lambda m: (m.a.weight, m.b.weight), model, weights)
    for norm in (model.a, model.b):
        old = state.get(norm.ema_state_index)
        state = state.set(norm.ema_state_index, (norm.weight.astype("float32"), old[1]))
    ec.tree_serialise_leaves(tmp_path / "c", {"model": model, "state": state})
    like = dict(zip(("model", "state"), eqx.nn.make_with_state(_Norms)()))
    rules = "^model.a.=model.c.", "^model.b.=model.a.", "^model.c.=model.b."
    options = [x for rule in rules for x in ("--rename", rule)]
    assert run("edit", tmp_path / "c", tmp_path / "c", *options)[0] == 0
    out = ec.tree_deserialise_leaves(tmp_path / "c", like)
    for norm, weight in ((out["model"].a, weights[1]), (out["model"].b, weights[0])):
        mean, _ = out["state"].get(norm.ema_state_index)
        assert np.array_equal(norm.weight, weight) and np.array_equal(mean, weight)


class _Block(eqx.Module):
    weight: jax.Array
    norm: eqx.nn.BatchNorm

    def __init__(self, weight):
        self.weight = jnp.full(2, weight)
        self.norm = eqx.nn.BatchNorm(2, "batch", channelwise_affine=False, mode="ema")


@pytest.mark.parametrize("times", [1, 2, 3])
def test_statistics_of_layers_without_leaves_that_are_exchanged(tmp_path, run, times):
    make = eqx.nn.make_with_state(lambda: {"a": _Block(0.0), "b": _Block(1.0)})
    model, state = make()
    for block in model.values():
        index = block.norm.ema_state_index
        mean = block.weight.astype("float32")
        state = state.set(index, (mean, mean))
    tree = {"model": model, "state": state}
    ec.tree_serialise_leaves(tmp_path / "c", tree, eqx.is_array)
    rules = "^model.a.=model.c.", "^model.b.=model.a.", "^model.c.=model.b."
    options = [x for rule in rules for x in ("--rename", rule)]
    for _ in range(times):
        assert run("edit", tmp_path / "c", tmp_path / "c", *options)[0] == 0
    like = dict(zip(("model", "state"), make()))
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, eqx.is_array)
    assert out["model"]["a"].weight[0] == times % 2
    for block in out["model"].values():
        mean, _ = out["state"].get(block.norm.ema_state_index)
        assert np.array_equal(mean, block.weight)


def test_a_node_and_its_children_get_other_names(tmp_path, run):
    """Whichever of its leaves still end as they did: the node is in their place."""
    model = eqx.nn.MultiheadAttention(4, 8, key=jax.random.key(0))
    ec.tree_serialise_leaves(tmp_path / "a", {"model": model})
    rules = ["--rename", "^model=net", "--rename", "query_proj=q"]
    assert run("edit", tmp_path / "a", tmp_path / "b", *rules)[0] == 0
    assert ec.open(tmp_path / "b").tree.net.num_heads == 4
    # All are one node deeper. Where the Linear was, there is another node.
    deeper = "^model[.](query_proj)[.]=model.\\1.base."
    assert run("edit", tmp_path / "a", tmp_path / "c", "--rename", deeper)[0] == 0
    node = ec.open(tmp_path / "c").tree.model.query_proj
    assert node.base.in_features == 8 and not hasattr(node, "in_features")


def test_a_leaf_gets_the_name_of_a_node(tmp_path, run):
    one = tmp_path / "one"
    ec.tree_serialise_leaves(one, jnp.ones(2))
    for rule, name in (("^%root$=a.b", "a.b"), ("$=.c.d", "a.b.c.d")):
        assert run("edit", one, one, "--rename", rule)[0] == 0
        assert list(ec.open(one)) == [name]


def test_edit_the_step_of_a_run(steps, run, asked):
    assert run("edit", steps / "20", steps / "20", "--metadata", "note=x")[0] == 0
    assert ec.open(steps / "20" / "default").metadata["note"] == "x"
    assert asked("steps", steps, "--best", "loss")["best"] == 40


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--keep", "modle"], "is that of no leaf"),
        (["--drop", "*"], "No leaf is left"),
        (["--rename", "x"], "has no `=`"),
        (["--rename", "zzz=y"], "changes no name"),
        (["--rename", "[=y"], "is no regex"),
        (["--rename", "layers[.][01]=a"], "would both be"),
        (["--rename", "^step$=model.layers"], "a node as well"),
        (["--rename", "^step$=a b"], "is no name of a leaf"),
        (["--cast", "float99"], "float99"),
    ],
)
def test_edits_that_mean_nothing(ckpt, tmp_path, run, options, text):
    code, out, err = run("edit", ckpt, tmp_path / "b", *options)
    assert (code, out) == (2, "") and text in err, err
    assert not (tmp_path / "b").exists()


def test_nothing_is_replaced_unasked(ckpt, tmp_path, run):
    target, file = tmp_path / "b", tmp_path / "b.safetensors"
    calls = [
        ("edit", ckpt, target),
        ("average", ckpt, ckpt, "--to", target),
        ("convert", ckpt, target),
        ("export", ckpt, file, "--node", "model"),
    ]
    for call in calls:
        ec.tree_serialise_leaves(target, {"w": jnp.ones(2)})
        ec.export_safetensors(file, {"w": jnp.ones(2)})
        code, out, err = run(*call)
        assert (code, out) == (2, "") and "Pass `--overwrite`" in err, call
        assert list(ec.open(target)) == list(ec.open(file)) == ["w"]
        assert run(*call, "--overwrite")[0] == 0


def test_average(steps, tmp_path, run):
    for step in (10, 20):
        tree = {"w": jnp.full(3, step, jnp.float32), "n": 1}
        ec.tree_serialise_leaves(
            tmp_path / f"{step}", {"model": tree}, metadata={"a": 1, "step": step}
        )
    two = [tmp_path / "10", tmp_path / "20"]
    assert run("average", *two, "--to", tmp_path / "mean")[0] == 0
    mean = ec.open(tmp_path / "mean")
    assert mean["model.w"].read().tolist() == [15, 15, 15]
    assert mean.metadata == {"a": 1} and mean["model.n"].read() == 1
    options = ["--weights", "3,1", "--node", "model", "--metadata", "b=2"]
    assert run("average", *two, "--to", tmp_path / "m", *options)[0] == 0
    mean = ec.open(tmp_path / "m")
    assert mean["w"].read().tolist() == [12.5] * 3 and mean.metadata == {"a": 1, "b": 2}
    code, _, err = run("average", *two, "--to", tmp_path / "x", "--weights", "a")
    assert code == 2 and "no numbers" in err
    # `w` has another shape at each step.
    last = ["--to", tmp_path / "last", "--last", 2]
    assert run("average", steps, *last)[0] == 2
    assert run("average", steps, *last, "--node", "frozen")[0] == 0
    assert ec.open(tmp_path / "last")["%root"].read().tolist() == [1] * 9
    code, _, err = run("average", steps, "--to", tmp_path / "x", "--last", 9)
    assert code == 2 and "only 4 complete steps" in err
    assert run("average", *two, *last)[0] == 2


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--method", "slerp", "--t", "0"], 1),
        (["--method", "ema", "--decay", "0.75"], 1.5),
        (["--method", "task_arithmetic", "--base", 0], 4),
        (["--method", "task_arithmetic", "--base", 0, "--weights", "1,-1"], -2),
        (["--method", "ties", "--base", 0, "--density", "1"], 2),
        (["--method", "dare", "--base", 0, "--density", "1", "--seed", "3"], 4),
        (["--method", "ties", "--base", 0, "--normalize", "none", "--lambda", 0.5], 2),
        (["--method", "model_stock", "--base", 0], 2),
        (["--method", "average", "--weights", '[{"w": 3, "*": 1}, [1, 1]]'], 1.5),
        (["--method", "own:furthest", "--base", 0], 3),
        (["--method", "own:shifted", "--t", "5"], 6),
    ],
)
def test_merge(tmp_path, run, monkeypatch, options, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    paths = []
    for number in (0, 1, 3):
        tree = {"w": jnp.full(4, number, jnp.float32)}
        ec.tree_serialise_leaves(tmp_path / str(number), tree)
        paths.append(tmp_path / str(number))
    options = [paths[0] if x == 0 else x for x in options]
    code, _, err = run("merge", *paths[1:], "--to", tmp_path / "m", *options)
    assert code == 0, err
    assert ec.open(tmp_path / "m")["w"].read().tolist() == pytest.approx([value] * 4)


OWN = """
import numpy as np
from eqx_ckpt.merging import Method
furthest = Method("furthest", lambda trees, base, leaf: np.max(trees, 0), base=True)
def shifted(t, other=0):
    add = lambda trees, base, leaf: trees[0] + leaf.options["t"]
    return Method("shifted", add, options={"t": t})
def nothing():
    return 3
"""


def test_merge_says_what_and_where(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own2.py").write_text(OWN)
    model = {"w": jnp.ones(4)}
    for name, tree in {
        "a": {"model": model, "step": 1},
        "b": {"model": model, "step": 2},
        "base": model,
        "other": {"v": jnp.ones(4)},
    }.items():
        ec.tree_serialise_leaves(tmp_path / name, tree)
    both = ["merge", "a", "b", "--to", "m", "--method"]
    # A base that is only the model.
    assert run(*both, "ties", "--node", "model", "--base", "base")[0] == 0
    assert list(ec.open("m")) == ["w"]
    for options, text in {
        ("ties", "--node", "model", "--base", "other"): f"of `{tmp_path / 'other'}`",
        ("average", "--node", "modle"): f"at `{tmp_path / 'a'}` has no node or leaf",
        ("average",): f"tree 1 is of `{tmp_path / 'b'}`",
        ("slerp", "--density", "1"): "`--density` is no option of the method `slerp`",
        ("soup",): "`--method soup` is none of average, ",
        ("own2:none",): "has no attribute 'none'",
        ("none:own",): "No module named 'none'",
        ("own2:nothing",): "no `ec.merging.Method`",
        ("slerp", "--t", "a"): "no numbers",
        ("slerp", "--t", "{a"): "no JSON",
    }.items():
        code, _, err = run(*both, *options, "--overwrite")
        assert code == 2 and text in err, err


def test_convert_and_export(ckpt, tmp_path, run):
    assert run("convert", ckpt, tmp_path / "a.zip")[0] == 0
    assert run("diff", ckpt, tmp_path / "a.zip")[0] == 0
    assert run("convert", ckpt)[0] == 2
    assert run("convert", ckpt, "--orbax", "--layout", "zarr")[0] == 2
    assert run("convert", ckpt, "--orbax")[0] == 0
    assert (ckpt / "_METADATA").exists()
    options = ["--layout", "zarr", "--compression", "zstd", "--chunks", 4096]
    assert run("convert", tmp_path / "a.zip", tmp_path / "z", *options)[0] == 0
    assert ec.open(tmp_path / "z").layout == "zarr"
    file = tmp_path / "a.safetensors"
    code, _, err = run("export", ckpt, file)
    assert code == 2 and "`--skip key" in err
    skip = ["--skip", "key", "--skip", "lr", "--skip", "step"]
    options = [*skip, "--rename", "^model[.]=net.", "--metadata", "format=pt"]
    assert run("export", ckpt, file, *options)[0] == 0
    made = ec.open(file)
    assert all(name.startswith("net.") for name in made)
    assert made.metadata == {"format": "pt"}
    assert run("convert", file, tmp_path / "again.safetensors")[0] == 0
    assert [*ec.open(tmp_path / "again.safetensors")] == [*made]
    assert run("convert", file, tmp_path / "back")[0] == 0
    back, source = ec.open(tmp_path / "back"), ec.open(ckpt)
    name = "model.layers.1.weight"
    assert np.array_equal(back[name.replace("model", "net")], source[name])


def test_modules_without_leaves_and_states_stay(tmp_path, run):
    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        drop: eqx.nn.Lambda
        pool: eqx.nn.AvgPool1d

    def make():
        norm = eqx.nn.BatchNorm(3, axis_name="b", mode="batch")
        return Net(norm, eqx.nn.Lambda(jax.nn.relu), eqx.nn.AvgPool1d(2))

    model, state = eqx.nn.make_with_state(make)()
    tree = {"model": model, "state": state, "step": 1}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    assert run("edit", tmp_path / "a", tmp_path / "b", "--drop", "step")[0] == 0
    del tree["step"]
    loaded = ec.tree_deserialise_leaves(tmp_path / "b", tree)
    assert eqx.tree_equal(loaded, tree)
    rename = ["--rename", "^model=net"]
    assert run("edit", tmp_path / "a", tmp_path / "c", *rename)[0] == 0
    made = ec.open(tmp_path / "c")
    assert made.tree.net.norm.mode == "batch" and made.tree.net.pool.kernel_size
    like = {"net": model, "state": state, "step": 1}
    assert eqx.tree_equal(ec.tree_deserialise_leaves(tmp_path / "c", like), like)


def test_children_without_keys_stay_the_attributes_that_they_are(tmp_path, run):
    old, new = (
        trees.without_keys("mean", "var", "std"),
        trees.without_keys("std", "mean", "var"),
    )
    tree = {"model": [old(mean=1.0, var=2.0, std=3.0)], "step": 1}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    options = ["--rename", "^model=net", "--drop", "step", "--drop", "model.0.1"]
    assert run("edit", tmp_path / "a", tmp_path / "b", *options)[0] == 0
    like = {"net": [new(mean=0.0, var=0.0, std=0.0)]}
    loaded = ec.tree_deserialise_leaves(tmp_path / "b", like, missing="keep")
    assert vars(loaded["net"][0]) == {"mean": 1.0, "var": 0.0, "std": 3.0}
