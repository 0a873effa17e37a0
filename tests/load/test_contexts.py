"""Loads do not depend on what JAX is told for the caller's own functions."""

import gc
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import assert_alike, until

import eqx_ckpt as ec


# More than are made one by one.
_COUNT = 3000


@pytest.mark.parametrize(
    "context",
    [
        jax.disable_jit,
        jax.debug_nans,
        jax.debug_infs,
        jax.check_tracer_leaks,
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.numpy_rank_promotion("raise"),
    ],
    ids=["no jit", "NaNs", "infinities", "leaks", "transfers", "ranks"],
)
def test_many_alike_leaves(tmp_path, context):
    value = np.asarray([np.nan, np.inf, 1.0], np.float32)
    tree = {
        "many": [jnp.asarray(value + i) for i in range(_COUNT)],
        "few": [jnp.asarray(value), jnp.float32(np.nan), jnp.arange(3)],
        "key": jax.random.key(0),
    }
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    like = eqx.filter_eval_shape(lambda: tree)
    with context() if context.__name__ == "<lambda>" else context(True):
        loaded = ec.tree_deserialise_leaves(tmp_path / "a", like)
        read = ec.materialise(ec.open(tmp_path / "a").splice(like))
    assert_alike(loaded, tree)
    assert_alike(read, tree)


def test_leaves_keep_little_memory(tmp_path):
    # A leaf that is kept is not to keep the others that were read with it.
    tree = {"a": [np.full(3, i, np.float32) for i in range(4 * _COUNT)]}
    tree["b"] = [np.full(1028, i, np.float32) for i in range(_COUNT)]
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
