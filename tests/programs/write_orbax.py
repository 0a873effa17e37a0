"""Checkpoints of the Orbax that is installed, of each kind: `DIRECTORY`."""

import sys
import warnings


warnings.simplefilter("ignore")
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1


base = sys.argv[1]
mesh = jax.make_mesh((16,), ("x",))
put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
tree = {
    "model": {
        "w": put(jnp.arange(64 * 32.0).reshape(64, 32), "x"),
        "layers": [jnp.ones(3), jnp.full((2,), 2.5, jnp.bfloat16)],
    },
    "big": put(jax.random.normal(jax.random.key(0), (512, 1024)), "x"),
    "dtypes": {
        d: jnp.arange(4).astype(d)
        for d in ("bool", "int8", "uint16", "float16", "float8_e4m3fn", "int4")
    },
    "numpy": np.arange(4.0),
    "zeros": jnp.zeros((5, 5)),
    "key": jax.random.key(3),
    "step": 3,
    "rate": 1e-3,
    "flag": True,
    "nothing": None,
    "empty": {},
}
for ocdbt in (False, True):
    for zarr3 in (False, True):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        with ocp.Checkpointer(handler) as saver:
            path = f"{base}/v0-{'ocdbt' if ocdbt else 'files'}-{2 + zarr3}"
            saver.save(path, args=ocp.args.PyTreeSave({**tree, "text": "héllo"}))
v1.save(f"{base}/v1", tree, custom_metadata={"width": 8})
with ocp.CheckpointManager(f"{base}/manager") as manager:
    args = ocp.args.StandardSave(tree)
    manager.save(5, args=args, custom_metadata={"width": 8})
    manager.wait_until_finished()
with ocp.CheckpointManager(f"{base}/items", item_names=("state", "more")) as manager:
    more = ocp.args.JsonSave({"a": 1})
    manager.save(
        7, args=ocp.args.Composite(state=ocp.args.StandardSave(tree), more=more)
    )
    manager.wait_until_finished()
