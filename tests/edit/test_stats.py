import math

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from support import trees
from support.helpers import BytesRead

import eqx_ckpt as ec


SEEDS = [*range(8), *(pytest.param(i, marks=pytest.mark.long) for i in range(8, 200))]


def _reference(x):
    """The same by plain NumPy, with integers of Python and exact sums."""
    x = np.asarray(x)
    kind = "c" if np.issubdtype(x.dtype, np.complexfloating) else "f"
    if x.dtype.kind in "biu" or "int" in x.dtype.name:
        numbers = [int(n) for n in x.reshape(-1)]
    elif kind == "c":
        numbers = [complex(n) for n in x.reshape(-1)]
    else:
        numbers = [float(n) for n in x.reshape(-1)]
    is_nan = [n != n for n in numbers]
    is_inf = [
        not nan and not math.isfinite(abs_max(n)) for n, nan in zip(numbers, is_nan)
    ]
    good = [n for n, *bad in zip(numbers, is_nan, is_inf) if not any(bad)]
    counts = sum(is_nan), sum(is_inf), sum(n == 0 for n in numbers)
    nan = math.nan
    if not good:
        return (nan, nan, nan, nan, 0.0, *counts)
    with np.errstate(all="ignore"):
        ends = np.abs(np.array(good)) if kind == "c" else np.array(good, object)
        wide = np.array(good, np.clongdouble if kind == "c" else np.longdouble)
        mean = wide.mean()
        std = np.sqrt(np.mean(np.abs(wide - mean) ** 2))
        norm = np.sqrt(np.sum(np.abs(wide) ** 2))
        to = complex if kind == "c" else float
        return (ends.min(), ends.max(), to(mean), float(std), float(norm), *counts)


def abs_max(n):
    return max(abs(n.real), abs(n.imag)) if isinstance(n, complex) else float(n)


