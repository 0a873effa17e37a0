"""Process 0 saves, and process 1 does not."""

from support.leaves_of_all import tree
from support.member import caught, path, rank

import eqx_ckpt as ec


if rank == 0:
    caught(ec.tree_serialise_leaves, path / "c", tree, processes=ec.Together(timeout=2))
