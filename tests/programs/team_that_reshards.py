"""Loads of one array to many shardings, in which no byte is read twice."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.member import path, rank, read, same, size

import eqx_ckpt as ec


x = np.load(path / "x.npy")
grid = Mesh(np.asarray(jax.devices()).reshape(2, size), ("a", "b"))
back = Mesh(np.asarray(jax.devices())[::-1].reshape(size, 2), ("a", "b"))
# The first load imports and compiles.
for mesh, spec in [
    (grid, P()),
    (grid, P()),
    (grid, P(None, ("a", "b"))),
    (grid, P("b", "a")),
    (back, P("b")),
    (back, P(None, ("b", "a"))),
]:
    to = NamedSharding(mesh, spec)
    like = {"w": jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=to)}
    before = read()
    out = ec.tree_deserialise_leaves(path / "c", like, reshard="devices")["w"]
    print(f"read={(read() - before) / x.nbytes};")
    assert out.sharding == to
    for shard in out.addressable_shards:
        data = np.ascontiguousarray(np.asarray(shard.data)).view(np.uint32)
        assert np.array_equal(data, x[shard.index]), spec
# Chunks that do not divide evenly. The last process has none of the one chunk.
odd = {"prime": (257, 64), "one": (8, 8), "long": (2, 1021)}
like = {
    n: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(grid, P()))
    for n, s in odd.items()
}
out = ec.tree_deserialise_leaves(
    path / "odd", like, reshard="devices", unexpected="ignore"
)
for n, s in odd.items():
    assert same(out[n], np.arange(math.prod(s), dtype=np.float32).reshape(s))
lines, log = [], logging.getLogger("eqx_ckpt")
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
log.addHandler(handler)
log.setLevel(logging.INFO)
to = NamedSharding(grid, P("b"))
like = {"odd": jax.ShapeDtypeStruct((1536,), jnp.float32, sharding=to)}
out = ec.tree_deserialise_leaves(
    path / "odd",
    like,
    reshard="devices",
    unexpected="ignore",
    processes=ec.Together("log"),
)["odd"]
assert (np.asarray(out.addressable_data(0)) == 1).all()
assert rank or any("read more than once: `odd` (" in x for x in lines), lines
