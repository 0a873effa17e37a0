"""Two processes save steps of the run at `URL`, and restore."""

import sys

import jax
import numpy as np
from support.member import columns, rows, same, spread

import eqx_ckpt as ec


X = np.arange(64.0).reshape(8, 8)
x = jax.ShapeDtypeStruct(X.shape, np.float32, sharding=columns)
like = {"x": x, "step": 0}
how = {"keep": 1, "processes": ec.Together(timeout=60)}
with ec.CheckpointManager(sys.argv[5], **how) as manager:
    for step in (1, 2, 3):
        tree = {"x": spread(X + step, rows), "step": step}
        manager.save(step, tree, {"loss": 1 / step})
        if step == 2:
            manager.pin(2)
    manager.wait()
    out, at = manager.restore(like)
    assert at == 3 and same(out["x"], (X + 3).astype("float32"))
    assert manager.steps() == [2, 3]
