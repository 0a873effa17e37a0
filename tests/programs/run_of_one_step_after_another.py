"""A run at `PATH` that keeps one step and saves the next as fast as it can. It pauses
`SECONDS` between each directory and its lock, and says when it has begun."""

import itertools
import sys
import time

import numpy as np
import pytest
from support import inside

import eqx_ckpt as ec


root, pause = sys.argv[1], float(sys.argv[2])


def make_and_wait(make):
    return lambda directory: [make(directory), time.sleep(pause)][0]


inside.wrap(pytest.MonkeyPatch(), "make a directory", make_and_wait)
manager = ec.CheckpointManager(root, keep=1, reuse=False)
for step in itertools.count(1):
    manager.save(step, {"step": step, "x": np.full(2, step)})
    if step == 3:
        print("begun", flush=True)
