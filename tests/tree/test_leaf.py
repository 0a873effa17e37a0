import enum
import functools as ft
import itertools as it
import math
import os
import re
import tempfile

import equinox as eqx
import hypothesis as hyp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)
from support.helpers import (
    assert_alike,
    enable_x64,
    examples,
    facts,
    files_of,
    long,
)

import eqx_ckpt as ec


layouts = pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])

_jax_dtypes = (
    "bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 bfloat16 float16 "
    "float32 complex64 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
_wide = "int64 uint64 float64 complex128".split()
_numpy_dtypes = _jax_dtypes + _wide + "float6_e2m3fn float6_e3m2fn int1 uint1".split()

_nans = {
    "float16": [0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE5A, 1],
    "bfloat16": [0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFDA, 1],
    "float32": [1 << 31, 0x7F8 << 20, 0xFF8 << 20, 0x7F800001, 0xFFC12345, 1],
    "float64": [1 << 63, 0x7FF << 52, 0xFFF << 52, 1 + (0x7FF << 52), (1 << 64) - 9, 1],
}
_nans["complex64"] = _nans["float32"]
_nans["complex128"] = _nans["float64"]


@pytest.fixture
def x64(request):
    with enable_x64(request.param):
        yield request.param


widths = pytest.mark.parametrize(
    "x64, layout",
    [
        *[(False, "ocdbt"), (True, "zarr")],
        *long((False, "zarr"), (True, "ocdbt")),
    ],
    indirect=["x64"],
)


def _dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def _vector(name):
    """Every bit pattern of a small dtype. Of a larger one random bits, and for floats
    -0.0, infinities, a subnormal number, and NaNs of both kinds with payloads."""
    dtype = _dtype(name)
    if name == "bool":
        return np.array([True, False, False, True])
    if dtype.itemsize == 1:
        kind = ml_dtypes.iinfo if "int" in name else ml_dtypes.finfo
        return np.arange(2 ** kind(dtype).bits, dtype=np.uint8).view(dtype)
    size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    head = np.array(_nans.get(name, []) * 2, f"u{size}").view(dtype)
    random = np.random.default_rng(0).integers(0, 256, 16 * dtype.itemsize, np.uint8)
    return np.concatenate([head, random.view(dtype)])


def _forms(array):
    return {
        "vector": array,
        "scalar": array[:1].reshape(()),
        "matrix": np.stack([array, array[::-1]]),
        "empty": array[:0].reshape(3, 0, 2),
        "rank32": array[:2].reshape((1,) * 15 + (2,) + (1,) * 16),
    }


def _jax_tree(x64):
    names = _jax_dtypes + (_wide if x64 else [])
    return {
        name: {form: jax.device_put(x) for form, x in _forms(_vector(name)).items()}
        for name in names
    }


def _numpy_tree(names):
    out = {}
    for name in names:
        forms = _forms(_vector(name))
        matrix = np.stack([forms["vector"]] * 3 + [forms["vector"][::-1]])
        forms["fortran"] = np.asfortranarray(matrix)
        forms["strided"] = matrix[::2, ::-1]
        forms["broadcast"] = np.broadcast_to(matrix[0, 0], (2, 3))
        forms["readonly"] = matrix.copy()
        forms["readonly"].flags.writeable = False
        if matrix.dtype.itemsize > 1:
            swapped = matrix.astype(matrix.dtype.newbyteorder(">"))
            forms["big"] = swapped
            forms["bigstrided"] = swapped.T[1:, ::2]
            forms["bigscalar"] = swapped[:1, 0].reshape(())
        out[name] = forms
    return out


def _generics(names):
    return {name: _vector(name)[-1] for name in names}


def _native(tree):
    return jtu.tree_map(lambda x: x.astype(x.dtype.newbyteorder("=")), tree)


def _load_each(path, likes):
    return [ec.tree_deserialise_leaves(path, like) for like in likes]


# ---- Bits, dtypes and types.


@widths
def test_jax_arrays(x64, layout, tmp_path):
    tree = _jax_tree(x64)
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    likes = [
        tree,
        jtu.tree_map(lambda x: jnp.asarray(np.zeros_like(np.asarray(x))), tree),
        eqx.filter_eval_shape(lambda: tree),
        ec.skeleton(lambda: tree),
    ]
    for loaded in _load_each(tmp_path / "c", likes):
        assert_alike(loaded, tree)
    host = jtu.tree_map(np.asarray, tree)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", host), host)
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), tree)


@widths
def test_numpy_arrays(x64, layout, tmp_path):
    tree = _numpy_tree(_numpy_dtypes)
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    likes = [
        tree,
        jtu.tree_map(lambda x: np.empty_like(x), tree),
        ec.skeleton(lambda: tree),
    ]
    for loaded in _load_each(tmp_path / "c", likes):
        assert_alike(loaded, tree)
        for x in jtu.tree_leaves(loaded):
            assert x.flags.writeable and x.flags.aligned and x.flags.forc
    native = _native(tree)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", native), native)
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), native)


@widths
def test_numpy_into_abstract_jax(x64, layout, tmp_path):
    names = _jax_dtypes + (_wide if x64 else [])
    tree = {"array": _numpy_tree(names), "generic": _generics(names)}
    expected = jtu.tree_map(jax.device_put, _native(tree))
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    likes = [eqx.filter_eval_shape(lambda: expected), expected]
    if x64:
        likes.append(eqx.filter_eval_shape(lambda: _native(tree)))
    for loaded in _load_each(tmp_path / "c", likes):
        assert_alike(loaded, expected)


@widths
def test_numpy_scalars(x64, layout, tmp_path):
    tree = _generics(_numpy_dtypes)
    tree["np.bool"], tree["longlong"] = np.False_, np.longlong(-(2**63))
    tree["nan"] = np.uint64((1 << 64) - 9).view(np.float64)
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    likes = [tree, {k: type(v)(0) for k, v in tree.items()}, ec.skeleton(lambda: tree)]
    for loaded in _load_each(tmp_path / "c", likes):
        assert_alike(loaded, tree)
    tree["longlong"] = np.int64(-(2**63))
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), tree)


class _Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class _Seconds(float):
    pass


