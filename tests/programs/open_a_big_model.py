"""A skeleton of 70 billion parameters with lazy leaves: `DIRECTORY`. Prints its
parameters, seconds, and MiB of memory."""

import pathlib
import resource
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from attacks import forge
from support.clock import timed

import eqx_ckpt as ec


class Block(eqx.Module):
    attention: list[eqx.nn.Linear]
    mlp: list[eqx.nn.Linear]
    norms: list[eqx.nn.RMSNorm]

    def __init__(self, key, unit):
        d, h = 8 * unit, 28 * unit
        make = lambda i, o: eqx.nn.Linear(i, o, use_bias=False, key=key)
        self.attention = [make(d, d), make(d, unit), make(d, unit), make(d, d)]
        self.mlp = [make(d, h), make(d, h), make(h, d)]
        self.norms = [eqx.nn.RMSNorm(d), eqx.nn.RMSNorm(d)]


class Llama(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, unit):
        d, words = 8 * unit, 128 * unit
        self.embedding = eqx.nn.Embedding(words, d, key=key)
        self.blocks = [Block(key, unit) for _ in range(80)]
        self.head = eqx.nn.Linear(d, words, use_bias=False, key=key)


# The index of a small model, with all its dimensions 1024 times as large.
small = eqx.filter_eval_shape(lambda key: Llama(key, 1), jr.key(0))
is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
fill = lambda x: jnp.zeros(x.shape) if is_shape(x) else x
path = pathlib.Path(sys.argv[1])
ec.tree_serialise_leaves(path, jax.tree.map(fill, small))


def scaled(x):
    if isinstance(x, dict):
        return {key: scaled(value) for key, value in x.items()}
    if isinstance(x, list):
        return list(map(scaled, x))
    return 1024 * x if type(x) is int else x


def grow(value):
    for row in value["templates"]:
        row[3] = row[5] = scaled(row[3])
    value["tree"]["values"] = scaled(value["tree"]["values"])


forge(path, grow)
like = eqx.filter_eval_shape(lambda key: Llama(key, 1024), jr.key(0))

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lazy, seconds = timed(3, lambda: ec.open(path).splice(like))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
leaves = jax.tree.leaves(lazy)
assert all(isinstance(x, ec.LazyArray) for x in leaves)
print(sum(x.size for x in leaves), seconds, grown / 1024)
