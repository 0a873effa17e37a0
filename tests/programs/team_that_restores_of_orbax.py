"""Prints how long a restore of a step that Orbax calls otherwise takes if one process
cannot open it, and the error."""

import time

import jax
import numpy as np
import pytest
from support import inside
from support.member import path, rank, rows

import eqx_ckpt as ec


def refused(told):
    def refuse(*arguments, **how):
        raise OSError("no more open files")

    return refuse


like = {"x": jax.ShapeDtypeStruct((1000,), np.float32, sharding=rows), "step": 0}
with ec.CheckpointManager(path, processes=ec.Together(timeout=30)) as manager:
    for step in (None, 10):
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                inside.wrap(patch, "open a path", refused)
            try:
                manager.restore(like, step)
            except Exception as e:
                print("no more open files" in str(e) or e)
        print(time.monotonic() - start < 20)
