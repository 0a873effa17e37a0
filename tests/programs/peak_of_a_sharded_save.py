"""The peak of memory, in bytes, of a save of sharded arrays of 512 MiB."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt as ec


def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


mesh = Mesh(jax.devices(), ("x",))
make = lambda spec: jax.jit(
    lambda: jnp.ones((8192, 8192)), out_shardings=NamedSharding(mesh, spec)
)()
tree = {"rows": make(P("x")), "columns": make(P(None, "x"))}
jax.block_until_ready(tree)
with tempfile.TemporaryDirectory() as path:
    ec.tree_serialise_leaves(path + "/warm", jnp.ones(3))
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    ec.tree_serialise_leaves(path + "/c", tree, durable=False)
    print(peak() - before)
