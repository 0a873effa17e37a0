"""Two processes of a run: process 1 has other metrics, and sees no step."""

import numpy as np
import pytest
from support import inside
from support.member import path, rank, rows, spread

import eqx_ckpt as ec


if rank:
    inside.replace(pytest.MonkeyPatch(), "find the latest step", lambda *_: None)
how = {"every": 2, "processes": ec.Together(timeout=30)}
with ec.CheckpointManager(path / "run", **how) as manager:
    assert manager.latest() is None
    for step in (1, 2, 3):
        metrics = {"speed": object() if rank else step / 4}
        manager.save(step, {"x": spread(np.ones((8, 8)), rows)}, metrics)
    manager.wait()
    assert manager.latest() == 2
assert manager.latest() == 3
