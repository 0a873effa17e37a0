"""Exports shards to `PATH` and ends, as if killed, once one file is whole."""

import os
import sys

import jax.numpy as jnp

import eqx_ckpt as ec


sync, done = os.fsync, []


def die_at_the_second(fd):
    if done:
        os._exit(9)
    done.append(sync(fd))


os.fsync = die_at_the_second
ec.export_safetensors(
    sys.argv[1], {"a": jnp.zeros(9), "b": jnp.zeros(9)}, shard_bytes=9
)
