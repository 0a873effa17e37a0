"""Errors of paths of wrong types."""

import eqx_ckpt as ec


for bad in ("", "a\0b", "nonsense://x", 3, b"x"):
    for use in (lambda p: ec.tree_serialise_leaves(p, 1.0), ec.open):
        try:
            use(bad)
        except (ValueError, TypeError) as e:
            print(type(e).__name__, str(e)[:40])

for call in (
    ec.tree_serialise_leaves,
    ec.tree_deserialise_leaves,
    ec.async_tree_serialise_leaves,
):
    try:
        call({"x": 1.0}, "path")
    except TypeError as e:
        print(e)
