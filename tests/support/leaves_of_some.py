"""A tree of arrays that only some processes of a team have shards of."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from support.member import rows, size


X = np.arange(2**16, dtype=np.float32).reshape(256, 256)
# JAX 0.6 has no arrays without a shard unless it is asked.
if hasattr(jax.config, "jax_enable_empty_arrays"):
    jax.config.update("jax_enable_empty_arrays", True)
late = Mesh(np.asarray(jax.devices()[size:]), ("x",))
some, same_on_some = NamedSharding(late, P("x")), NamedSharding(late, P())


def made(make, sharding):
    return jax.jit(make, out_shardings=sharding)()


def array(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i], x.dtype)


tree = {
    "all": array(X, rows),
    "some": array(X + 1, some),
    "copies": array(X.astype(jnp.bfloat16), same_on_some),
    "small": array(X[:8], some),
    "keys": made(lambda: jax.random.split(jax.random.key(0), 8), some),
    "weak": made(lambda: 2.5, same_on_some),
    "count": made(lambda: jnp.asarray(3), same_on_some),
}
like = {
    name: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=x.sharding, weak_type=getattr(x, "weak_type", False)
    )
    for name, x in tree.items()
}


def data(shard):
    x = shard.data
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)


def check(out):
    for name, y in out.items():
        x = tree[name]
        assert (y.shape, y.dtype, y.sharding) == (x.shape, x.dtype, x.sharding), name
        assert name != "weak" or y.weak_type
        both = zip(y.addressable_shards, x.addressable_shards, strict=True)
        assert all(np.array_equal(data(a), data(b)) for a, b in both), name
