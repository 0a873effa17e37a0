"""The peak of memory of `load_or_init`, in arrays of the model's size."""

import resource
import tempfile

import jax.numpy as jnp
import numpy as np

import eqx_ckpt as ec


def init(size):
    shape, dtype = (size,), "float32"
    return {"a": jnp.full(shape, 1.0, dtype), "b": jnp.full(shape, 2.0, dtype)}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


size = 16 * 2**20
where = lambda t: t["a"]
with tempfile.TemporaryDirectory() as path:
    ec.tree_serialise_leaves(path + "/5", {"a": np.ones(5, "f4")})
    ec.load_or_init(init, path + "/5", (5,), where=where)
    before = peak()
    ec.tree_serialise_leaves(path + "/x", {"a": np.zeros(size, "f4")})
    tree = ec.load_or_init(init, path + "/x", (size,), where=where)
    assert float(tree["a"][-1]) == 0 and float(tree["b"][-1]) == 2
    print((peak() - before) / (4 * size))
