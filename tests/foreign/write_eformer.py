"""Wrote the checkpoints in `eformer-*`: `python write_eformer.py eformer-VERSION`.

The tests read what it wrote, so they do without eformer.
"""

import datetime
import os
import pathlib
import sys


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.checkpointer import Checkpointer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main(out):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    model = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "layers": [jnp.full(3, 2.5, jnp.bfloat16), jnp.zeros(3)],
        "big": jax.device_put(
            jnp.arange(64 * 64).reshape(64, 64), NamedSharding(mesh, PartitionSpec("x"))
        ),
    }
    manager = AsyncCheckpointManager()
    tree = {"model": model, "step": jnp.asarray(7)}
    states = optax.adam(1e-3).init(model["layers"])
    manager.save_tree(tree, str(out / "tree"), mesh)
    extras = {"width": 8}
    manager.save_pytree(states, str(out / "tree"), mesh, prefix="tx.0", extras=extras)

    run = Checkpointer(str(out / "run"), datetime.timedelta(minutes=10), [])
    run.save_pytree(model, "model", step=6, mesh=mesh)
    run.save_pytree(states, "optimizer", step=6, mesh=mesh, extras={"rate": 1e-3})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
