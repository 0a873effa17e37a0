"""Loads over the devices, of which the share of the last process is damaged."""

import jax
import jax.numpy as jnp
from support.member import columns, meet, path, rank, size
from support.timed_loads import load


like = {
    n: jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=columns) for n in "vw"
}
load(like, reshard="devices")
# The first batch is moved, and then the second one is read.
load(like, reshard="devices", max_bytes=2**20)
(file,) = (path / "c" / "d").glob("*/0")
# The other process may still be reading it.
meet("read")
if rank == size - 1:
    file.write_bytes((path / "whole").read_bytes())
load(like, reshard="devices" if rank else "read")
load(like, reshard="devices", max_bytes=2 ** (20 + 3 * rank))
load(like, reshard="devices", tag="all good")