@widths
def test_python_scalars(x64, layout, tmp_path):
    payload = float(np.uint64((1 << 64) - 9).view(np.float64))
    tree = {
        "bool": [True, False],
        "int": [0, -1, 2**31, -(2**63), 2**63 - 1],
        "long": [2**63, -(2**63) - 1, 2**64, 255**40, -(256**40), 7**1000],
        "float": [0.0, -0.0, math.inf, -math.inf, payload, 5e-324, 0.1],
        "complex": [0.1 + 2j, complex(-0.0, payload), complex(math.inf, -0.0)],
        "subclass": [_Colour.BLUE, _Seconds(1.5)],
    }
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    zeros = jtu.tree_map(lambda x: x if type(x) is _Colour else type(x)(0), tree)
    likes = [
        tree,
        zeros,
        eqx.filter_eval_shape(lambda: tree),
        ec.skeleton(lambda: tree),
    ]
    for loaded in _load_each(tmp_path / "c", likes):
        assert_alike(loaded, tree)
    del tree["subclass"]
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree.long), tree["long"])
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree.float), tree["float"])


@layouts
def test_str_and_bytes_where_the_filter_spec_says_so(layout, tmp_path):
    tree = {
        "str": ["", "a", "\0b\0", "ünï\U0001f600", "\ud800", "x" * 100_000],
        "bytes": [b"", b"\0\xff\0", bytes(range(256))],
        "number": 1.5,
        "function": jax.nn.relu,
    }

    def spec(x):
        return ec.is_storable(x) or isinstance(x, (str, bytes))

    ec.tree_serialise_leaves(tmp_path / "c", tree, spec, layout=layout)
    zeros = {
        "str": ["other"] * 6,
        "bytes": [b"other"] * 3,
        "number": 0.0,
        "function": jax.nn.relu,
    }
    for like in (tree, zeros, eqx.filter_eval_shape(lambda: zeros)):
        loaded = ec.tree_deserialise_leaves(tmp_path / "c", like, spec)
        assert_alike(loaded, tree)
    del tree["function"]
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), tree)
    # By default a str is configuration: not stored, and as in `like`, if it may differ.
    ec.tree_serialise_leaves(tmp_path / "d", tree, layout=layout)
    stored = ["bytes.0", "bytes.1", "bytes.2", "number"]
    assert list(ec.open(tmp_path / "d").leaves) == stored
    del zeros["function"]
    loaded = ec.tree_deserialise_leaves(tmp_path / "d", zeros, static=["str.*"])
    assert_alike(loaded, {**tree, "str": zeros["str"]})
    with pytest.raises(RuntimeError, match="number"):
        ec.tree_deserialise_leaves(tmp_path / "c", {**zeros, "number": "text"}, spec)
    with pytest.raises(RuntimeError, match="saved str, `like` has bytes"):
        ec.tree_deserialise_leaves(tmp_path / "c", b"", spec, source="str.1")


@layouts
def test_float0(layout, tmp_path):
    primal = {"a": jnp.arange(6).reshape(2, 3), "b": jnp.arange(3.0), "c": 2}
    gradient = jax.grad(lambda x: (x["b"] * x["a"][0] * x["c"]).sum(), allow_int=True)(
        primal
    )
    gradient["empty"] = np.zeros((0, 3), jax.dtypes.float0)
    gradient["generic"] = np.zeros((), jax.dtypes.float0)[()]
    assert gradient["a"].dtype == jax.dtypes.float0
    ec.tree_serialise_leaves(tmp_path / "c", gradient, layout=layout)
    # JAX has a type of its own for them, which is private.
    gradient["a"], gradient["c"] = np.asarray(gradient["a"]), np.asarray(gradient["c"])
    for like in (gradient, ec.skeleton(lambda: gradient)):
        assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", like), gradient)
    del gradient["generic"]
    like = eqx.filter_eval_shape(lambda: gradient)
    loaded = ec.tree_deserialise_leaves(tmp_path / "c", like, unexpected="ignore")
    assert_alike(loaded, gradient)
    with pytest.raises(RuntimeError, match="dtype"):
        like = {**gradient, "a": np.zeros((2, 3), bool)}
        ec.tree_deserialise_leaves(tmp_path / "c", like, unexpected="ignore")


@widths
def test_weak_types(x64, layout, tmp_path):
    payload = np.array([1 << 31, 0xFFC12345, 0x7F800001], np.uint32).view(np.float32)
    tree = {
        "float": jnp.asarray(0.1),
        "int": jnp.asarray(7),
        "complex": jnp.asarray(1j),
        "matrix": jnp.full((2, 3), 1.5),
        "empty": jnp.full((0, 3), 1.5),
        "nan": jnp.full((3,), 0.0).at[...].set(payload),
        "strong": jnp.asarray(np.full((2, 3), 1.5, jnp.asarray(0.1).dtype)),
        "committed": jax.device_put(jnp.full((2,), 1.5), jax.devices()[1]),
    }
    assert all(bool(x.weak_type) == (name != "strong") for name, x in tree.items())
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", tree), tree)
    tree["committed"] = jnp.full((2,), 1.5)
    for like in (eqx.filter_eval_shape(lambda: tree), ec.skeleton(lambda: tree)):
        assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", like), tree)
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), tree)
    # The type comes from `like`: strong where it is strong, and weak where it is weak.
    flipped = jtu.tree_map(lambda x: jnp.asarray(x, x.dtype), tree)
    flipped["strong"] = tree["matrix"]
    assert not flipped["matrix"].weak_type and flipped["strong"].weak_type
    for like in (flipped, eqx.filter_eval_shape(lambda: flipped)):
        assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", like), flipped)


# ---- PRNG keys.


