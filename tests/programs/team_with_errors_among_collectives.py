"""Loads over the devices that fail in process 1 only."""

import jax
import jax.numpy as jnp
import pytest
from support import inside
from support.member import copies, rank
from support.timed_loads import load


like = {n: jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=copies) for n in "vw"}


def fail(*_):
    raise MemoryError("no room")


def fails(call, fake):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            inside.replace(patch, call, fake)
        load(like, reshard="devices")


fails("end of a reshard", fail)
load(like, reshard="devices")
fails("program of a reshard", lambda *_: fail)
