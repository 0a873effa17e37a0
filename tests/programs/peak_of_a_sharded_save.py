"""The peak of memory, in MiB, of a save of sharded arrays of 512 MiB."""

import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.peaks import peak

import eqx_ckpt as ec


mesh = Mesh(jax.devices(), ("x",))
make = lambda spec: jax.jit(
    lambda: jnp.ones((8192, 8192)), out_shardings=NamedSharding(mesh, spec)
)()
tree = {"rows": make(P("x")), "columns": make(P(None, "x"))}
jax.block_until_ready(tree)
with tempfile.TemporaryDirectory() as path:
    ec.tree_serialise_leaves(path + "/warm", jnp.ones(3))
    save = lambda: ec.tree_serialise_leaves(path + "/c", tree, durable=False)
    print(peak(save)[0])
