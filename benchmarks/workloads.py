"""The trees that are saved and loaded: as flat dicts of named jax arrays on CPU."""

import jax
import jax.numpy as jnp
import numpy as np


Tree = dict[str, jax.Array]


def _arrays(shapes: dict[str, tuple[tuple[int, ...], str]]) -> Tree:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(48 * 2**20, dtype=np.float32)
    out = {}
    for i, (name, (shape, dtype)) in enumerate(shapes.items()):
        size = int(np.prod(shape, dtype=np.int64))
        start = (i * 4096) % (len(pool) - size)
        part = pool[start : start + size].reshape(shape)
        out[name] = jnp.array(part, dtype)
    return jax.block_until_ready(out)


def large() -> Tree:
    """L: 16 leaves of 64 MiB, float32."""
    return _arrays({f"w{i}": ((4096, 4096), "float32") for i in range(16)})


def gpt2() -> Tree:
    """M: GPT-2-small in bfloat16 with Adam in float32: 445 leaves, 1.16 GiB."""
    shapes = {"wte": (50257, 768), "wpe": (1024, 768)}
    for i in range(12):
        for name, shape in {
            "ln_1_w": (768,),
            "ln_1_b": (768,),
            "attn_w": (768, 2304),
            "attn_b": (2304,),
            "proj_w": (768, 768),
            "proj_b": (768,),
            "ln_2_w": (768,),
            "ln_2_b": (768,),
            "fc_w": (768, 3072),
            "fc_b": (3072,),
            "out_w": (3072, 768),
            "out_b": (768,),
        }.items():
            shapes[f"h{i}_{name}"] = shape
    shapes.update(ln_f_w=(768,), ln_f_b=(768,))
    named = {f"params_{n}": (s, "bfloat16") for n, s in shapes.items()}
    named |= {f"mu_{n}": (s, "float32") for n, s in shapes.items()}
    named |= {f"nu_{n}": (s, "float32") for n, s in shapes.items()}
    return _arrays({**named, "count": ((), "int32")})


def small(count: int = 10_000) -> Tree:
    """S: 10,000 leaves of 256 float32."""
    return _arrays({f"w{i}": ((256,), "float32") for i in range(count)})


def embedding() -> Tree:
    """One embedding of 50,257 x 768 float32, 147 MiB."""
    return _arrays({"wte": ((50257, 768), "float32")})


WORKLOADS = {"L": large, "M": gpt2, "S": small, "E": embedding}


def nbytes(tree: Tree) -> int:
    return sum(x.nbytes for x in tree.values())
