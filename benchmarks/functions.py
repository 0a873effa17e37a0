"""What it costs to store functions with a model, and to run them.

    python benchmarks/functions.py [--short] [--scratch DIRECTORY] [--out DIRECTORY]

`export` is what the first save with a function takes beyond one that has it already.
`first` is from `ec.open` to the result of the first call, weights and compilation
included; beside it, `model` is the same with the class: a load, and `eqx.filter_jit`.
It fails where a limit is exceeded.
"""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import program

import eqx_ckpt as ec


# A function may take so many bytes, and so many for each leaf that it uses.
MOST, PER_LEAF = 2**16, 2**13


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array):
        a, b = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(width // 64, width, key=a)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=b)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """Of the size of MiniLM or GPT-2."""

    words: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list[Block]

    def __init__(self, vocabulary: int, width: int, depth: int, key: jax.Array):
        a, b, *keys = jr.split(key, depth + 2)
        self.words = eqx.nn.Embedding(vocabulary, width, key=a)
        self.places = eqx.nn.Embedding(1024, width, key=b)
        self.blocks = [Block(width, key) for key in keys]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        count = tokens.shape[0]
        x = jax.vmap(self.words)(tokens) + self.places.weight[:count]
        mask = jnp.tril(jnp.ones((count, count), bool))
        for block in self.blocks:
            x = block(x, mask)
        return x


class Case(NamedTuple):
    name: str
    make: Callable[[], Any]
    symbolic: jax.ShapeDtypeStruct
    x: jax.Array


_TOKENS = jnp.arange(128).reshape(2, 64)
_text = jax.ShapeDtypeStruct("batch, 64", jnp.int32)
CASES = [
    Case(
        "MLP",
        lambda: eqx.nn.MLP(384, 10, 256, 3, key=jr.key(0)),
        jax.ShapeDtypeStruct("batch, 384", jnp.float32),
        jnp.ones((2, 384)),
    ),
    Case("MiniLM", lambda: Transformer(30522, 384, 6, jr.key(0)), _text, _TOKENS),
    Case("GPT-2", lambda: Transformer(50257, 768, 12, jr.key(0)), _text, _TOKENS),
]


def forward(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = jax.block_until_ready(call())
    return time.perf_counter() - start, out


def _measure(case: Case, order: int, scratch: pathlib.Path) -> dict[str, float]:
    model = jax.block_until_ready(case.make())
    path = scratch / f"{case.name}-{order}"
    function = ec.function(forward, case.symbolic, vjp_order=order)

    def save(functions: Any) -> None:
        ec.tree_serialise_leaves(path, model, durable=False, functions=functions)

    save(None)
    plain, _ = _timed(lambda: save(None))
    both, _ = _timed(lambda: save({"forward": function}))
    again, _ = _timed(lambda: save({"forward": function}))
    jax.clear_caches()
    stored = ec.open(path).functions["forward"]
    first, out = _timed(lambda: stored(case.x))
    like = eqx.filter_eval_shape(case.make)
    jax.clear_caches()
    run = eqx.filter_jit(forward)
    load = lambda: run(ec.tree_deserialise_leaves(path, like), case.x)
    own, expected = _timed(load)
    if not jnp.allclose(out, expected, atol=1e-5):
        raise AssertionError(f"{case.name} gives something else")
    nbytes, leaves = stored.nbytes, len(stored.leaves)
    if nbytes > MOST + PER_LEAF * leaves * (1 + order):
        raise AssertionError(f"The function of {case.name} has {nbytes} bytes")
    return {
        "leaves": leaves,
        "MB": ec.open(path).nbytes / 1e6,
        "function kB": nbytes / 1e3,
        "save": plain,
        "export": both - again,
        "save again": again,
        "first": first,
        "model": own,
    }


def measure(short: bool, scratch: pathlib.Path) -> Any:
    rows = [
        {"name": case.name, "order": order, **_measure(case, order, scratch)}
        for case in CASES[: 1 if short else None]
        for order in (0, 1)
    ]
    return {"rows": rows}


if __name__ == "__main__":
    program.run("functions", measure, ["functions"])
