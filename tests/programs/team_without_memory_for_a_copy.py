"""Two processes save to near disks; process 1 has no memory for its first copy. Later
it has a new disk: process 0 cannot open the part that goes to it, and then there is
no room for that part."""

import errno
from typing import Any

import numpy as np
import pytest
from support.member import path, rank, rows, spread

import eqx_ckpt as ec
from eqx_ckpt._near import _disk


def failing(bad_mode, error):
    def fail(file, mode, **how):
        if mode == bad_mode:
            raise error
        return open(file, mode, **how)

    return fail


patch = pytest.MonkeyPatch()
how: dict[str, Any] = {"every": 100, "near": path / f"disk{rank}", "near_every": 1}
how["processes"] = ec.Together(timeout=60)
manager = ec.CheckpointManager(path / "run", **how)
tree = {"x": spread(np.arange(8.0, dtype=np.float32), rows)}
if rank == 1:
    patch.setattr(_disk, "open", failing("xb", MemoryError("no room")), raising=False)
manager.save(1, tree)
try:
    manager.wait()
except Exception as e:
    print(type(e).__name__, e)
patch.undo()
manager.save(2, tree)
manager.wait()
print(manager.latest())
how["near"] = path / f"disk{-rank}"
manager = ec.CheckpointManager(path / "run", **how)
for rank_of_error, bad_mode, number in (
    (0, "rb", errno.EMFILE),
    (1, "xb", errno.ENOSPC),
):
    error = OSError(number, "no place")
    if rank == rank_of_error:
        patch.setattr(_disk, "open", failing(bad_mode, error), raising=False)
    try:
        manager.restore(tree)
    except Exception as e:
        print(type(e).__name__, e)
    patch.undo()
print(manager.restore(tree)[1])
