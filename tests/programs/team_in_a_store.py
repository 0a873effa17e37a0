"""Processes save a tree in the store at `URL` and load it: `LAYOUT`."""

import sys
from typing import Any

from support.leaves_of_all import check_a_load, tree

import eqx_ckpt as ec


url: str = sys.argv[5]
layout: Any = sys.argv[6]
place = ec.Store(url) / "c"
ec.tree_serialise_leaves(place, tree, layout=layout)
if layout == "ocdbt":
    ec.async_tree_serialise_leaves(place, tree).result()
check_a_load(place)
