"""Peaks of memory, in MiB, of a save and of a load that cast: `PATH`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from support.peaks import peak

import eqx_ckpt as ec


path = sys.argv[1]
MiB = 2**20
tree = {"w": np.ones((64, MiB), np.float32), "t": np.ones((64, MiB // 4)).T}
save = lambda **k: ec.tree_serialise_leaves(path, tree, durable=False, **k)
save()
print(peak(lambda: save(dtype="float16", max_bytes=64 * MiB))[0])
save()
del tree
like = {
    "w": jax.ShapeDtypeStruct((64, MiB), jnp.float16),
    "t": jax.ShapeDtypeStruct((MiB // 4, 64), jnp.float32),
}
load = lambda **k: ec.tree_deserialise_leaves(path, like, cast=True, **k)
load(max_bytes=64 * MiB)
used, tree = peak(lambda: load(max_bytes=64 * MiB))
print(used - sum(x.nbytes for x in tree.values()) / MiB)
