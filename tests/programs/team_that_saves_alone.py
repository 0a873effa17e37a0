"""Each process saves and loads its shards alone. Prints an error."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.member import columns, copies, path, rank, rows, same, spread

import eqx_ckpt as ec


X = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
grid = Mesh(np.asarray(jax.devices()).reshape(2, -1), ("a", "b"))
corners = NamedSharding(grid, P("b", "a"))
bits = X.view(np.uint32)
tree = {
    "rows": spread(X, rows),
    "columns": spread(2 * X, columns),
    "corners": spread(3 * X, corners),
    "copies": spread(4 * X, copies),
    "keys": jax.jit(
        lambda: jax.random.split(jax.random.key(0), 8), out_shardings=rows
    )(),
    "numpy": np.full(3, rank),
    "rank": rank,
    "local": jnp.full(2, rank),
}
tree["again"] = tree["rows"]


def abstract(x):
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


like = jax.tree.map(abstract, tree)

own = path / str(rank)
# Only one of them: nobody is waited for.
if rank == 1:
    ec.tree_serialise_leaves(own, tree, processes="own", layout="zarr")
    ec.async_tree_serialise_leaves(own, tree, processes="own").result()
else:
    ec.async_tree_serialise_leaves(own, tree, processes="own").result()
out = ec.tree_deserialise_leaves(own, like, processes="own")
for name, n in (("rows", 1), ("columns", 2), ("corners", 3), ("copies", 4)):
    assert same(out[name], n * X), name
    assert out[name].sharding == tree[name].sharding
words = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
for shard in out["keys"].addressable_shards:
    got = jax.random.key_data(shard.data)
    assert np.array_equal(np.asarray(got), np.asarray(words)[shard.index])
assert out["rank"] == rank and out["numpy"].tolist() == [rank] * 3
assert same(out["again"], X)
lazy = ec.open(own).splice(like)
assert same(ec.materialise(lazy, processes="own")["rows"], X)
assert ec.verify(own) == []
# One of them loads what all have saved.
shared = {name: tree[name] for name in ("rows", "copies", "keys")}
ec.tree_serialise_leaves(path / "all", shared)
if rank == 1:
    likes = {name: like[name] for name in shared}
    out = ec.tree_deserialise_leaves(path / "all", likes, processes="own")
    assert same(out["rows"], X) and same(out["copies"], 4 * X)
# Other devices' parts are not there.
try:
    ec.tree_deserialise_leaves(
        own,
        {"rows": jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=columns)},
        unexpected="ignore",
        processes="own",
    )
except RuntimeError as e:
    print(e)
