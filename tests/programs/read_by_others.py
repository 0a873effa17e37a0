"""TensorStore, Orbax and zarr-python read a checkpoint: `PATH LAYOUT`."""

import sys
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import v1

import eqx_ckpt as ec


path, layout = sys.argv[1], sys.argv[2]
x = np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)
want = {"rows": x, "columns": 2 * x, "copies": 3 * x}
ckpt = ec.open(path)
trees = [
    ocp.PyTreeCheckpointer().restore(path),
    getattr(v1, "load", v1.load_pytree)(path),
    {name: ts.open(ckpt[name].url).result().read().result() for name in want},
]
if layout == "zarr":
    import zarr

    group: Any = zarr.open_group(path, mode="r")
    trees.append({name: group[name][...] for name in want})
for tree in trees:
    for name, y in want.items():
        assert np.array_equal(np.asarray(tree[name]), y), name
print("all equal")
