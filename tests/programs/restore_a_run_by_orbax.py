"""Restores the newest step of the run at `PATH` by Orbax's manager. Prints its steps
and two values."""

import json
import sys
import warnings

import jax.numpy as jnp
import orbax.checkpoint as ocp


warnings.simplefilter("ignore")
manager = ocp.CheckpointManager(sys.argv[1])
like = {"x": jnp.zeros(1000), "step": 0}
out = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
print(json.dumps([list(manager.all_steps()), float(out["x"][0]), int(out["step"])]))