def _assert_alike(found, expected):
    *numbers, nan, inf, zero = found[2:]
    assert (nan, inf, zero) == expected[-3:]
    assert numbers[:2] == list(expected[:2]) or np.allclose(
        numbers[:2], expected[:2], rtol=1e-15, atol=0, equal_nan=True
    )
    scale = max(abs(x) for x in expected[:2]) if expected[0] == expected[0] else 1.0
    for x, y in zip(numbers[2:], expected[2:]):
        with np.errstate(all="ignore"):
            assert np.isclose(x, y, rtol=1e-9, atol=0, equal_nan=True) or (
                abs(x - y) <= 1e-14 * scale + 1e-322
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_any_tree(seed, tmp_path):
    tree = trees.make(seed)
    names = jtu.tree_leaves(ec.leaf_names(tree))
    leaves = {
        name: x for name, x in zip(names, jtu.tree_leaves(tree)) if ec.is_storable(x)
    }
    if not leaves:
        return
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    ckpt = ec.open(tmp_path / "a")
    for found in (ec.stats(tmp_path / "a"), ec.stats(tree), ec.stats(ckpt.tree)):
        assert set(leaves) <= set(found) and repr(found)
        for name, x in leaves.items():
            row = found[name]
            assert row.size == np.size(x)
            is_array = hasattr(x, "dtype")
            if is_array and (
                x.dtype == jax.dtypes.float0
                or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            ):
                assert row[2:] == (None,) * 8
            elif isinstance(x, int) and not -(2**63) <= x < 2**63:
                assert row.min == row.max == x and row.mean == float(x)
            else:
                _assert_alike(row, _reference(x))


def test_definitions():
    nan, inf = math.nan, math.inf
    found = ec.stats(
        {
            "floats": jnp.array([3, -4, 0.0, -0.0, nan, inf, -inf, nan]),
            "none": np.array([nan, inf]),
            "empty": np.zeros((0, 3)),
            "complex": np.array([3 + 4j, 0, complex(1, nan), complex(inf, 1)]),
            "ints": np.array([2**63 - 1, -(2**63)]),
            "unsigned": np.array([2**64 - 1, 0], np.uint64),
            "bools": np.array([True, False, True, True]),
            "huge": np.array([1.5e308, 1.5e308, -1.5e308, 1.5e308]),
            "tiny": np.array([5e-310, -5e-310]),
            "integer": -(2**5000),
            "key": jr.key(0),
            "half": jnp.full(100, 60000, jnp.float16),
        }
    )
    assert found["floats"][2:] == (-4, 3, -0.25, math.sqrt(6.1875), 5, 2, 3 - 1, 2)
    assert found["floats"].array == "f32[8]" and found["floats"].size == 8
    for name, norm in (("none", 0), ("empty", 0)):
        row = found[name]
        assert all(math.isnan(x) for x in row[2:6]) and row.norm == norm
    assert found["none"][7:] == (1, 1, 0) and found["empty"][7:] == (0, 0, 0)
    row = found["complex"]
    assert row[2:5] == (0, 5, 1.5 + 2j) and (row.std, row.norm) == (2.5, 5)
    assert row[7:] == (1, 1, 1)
    assert found["ints"][2:4] == (-(2**63), 2**63 - 1)
    assert found["ints"].mean == 0 and found["ints"].std == 2.0**63
    assert found["unsigned"][2:4] == (0, 2**64 - 1)
    assert found["bools"][2:5] == (0, 1, 0.75) and found["bools"].zero == 1
    assert found["huge"].mean == 0.75e308 and found["huge"].norm == inf
    assert math.isclose(found["huge"].std, 1.5e308 * math.sqrt(0.75))
    assert found["tiny"][4:6] == (0, 5e-310)
    assert found["integer"].min == -(2**5000) and found["integer"].mean == -inf
    assert found["key"][2:] == (None,) * 8
    assert found["half"].mean == 60000 and found["half"].norm == 600000


def test_many_blocks(tmp_path):
    """What a part of the array has does not matter, nor how it is cut."""
    x = np.asarray(jr.normal(jr.key(0), (350, 150))) + np.float32(1000)
    x[3, 4] = np.nan
    y = x[np.isfinite(x)].astype(np.float64)
    ec.tree_serialise_leaves(tmp_path / "a", {"x": x}, chunks=lambda *_: (50, 35))
    ec.export_safetensors(tmp_path / "b.safetensors", {"x": x})
    for path in ("a", "b.safetensors"):
        for max_bytes in (1, 10_000, None):
            with BytesRead() as read:
                row = ec.stats(tmp_path / path, max_bytes=max_bytes)["x"]
            assert x.nbytes <= read.total < 1.3 * x.nbytes
            assert (row.min, row.max) == (y.min(), y.max())
            expected = y.mean(), y.std(), np.linalg.norm(y)
            assert np.allclose(row[4:7], expected, rtol=1e-13, atol=0)
            assert row[7:] == (1, 0, 0)


def test_an_array_is_read_once(tmp_path):
    w = np.arange(2**17, dtype=np.float64)
    ec.tree_serialise_leaves(tmp_path / "a", {"w": w, "tied": w})
    with BytesRead() as read:
        found = ec.stats(tmp_path / "a")
    assert found["w"] == found["tied"] and read.total < 1.1 * w.nbytes


def test_the_table():
    found = ec.stats({"layers": [jnp.ones(2)] * 300, "name": "text"})
    lines = repr(found).splitlines()
    assert lines[0] == "Stats of a tree: 300 leaves"
    assert lines[-1] == "  ... and 100 more" and len(lines) == 203
    assert "f32[2]" in lines[2] and max(map(len, lines)) < 100
    assert dict(found) == {f"layers.{i}": found["layers.0"] for i in range(300)}


def test_damage(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones(2**15)}, layout="zarr")
    (tmp_path / "a" / "w" / "c" / "0").write_bytes(bytes(2**17))
    with pytest.raises(ec.DamagedError, match="w: its bytes are not those"):
        ec.stats(tmp_path / "a")
    assert ec.stats(tmp_path / "a", verify=False)["w"].zero == 2**15


def test_abstract_leaves():
    with pytest.raises(ValueError, match="Leaf `w`: it is abstract"):
        ec.stats(jax.eval_shape(lambda: {"w": jnp.ones(3)}))


@pytest.mark.parametrize(
    "dtype", "bool int8 uint64 float16 bfloat16 float64 complex64 int4".split()
)
def test_leaves_that_are_alike_are_measured_as_each_alone(dtype):
    """Each of them, whatever the others have: NaNs, infinities, huge numbers."""
    rng = np.random.default_rng(0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tree = {f"l{i}": rng.integers(0, 2, (3, 5)).astype(kind) for i in range(40)}
    tree |= {f"m{i}": rng.integers(0, 2, i % 3).astype(kind) for i in range(9)}
    if dtype in ("float16", "bfloat16", "float64", "complex64"):
        ends = ml_dtypes.finfo(kind)
        odd = np.nan, np.inf, -np.inf, ends.max, ends.tiny
        for i, value in enumerate(odd):
            tree[f"l{3 * i}"][i % 3, i] = value
    found = ec.stats(tree)
    ec.tree_serialise_leaves(f"memory://alike/{dtype}", tree)
    stored = ec.stats(f"memory://alike/{dtype}")
    for name, leaf in tree.items():
        (alone,) = ec.stats({"x": leaf}).values()
        assert repr(found[name]) == repr(alone) == repr(stored[name]), name
