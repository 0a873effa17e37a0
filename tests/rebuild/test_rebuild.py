"""Trees without a `like`: what comes back is what a load with one gives."""

import ast
import collections
import functools as ft
import random
import re
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from support import inside, trees
from support.helpers import assert_alike
from support.renaming import value_at

import eqx_ckpt as ec


KNOWN = [trees, eqx, optax, jax, np, flax, print, len, abs, collections.Counter]


def unmarked(tree: Any) -> Any:
    """The tree without markers of States that are objects, of which each tree has its
    own, and without other values that are equal to themselves only. A `like` alone says
    the order of bytes."""

    def shown(marker):
        return marker if isinstance(marker, str) else "object"

    def plain(x):
        if isinstance(x, eqx.nn.StateIndex):
            return ["index", shown(x.marker), unmarked(x.init)]
        if isinstance(x, eqx.nn.State):
            children, markers = x.tree_flatten()
            return ["state", list(map(shown, markers)), unmarked(list(children))]
        if isinstance(x, ft.partial) and not isinstance(x, jtu.Partial):
            return ["partial", x.func, list(x.args), x.keywords]
        if type(x).__name__ == "SharedNode":
            return "shared"
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            return x.astype(x.dtype.newbyteorder("="))
        return x

    stop = lambda x: isinstance(x, (eqx.nn.State, eqx.nn.StateIndex))
    return jtu.tree_map(plain, tree, is_leaf=stop)


def asked(error: Exception) -> list[str]:
    """The keys that `replace` is to have."""
    rows = re.findall(r"^    ('.*?'): a", str(error), re.M)
    return [ast.literal_eval(row) for row in rows]


def rebuilt(path: Any, like: Any, known: Any = KNOWN, **options: Any) -> Any:
    """With what the error asks for, taken from a tree with other numbers."""
    try:
        return ec.rebuild(path, known, **options)
    except RuntimeError as e:
        assert "nothing was loaded" in str(e) and "`known` lacks" not in str(e), e
        replace = {name: value_at(like, name) for name in asked(e)}
        assert replace, e
    return ec.rebuild(path, known, replace=replace, **options)


def check(tree: Any, tmp_path: Any) -> None:
    like = trees.changed(tree)
    try:
        ec.tree_serialise_leaves(tmp_path, tree, durable=False)
    except ValueError:  # Two leaves of one name, or none at all.
        return
    out = rebuilt(tmp_path, like)
    assert_alike(unmarked(out), unmarked(ec.tree_deserialise_leaves(tmp_path, like)))
    assert_alike(unmarked(out), unmarked(tree))


# Without models of libraries, which take long to make.
@pytest.mark.parametrize("seed", [0, 1, 5, 9, 10, 13, 15])
def test_trees(seed, tmp_path):
    check(trees.make(seed), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(10, 3010, 100))
def test_many_trees(first, tmp_path):
    for seed in range(first, first + 100):
        check(trees.make(seed), tmp_path / str(seed))


# ---- Models and training states.


class Block(eqx.Module):
    linear: eqx.nn.Linear
    scale: jax.Array = eqx.field(converter=jnp.asarray)
    name: str = eqx.field(static=True)
    doubled: int = eqx.field(init=False)
    sizes: tuple = eqx.field(static=True, default=(1, (2, 3)))

    calls = 0

    def __post_init__(self):
        type(self).calls += 1
        self.doubled = 2


class Abstract(eqx.Module):
    width: eqx.AbstractVar[int]

    @property
    def area(self):
        return self.width**2


class Concrete(Abstract):
    width: int = eqx.field(static=True)
    blocks: list
    act: Any
    inner: trees.Point

    def __init__(self, key):
        assert key is not None
        self.width = 3
        linear = eqx.nn.Linear(2, 2, key=key)
        self.blocks = [Block(linear, 1.5, "a"), Block(linear, [2.0], "b")]
        self.act = ft.partial(jax.nn.leaky_relu, negative_slope=0.2)
        self.inner = trees.Point(1, None)


def test_modules(tmp_path):
    """Converters, fields that are not set, properties, shared arrays; and no code of
    the class runs."""
    model = Concrete(jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "a", model)
    Block.calls = 0
    out = ec.rebuild(tmp_path / "a", [Concrete, Block, trees.Point, eqx.nn, jax.nn])
    assert Block.calls == 0
    assert out.blocks[0].sizes == (1, (2, 3)) and out.blocks[1].doubled == 2
    assert out.area == 9 and out.act.keywords == {"negative_slope": 0.2}
    assert out.blocks[0].linear.weight is out.blocks[1].linear.weight
    like = trees.changed(model)
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", like)
    assert_alike(unmarked(out), unmarked(loaded))


def _layers(key: Any) -> Any:
    nn, keys = eqx.nn, iter(jr.split(key, 9))
    return {
        "mlp": nn.MLP(2, 1, 3, 2, activation=jax.nn.gelu, key=next(keys)),
        "plain": nn.MLP("scalar", 2, 3, 1, key=next(keys)),
        "attention": nn.MultiheadAttention(2, 4, dropout_p=0.1, key=next(keys)),
        "gru": nn.GRUCell(2, 3, key=next(keys)),
        "conv": nn.Conv2d(1, 2, (3, 1), padding="SAME", key=next(keys)),
        "norm": nn.LayerNorm((2, 3)),
        "several": eqx.filter_vmap(lambda k: nn.Linear(2, 3, key=k))(jr.split(key)),
        "sequence": nn.Sequential([nn.Lambda(jnp.tanh), nn.Dropout(0.3), nn.PReLU()]),
    }


