"""Checkpoints of Orbax of a tree of the tests: `DIRECTORY TESTS`."""

import warnings


warnings.simplefilter("ignore")
import sys

import orbax.checkpoint as ocp
from orbax.checkpoint import v1


sys.path.insert(0, sys.argv[2])
from test_foreign_stores import _tree


base = sys.argv[1]
for ocdbt in (False, True):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=True)
    with ocp.Checkpointer(handler) as saver:
        saver.save(f"{base}/orbax-{ocdbt}", args=ocp.args.PyTreeSave(_tree()))
v1.save(f"{base}/orbax-v1", _tree())
with ocp.CheckpointManager(f"{base}/orbax-run") as manager:
    manager.save(5, args=ocp.args.StandardSave(_tree()))
    manager.wait_until_finished()
