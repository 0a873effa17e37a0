"""Two processes save functions. Process 0 exports them, or each those of its own."""

import jax
import jax.numpy as jnp
import numpy as np
from support.member import path, rank, rows, spread

import eqx_ckpt as ec


tree = {"w": spread(np.arange(8.0, dtype=np.float32), rows), "step": 3}
n = jax.ShapeDtypeStruct("n", jnp.float32)
f = ec.function(lambda t, x: t["w"].sum() * x, n, platforms=["cpu"])
ec.tree_serialise_leaves(path / "a", tree, functions={"f": f})
ec.async_tree_serialise_leaves(path / "b", tree, functions={"f": f}).result()
for name in "ab":
    print(ec.open(path / name).functions["f"](np.ones(2, np.float32)))
alone = ec.function(lambda t, x: t["step"] * x, n, platforms=["cpu"])
own = {"step": np.float32(3)}
ec.tree_serialise_leaves(path / f"{rank}", own, functions={"f": alone}, processes="own")
print(ec.open(path / f"{rank}").functions["f"](np.ones(2, np.float32)))
try:
    bad = ec.function(lambda t: 1 / 0)
    ec.tree_serialise_leaves(path / "c", tree, functions={"bad": bad})
except (ZeroDivisionError, RuntimeError) as e:
    print("ZeroDivisionError" in repr(e))
