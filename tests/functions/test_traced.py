"""Functions that are computed by blocks give what they give of the whole."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from support import inside
from support.helpers import enable_x64

import eqx_ckpt as ec


_numbers = itertools.count()


def computed(fn, *arrays, elementwise=True):
    """What `ec.lazy` gives of arrays that are saved."""
    path = f"memory://traced/{next(_numbers)}"
    ec.tree_serialise_leaves(path, list(arrays))
    return ec.lazy(fn, elementwise=elementwise)(*ec.open(path).values())


ELEMENTWISE = {
    "half": lambda w: w / 2,
    "cast": lambda w: w.astype(jnp.bfloat16),
    "where": lambda w: jnp.where(w > 0, w, 0.0),
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "clip": lambda w: jnp.clip(w, -1, 1),
    "of the shape": lambda w: w / w.shape[0],
    "bits": lambda w: lax.bitcast_convert_type(w, jnp.uint32) >> 3,
    "nan": jnp.nan_to_num,
    "constant": lambda w: jnp.full_like(w, 2),
    "bool": lambda w: jnp.isfinite(w) & (w != 0),
    "complex": lambda w: jnp.exp(1j * w).real,
    "jit": jax.jit(lambda w: w * 2),
    "checkpoint": jax.checkpoint(lambda w: w * 2),
    "composite": lax.composite(lambda w: w * 2, name="tests.twice"),
}
NOT = {
    "norm": (lambda w: w / jnp.linalg.norm(w), "`reduce_sum`"),
    "mean": (lambda w: w - w.mean(), "`reduce_sum`"),
    "sort": (jnp.sort, "`sort`"),
    "random": (lambda w: w + jr.normal(jr.key(0), w.shape), "`random_seed`"),
    "transposed": (lambda w: w.T, "float32"),
    "an index": (lambda w: w * jnp.arange(w.shape[1]), "`iota`"),
    "closed over": (lambda w: w + np.ones((5, 7), np.float32), "not an argument"),
    "bytes": (lambda w: lax.bitcast_convert_type(w, jnp.uint8), "result of shape"),
    "reversed": (lambda w: w[::-1], "`rev`"),
    "loop": (lambda w: lax.fori_loop(0, 3, lambda i, c: c * 2, w), "`scan`"),
    "scan": (lambda w: lax.scan(lambda c, _: (c * 2, None), w, None, 3)[0], "`scan`"),
    "rows": (lambda w: lax.map(lambda row: row * 2, w), "`scan`"),
    "while": (
        lambda w: lax.while_loop(lambda c: c.sum() < 99, lambda c: c * 2, w),
        "`while`",
    ),
    "cond": (
        lambda w: lax.cond(w.sum() > 0, lambda c: c * 2, lambda c: c, w),
        "`reduce_sum`",
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_blocks_are_those_of_the_whole(name):
    fn = ELEMENTWISE[name]
    w = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    w[0, :3] = np.nan, np.inf, -0.0
    lazy = computed(fn, w)
    whole = np.asarray(jax.jit(fn)(w))
    assert (lazy.shape, lazy.dtype) == (whole.shape, whole.dtype)
    for rows in (slice(0, 2), slice(2, 5)):
        for columns in (slice(0, 7), slice(3, 4)):
            block = np.asarray(lazy[rows, columns].read())
            np.testing.assert_allclose(
                block.astype(np.float64),
                whole[rows, columns].astype(np.float64),
                rtol=1e-6,
            )


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_elementwise_is_refused(name):
    fn, why = NOT[name]
    w = np.ones((5, 7), np.float32)
    with pytest.raises(ValueError, match="it is not elementwise") as e:
        computed(fn, w)
    assert why in str(e.value)
    whole = computed(fn, w, elementwise=False).read()
    np.testing.assert_array_equal(whole, jax.jit(fn)(w))


@given(st.floats(-3, 3), st.sampled_from(["f4", "bfloat16", "i4"]))
@settings(max_examples=20)
def test_scalars_and_several_arrays(number, dtype):
    dtype = jnp.dtype(dtype)
    a = np.arange(6).astype(dtype).reshape(2, 3)
    fn = lambda a, b, c: (a + b) * c
    scalar = np.asarray(number, np.float32)
    expected = np.asarray(jax.jit(fn)(a, a, scalar))
    got = np.asarray(computed(fn, a, a, scalar)[1:].read())
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected[1:])


def test_an_array_of_scalars_alone():
    fn = lambda a: jnp.broadcast_to(a, (5, 7)) * 2
    lazy = computed(fn, np.float32(3))
    np.testing.assert_array_equal(lazy[1:3, 2:].read(), np.full((2, 5), 6))
    with pytest.raises(ValueError, match="has `iota` in it"):
        computed(lambda a: a + jnp.arange(5), np.float32(3))


_OF_NUMBERS = {
    "add": lambda w: w + 1,
    "double": lambda w: w * 2,
    "clip": lambda w: jnp.clip(w, -20, 20),
    "where": lambda w: jnp.where(w % 2 == 0, w, -w),
    "index": lambda w: w + lax.broadcasted_iota(w.dtype, w.shape, 0),
    "largest": lambda w: w - w.max(),
    "reverse": lambda w: w[::-1],
    "twice": lambda w: jnp.broadcast_to(w[:1], w.shape),
}
_AROUND = {
    "jit": jax.jit,
    "inline": lambda f: jax.jit(f, inline=True),
    "checkpoint": jax.checkpoint,
    "composite": lambda f: lax.composite(f, name="tests.some"),
    "custom_jvp": lambda f: _with_jvp(f),
    "custom_vjp": lambda f: _with_vjp(f),
    "vmap": lambda f: lambda w: jax.vmap(f)(w) if w.ndim > 1 else f(w),
    "fori": lambda f: lambda w: lax.fori_loop(0, 3, lambda i, c: f(c), w),
    "scan": lambda f: lambda w: lax.scan(lambda c, _: (f(c), None), w, None, 2)[0],
    "rows": lambda f: lambda w: lax.map(f, w) if w.ndim > 1 else f(w),
    "while": lambda f: (
        lambda w: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, w)
        )[1]
    ),
    "cond": lambda f: lambda w: lax.cond(True, f, lambda c: c, w),
}


def _with_jvp(f):
    out = jax.custom_jvp(f)
    out.defjvps(None)
    return out


def _with_vjp(f):
    out = jax.custom_vjp(f)
    out.defvjp(lambda w: (f(w), None), lambda _, g: (g,))
    return out


def _program(words):
    def fn(w):
        for word in words:
            *around, last = word
            step = _OF_NUMBERS[last]
            for name in around:
                step = _AROUND[name](step)
            w = step(w)
        return w

    return fn


_words = st.tuples(
    st.lists(st.sampled_from([*_AROUND]), max_size=2), st.sampled_from([*_OF_NUMBERS])
)


@given(st.lists(_words.map(lambda x: (*x[0], x[1])), min_size=1, max_size=3))
@settings(max_examples=30)
def test_a_program_is_refused_or_gives_what_jax_gives(words):
    fn, w = _program(words), np.arange(-14, 14, dtype=np.int32).reshape(7, 4)
    expected = np.asarray(jax.jit(fn)(w))
    try:
        lazy = computed(fn, w)
    except ValueError as e:
        assert "it is not elementwise" in str(e)
        return
    np.testing.assert_array_equal(lazy.read(), expected)
    np.testing.assert_array_equal(lazy[2:5, 1:].read(), expected[2:5, 1:])


def test_x64_is_that_of_the_trace():
    fn = lambda w: w * 3
    with enable_x64(True):
        lazy = computed(fn, np.asarray([1e-300, 2.0]))
    out = np.asarray(lazy)
    assert out.dtype == np.float64 and out[0] == 3e-300


def _twice(w):
    return w * 2


def test_pickles_if_its_function_does():
    lazy = computed(_twice, np.ones(2, np.float32))
    again = pickle.loads(pickle.dumps(lazy))
    np.testing.assert_array_equal(again.read(), [2, 2])


@pytest.mark.parametrize("fn", [lambda w: (w, w), lambda w: {}, lambda w: None])
def test_one_array_is_returned(fn):
    with pytest.raises(TypeError, match="and not one array"):
        computed(fn, np.ones(2, np.float32), elementwise=False)


_scale = 1.0


def test_results_of_one_function_are_one_array_if_it_reads_the_same(tmp_path):
    class Settings:
        scale = 1.0

    shift, given = np.zeros(500), Settings()

    def fn(w):
        return w * _scale * given.scale + shift[: len(w)].astype(np.float32)

    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.arange(500.0)})
    w, out = ec.open(tmp_path / "a")["w"], []
    for number in range(4):
        globals()["_scale"] = 3.0 if number > 0 else 1.0
        given.scale = 5.0 if number > 1 else 1.0
        shift[1] = 7.0 if number > 2 else 0.0
        out += [ec.lazy(fn)(w), ec.lazy(fn)(w)]
    ec.tree_serialise_leaves(tmp_path / "b", out)
    again = ec.open(tmp_path / "b")
    values = [float(x[1].read()) for x in again.values()]
    assert values == [1, 1, 3, 3, 15, 15, 22, 22]
    assert len({tuple(inside.runs_of(tmp_path / "b", name)) for name in again}) == 4


def test_results_of_one_function_may_differ_if_it_calls_python(tmp_path):
    factor = iter([2.0, 3.0])

    def fn(w):
        return jax.pure_callback(lambda x: np.asarray(x) * next(factor), w, w)

    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones(2)})
    w = ec.open(tmp_path / "a")["w"]
    ec.tree_serialise_leaves(tmp_path / "b", [ec.lazy(fn)(w), ec.lazy(fn)(w)])
    again = ec.open(tmp_path / "b")
    assert sorted(float(x[1].read()) for x in again.values()) == [2, 3]