def test_names_of_what_is_lacked_are_those_that_people_import(tmp_path):
    model = {"mlp": eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)), "x": trees.Point(1.0, 2.0)}
    ec.tree_serialise_leaves(tmp_path, model)
    with pytest.raises(RuntimeError, match="`known` lacks these") as e:
        ec.rebuild(tmp_path, [])
    lacked = re.findall(r"^    (\S+)  \(at", str(e.value), re.M)
    names = ["equinox.nn.MLP", "equinox.nn.Linear", "jax.nn.relu"]
    assert sorted(lacked) == sorted([*names, "support.trees.Point"])
    ec.tree_serialise_leaves(tmp_path, model["x"])
    with pytest.raises(RuntimeError, match=r"trees\.Point  \(at the whole tree\)"):
        ec.rebuild(tmp_path, [])


def test_a_class_without_a_field_that_was_saved_is_to_get_it(tmp_path):
    def make(fields):
        own = {"__annotations__": dict.fromkeys(fields, Any), "__module__": __name__}
        return type("Net", (eqx.Module,), own)

    old, new = make(["w", "act", "depth"]), make(["w"])
    ec.tree_serialise_leaves(tmp_path, {"net": old(np.ones(2), np.ones(3), 4)})
    with pytest.raises(RuntimeError, match="or give `Net` `act`, `depth` too"):
        ec.rebuild(tmp_path, [new])


def test_a_tree_of_more_nodes_than_are_read_is_not_saved(tmp_path, monkeypatch):
    model = eqx.nn.MLP(2, 2, 3, 2, key=jr.key(0))
    inside.limit(monkeypatch, tree_cost=-(2**40))
    with pytest.raises(ValueError, match="Nothing was saved: .*nodes.*several check"):
        ec.tree_serialise_leaves(tmp_path / "a", model)
    assert not (tmp_path / "a").exists()


def test_layers(tmp_path):
    # Filled without the compiler, which takes longer than all the rest.
    fill = lambda x: jnp.asarray(np.arange(x.size, dtype=x.dtype).reshape(x.shape))
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    layers = jax.tree.map(
        lambda x: fill(x) if is_shape(x) else x,
        eqx.filter_eval_shape(_layers, jr.key(0)),
    )
    numbers = (1, 2.5, True, 1j, np.float64(2), np.arange(3), None)
    tree = {**layers, "key": jr.key(3), "numbers": numbers}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    out = ec.rebuild(tmp_path / "a", [eqx.nn, jax.nn, jnp])
    assert_alike(out, ec.tree_deserialise_leaves(tmp_path / "a", trees.changed(tree)))
    assert out["mlp"].activation is jax.nn.gelu


class Net(eqx.Module):
    norm: eqx.nn.BatchNorm
    layers: list
    other: eqx.nn.BatchNorm

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.layers = [eqx.nn.Linear(2, 2, key=key), eqx.nn.Lambda(jax.nn.relu)]
        self.other = eqx.nn.BatchNorm(2, "batch", mode="batch")


@pytest.mark.parametrize("by_text", [True, False])
def test_training_state(tmp_path, by_text):
    model, state = eqx.nn.make_with_state(Net)(jr.key(0))
    if not by_text:
        raw = Net(jr.key(0))
        model, state = eqx.nn.delete_init_state(raw), eqx.nn.State(raw)
    state = trees.changed(state, random.Random(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    adam = optax.adam(1e-3)
    mask = jax.tree.map(lambda x: x.ndim > 1, params)
    opts = [
        optax.MultiSteps(optax.chain(optax.clip(1.0), adam), 2),
        optax.masked(adam, mask),
        optax.inject_hyperparams(optax.adamw)(1e-3),
    ]
    tree = {"m": model, "state": state, "opt": [x.init(params) for x in opts]}
    ec.tree_serialise_leaves(tmp_path / "a", {**tree, "key": jr.key(7)})
    known = [Net, eqx.nn, jax.nn, optax]
    out = ec.rebuild(tmp_path / "a", known)
    assert_alike(unmarked(out), unmarked({**tree, "key": jr.key(7)}))
    # The model finds what belongs to it in the State.
    for old, new in ((model.norm, out["m"].norm), (model.other, out["m"].other)):
        for name in ("ema_first_time_index", "batch_state_index"):
            if (index := getattr(new, name)) is not None:
                found = out["state"].get(index)
                assert_alike(found, state.get(getattr(old, name)))
    # A part alone, and what it was saved of again.
    part = ec.rebuild(tmp_path / "a", known, source="m.layers")
    assert_alike(part, model.layers)
    part = ec.rebuild(tmp_path / "a", [optax, Net, eqx.nn], lambda c: c.opt[2])
    assert_alike(unmarked(part), unmarked(tree["opt"][2]))
    ec.tree_serialise_leaves(tmp_path / "b", out)
    ec.tree_deserialise_leaves(tmp_path / "b", out)
    ec.tree_deserialise_leaves(tmp_path / "b", {**tree, "key": jr.key(0)})


class _Held(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex({"a": [jnp.ones(3)]})


def test_a_list_in_an_entry_of_a_state_is_no_state(tmp_path):
    """Also of a file that has no record of the tree, but the labels of entries."""
    model_and_state = eqx.nn.make_with_state(_Held)()
    ec.export_safetensors(tmp_path / "x.safetensors", model_and_state)
    ec.tree_serialise_leaves(tmp_path / "y", ec.open(tmp_path / "x.safetensors").tree)
    with pytest.raises(RuntimeError, match="'1.0.a': a `node of a checkpoint`"):
        ec.rebuild(tmp_path / "y", [], source="1.0.a")
