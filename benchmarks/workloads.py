"""The trees that are saved and loaded: as flat dicts of named jax arrays on CPU."""

import functools as ft
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


Tree = dict[str, jax.Array]


def _arrays(shapes: dict[str, tuple[tuple[int, ...], str]]) -> Tree:
    # Random, so that nobody's compression gains; each leaf is another part of one pool.
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape, _ in shapes.values()]
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(max(sizes) + 2**20, dtype=np.float32)
    out = {}
    for i, (name, (shape, dtype)) in enumerate(shapes.items()):
        start = (i * 4099) % 2**20
        out[name] = jnp.array(pool[start : start + sizes[i]].reshape(shape), dtype)
    return jax.block_until_ready(out)


def large(rows: int = 4096) -> Tree:
    """L: 16 leaves of 64 MiB, float32."""
    return _arrays({f"w{i}": ((rows, 4096), "float32") for i in range(16)})


def gpt2(layers: int = 12, vocabulary: int = 50257) -> Tree:
    """M: GPT-2-small in bfloat16 with Adam in float32: 445 leaves, 1.16 GiB."""
    shapes = {"wte": (vocabulary, 768), "wpe": (1024, 768)}
    sides = {"attn": (768, 2304), "proj": (768, 768)}
    sides |= {"fc": (768, 3072), "out": (3072, 768)}
    for i in range(layers):
        shapes |= {f"h{i}_ln_{n}": (768,) for n in ("1_w", "1_b", "2_w", "2_b")}
        for name, shape in sides.items():
            shapes |= {f"h{i}_{name}_w": shape, f"h{i}_{name}_b": shape[1:]}
    shapes.update(ln_f_w=(768,), ln_f_b=(768,))
    named = {f"params_{n}": (s, "bfloat16") for n, s in shapes.items()}
    named |= {f"mu_{n}": (s, "float32") for n, s in shapes.items()}
    named |= {f"nu_{n}": (s, "float32") for n, s in shapes.items()}
    return _arrays({**named, "count": ((), "int32")})


def small(count: int = 10_000) -> Tree:
    """S: 10,000 leaves of 256 float32."""
    return _arrays({f"w{i}": ((256,), "float32") for i in range(count)})


def embedding(rows: int = 50257) -> Tree:
    """One embedding of 50,257 x 768 float32, 147 MiB."""
    return _arrays({"wte": ((rows, 768), "float32")})


def sized(mebibytes: int) -> Tree:
    """16 leaves of together so many MiB, or more leaves of 64 MiB."""
    count = max(16, mebibytes // 64)
    rows = mebibytes * 256 // count
    return _arrays({f"w{i}": ((rows, 1024), "float32") for i in range(count)})


class Sizes(NamedTuple):
    """The trees that are saved and loaded whole, and the one of which rows are read."""

    whole: dict[str, ft.partial[Tree]]
    embedding: ft.partial[Tree]


def sizes(short: bool) -> Sizes:
    return Sizes(
        {
            "L": ft.partial(large, 256 if short else 4096),
            "M": ft.partial(gpt2, 1, 2000) if short else ft.partial(gpt2),
            "S": ft.partial(small, 200 if short else 10_000),
        },
        ft.partial(embedding, 16_384 if short else 50_257),
    )


def nbytes(tree: Tree) -> int:
    return sum(x.nbytes for x in tree.values())
