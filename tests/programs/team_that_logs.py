"""Prints the first word of each message that is logged in a run of two processes."""

import logging

import numpy as np
from support.member import (
    path,
    rows,
    spread,
)

import eqx_ckpt as ec


logging.getLogger("eqx_ckpt").setLevel(logging.DEBUG)


class Shown(logging.Handler):
    def emit(self, record):
        print(record.getMessage().split()[0], flush=True)


logging.getLogger("eqx_ckpt").addHandler(Shown())
with ec.CheckpointManager(path / "run", keep=1) as manager:
    for step in (1, 2):
        manager.save(step, {"w": spread(np.arange(8), rows)})
    manager.wait()
manager.restore({"w": spread(np.arange(8), rows)})
