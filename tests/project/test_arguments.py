"""Each argument of each public call has a row: what it cannot be is one error, which
names it, before anything is read or written."""

import inspect
import re

import jax.numpy as jnp
import pytest
from test_docstrings import public

import eqx_ckpt as ec


# Of each name of an argument: what it cannot be, of a wrong type and of a wrong value.
WRONG = {
    "axes": ["a", 1.5],
    "axis": ["a", 1.5],
    "best": ["loss", ("loss", "least")],
    "cast": ["yes", jnp.float32, 1],
    "chunks": ["4 MiB", 0, -1],
    "compression": [3, "gzip"],
    "copies": ["1", -1],
    "drop": [3],
    "durable": ["no", 0],
    "orbax": ["no", 0],
    "elementwise": ["yes"],
    "every": [2.5, 0],
    "every_seconds": ["1", -1, float("inf")],
    "filter_spec": [3, "nope", 1.5],
    "fn": [3],
    "follow_symlinks": ["yes"],
    "force": ["yes"],
    "fresh": ["head"],
    "idle": [1],
    "init": [3],
    "init_fn": [3],
    "is_leaf": [3],
    "keep": [1.5, 0],
    "keep_best": [1.5, 0],
    "keep_if": ["loss < 1"],
    "keep_every": ["5", -5],
    "keep_nearest": ["5", -5],
    "keep_seconds": ["5", -5],
    "layout": [3, "hdf5"],
    "max_bytes": [1e9, "1", True, 0, -1],
    "method": ["average"],
    "missing": [None, "drop"],
    "near_every": ["1", 0],
    "overwrite": [None],
    "platforms": [3, True, iter(["cpu"])],
    "processes": [2, "mine"],
    "progress": ["yes", 1],
    "remove": ["yes"],
    "reshard": [None, "broadcast"],
    "scalars": [None, "drop"],
    "shard_bytes": ["5GB", 0, 1.5],
    "signals": [15, [0]],
    "static": [3, 1.5, object(), dict.get, iter(["size"])],
    "unexpected": [True, "keep"],
    "values": ["all"],
    "verify": ["no", None],
    "where": ["model", 3],
}
# Of other types in some of the calls: `reuse` is a flag of a manager alone.
ONLY = {
    ("tree_serialise_leaves", "reuse"): [3, 1.5, ["x"]],
    ("async_tree_serialise_leaves", "reuse"): [3, 1.5, ["x"]],
    ("CheckpointManager", "reuse"): ["yes"],
    ("CheckpointManager.save", "metrics"): [3],
}
# Those whose errors are tested with what they are about, or that may be anything.
FREE = {
    *("a", "args", "b", "base", "ckpt", "data", "directory", "dtype"),
    *("functions", "index", "known", "kwargs", "like", "metadata", "metrics", "model"),
    *("only", "vjp_order"),
    *("near", "own", "pairs", "path", "pytree", "rename", "replace", "reuse", "root"),
    *("run", "self", "sharding", "skip", "source", "state_dict", "step", "target"),
    *("tree", "trees"),
}
# Of these each argument is what they are about.
OTHERS = {
    *("counting", "inverse", "is_storable", "nest"),
    *("partition_rules", "register_leaf", "rename", "unloaded"),
}
GOOD = {"data": b"", "fn": dict, "init_fn": dict, "method": ec.merging.average()}
CALLS = {
    name: call
    for name, call in public.items()
    if inspect.isfunction(call) and "." not in name and name not in OTHERS
}
CALLS |= {
    "CheckpointManager": ec.CheckpointManager.__init__,
    "CheckpointManager.save": ec.CheckpointManager.save,
    "CheckpointManager.restore": ec.CheckpointManager.restore,
    "Checkpoint.splice": ec.Checkpoint.splice,
    "Function.read": ec.Function.read,
    "LazyArray.read": ec.LazyArray.read,
}
CALLS |= {
    name: getattr(ec.adapters, name)
    for name in ("concatenate", "split", "stack", "take", "transpose", "unstack")
}
ROWS = [
    (name, parameter, wrong)
    for name, call in CALLS.items()
    for parameter in inspect.signature(call).parameters
    for wrong in ONLY.get((name, parameter), WRONG.get(parameter, []))
]


def test_each_argument_has_a_row():
    for name, call in CALLS.items():
        assert not inspect.signature(call).parameters.keys() - WRONG.keys() - FREE, name