@widths
def test_prng_keys(x64, layout, tmp_path):
    tree = {}
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jr.key(2**31 - 5, impl=impl)
        tree[impl] = {
            "key": key,
            "batch": jr.split(key, 6).reshape(2, 3),
            "empty": jr.split(key, 6)[:0],
            "raw": jr.PRNGKey(3, impl=impl),
            "committed": jax.device_put(key, jax.devices()[2]),
        }
    zeros = {
        impl: {
            "key": jr.key(0, impl=impl),
            "batch": jr.split(jr.key(0, impl=impl), 6).reshape(2, 3),
            "empty": keys["empty"],
            "raw": jnp.zeros_like(keys["raw"]),
            "committed": jax.device_put(jr.key(0, impl=impl), jax.devices()[2]),
        }
        for impl, keys in tree.items()
    }
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    for loaded in _load_each(tmp_path / "c", [tree, zeros]):
        assert_alike(loaded, tree)
    draws = jr.normal(loaded["rbg"]["batch"][1, 2], (3,))
    assert facts(draws) == facts(jr.normal(tree["rbg"]["batch"][1, 2], (3,)))
    for keys in tree.values():
        keys["committed"] = keys["key"]
    likes = [eqx.filter_eval_shape(lambda: tree), ec.skeleton(lambda: tree)]
    for loaded in _load_each(tmp_path / "c", likes):
        assert_alike(loaded, tree)
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), tree)
    # The words of a key and the key are made of each other by a cast alone.
    for place, like in (
        ("rbg.key", tree["rbg"]["raw"]),
        ("rbg.raw", tree["rbg"]["key"]),
    ):
        load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "c", like)
        with pytest.raises(RuntimeError, match=place):
            load(source=place)
        words = lambda x: x if x.dtype == "uint32" else jr.key_data(x)
        loaded, saved = load(source=place, cast=True), tree["rbg"][place[4:]]
        assert loaded.dtype == like.dtype and (words(loaded) == words(saved)).all()
    # A key of another implementation is something else.
    for place, like in (
        ("rbg.key", jr.key(0)),
        ("rbg.key", jr.key(0, impl="unsafe_rbg")),
        ("rbg.key", jax.eval_shape(jr.key, 0)),
        ("rbg.batch", tree["rbg"]["key"]),
        ("rbg.batch", tree["rbg"]["batch"].T),
    ):
        with pytest.raises(RuntimeError, match=place):
            ec.tree_deserialise_leaves(tmp_path / "c", like, source=place, cast=True)


# ---- Places: shardings and committed-ness.


@layouts
def test_committed_where_like_is(layout, tmp_path, getkey):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    third = SingleDeviceSharding(jax.devices()[3])
    big, small = jr.normal(getkey(), (512, 64)), jr.normal(getkey(), (8, 2))
    tree = {"big": big, "small": small, "key": jr.split(getkey(), 8)}
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    for sharding in (rows, third, NamedSharding(mesh, P())):
        put = jax.device_put(tree, sharding)
        skeleton = ec.skeleton(lambda: tree, sharding=sharding)
        for like in (put, skeleton):
            loaded = ec.tree_deserialise_leaves(tmp_path / "c", like)
            assert_alike(loaded, put)
            assert all(x.committed for x in jtu.tree_leaves(loaded))
    # And saved from many devices, loaded as if there were one.
    ec.tree_serialise_leaves(tmp_path / "c", jax.device_put(tree, rows), layout=layout)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", tree), tree)
    assert not any(x.committed for x in jtu.tree_leaves(tree))


# ---- One array at two places.


@layouts
def test_aliases(layout, tmp_path, getkey):
    big, small, host = jr.normal(getkey(), (300, 100)), jr.key(1), np.arange(5.0)
    large = np.arange(50_000, dtype=np.float32)
    tree = {
        "a": [big, small, host, large, host.copy()],
        "b": (big, small, host, large),
    }
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    stored = big.nbytes + 8 + 2 * host.nbytes + large.nbytes
    assert ec.open(tmp_path / "c").nbytes == stored

    def is_one(tree):
        return [x is y for x, y in zip(tree["a"], tree["b"])]

    for load in (
        lambda like: ec.tree_deserialise_leaves(tmp_path / "c", like),
        lambda like: ec.materialise(ec.open(tmp_path / "c").splice(like)),
    ):
        loaded = load(tree)
        assert_alike(loaded, tree)
        assert is_one(loaded) == [True] * 4
        assert loaded["a"][4] is not loaded["a"][2]
        # Two objects in `like`, as after a step of training: two objects.
        apart = jtu.tree_map(lambda x: x.copy(), tree)
        loaded = load(apart)
        assert_alike(loaded, tree)
        assert is_one(loaded) == [False] * 4
        loaded["a"][2][:] = loaded["a"][3][:] = 7
        assert_alike(loaded["b"], tree["b"])
        # Nor do two leaves of different types share memory.
        for one, two in ((jnp.zeros_like, np.copy), (np.copy, jnp.zeros_like)):
            loaded = load(
                {
                    **tree,
                    "a": [*tree["a"][:3], one(large), host.copy()],
                    "b": (*tree["b"][:3], two(large)),
                }
            )
            a, b = loaded["a"][3], loaded["b"][3]
            (a if one is np.copy else b)[:] = 7
            assert (np.asarray(b if one is np.copy else a) == large).all()
        # One object in `like`, two arrays in the checkpoint: two arrays.
        like = {**tree, "a": [*tree["a"][:4], host]}
        loaded = load(like)
        assert_alike(loaded, tree)
        assert loaded["a"][4] is not loaded["a"][2]


def _donate(tree):
    add = jax.jit(lambda t: jtu.tree_map(lambda x: x + 1, t), donate_argnums=0)
    return add(tree)


@layouts
def test_a_loaded_tree_can_be_donated(layout, tmp_path, getkey):
    big, small = jr.normal(getkey(), (2**16, 5)), jr.normal(getkey(), (3,))
    tree = {"a": [big, small], "b": [big, small], "c": big[:1000], "d": jnp.float32(1)}
    expected = jtu.tree_map(lambda x: np.asarray(x) + 1, tree)
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    separate = jtu.tree_map(lambda x: x.copy(), tree)
    for like in (separate, eqx.filter_eval_shape(lambda: tree), ec.skeleton(_of, tree)):
        loaded = ec.tree_deserialise_leaves(tmp_path / "c", like)
        out = _donate(loaded)
        assert all(x.is_deleted() for x in jtu.tree_leaves(loaded))
        for x, y in zip(jtu.tree_leaves(out), jtu.tree_leaves(expected), strict=True):
            assert (np.asarray(x) == y).all()
    # The arrays that were saved, and the file, are as they were.
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", tree), tree)


def _of(tree):
    return tree


@layouts
def test_into_what_was_donated(layout, tmp_path, getkey):
    tree = {"a": jr.normal(getkey(), (3,)), "k": getkey(), "w": jnp.asarray(0.5)}
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    like = jtu.tree_map(lambda x: _deleted(x.copy()), tree)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", like), tree)


