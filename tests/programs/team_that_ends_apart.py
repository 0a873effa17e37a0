"""Two processes end runs in which one process alone finds something wrong."""

import warnings

import numpy as np
from support.member import caught, path, rank, rows, spread

import eqx_ckpt as ec


tree = {"x": spread(np.arange(64.0, dtype=np.float32).reshape(8, 8), rows)}
# None waits so long for the other.
together = ec.Together(timeout=1000)


def save_with_metadata(name, wrong):
    with ec.CheckpointManager(path / name, processes=together) as manager:
        manager.save(1, tree, metadata={"step": 1} if rank == wrong else None)


def end_after_a_failure():
    with ec.CheckpointManager(path / "run", every=10, processes=together) as manager:
        manager.save(1, tree)
        if rank == 0:
            manager._saves._follow_up.failures.append("step 0 was not deleted")


warnings.simplefilter("error", UserWarning)
caught(save_with_metadata, "0", 0)
caught(save_with_metadata, "1", 1)
caught(end_after_a_failure)
