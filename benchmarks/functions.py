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
from models import GPT2

import eqx_ckpt as ec


# A function may take so many bytes, and so many for each leaf that it uses.
MOST, PER_LEAF = 2**16, 2**13


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
    Case("MiniLM", lambda: GPT2(6, 384, jr.key(0), 30522), _text, _TOKENS),
    Case("GPT-2", lambda: GPT2(12, 768, jr.key(0), 50257), _text, _TOKENS),
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
