"""Errors of selectors of wrong types."""

import equinox as eqx
import jax
import jax.random as jr

import eqx_ckpt as ec


tree = {"x": 1.0}
ec.tree_serialise_leaves("memory://a", tree)
for keywords in (
    dict(where="x"),
    dict(where=[len]),
    dict(where={"x": True}),
    dict(where=jax.tree.map(eqx.is_array, eqx.nn.MLP(1, 1, 1, 0, key=jr.key(0)))),
    dict(source=0),
    dict(source=[b"x"]),
):
    try:
        ec.tree_deserialise_leaves("memory://a", tree, **keywords)
    except TypeError as e:
        print(e)
