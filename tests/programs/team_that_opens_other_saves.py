"""Loads without a sharding, and of another save in each process."""

import jax
import jax.numpy as jnp
import pytest
from support import inside
from support.member import caught, path, rank, rows

import eqx_ckpt as ec


like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
caught(ec.tree_deserialise_leaves, path / "0", like)
inside.replace(pytest.MonkeyPatch(), "URL of a place", lambda _: "one path")
like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows)}
together = ec.Together(timeout=60)
caught(ec.tree_deserialise_leaves, path / str(rank), like, processes=together)