def test_not_into_tracers(tmp_path):
    tree = {"a": [jnp.arange(3.0)]}
    ec.tree_serialise_leaves(tmp_path / "c", tree)

    def load(like):
        return ec.tree_deserialise_leaves(tmp_path / "c", like)

    for transform in (jax.jit, lambda f: lambda x: jax.eval_shape(f, x)):
        with pytest.raises(TypeError, match="`a.0`: `like` has a tracer there"):
            transform(load)(tree)
    skeleton = eqx.filter_eval_shape(lambda: tree)
    assert_alike(jax.jit(lambda: load(skeleton))(), tree)


# ---- Conversions. Of each case: what is saved, and what is in `like`.


def _abstract(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def _save_cases(path, layout, cases):
    ec.tree_serialise_leaves(path, {k: v[0] for k, v in cases.items()}, layout=layout)
    return ec.open(path)


@layouts
def test_casts(layout, tmp_path):
    def of(dtype, *values):
        return np.array(values, dtype)

    third = 1 / 3
    cases = {
        "f32_f64": (of("f4", third, -0.0), of("f8", 9, 9)),
        "f64_f32": (of("f8", third, np.inf, np.nan), of("f4", 9, 9, 9)),
        "f64_big": (of("f8", third, -0.0), of(">f4", 9, 9)),
        "big_f32": (of(">f8", third, -0.0), of("f4", 9, 9)),
        "f64_jax": (of("f8", third, -0.0), _abstract("float32", 2)),
        "f32_bf16": (jnp.array([third, -0.0]), _abstract(jnp.bfloat16, 2)),
        "bf16_f16": (of(jnp.bfloat16, third, 6e4), jnp.zeros(2, "float16")),
        "f8_f32": (of(jnp.float8_e4m3fn, 0.5, 448), jnp.zeros(2)),
        "f4_bf16": (of(ml_dtypes.float4_e2m1fn, 1.5, -6), of(jnp.bfloat16, 9, 9)),
        "c64_c128": (of("c8", 1j / 3, -1), of("c16", 9, 9)),
        "c128_c64": (of("c16", 1j / 3, 1e30), jnp.zeros(2, "complex64")),
        "i8_i64": (of("i1", -128, 127), of("i8", 9, 9)),
        "i64_i8": (of("i8", -128, 127), of("i1", 9, 9)),
        "u64_i32": (of("u8", 0, 2**31 - 1), jnp.zeros(2, "int32")),
        "i4_u8": (of(ml_dtypes.int4, 0, 7), of("u1", 9, 9)),
        "u8_i2": (of("u1", 0, 1), of(ml_dtypes.int2, 0, 0)),
        "u2_i4": (of(ml_dtypes.uint2, 0, 3), jnp.zeros(2, "int4")),
        "f82_e8": (of(jnp.float8_e5m2, 0.5, 4), jnp.ones(2, jnp.float8_e8m0fnu)),
        "none_f": (of("f8").reshape(0, 2), of(jnp.bfloat16).reshape(0, 2)),
        "none_i": (of("i8").reshape(0, 2), of("u1").reshape(0, 2)),
        "numpy_scalar": (np.float32(third), np.float64(9)),
        "generic": (np.float64(third), np.float16(9)),
        "python": (third, jnp.float32(9)),
        "abstract": (third, _abstract("float32")),
        "complex": (complex(third, math.nan), np.complex64(9)),
        "zero_d": (jnp.float32(third), np.array(9.0)),
        # With x64 off, JAX narrows what these ask for.
        "narrow_f": (of("f8", third, -0.0), _abstract("float64", 2)),
        "narrow_i": (of("i8", -(2**31), 5), _abstract("int64", 2)),
        "narrow_c": (of("c16", 1j / 3, 5), _abstract("complex128", 2)),
        "narrow_0": (third, _abstract("float64")),
    }
    ckpt = _save_cases(tmp_path / "c", layout, cases)
    for name, (saved, like) in cases.items():
        with pytest.raises(
            RuntimeError, match=f"(?s)`{name}` is .*`cast=True`|exactly"
        ):
            ec.tree_deserialise_leaves(ckpt, like, source=name)
        loaded = ec.tree_deserialise_leaves(ckpt, like, source=name, cast=True)
        dtype = jax.dtypes.canonicalize_dtype(like.dtype)
        dtype = like.dtype if isinstance(like, (np.ndarray, np.generic)) else dtype
        with np.errstate(over="ignore"):
            expected = np.asarray(saved)
            if "2" in name and expected.dtype.itemsize == 1:
                expected = expected.astype("f4")
            expected = expected.astype(dtype)
        if isinstance(like, np.generic):
            expected = expected[()]
        elif not isinstance(like, np.ndarray):
            expected = jnp.asarray(expected)
        assert facts(loaded) == facts(expected), name
        lazy = ckpt.splice({name: like}, unexpected="ignore", cast=True)
        assert_alike(ec.materialise(lazy), {name: expected})


@layouts
def test_scalars_of_another_kind(layout, tmp_path):
    def zero_d(dtype, value=0):
        return np.array(value, dtype)

    cases = {
        "int_jax": (3, jnp.int32(0), jnp.int32(3)),
        "int_abstract": (3, _abstract("int32"), jnp.int32(3)),
        "int_generic": (-3, np.int8(0), np.int8(-3)),
        "int_zero_d": (3, zero_d(">i2"), zero_d(">i2", 3)),
        "int_sub": (7, jnp.int4(0), jnp.int4(7)),
        "long_generic": (2**64 - 1, np.uint64(0), np.uint64(2**64 - 1)),
        "jax_int": (jnp.int32(-3), 0, -3),
        "generic_int": (np.uint64(2**64 - 1), 0, 2**64 - 1),
        "zero_d_int": (zero_d(">i4", -5), 0, -5),
        "sub_int": (jnp.int4(-8), 0, -8),
        "float_jax": (-0.0, jnp.float32(1), jnp.float32(-0.0)),
        "float_bf16": (1.5, _abstract(jnp.bfloat16), jnp.bfloat16(1.5)),
        "inf": (math.inf, np.float16(0), np.float16(math.inf)),
        "nan": (math.nan, jnp.float32(0), jnp.float32(math.nan)),
        "jax_float": (jnp.float32(0.1), 0.0, float(np.float32(0.1))),
        "bf16_float": (jnp.bfloat16(0.1), 0.0, float(jnp.bfloat16(0.1))),
        "generic_float": (np.float64(-0.0), 0.0, -0.0),
        "generic_jax": (np.float64(0.5), jnp.float32(0), jnp.float32(0.5)),
        "jax_generic": (jnp.float32(0.1), np.float64(0), np.float64(np.float32(0.1))),
        "complex_jax": (-0.0 + 2j, _abstract("complex64"), jnp.complex64(-0.0 + 2j)),
        "complex_nan": (complex(math.nan, 2), np.complex64(0), np.complex64("nan+2j")),
        "jax_complex": (jnp.complex64(1j), 0j, 1j),
        "bool_jax": (True, jnp.asarray(False), jnp.asarray(True)),
        "bool_generic": (True, np.False_, np.True_),
        "bool_zero_d": (False, zero_d(bool, 1), zero_d(bool, 0)),
        "jax_bool": (jnp.asarray(True), False, True),
        "generic_bool": (np.True_, False, True),
    }
    ckpt = _save_cases(tmp_path / "c", layout, cases)
    like = {name: case[1] for name, case in cases.items()}
    expected = {name: case[2] for name, case in cases.items()}
    for cast in (False, True):
        loaded = ec.tree_deserialise_leaves(ckpt, like, cast=cast)
        assert_alike(loaded, expected)
    assert_alike(ec.materialise(ckpt.splice(like)), expected)


@layouts
def test_values_that_do_not_survive(layout, tmp_path):
    cases = {
        "third": (1 / 3, jnp.float32(0), "0.3333.* is not a float32 exactly"),
        "huge": (1e300, np.float32(0), "1e.300 is not a float32 exactly"),
        "imaginary": (1 + 0.1j, np.complex64(0), "is not a complex64 exactly"),
        "beside_nan": (complex(math.nan, 0.1), np.complex64(0), "exactly"),
        "beside_inf": (complex(0.1, math.inf), np.complex64(0), "exactly"),
        "generic": (np.float64(1 / 3), _abstract("float32"), "exactly"),
        "int": (2**31, jnp.int32(0), "2147483648 does not fit into int32"),
        "negative": (-1, np.uint64(0), "-1 does not fit into uint64"),
        "long": (2**64, np.uint64(0), "does not fit into uint64"),
        "long_as_bytes": (2**70, jnp.uint8(0), "does not fit into uint8"),
        "minus_long": (-(2**63) - 1, np.int64(0), "does not fit into int64"),
        "sub": (8, jnp.int4(0), "8 does not fit into int4"),
        "array": (np.array([5, -129, 127]), np.zeros(3, "i1"), "-129 does not fit"),
        "unsigned": (np.uint64([0, 2**63]), np.zeros(2, "i8"), "does not fit"),
        "narrow": (np.array([2**31]), _abstract("int64", 1), "fit into int32"),
    }
    ckpt = _save_cases(tmp_path / "c", layout, cases)
    for name, (_, like, message) in cases.items():
        cast = name in ("array", "unsigned", "narrow")
        with pytest.raises(RuntimeError, match=rf"(?s)survive.* {name}: .*{message}"):
            ec.tree_deserialise_leaves(ckpt, like, source=name, cast=cast)
    # `cast=True` rounds floats, and never changes an int.
    for name in ("int", "negative", "long", "minus_long", "sub"):
        with pytest.raises(RuntimeError, match="does not fit"):
            ec.tree_deserialise_leaves(ckpt, cases[name][1], source=name, cast=True)
    # All of them are in one report.
    names = ("int", "sub", "third")
    like = {name: cases[name][1] for name in names}
    with pytest.raises(RuntimeError, match=r"(?s) int: .* sub: .* third: "):
        ec.tree_deserialise_leaves(ckpt, like, unexpected="ignore")


class _Metres(np.ndarray):
    """As arrays with a unit are, such as those of astropy."""


class _Next(int):
    def __new__(cls, number):
        return super().__new__(cls, number + 1)


class _Twice(float):
    def __new__(cls, number):
        return super().__new__(cls, number * 2)


class _Louder(str):
    def __new__(cls, text):
        return super().__new__(cls, text.upper())


class _Known(int):
    def __new__(cls, number):
        return {1: super().__new__(cls, 1)}[number]


class _Flag(enum.IntFlag, boundary=enum.CONFORM):
    a = 1


class _Odd(float):
    """One whose methods say nothing of what it is."""

    def __repr__(self):
        return "odd"

    def __eq__(self, other):
        return False


@pytest.mark.parametrize(
    ("saved", "like", "why"),
    [
        (_Next(2), _Next(0), "`_Next\\(3\\)` is 4"),
        (np.float32(1.5), _Twice(0), "`_Twice\\(1.5\\)` is 3.0"),
        ("a", _Louder("b"), "`_Louder\\('a'\\)` is 'A'"),
        (4, _Flag.a, "`_Flag\\(4\\)` is <_Flag: 0>"),
        (2, _Known(1), "`_Known` cannot be made of it: 2"),
    ],
)
def test_classes_that_make_other_values_of_what_was_saved(tmp_path, saved, like, why):
    ec.tree_serialise_leaves(tmp_path / "c", {"x": saved}, True)
    with pytest.raises(RuntimeError, match=f"(?m)^  x: {why}"):
        ec.tree_deserialise_leaves(tmp_path / "c", {"x": like}, True)
    for good in (_Louder("A"), _Flag.a, _Known(1), _Odd(-0.0), _Odd("nan")):
        ec.tree_serialise_leaves(tmp_path / "c", {"x": good}, True)
        loaded = ec.tree_deserialise_leaves(tmp_path / "c", {"x": good}, True)["x"]
        assert type(loaded) is type(good)
        if isinstance(good, float):
            assert float.__repr__(loaded) == float.__repr__(good)
        else:
            assert loaded == good


def test_subclasses_of_arrays(tmp_path):
    tree = {"x": np.arange(3.0)}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    for like in (
        np.ones(3).view(_Metres),
        np.ones((1, 2)).view(np.matrix),
        np.ma.ones(3),
    ):
        with pytest.raises(TypeError, match=r"Leaf `x`: it is a `?\w+"):
            ec.tree_deserialise_leaves(tmp_path / "a", {"x": like})
        with pytest.raises(TypeError, match="leaf `x` cannot be saved: it is a"):
            ec.tree_serialise_leaves(tmp_path / "b", {"x": like})
    # What the error advises.
    with ec.register_leaf(_Metres, np.asarray, lambda x: x.view(_Metres)):
        metres = {"x": np.arange(3.0).view(_Metres)}
        ec.tree_serialise_leaves(tmp_path / "c", metres)
        assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", metres), metres)
    # An array whose memory is a file is an array.
    np.save(tmp_path / "a.npy", tree["x"])
    mapped = {"x": np.load(tmp_path / "a.npy", mmap_mode="r")}
    ec.tree_serialise_leaves(tmp_path / "d", mapped)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "d", mapped), tree)


