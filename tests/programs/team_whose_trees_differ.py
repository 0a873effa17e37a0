"""Saves in the ways `NAMES...`, in which processes differ. Prints the errors."""

import sys

import numpy as np
from support.leaves_of_all import tree as whole
from support.member import caught, meet, path, rank

import eqx_ckpt as ec


def altered(name):
    """The tree of this process, and where it saves it."""
    tree, place = dict(whole), path / name / "c"
    if name == "numpy":
        tree["numpy"] = np.arange(10) + rank
    elif name == "scalar":
        tree["step"] = rank
    elif name == "more" and rank:
        tree["more"] = 1
    elif name == "fewer" and rank:
        del tree["rows"]
    elif name == "path" and rank:
        place = path / name / "other"
    elif name in ("bad on 0", "bad on 1") and rank == int(name[-1]):
        tree["b"] = np.array([None])
    elif name == "foreign":
        place = path / name
        (place / "foreign").touch()
    elif name == "function" and rank:
        tree["function"] = print
    return tree, place


for name in sys.argv[5:]:
    tree, place = altered(name)
    together = ec.Together(timeout=6 if name == "path" else 60)
    meet(name)
    caught(ec.tree_serialise_leaves, place, tree, processes=together)
