"""Saves, loads, grafts, and goes on with a run; PyInstaller packs it. Prints what it
has."""

import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_ckpt as ec
from eqx_ckpt._cli import _main


here = pathlib.Path(sys.argv[1])
model = eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0))
like = eqx.nn.MLP(2, 2, 4, 1, key=jr.key(1))
f = ec.function(lambda model, x: model(x), jnp.ones(2))
ec.tree_serialise_leaves(here / "a", model, functions={"f": f})
loaded = ec.tree_deserialise_leaves(here / "a", like)
assert eqx.tree_equal(loaded, model)
ckpt = ec.open(here / "a")
assert ckpt.functions["f"](jnp.ones(2)).shape == (2,)
pairs = [(lambda m: m.layers, lambda c: c.layers)]
grafted, _ = ec.graft(like, ckpt, pairs)
assert eqx.tree_equal(grafted, model)
ec.tree_serialise_leaves("memory://a.zip", model)
ec.tree_serialise_leaves(here / "b", {"w": ec.open("memory://a.zip").tree.layers[0]})
ec.export_safetensors(here / "c.safetensors", model)
assert ec.open(here / "c.safetensors").leaves
with ec.CheckpointManager(here / "run", keep=2) as manager:
    for step in range(3):
        manager.save(step, {"model": model, "step": step}, {"loss": 1 / (step + 1)})
state, step = ec.CheckpointManager(here / "run").restore({"model": like, "step": 0})
assert step == 2 and eqx.tree_equal(state["model"], model)
assert jax.process_count() == 1
assert _main.main(["view", str(here / "a"), "--to", str(here / "a.html")]) == 0
print(ckpt.writer)