@pytest.mark.parametrize("name", CALLS)
def test_what_an_argument_cannot_be(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    signature = inspect.signature(CALLS[name])
    for _, parameter, wrong in (row for row in ROWS if row[0] == name):
        given = {
            x.name: None
            for x in signature.parameters.values()
            if x.default is x.empty and x.name != parameter
        }
        given |= {name: GOOD[name] for name in GOOD.keys() & given.keys()}
        match = re.escape(f"`{parameter}` must be ")
        with pytest.raises((TypeError, ValueError), match=match):
            if parameter == "axes":
                CALLS[name](wrong)
            else:
                CALLS[name](**given, **{parameter: wrong})
    if "kwargs" not in signature.parameters:
        with pytest.raises(TypeError, match="no argument `broadcast`"):
            CALLS[name](broadcast=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "options, why",
    [
        ({"keep_every": 5}, "`keep_every` is for steps that `keep` would let go"),
        ({"keep_nearest": 5}, "`keep_nearest` is for steps that `keep` would let go"),
        ({"keep_seconds": 5}, "`keep_seconds` is for steps that `keep` would let go"),
        ({"keep_if": bool}, "`keep_if` is for steps that `keep` would let go"),
        ({"keep": 1, "keep_best": 2}, "give `best` too"),
        ({"copies": 3}, "`copies` is for near disks"),
        ({"near_every": 3}, "`near_every` is for near disks"),
        ({"keep": 1, "durable": False}, "`keep` deletes older steps"),
        ({"processes": ec.Together(tag=1)}, "`processes` of a manager is"),
        ({"processes": "own"}, "`processes` of a manager is"),
        ({"max_to_keep": 3}, "no argument `max_to_keep`: here it is `keep`"),
        ({"monitor": "loss"}, "no argument `monitor`: here it is `best="),
        ({"save_interval_steps": 3}, "here it is `every`"),
        ({"should_save_fn": bool}, "here it is `every`"),
        ({"save_weights_only": True}, "here it is `where=lambda tree: tree.model`"),
        ({"save_last": True}, "the end of the `with`, which saves the last state"),
        ({"kep": 3}, "Is it `keep`"),
        ({"timeout": 3}, "ec.Together"),
    ],
)
def test_options_of_a_run_that_make_no_sense(tmp_path, options, why):
    with pytest.raises((TypeError, ValueError), match=re.escape(why)):
        ec.CheckpointManager(tmp_path / "run", **options)
    assert not [*tmp_path.iterdir()]


def test_arguments_of_loads_that_make_no_sense(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", {"w": jnp.ones(2)})
    like = {"w": jnp.zeros(2)}
    with pytest.raises(ValueError, match="`follow_symlinks` must be False"):
        ec.open(ec.open(tmp_path / "c"), follow_symlinks=True)
    with pytest.raises(ValueError, match='`missing="init"` is for `load_or_init`'):
        ec.tree_deserialise_leaves(tmp_path / "c", like, missing="init")
    with pytest.raises(
        ValueError, match='`missing="keep"` is for a load into a `like`'
    ):
        ec.load_or_init(dict, tmp_path / "c", missing="keep")
    with pytest.raises(ValueError, match="sends what one process reads"):
        ec.rebuild(tmp_path / "c", [], reshard="devices", processes="own")
    with pytest.raises(ValueError, match="`layout` is for a checkpoint"):
        ec.convert(tmp_path / "c", tmp_path / "c.safetensors", layout="zarr")
    with pytest.raises(ValueError, match="`processes` is for an export to several"):
        ec.export_safetensors("m.safetensors", like, processes=ec.Together(timeout=3))
    with pytest.raises(ValueError, match='`reuse` needs `layout="ocdbt"`'):
        ec.tree_serialise_leaves(tmp_path / "d", [1.0], layout="zarr", reuse=tmp_path)
    for wrong in ({"timeout": -1}, {"timeout": "1"}, {"tag": 1.5}):
        name = [*wrong][0]
        said = f"`{name}` must be|parameter {name}="  # Where types are checked first.
        with pytest.raises((TypeError, ValueError), match=said):
            ec.Together(**wrong)


_WRONG_VALUES = {
    "base": [3, b"base", {"w": 3}],
    "dtype": [3, "nope", {3: "a"}, "int32"],
    "functions": [3, "nope", {"f": 3}, {3: "f"}],
    "metadata": [{3}, {3: "a"}, [("a",)]],
    "metrics": [3, "nope", {"loss": "low"}],
    "near": [3, object()],
    "own": [object()],
    "rename": [3, "nope", {"n": 3}, [("a",)], [3]],
    "replace": [3, "nope", [3]],
    "sharding": [3, "nope", [3], {"n": 3}],
    "skip": [3, "nope"],
    "source": [3, 1.5, "nope", [3]],
    "step": ["nope", 1.5, True, -1],
    "vjp_order": ["1", -1, 1.5, True],
}


@pytest.mark.parametrize("parameter", _WRONG_VALUES)
def test_what_only_the_call_can_judge(tmp_path, monkeypatch, parameter):
    """An error that names the argument or what it is about, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    tree = {"w": jnp.ones(2), "n": 3}
    ec.tree_serialise_leaves("ckpt", tree)
    with ec.CheckpointManager("run") as manager:
        manager.save(1, tree)
        calls = {
            ec.tree_serialise_leaves: ["new", tree],
            ec.async_tree_serialise_leaves: ["new", tree],
            ec.to_bytes: [tree],
            ec.convert: ["ckpt", "new"],
            ec.CheckpointManager: ["new"],
            manager.restore: [tree],
            ec.tree_deserialise_leaves: ["ckpt", tree],
            ec.load_or_init: [lambda: tree, "ckpt"],
            ec.open("ckpt").splice: [tree],
            ec.rebuild: ["ckpt", []],
            ec.skeleton: [lambda: tree],
            ec.function: [lambda tree: tree],
            manager.save: [] if parameter == "step" else [2, tree],
        }
        asked = 0
        for call, args in calls.items():
            here = [*inspect.signature(call).parameters][len(args) :]
            for wrong in _WRONG_VALUES[parameter] if parameter in here else ():
                more = {"tree": tree} if parameter == "step" and not args else {}
                with pytest.raises((TypeError, ValueError, LookupError)) as caught:
                    call(*args, **{parameter: wrong}, **more)
                asked += 1
                notes = getattr(caught.value, "__notes__", ())
                text = "\n".join([str(caught.value), *notes])
                # The third where types are checked first.
                about = [f"`{parameter}", *_ABOUT.get(parameter, ()), " violates type "]
                assert any(x in text for x in about), (call, wrong, text)
        assert asked
    assert [*manager.steps()] == [1]
    assert {x.name for x in tmp_path.iterdir()} == {"ckpt", "run"}


_ABOUT = {
    "functions": ["name of a function"],
    "metrics": ["The metric `loss`"],
    "rename": ["A rule is"],
    "sharding": ["as its sharding"],
    "step": ["A step must"],
}
