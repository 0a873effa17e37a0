"""Loads a small array, by devices and from the disk; logs which and why."""

import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import inside
from support.member import copies, path, same

import eqx_ckpt as ec


logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, force=True)
patch = pytest.MonkeyPatch()
like = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=copies)}
for rate in (None, 1):
    if rate:
        inside.limit(patch, read_bytes_per_second=rate)
    out = ec.tree_deserialise_leaves(path / "c", like)
    assert same(out["w"], np.arange(2**18, dtype=np.float32).reshape(512, 512))
    print("next")
