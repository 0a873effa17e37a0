"""The peak of memory of a save, in MiB over the tree: `DIRECTORY`."""

import resource
import sys

import jax
import jax.numpy as jnp

import eqx_ckpt as ec


path = sys.argv[1]
ec.tree_serialise_leaves(f"{path}/warm", jnp.ones(10))
tree = [jnp.full(8 * 2**20, float(i)) for i in range(8)]
jax.block_until_ready(tree)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ec.tree_serialise_leaves(f"{path}/a", tree, durable=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