def test_advice_keeps_digits(tmp_path):
    def make(key):
        return {"w": jr.normal(key, (2,)), "mean": np.array([0.1234567890123])}

    tree = make(jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    with pytest.raises(RuntimeError, match="mean .*`ec.skeleton` keeps it as it is"):
        ec.tree_deserialise_leaves(
            tmp_path / "a", eqx.filter_eval_shape(make, jr.key(0))
        )
    like = ec.skeleton(make, jr.key(0))
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", like), tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_legacy_keys_and_typed_ones(impl, tmp_path):
    one, many = jr.key(3, impl=impl), jr.split(jr.key(4, impl=impl), (5, 2))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "x"))
    typed = {"a": one, "b": many, "c": jax.device_put(many, sharding), "d": one}
    legacy = jax.tree.map(jr.key_data, typed)
    legacy["d"] = np.asarray(legacy["d"])
    for name, saved, other in (("typed", typed, legacy), ("legacy", legacy, typed)):
        path = tmp_path / name
        ec.tree_serialise_leaves(path, saved)
        for like in (other, eqx.filter_eval_shape(lambda other=other: other)):
            with pytest.raises(RuntimeError, match="(?s)kind.* b .*`cast=True`"):
                ec.tree_deserialise_leaves(path, like)
        # As the error advises.
        made = ec.tree_deserialise_leaves(path, other, cast=True)
        assert_alike(made, other)
        lazy = ec.open(path).splice(other, cast=True)
        assert_alike(ec.materialise(lazy), other)
        ec.tree_serialise_leaves(tmp_path / "again", lazy)
        kinds = [x.dtype for x in ec.open(tmp_path / "again").values()]
        assert kinds == [other[k].dtype for k in sorted(other)]
    wrong = {"a": jr.key(0, impl="rbg" if impl != "rbg" else "threefry2x32")}
    with pytest.raises(RuntimeError, match="of another kind"):
        ec.tree_deserialise_leaves(
            tmp_path / "legacy", wrong, unexpected="ignore", cast=True
        )
    data = ec.open(tmp_path / "legacy")["a"]
    with pytest.raises(TypeError, match="returns PRNG keys.*`cast=True`"):
        ec.lazy(lambda x: jr.wrap_key_data(x, impl=impl))(data)


