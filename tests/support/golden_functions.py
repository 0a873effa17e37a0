"""Functions that the lowest version of JAX has written, in tests/golden/1/functions.

`write` was run once, with that version: later ones have to run what it wrote.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_ckpt as ec


PATH = pathlib.Path(__file__).parents[1] / "golden" / "1" / "functions"
X = jax.ShapeDtypeStruct("b, 4", jnp.float32)


def tree() -> dict[str, Any]:
    """Numbers that no version of JAX makes otherwise."""
    w = jnp.arange(12.0).reshape(4, 3) / 8 - 0.5
    return {"w": w, "half": w[0].astype(jnp.bfloat16), "key": jr.key(7), "step": 3}


def forward(tree: Any, x: Any) -> Any:
    return jax.nn.relu(x @ tree["w"]) + tree["half"].astype(jnp.float32)


def loss(tree: Any, x: Any, key: Any) -> Any:
    noise = jr.normal(key, (3,)) + jr.normal(tree["key"], (3,))
    return {"loss": jnp.mean((forward(tree, x) + noise) ** 2), "keys": [tree["key"]]}


def write() -> None:
    functions = {
        "forward": ec.function(forward, X, vjp_order=1),
        "loss": ec.function(loss, X, jr.key(0), platforms=["cpu"]),
    }
    ec.tree_serialise_leaves(PATH, tree(), functions=functions)
