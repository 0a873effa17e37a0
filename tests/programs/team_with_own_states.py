"""Two processes save and restore states of their own. Prints an error."""

import jax
import jax.numpy as jnp
import numpy as np
from support.member import path, rank, rows, spread

import eqx_ckpt as ec


with ec.CheckpointManager(path / "run", every=2) as manager:
    for step in range(1, 4):
        tree = {"x": spread(np.full(8, step, np.float32), rows), "step": step}
        manager.save(step, tree, own={"at": 10 * step + rank})
like = {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows), "step": 0}
tree, own, step = manager.restore(like, own={"at": 0})
assert (step, own["at"]) == (3, 30 + rank), own
tree, own, step = manager.restore(like, step=2, own="all")
assert own == [{"at": 20}, {"at": 21}]
# One of them has none.
try:
    manager.save(9, tree, own=None if rank else {"at": 0}, force=True)
    manager.wait()
except RuntimeError as e:
    print(e)
