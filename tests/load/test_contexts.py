"""Saves and loads do not depend on what JAX is told for the caller's own functions."""

import contextlib
import functools as ft
import gc
import random
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from support import trees
from support.helpers import assert_alike, facts, long, until

import eqx_ckpt as ec


# More than are made one by one.
_COUNT = 1200


@contextlib.contextmanager
def _flag(name, value):
    """A flag of JAX, for all threads of this process."""
    was = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, was)


_FLAGS = {
    "jax_disable_jit": [True],
    "jax_debug_nans": [True],
    "jax_debug_infs": [True],
    "jax_debug_key_reuse": [True],
    "jax_enable_checks": [True],
    "jax_enable_custom_prng": [True],
    "jax_enable_x64": [True],
    "jax_check_tracer_leaks": [True],
    "jax_eager_constant_folding": [True],
    "jax_threefry_partitionable": [False],
    "jax_thread_guard": [True],
    "jax_remove_size_one_mesh_axis_from_type": [True],
    "jax_transfer_guard": ["disallow", "disallow_explicit"],
    "jax_numpy_rank_promotion": ["raise"],
    "jax_numpy_dtype_promotion": ["strict"],
    "jax_default_prng_impl": ["rbg"],
    "jax_legacy_prng_key": ["error"],
}


# Before JAX 0.7 it had another name.
_in_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh


def _mesh(kind):
    devices = jax.devices()[:4]
    return jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=devices)


_FLAG_BY_FLAG = {
    f"{name}={value}": lambda name=name, value=value: _flag(name, value)
    for name, values in _FLAGS.items()
    for value in values
    if hasattr(jax.config, name)
}


@contextlib.contextmanager
def _all_flags():
    with contextlib.ExitStack() as stack:
        for make in _FLAG_BY_FLAG.values():
            stack.enter_context(make())
        yield


_CONTEXTS = {
    **_FLAG_BY_FLAG,
    "none": contextlib.nullcontext,
    "all": _all_flags,
    "transfers here": lambda: jax.transfer_guard("disallow"),
    "NaNs here": lambda: jax.debug_nans(True),
    "another device": lambda: jax.default_device(jax.devices()[3]),
    "a mesh": lambda: _in_mesh(_mesh(AxisType.Auto)),
    "an explicit mesh": lambda: _in_mesh(_mesh(AxisType.Explicit)),
}
_QUICK = ["all", "another device", "an explicit mesh"]


def _kinds():
    """An array of each kind that JAX has, with bits of all sorts."""
    rng = random.Random(7)
    shape = (8, 3)
    out = {}
    for name in trees.JAX_DTYPES:
        array = trees.numbers(rng, trees.dtype_of(name), shape)
        if array.dtype.kind == "f":
            array[0], array[1] = np.nan, -np.inf
        out[name] = jnp.array(array)
    for value in (True, 3, 2.5, 1j, np.nan, np.inf):
        out[f"weak {value}"] = jnp.full(shape, value)
        out[f"weak scalar {value}"] = jnp.asarray(value)
    for impl in ("threefry2x32", "rbg"):
        out[impl] = jr.split(jr.key(3, impl=impl), 8)
    return out


@ft.cache
def _trees():
    """Each kind on no device, on one, on copies, and cut into shards; many of each;
    and leaves that are not JAX's."""
    kinds = _kinds()
    mesh = _mesh(AxisType.Auto)
    put = lambda sharding: jax.tree.map(lambda x: jax.device_put(x, sharding), kinds)
    is_cut = {name: x for name, x in kinds.items() if x.ndim}
    return {
        "plain": kinds,
        "on one": put(jax.devices()[1]),
        "copies": put(NamedSharding(mesh, P())),
        "cut": jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, P("x"))), is_cut
        ),
        "large": jnp.full(2**15, jnp.nan),
        "numpy": trees.numbers(random.Random(1), np.dtype("f8"), (3,)),
        "rest": [np.float16(2), True, 2**70, 0.5, 1j],
    }


def _read_all(path, like):
    return ec.materialise(ec.open(path).splice(like))


@pytest.mark.parametrize(
    "context", [*_QUICK, *long(*[x for x in _CONTEXTS if x not in _QUICK])]
)
def test_every_kind_of_leaf(tmp_path, context):
    tree = _trees()
    like = eqx.filter_eval_shape(lambda: tree["plain"])
    with _CONTEXTS[context]():
        ec.tree_serialise_leaves(tmp_path / "a", tree)
        ec.tree_serialise_leaves(tmp_path / "b", tree, layout="zarr", processes="own")
        ec.async_tree_serialise_leaves(tmp_path / "c", tree).result()
        with jax.transfer_guard("allow"):
            # Where JAX puts an array that is bound to no device.
            here = jax.device_put(np.zeros(2)).sharding
        made = [
            *(ec.tree_deserialise_leaves(tmp_path / x, tree) for x in "abc"),
            _read_all(tmp_path / "a", tree),
        ]
        into = ec.tree_deserialise_leaves(tmp_path / "a", like, source="plain")
    for out in made:
        _check(out, tree, here)
    _check(into, tree["plain"], here)
    # What is compiled sees them as they are.
    keys = jax.dtypes.prng_key
    arrays = {k: x for k, x in into.items() if not jnp.issubdtype(x.dtype, keys)}
    for name, x in jax.jit(lambda xs: xs)(arrays).items():
        assert x.weak_type == tree["plain"][name].weak_type, name


def _check(tree, expected, here):
    pairs = jtu.tree_flatten_with_path(tree)[0], jtu.tree_leaves(expected)
    for (path, x), y in zip(*pairs, strict=True):
        is_free = isinstance(y, jax.Array) and not y.committed
        known = facts(y)[:-1] + ((here,) if is_free else facts(y)[-1:])
        assert facts(x) == known, jtu.keystr(path)


@ft.cache
def _many():
    value = np.asarray([np.nan, np.inf, 1.0], np.float32)
    return {
        "many": [jnp.asarray(value + i) for i in range(_COUNT)],
        "few": [jnp.asarray(value), jnp.float32(np.nan), jnp.arange(3)],
        "weak": [jnp.full(3, jnp.nan) for _ in range(_COUNT)],
        "keys": list(jr.split(jr.key(0), _COUNT)),
    }


@pytest.mark.parametrize("context", ["all", *long(*_FLAG_BY_FLAG)])
def test_many_alike_leaves(tmp_path, context):
    tree = _many()
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    like = eqx.filter_eval_shape(lambda: tree)
    with _CONTEXTS[context]():
        loaded = ec.tree_deserialise_leaves(tmp_path / "a", like)
        read = _read_all(tmp_path / "a", like)
    assert_alike(loaded, tree)
    assert_alike(read, tree)


def test_leaves_keep_little_memory(tmp_path):
    # A leaf that is kept is not to keep the others that were read with it.
    tree = {"a": [np.full(3, i, np.float32) for i in range(12_000)]}
    tree["b"] = [np.full(1028, i, np.float32) for i in range(3000)]
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    ec.tree_deserialise_leaves(tmp_path / "a", like)
    tracemalloc.start()
    try:
        loaded = ec.tree_deserialise_leaves(tmp_path / "a", like)
        kept = loaded["b"][::30]
        del loaded
        most = 2 * sum(x.nbytes for x in kept) + 2**19

        def is_little():
            gc.collect()  # JAX gives up what it has copied, in threads of its own.
            return tracemalloc.get_traced_memory()[0] < most

        until(is_little)
    finally:
        tracemalloc.stop()
