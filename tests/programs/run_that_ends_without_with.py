"""A run at `PATH` whose last state nobody saves."""

import sys

import eqx_ckpt as ec


manager = ec.CheckpointManager(sys.argv[1], every=10)
manager.save(21, {"x": 1})
