"""Loads an array of which one process reads what is damaged."""

import jax
import jax.numpy as jnp
from support.member import caught, path, rows

import eqx_ckpt as ec


like = {"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=rows)}
caught(ec.tree_deserialise_leaves, path / "c", like, processes=ec.Together(timeout=60))