_NARROW = [
    *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e8m0fnu"),
    *long("float8_e5m2", "float8_e4m3fnuz", "float8_e3m4", "float4_e2m1fn"),
]


@pytest.mark.parametrize("dtype", _NARROW)
def test_casts_never_overflow_in_silence(dtype, tmp_path):
    wanted = np.dtype(dtype)
    wide = {"float32": "f8", "complex64": "c16"}.get(dtype, "f4")
    part = np.float32 if dtype == "complex64" else wanted
    most = float(ml_dtypes.finfo(part).max)
    rest = [] if dtype == "float4_e2m1fn" else [math.nan]
    good = np.asarray([1, most, *rest], np.float64).astype(wide)
    large = float(np.finfo(wide).max)
    bad = np.concatenate([good, np.asarray([large, 2, large]).astype(wide)])
    if wide == "c16":
        bad[-1] = 1 + 1j * large
    # In one block with others; in many, of which two hold some.
    tree = {"good": good, "few": bad, "many": np.zeros(2**20, wide) + 1}
    tree["many"][[0, -1]] = large
    few = rf" few: .* into {dtype} \(2 of {bad.size} numbers"
    many = rf" many: .* into {dtype} \(2 of {2**20} numbers"
    path = tmp_path / "saved"
    ec.tree_serialise_leaves(path, tree, chunks=2**20)
    like = jax.tree.map(lambda x: np.zeros(x.shape, wanted), tree)
    saved = ec.open(path).tree

    pairs = [(lambda m: m, lambda c: c, ec.adapters.cast())]
    loads = [
        lambda: ec.tree_deserialise_leaves(path, like, cast=True),
        lambda: ec.materialise(ec.open(path).splice(like, cast=True)),
        lambda: ec.materialise([x.astype(dtype) for x in ec.open(path).values()]),
        lambda: ec.graft(like, path, pairs),
    ]
    for load in loads:
        with pytest.raises(RuntimeError, match="nothing was loaded") as e:
            load()
        assert re.search(few, str(e.value)) and re.search(many, str(e.value))
        assert " good:" not in str(e.value)
    ok = ec.tree_deserialise_leaves(path, like, cast=True, where=lambda t: t["good"])
    assert facts(ok["good"]) == facts(good.astype(wanted))
    if dtype == "complex64":
        return  # `dtype` is that of floats.
    given = {"dtype": dtype, "chunks": 2**18}
    to = tmp_path / "to"
    saves = [
        lambda: ec.tree_serialise_leaves(to, tree, **given),
        lambda: ec.tree_serialise_leaves(to, tree, layout="zarr", **given),
        lambda: ec.tree_serialise_leaves(tmp_path / "to.zip", tree, **given),
        lambda: ec.async_tree_serialise_leaves(to, tree, **given).result(),
    ]
    for save in saves:
        with pytest.raises(ValueError, match="nothing was saved") as e:
            save()
        assert re.search(few, str(e.value)) and re.search(many, str(e.value))
        assert os.listdir(tmp_path) == ["saved"]
    with pytest.raises(RuntimeError, match="do not survive"):
        ec.tree_serialise_leaves(to, saved, **given)
    ec.tree_serialise_leaves(to, {"good": good}, **given)
    assert facts(np.asarray(ec.open(to)["good"])) == facts(good.astype(wanted))


