"""Loads arrays of `DTYPES...` to any sharding, and compares each bit."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.member import path

import eqx_ckpt as ec


jax.config.update("jax_enable_x64", True)
want = dict(np.load(path / "bits.npz"))
names = sys.argv[5:]
grid = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("a", "b"))
specs = [P(), P("b"), P(None, "a")]
for spec in specs:
    to = NamedSharding(grid, spec)
    like = {n: jax.ShapeDtypeStruct((16, 8), jnp.dtype(n), sharding=to) for n in names}
    like["key"] = jax.ShapeDtypeStruct(
        (16,), jax.random.key(0).dtype, sharding=NamedSharding(grid, P(*spec[:1]))
    )
    for reshard in ("read", "devices"):
        out = ec.tree_deserialise_leaves(path / "c", like, reshard=reshard)
        out["key"] = jax.random.key_data(out["key"])
        for name, x in out.items():
            for shard in x.addressable_shards:
                data = np.asarray(shard.data)
                whole = want[name].view(data.dtype)[shard.index]
                is_equal = data.tobytes() == np.ascontiguousarray(whole).tobytes()
                assert is_equal, (name, spec, reshard)
print("every bit")
