"""Random leaves, cut at random, through random sinks, and with thresholds at which a
little is much: each way out and in gives the same bits.

`python -m pytest tests/interop/test_mixtures.py -m long` runs many more.
"""

import random
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support import inside
from support.helpers import assert_alike

import eqx_ckpt as ec


_SIZES = [1, 2, 3, 5, 8, 13, 33, 64, 100] * 2 + [0]
_DTYPES = "float32 float32 bfloat16 float16 int8 uint16 bool complex64 int4".split()
_DTYPES += ["float8_e4m3fn"]
_SPECS = [P("a"), P("b"), P(("a", "b")), P(), P(None, "a"), P("b", "a")]


def _array(rng: random.Random) -> np.ndarray:
    shape = [rng.choice(_SIZES) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 2]))]
    numbers = np.random.default_rng(rng.getrandbits(32)).integers(-100, 100, shape)
    dtype = np.dtype(jnp.dtype(rng.choice(_DTYPES)))
    return (numbers % 8 if dtype.name == "int4" else numbers).astype("f4").astype(dtype)


def _sharded(x: np.ndarray, rng: random.Random) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    for spec in rng.sample(_SPECS, len(_SPECS)):
        try:
            return jax.device_put(x, NamedSharding(mesh, spec))
        except ValueError:  # The axes cannot be cut so.
            pass
    return jnp.asarray(x)


_MAKE: list[Any] = [
    *[lambda x, rng: jnp.asarray(x)] * 9,
    *[lambda x, rng: x] * 4,
    *[_sharded] * 2,
    lambda x, rng: x[::-1] if x.ndim else x,
    lambda x, rng: np.asfortranarray(x),
    lambda x, rng: jr.split(jr.key(3), rng.randrange(1, 9)),
    lambda x, rng: jnp.asarray(rng.choice([1, 2.5])),
    lambda x, rng: rng.choice([True, 3, 2.5, 1j, 2**70, "", "é" * 300, bytes(200)]),
    lambda x, rng: np.float32(2.5),
]


def _tree(rng: random.Random) -> dict[str, Any]:
    count = rng.choice([1, 3, 10, 30, 60])
    tree = {f"n{i}": rng.choice(_MAKE)(_array(rng), rng) for i in range(count)}
    if rng.random() < 0.3:
        tree["tied"] = rng.choice([*tree.values()])
    return {"one": jnp.ones(1), "model": tree}


def _chunks(rng: random.Random) -> Any:
    if rng.random() < 0.6:
        return rng.choice([None, 64, 256, 256, 1024, 4096])
    cut = random.Random(rng.random())
    part = lambda s: max(1, s // cut.randrange(1, 9))
    return lambda name, shape, dtype: tuple(map(part, shape))


def _options(rng: random.Random, sink: str) -> dict[str, Any]:
    options = {
        "chunks": _chunks(rng),
        "compression": rng.choice([None, None, "lz4", "zstd"]),
        "durable": False,
    }
    if sink != "a.zip":
        options["layout"] = rng.choice(["ocdbt", "ocdbt", "zarr"])
    return options


def _key(shape: tuple[int, ...], rng: random.Random) -> tuple[Any, ...]:
    """A part of an array: by slices and numbers, and at most one list of rows."""
    key: list[Any] = []
    for s in shape:
        some = [rng.randrange(-s, s) for _ in range(rng.randrange(9))] if s else []
        ways = [slice(*(rng.choice([None, *range(-s - 1, s + 2)]) for _ in "ab"))] * 3
        ways += [slice(None, None, rng.choice([2, 3, -1, 7])), slice(None)]
        ways += some[:1]
        if not any(isinstance(x, np.ndarray) for x in key):
            ways.append(np.asarray(some, int))
        key.append(rng.choice(ways))
    return tuple(key[: rng.randrange(len(shape) + 1)])


def _check_parts(path: str, tree: dict[str, Any], rng: random.Random) -> None:
    arrays = [k for k, x in tree["model"].items() if isinstance(x, np.ndarray)]
    for name in rng.sample(arrays, min(3, len(arrays))):
        x = tree["model"][name]
        key, is_verified = _key(x.shape, rng), rng.random() < 0.5
        part = ec.open(path)[f"model.{name}"][key].read(verify=is_verified)
        assert_alike(np.asarray(part), np.asarray(x[key]))


def _changed(x: Any, rng: random.Random) -> Any:
    if not isinstance(x, np.ndarray) or rng.random() < 0.7:
        return x
    return np.roll(x, 1)


def _run(seed: int, patch: pytest.MonkeyPatch, directory: Any) -> None:
    rng = random.Random(seed)
    for name, values in inside.THRESHOLDS.items():
        inside.limit(patch, **{name: rng.choice(values)})
    sink = rng.choice(["a", "a", "a", "a.zip", "memory"])
    root = f"memory://mixtures-{seed}" if sink == "memory" else str(directory)
    end = ".zip" if sink == "a.zip" else ""
    a, b, c, d = (f"{root}/{name}{end}" for name in "abcd")
    most = lambda: rng.choice([2**14, 2**18, None])

    def save(path: str, tree: Any, **options: Any) -> None:
        if rng.random() < 0.4:
            ec.async_tree_serialise_leaves(path, tree, **options).result()
        else:
            ec.tree_serialise_leaves(path, tree, max_bytes=most(), **options)

    def check(path: str, tree: Any) -> None:
        assert_alike(ec.tree_deserialise_leaves(path, tree, max_bytes=most()), tree)

    first = _tree(rng)
    options = _options(rng, sink)
    save(a, first, **options)
    check(a, first)
    _check_parts(a, first, rng)
    second = jtu.tree_map(lambda x: _changed(x, rng), first)
    if rng.random() < 0.5:
        options = _options(rng, sink)
    if root == str(directory) and options.get("layout") == "ocdbt":
        options["reuse"] = a
    save(b, second, **options)
    check(b, second)
    check(a, first)
    _check_parts(b, second, rng)
    stored = ec.open(b)
    mixed = {
        k: stored[f"model.{k}"] if f"model.{k}" in stored and rng.random() < 0.6 else x
        for k, x in second["model"].items()
    }
    save(c, second | {"model": mixed}, **_options(rng, sink))
    check(c, second)
    ec.convert(c, d, **_options(rng, sink))
    check(d, second)


@pytest.mark.parametrize("seed", range(20, 32))
def test_each_way_out_and_in(seed, tmp_path, monkeypatch):
    _run(seed, monkeypatch, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 300))
def test_each_way_out_and_in_often(seed, tmp_path, monkeypatch):
    _run(seed, monkeypatch, tmp_path)
