"""Prints the bytes that a load of replicas reads, of those of the array."""

import jax
import numpy as np
from support.member import copies, path, read, same

import eqx_ckpt as ec


x = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)
like = {
    "w": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=copies),
    "odd": jax.ShapeDtypeStruct((3, 5), x.dtype, sharding=copies),
}
for how in ("auto", "devices"):
    # What is imported for a load is read too.
    odd = lambda tree: tree["odd"]
    ec.tree_deserialise_leaves(path / "c", like, reshard=how, where=odd)
    before = read()
    out = ec.tree_deserialise_leaves(path / "c", like, reshard=how)
    print(f"read={(read() - before) / x.nbytes};")
    assert same(out["w"], x) and same(out["odd"], x[:3, :5])
    assert out["w"].sharding == copies
