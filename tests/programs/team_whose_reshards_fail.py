"""Loads over the devices, of which the share of the last process is damaged."""

import time

import jax
import jax.numpy as jnp
from support.member import columns, meet, path, rank, size

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


like = {
    n: jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=columns) for n in "vw"
}
load(reshard="devices")
# The first batch is moved, and then the second one is read.
load(reshard="devices", max_bytes=2**20)
(file,) = (path / "c" / "d").glob("*/0")
# The other process may still be reading it.
meet("read")
if rank == size - 1:
    file.write_bytes((path / "whole").read_bytes())
load(reshard="devices" if rank else "read")
load(reshard="devices", max_bytes=2 ** (20 + 3 * rank))
load(reshard="devices", tag="all good")
