"""Two processes save to near disks; process 1 has no memory for its first copy. Later
it has a new disk, and no memory for the part that comes to it."""

import numpy as np
import pytest
from support.member import path, rank, rows, spread

import eqx_ckpt as ec
from eqx_ckpt._near import _disk


def fail(file, mode, **how):
    if "x" in mode:
        raise MemoryError("no room")
    return open(file, mode, **how)


patch = pytest.MonkeyPatch()
how = {"every": 100, "near": path / f"disk{rank}", "near_every": 1}
how["processes"] = ec.Together(timeout=60)
manager = ec.CheckpointManager(path / "run", **how)
tree = {"x": spread(np.arange(8.0, dtype=np.float32), rows)}
if rank == 1:
    patch.setattr(_disk, "open", fail, raising=False)
manager.save(1, tree)
try:
    manager.wait()
except Exception as e:
    print(type(e).__name__, e)
patch.undo()
manager.save(2, tree)
manager.wait()
print(manager.latest())
manager = ec.CheckpointManager(path / "run", **how | {"near": path / f"disk{-rank}"})
if rank == 1:
    patch.setattr(_disk, "open", fail, raising=False)
try:
    manager.restore(tree)
except Exception as e:
    print(type(e).__name__, e)
patch.undo()
print(manager.restore(tree)[1])
