"""Errors of steps that are no integers: `RUN`."""

import sys

import numpy as np

import eqx_ckpt as ec


manager = ec.CheckpointManager(sys.argv[1])
for call in (manager.delete, manager.pin, manager.unpin):
    for step in ("1", 1.0, "../1"):
        try:
            call(step)
        except TypeError as e:
            assert str(e) == f"A step must be an integer, not {step!r}.", e
        else:
            raise AssertionError
try:
    manager.delete(np.array(1))
except ValueError as e:
    assert "pinned" in str(e)
print(manager.steps())
