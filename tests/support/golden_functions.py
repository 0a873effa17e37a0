"""Functions that versions of JAX have written, in tests/golden/1/functions-<version>.

`write` was run once with each: later ones have to run what it wrote for half a year,
and to say why they do not after that.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_ckpt as ec


GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "1"
# The first release that may not read them any more.
UNTIL = {"0.6.1": (0, 12), "0.10.2": (0, 13)}
X = jax.ShapeDtypeStruct("b, 4", jnp.float32)


def path(version: str) -> pathlib.Path:
    return GOLDEN / f"functions-{version}"


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
    ec.tree_serialise_leaves(path(jax.__version__), tree(), functions=functions)
