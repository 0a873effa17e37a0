"""Wrote the checkpoints in `levanter-*`: `python write_levanter.py levanter-VERSION`.

The tests read what it wrote, so they do without levanter (and marin-levanter, as it has
been called since). Of what these depend on only what `levanter.checkpoint` imports has
to be installed.
"""

import importlib.util
import os
import pathlib
import sys
import types


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


# Its `__init__` imports all of it.
spec = importlib.util.find_spec("levanter")
sys.modules["levanter"] = types.ModuleType("levanter")
sys.modules["levanter"].__path__ = list(spec.submodule_search_locations)

from levanter.checkpoint import save_checkpoint  # noqa: E402


In, Out = hax.Axis("in", 4), hax.Axis("out", 3)


class TrainerState(eqx.Module):
    step: int
    model: dict
    opt_state: tuple
    training_key: jax.Array


def model():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {
        "linear": hax.nn.Linear(
            hax.named(jnp.arange(12.0).reshape(4, 3), (In, Out)),
            hax.named(jnp.full(3, 2.5, jnp.bfloat16), (Out,)),
            In,
            Out,
        ),
        "layers": [jnp.full(2, float(i)) for i in range(3)],
        "zeros": jnp.zeros((2, 3)),
        "big": jax.device_put(
            jnp.arange(64 * 64).reshape(64, 64), NamedSharding(mesh, PartitionSpec("x"))
        ),
        "dtypes": {
            name: jnp.arange(4).astype(name)
            for name in ("bool", "int8", "uint16", "float16")
        },
    }


def main(out):
    saved = model()
    optimiser = optax.adamw(optax.linear_schedule(1e-3, 0, 10))
    states = optimiser.init(saved["layers"][:2])
    tree = TrainerState(7, saved, states, jax.random.PRNGKey(3))
    try:
        from jax.experimental.array_serialization.serialization import (
            GlobalAsyncCheckpointManager,
        )

        # As in `Checkpointer`: the metadata are written when everything else is.
        manager = GlobalAsyncCheckpointManager()
        save_checkpoint(tree, 7, out / "step-7", manager)
        manager.wait_until_finished()
    except TypeError:
        # Before 1.2 the model and the rest of it were two trees.
        state = (tree.opt_state, tree.training_key, 7, 0.5)
        save_checkpoint(tree.model, state, 7, out / "step-7", exist_ok=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
