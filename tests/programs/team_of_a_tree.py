"""Processes save a tree twice and load it: `LAYOUT`."""

import sys
from typing import Any

import jax
from support.leaves_of_all import check_a_load, tree
from support.member import columns, path, rows, same
from support.processes import X

import eqx_ckpt as ec


layout: Any = sys.argv[5]

ec.tree_serialise_leaves(path / "c", tree, layout=layout, metadata={"n": 1})
check_a_load(path / "c")
# Again, over it, and loaded onto other devices.
tree["step"] = 8
again = ec.async_tree_serialise_leaves(path / "c", tree, layout=layout, orbax=True)
again.result()
abstract = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=columns)
like = {"rows": abstract, "step": 0}
out = ec.tree_deserialise_leaves(path / "c", like, unexpected="ignore")
assert same(out["rows"], X) and out["step"] == 8
lazy = ec.open(path / "c")["columns"].update(sharding=rows)
print(same(ec.materialise([lazy])[0], 2 * X))
