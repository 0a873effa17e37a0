"""Processes end right after an asynchronous call, and wait for its save."""

from support import inside
from support.leaves_of_all import tree
from support.member import path, rank

import eqx_ckpt as ec


some = {name: tree[name] for name in ("small", "keys", "empty", "step")}
inside.forget()
for _ in range(3):
    ec.tree_serialise_leaves(path / "some", some)
made = inside.made()
# Where all lie is worked out once, and the files are planned by process 0.
assert made["deal"] == 1 and made["database"] == (rank == 0), made
ec.async_tree_serialise_leaves(path / "c", tree)
