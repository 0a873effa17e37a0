"""Two processes save lazy leaves, also of other files than the other's or damaged."""

import numpy as np
from support.member import path, rank, rows, spread

import eqx_ckpt as ec


X = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
lazy = ec.open(path / "a").tree
halved = ec.lazy(lambda w: w / 2, elementwise=True)(lazy.layers[0])
tree = {"lazy": lazy, "halved": halved, "rows": spread(X, rows)}
with ec.counting() as bytes_read:
    ec.tree_serialise_leaves(path / "b", tree, processes=ec.Together(1))
print(bytes_read() > 2**20)
how = {"layout": "zarr", "processes": ec.Together(2)}
ec.async_tree_serialise_leaves(path / "c", tree, **how).result()
wrong = {("a", "other")[rank]: "half` differs", "damaged": "layers.0"}
for number, (name, said) in enumerate(wrong.items()):
    try:
        other = ec.open(path / name).tree
        ec.tree_serialise_leaves(path / "d", other, processes=ec.Together(3 + number))
    except RuntimeError as e:
        print(said in str(e) or e)
