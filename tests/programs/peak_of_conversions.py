"""Peak of memory, in MiB beyond the tree, of a load that converts leaves of one block
each to float16, within a `max_bytes` of 16 MiB: `PATH`."""

import sys

import jax
import jax.numpy as jnp
from support.peaks import peak

import eqx_ckpt as ec


path = sys.argv[1]
like = [jax.ShapeDtypeStruct((2**20,), jnp.float16)] * 64
load = lambda where: ec.tree_deserialise_leaves(
    path, like, where=where, cast=True, max_bytes=2**24
)
load(lambda tree: tree[0])
used, tree = peak(lambda: load(lambda tree: tree))
print(used - sum(x.nbytes for x in tree) / 2**20)
