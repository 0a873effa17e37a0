"""Loads over the devices that fail in process 1 only."""

import time

import jax
import jax.numpy as jnp
import pytest
from support import inside
from support.member import copies, path, rank

import eqx_ckpt as ec


def load(tag=None, **options):
    """Prints the error of a load, or that it has loaded."""
    start = time.monotonic()
    try:
        options["processes"] = ec.Together(tag, 500)
        ec.tree_deserialise_leaves(path / "c", like, **options)
    except Exception as e:
        print(f"{type(e).__name__}: {e}".replace(chr(10), " "))
    else:
        print("loaded")
    assert time.monotonic() - start < 400


like = {n: jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=copies) for n in "vw"}


def fail(*_):
    raise MemoryError("no room")


def fails(call, fake):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            inside.replace(patch, call, fake)
        load(reshard="devices")


fails("end of a reshard", fail)
load(reshard="devices")
fails("program of a reshard", lambda *_: fail)
