"""Errors of selectors of wrong types."""

import eqx_ckpt as ec


tree = {"x": 1.0}
ec.tree_serialise_leaves("memory://a", tree)
for keywords in (
    dict(where="x"),
    dict(where=[len]),
    dict(source=0),
    dict(source=[b"x"]),
):
    try:
        ec.tree_deserialise_leaves("memory://a", tree, **keywords)
    except TypeError as e:
        print(e)
