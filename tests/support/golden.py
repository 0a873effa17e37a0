"""The checkpoints in `tests/golden`: what is in them, and the program that wrote them.

They are written once, by the first release of their format version, and never again:
whatever becomes of the library, it must load them.
`PYTHONPATH=.:tests python -m support.golden VERSION` writes those of a version of the
format, all but those of functions.
"""

import pathlib
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest

import eqx_ckpt as ec
from support import inside


GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
METADATA = {"width": 8, "name": "gölden", "nested": [1, 2.5, None, {"a": True}]}


class Model(eqx.Module):
    norm: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP
    tied: list[jax.Array]
    heads: int = eqx.field(static=True)

    def __init__(self, heads: int = 4):
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")
        self.mlp = eqx.nn.MLP(3, 2, 8, 2, key=jr.key(0))
        one = jnp.arange(6.0).reshape(2, 3)
        self.tied = [one, one]
        self.heads = heads


def tree() -> dict[str, Any]:
    """One leaf of every kind, and of every dtype that differs in how it is stored."""
    rng = np.random.default_rng(0)
    model, state = eqx.nn.make_with_state(Model)()
    dtypes = "bool int8 uint8 int32 uint32 float16 bfloat16 float32 complex64".split()
    small = "int2 int4 uint2 uint4 float8_e4m3 float8_e4m3fn float8_e5m2".split()
    return {
        "model": model,
        "state": state,
        "dtypes": {name: jnp.arange(5).astype(name) for name in dtypes},
        "small": {
            name: np.arange(2).astype(getattr(ml_dtypes, name)) for name in small
        },
        "numpy": {
            "float64": rng.standard_normal((3, 4)),
            "int64": np.array([-(2**63), 2**63 - 1]),
            "big": np.arange(4, dtype=">i4"),
            "empty": np.zeros((0, 3)),
            "zero-d": np.array(1.5),
            "scalar": np.float32(0.1),
        },
        # Several chunks, the last of them padded.
        "chunks": rng.standard_normal((37, 11)).astype("float32"),
        "special": np.array([np.nan, -0.0, np.inf, -np.inf], "float32"),
        "weak": jnp.asarray(2.5),
        "keys": jr.split(jr.key(7), 3),
        "python": [True, 7, 2.5, 1 + 2j, 2**100],
        "text": {"str": "tab\tö", "bytes": b"\x00\xff"},
        "names": {"a.b": 1, "": 2, "ü": 3},
        "numbers": {-5: 4, 12: 5},
        "_METADATA": 6,
        "none": None,
    }


def storable(leaf: Any) -> bool:
    return ec.is_storable(leaf) or isinstance(leaf, (str, bytes))


def _chunks(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return (10, 11) if name == "chunks" else None


def write(directory: pathlib.Path) -> None:
    for layout in ("ocdbt", "zarr"):
        ec.tree_serialise_leaves(
            directory / layout,
            tree(),
            storable,
            layout=layout,
            metadata=METADATA,
            chunks=_chunks,
        )


def write_compressed(directory: pathlib.Path) -> None:
    big = {"weights": compressible(), "rest": jnp.ones(3)}
    for codec in ("lz4", "zstd"):
        ec.tree_serialise_leaves(directory / codec, big, compression=codec)
    path = directory / "zarr-lz4"
    ec.tree_serialise_leaves(path, big, compression="lz4", layout="zarr")


def write_files(directory: pathlib.Path) -> None:
    """As if the files were very large."""
    with pytest.MonkeyPatch.context() as patch:
        inside.limit(patch, min_file_bytes=1024)
        ec.tree_serialise_leaves(
            directory / "files", tree(), storable, metadata=METADATA, chunks=_chunks
        )
        tree_of_both = {"plain": compressible()[:9000], "weights": compressible()}
        ec.tree_serialise_leaves(
            directory / "lz4-files", tree_of_both, compression="lz4", chunks=16384
        )


def compressible() -> np.ndarray:
    return np.arange(32768, dtype=np.int32) % 7


def shards() -> dict[str, np.ndarray]:
    return {
        "rows": np.arange(512.0, dtype=np.float32).reshape(32, 16),
        "columns": np.arange(256.0, dtype=np.float32).reshape(4, 64),
        "copies": np.arange(9, dtype=np.int32),
    }


if __name__ == "__main__":
    from support import golden  # So that classes are not those of `__main__`.
    from support.processes import good, run_team_program

    out = GOLDEN / sys.argv[1]
    golden.write(out)
    golden.write_compressed(out)
    golden.write_files(out)
    good(run_team_program(2, "team_of_golden_shards", out))
    good(run_team_program(2, "team_of_golden_states", out))
