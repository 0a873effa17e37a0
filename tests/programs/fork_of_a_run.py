"""A fork of a process with a manager saves nothing: `RUN`."""

import os
import sys
import warnings

import numpy as np

import eqx_ckpt as ec


warnings.simplefilter("ignore")
with ec.CheckpointManager(sys.argv[1], every=10) as manager:
    manager.save(5, {"x": np.ones(2)})
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    assert manager.steps() == []
assert manager.steps() == [5]
