"""A save by the user and the group nobody: `PATH OPTIONS`."""

import json
import os
import sys
import tempfile

import numpy as np

import eqx_ckpt as ec


def save(path):
    ec.tree_serialise_leaves(path, {"w": np.ones(3)}, **json.loads(sys.argv[2]))


# Nobody may not read the libraries: they are imported before, by a save and another one
# in its place.
own = f"{tempfile.mkdtemp()}/{os.path.basename(sys.argv[1])}"
save(own)
save(own)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
save(sys.argv[1])