@layouts
def test_never_another_type_of_number(layout, tmp_path):
    values = {
        "bool": [
            True,
            np.True_,
            jnp.asarray(True),
            np.ones(2, bool),
            jnp.ones(2, bool),
        ],
        "int": [1, np.int8(1), jnp.int32(1), np.ones(2, int), jnp.ones(2, "uint4")],
        "float": [
            1.0,
            np.float16(1),
            jnp.float32(1),
            np.ones(2),
            jnp.ones(2, "bfloat16"),
        ],
        "complex": [1j, np.complex64(1), jnp.complex64(1), np.ones(2, complex)],
        "str": ["text"],
        "bytes": [b"text"],
        "key": [jr.key(1)],
    }
    ec.tree_serialise_leaves(tmp_path / "c", values, lambda x: True, layout=layout)
    ckpt = ec.open(tmp_path / "c")
    for (saved, ones), (wanted, others) in it.permutations(values.items(), 2):
        for i, one in enumerate(ones):
            for other in others:
                if np.shape(one) != np.shape(other):
                    continue
                with pytest.raises(RuntimeError, match=f"`{saved}.{i}` is "):
                    ec.tree_deserialise_leaves(
                        ckpt, other, lambda x: True, source=f"{saved}.{i}", cast=True
                    )
    # Nor another shape, however little another.
    for name, like in (
        ("int.0", np.zeros(1, int)),
        ("int.3", np.int64(0)),
        ("float.3", np.zeros((1, 2))),
        ("float.3", np.zeros((2, 1))),
        ("float.3", _abstract("float32", 1)),
        ("float.3", 1.0),
    ):
        with pytest.raises(RuntimeError, match="changed shape"):
            ec.tree_deserialise_leaves(ckpt, like, source=name, cast=True)
    for like in (np.array(["a"]), np.array([None]), np.zeros((), "M8[s]")):
        with pytest.raises(RuntimeError, match="`float.0` is "):
            ec.tree_deserialise_leaves(ckpt, like.reshape(()), source="float.0")


def test_x64_off_never_narrows_silently(tmp_path):
    with enable_x64(True):
        tree = {"f": jnp.arange(3.0), "i": jnp.int64(1), "c": jnp.ones(2, complex)}
        skeleton = eqx.filter_eval_shape(lambda: tree)
    # Arrays of 64 bits can be saved with x64 off.
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    for like in (tree, skeleton):
        with pytest.raises(RuntimeError, match=r"narrow it to .*`jax_enable_x64`") as e:
            ec.tree_deserialise_leaves(tmp_path / "c", like)
        first = str(e.value).split("\n")[0]
        assert " and c128[2] in `like`, and JAX would narrow it to complex64: " in first
        with enable_x64(True):
            assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", like), tree)
        narrow = ec.tree_deserialise_leaves(tmp_path / "c", like, cast=True)
        assert [str(x.dtype) for x in jtu.tree_leaves(narrow)] == [
            "complex64",
            "float32",
            "int32",
        ]
    host = jtu.tree_map(np.asarray, tree)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", host), host)
    # Nor where nobody says how they come back.
    own = ec.open(tmp_path / "c").tree
    for name in tree:
        with pytest.raises(RuntimeError, match=rf"{name}: JAX would narrow .*asarray"):
            own[name].read()
        assert_alike(np.asarray(own[name]), host[name])
    with pytest.raises(RuntimeError, match="(?s)c: .*f: .*i: JAX would narrow int64"):
        ec.materialise(own)


@layouts
def test_dtype_casts_floats_as_they_are_saved(layout, tmp_path):
    tree = {
        "f": jnp.array([1 / 3, -0.0]),
        "h": np.float64([[1 / 3, math.inf]] * 2).T,
        "w": jnp.full((2,), 1 / 3),
        "b": jnp.ones(3, jnp.bfloat16),
        "i": jnp.arange(3),
        "c": jnp.ones(2, "complex64"),
        "k": jr.key(3),
        "p": 1 / 3,
    }
    ec.tree_serialise_leaves(tmp_path / "c", tree, dtype=jnp.bfloat16, layout=layout)
    with np.errstate(over="ignore"):
        expected = {
            **tree,
            "f": tree["f"].astype(jnp.bfloat16),
            "h": tree["h"].astype(jnp.bfloat16),
            "w": tree["w"].astype(jnp.bfloat16),
        }
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", expected), expected)
    assert_alike(ec.materialise(ec.open(tmp_path / "c").tree), expected)
    for bad in ("int8", "complex64", "float128", object):
        with pytest.raises(ValueError, match="`dtype` must be a floating dtype"):
            ec.tree_serialise_leaves(tmp_path / "d", tree, dtype=bad)
    assert not (tmp_path / "d").exists()


# ---- An inverse, for any bits.

