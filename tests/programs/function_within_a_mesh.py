"""Saves a function within a mesh of two devices, and then outside of it."""

import sys
import warnings

import jax
import jax.numpy as jnp


jax.config.update("jax_num_cpu_devices", 2)

import eqx_ckpt as ec  # noqa: E402


path = sys.argv[1]
mesh = jax.make_mesh((2,), ("d",))
spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
tree = {"w": jax.device_put(jnp.ones((8, 16)), spec)}
x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
function = ec.function(lambda tree, x: x @ tree["w"], x, platforms=["cpu"])
with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ec.tree_serialise_leaves(path, tree, functions={"f": function})
assert "A function is stored for 2 devices" in str(said[0].message), said
ec.tree_serialise_leaves(f"{path}-outside", tree, functions={"f": function})
