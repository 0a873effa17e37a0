"""Saves and loads where the system has no `O_PATH`, as macOS has none."""

import os


del os.O_PATH

import numpy as np  # noqa: E402

import eqx_ckpt as ec  # noqa: E402


tree = {"x": np.arange(3.0)}
for layout in ("ocdbt", "zarr"):
    for _ in range(2):
        ec.tree_serialise_leaves(f"a/{layout}", tree, layout=layout)
    assert ec.tree_deserialise_leaves(f"a/{layout}", tree)["x"].sum() == 3
    ec.delete(f"a/{layout}")
with ec.CheckpointManager("run", keep=1) as manager:
    for step in range(3):
        manager.save(step, tree)
assert manager.steps() == [2]
