"""A tree of many kinds of leaves, of whose arrays each process of a team has shards.

`tree` is what they save, and `check_a_load` loads it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ckpt as ec
from support.member import columns, copies, rows, same, spread
from support.processes import X


tree = {
    "rows": spread(X, rows),
    "columns": spread(2 * X, columns),
    "copies": spread(3 * X, copies),
    "small": spread(np.arange(64.0, dtype=np.float32), rows),
    "weak": jax.jit(lambda: 2.5, out_shardings=copies)(),
    "keys": jax.jit(
        lambda: jax.random.split(jax.random.key(0), 8), out_shardings=rows
    )(),
    "empty": spread(np.zeros((0, 8), np.float32), rows),
    "without columns": spread(np.zeros((8, 0), np.int8), rows),
    "numpy": np.arange(10),
    "step": 7,
    "local": jnp.arange(3.0),
}


def _abstract(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    weak_type = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=x.sharding, weak_type=weak_type
    )


def check_a_load(path: Any) -> None:
    """Loads the tree from `path`, and compares what this process has of it."""
    out = ec.tree_deserialise_leaves(path, jax.tree.map(_abstract, tree))
    assert same(out["rows"], X) and same(out["columns"], 2 * X)
    assert same(out["copies"], 3 * X)
    assert out["weak"].weak_type and float(out["weak"]) == 2.5
    assert out["numpy"].tolist() == list(range(10)) and out["step"] == 7
    words = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
    assert same(jax.random.key_data(out["keys"]), np.asarray(words))
    for name, x in tree.items():
        if isinstance(x, jax.Array):
            assert out[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