_names_of_dtypes = st.sampled_from(_numpy_dtypes)
_shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@examples(60)
@hyp.given(
    st.lists(st.tuples(_names_of_dtypes, _shapes), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
    st.sampled_from(["ocdbt", "zarr"]),
    st.none() | st.integers(1, 64),
)
def test_any_bits(parts, random, layout, chunks):
    tree = []
    for name, shape in parts:
        dtype = _dtype(name)
        data = random.randbytes(math.prod(shape) * dtype.itemsize)
        if name == "bool":
            data = bytes(x % 2 for x in data)
        tree.append(np.frombuffer(data, dtype).reshape(shape))
        if name in _jax_dtypes:
            tree.append(jax.device_put(tree[-1]))
    with tempfile.TemporaryDirectory() as path:
        ec.tree_serialise_leaves(
            path, tree, layout=layout, chunks=chunks, durable=False
        )
        for like in (tree, ec.skeleton(lambda: tree)):
            assert_alike(ec.tree_deserialise_leaves(path, like), tree)
        assert_alike(ec.materialise(ec.open(path).tree), tree)


# Leaves that are alike are described once: whatever their values and types are.
_TEXTS = "", "a", "ab", "é", "éé", "日本", "\0", "ab\0"
_texts = st.sampled_from(_TEXTS)
_leaves_alike = [
    _texts,
    _texts.map(np.str_),
    _texts.map(str.encode),
    _texts.map(str.encode).map(np.bytes_),
    st.integers(-(2**70), 2**70),
    *(st.booleans(), st.floats(width=32), st.complex_numbers(width=64)),
    st.floats(width=32).map(np.float32),
    st.integers(1, 3).map(jnp.ones),
]


@examples(100)
@hyp.given(st.lists(st.sampled_from(_leaves_alike), min_size=1, max_size=6), st.data())
def test_leaves_of_any_values_side_by_side(types, data):
    """And those of a later save of a tree that is like it."""
    every = lambda x: True
    with tempfile.TemporaryDirectory() as path:
        for _ in range(2):
            now = [data.draw(x) for x in types]
            ec.tree_serialise_leaves(path, now, every, durable=False)
            assert not ec.verify(path)
            assert_alike(ec.tree_deserialise_leaves(path, now, every), now)


# ---- What must be refused, before anything is written, with the leaf named.


def _deleted(x):
    x.delete()
    return x


class _Twins:
    """A node whose two leaves have one name."""

    def __init__(self, *leaves):
        self.leaves = leaves


jtu.register_pytree_with_keys(
    _Twins,
    lambda x: (
        [(jtu.GetAttrKey("x"), x.leaves[0]), (jtu.DictKey("x"), x.leaves[1])],
        0,
    ),
    lambda _, leaves: _Twins(*leaves),
)


def _refused():
    return {
        "rank_jax": (jnp.zeros((1,) * 33), ValueError, "33 axes"),
        "rank_numpy": (np.zeros((0,) * 33), ValueError, "33 axes"),
        "rank_key": (jr.split(jr.key(0), 1).reshape((1,) * 32), ValueError, "33 axes"),
        "object": (np.array([1, None]), TypeError, "`object`"),
        "structured": (np.zeros(2, [("a", "f4")]), TypeError, "cannot be stored"),
        "void": (np.void(b"abc"), TypeError, "cannot be stored"),
        "record": (np.zeros(2, [("a", "f4")])[0], TypeError, "cannot be stored"),
        "date": (np.array("2020-01-01", "M8[D]"), TypeError, "cannot be stored"),
        "text": (np.array(["a", "bc"]), TypeError, "cannot be stored"),
        "string": (np.array(["a"], np.dtypes.StringDType()), TypeError, "cannot be"),
        "long_double": (np.zeros(2, np.longdouble), TypeError, "cannot be stored"),
        "masked": (np.ma.array([1, 2], mask=[True, False]), TypeError, "masked"),
        "matrix": (
            np.ones((1, 2)).view(np.matrix),
            TypeError,
            "is a `matrix`.*register_leaf",
        ),
        "metres": (np.ones(2).view(_Metres), TypeError, "is a `_Metres`.*register"),
        "none": (np.ones(()).view(_Metres), TypeError, "is a `_Metres`"),
        "deleted": (_deleted(jnp.ones(3) + 1), ValueError, "deleted or donated"),
        "deleted_key": (
            _deleted(jr.split(jr.key(0))),
            ValueError,
            "deleted or donated",
        ),
        "abstract": (_abstract("float32", 2), ValueError, "abstract"),
        "abstract_key": (jax.eval_shape(jr.key, 0), ValueError, "abstract"),
        "function": (jax.nn.relu, TypeError, "`custom_jvp|`function|`PjitFunction"),
        "set": ({1, 2}, TypeError, "`set` cannot be stored"),
    }


def _is_untouched(path):
    return not path.exists() and list(path.parent.iterdir()) == []


@layouts
def test_refusals_name_the_leaf_and_write_nothing(layout, tmp_path):
    path = tmp_path / "c"

    def save(tree, **kwargs):
        ec.tree_serialise_leaves(path, tree, lambda x: True, layout=layout, **kwargs)

    for name, (leaf, error, message) in _refused().items():
        with pytest.raises(
            error, match=rf"(?s)`a\.{name}` cannot be saved: .*{message}"
        ):
            save({"a": {name: leaf, "good": jnp.ones(3)}})
        assert _is_untouched(path)
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(ValueError, match=r"`a\.0` cannot be saved: it is a tracer"):
            transform(lambda x: save({"a": [x]}))(
                jnp.float32(1) + jnp.zeros(2)[0:1] * 0
            )
        assert _is_untouched(path)
    with pytest.raises(ValueError, match=r"name `b\.x`.*GetAttrKey.*DictKey"):
        save({"b": _Twins(1, jnp.ones(2))})
    assert _is_untouched(path)


@layouts
def test_a_refusal_leaves_the_checkpoint_that_was_there(layout, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", {"good": jnp.ones(3)}, layout=layout)
    before = files_of(tmp_path)
    for name, (leaf, error, message) in _refused().items():
        with pytest.raises(error):
            ec.tree_serialise_leaves(
                tmp_path / "c", {name: leaf}, lambda x: True, layout=layout
            )
    assert files_of(tmp_path) == before


@layouts
def test_metadata_that_json_would_change(layout, tmp_path):
    path = tmp_path / "c"
    for metadata, part in (
        ((1, 2), "`metadata` is of type `tuple`.*list"),
        ({"a": [1, {"b": (2,)}]}, r"`metadata\['a'\]\[1\]\['b'\]`"),
        ({1: 2}, "key 1, of type `int`"),
        ({"a": {None: 2}}, r"`metadata\['a'\]` has the key None"),
        ({True: 2}, "key True"),
        ([math.nan], r"`metadata\[0\]` is nan"),
        ({"a": -math.inf}, "is -inf"),
        ("\ud800", "not Unicode text"),
        ({"\ud800": 1}, "not Unicode text"),
        (np.float32(1), "`float32`"),
        (np.float64(1), "`float64`"),
        ([np.zeros(2)], "`ndarray`.*Store arrays in the tree"),
        (b"bytes", "`bytes`"),
        ({"a": {1, 2}}, "`set`"),
        (_Colour.RED, "`_Colour`"),
        (jnp.ones(2), "`ArrayImpl`"),
        (1j, "`complex`"),
    ):
        with pytest.raises(ValueError, match=part):
            ec.tree_serialise_leaves(path, 1.0, metadata=metadata, layout=layout)
        assert _is_untouched(path)
    good = {
        "": [
            None,
            True,
            -0.0,
            1e-320,
            2**70,
            "\0\x7f\u2028\U0001f600",
            [],
            {},
            {"a": [0]},
        ]
    }
    ec.tree_serialise_leaves(path, 1.0, metadata=good, layout=layout)
    assert repr(ec.open(path).metadata) == repr(good)
