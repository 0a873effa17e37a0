"""The peak of memory, in MiB, of a compressed save to one file: `PATH`. Its leaf takes
256 MiB, which compression does not make much smaller."""

import sys

import numpy as np
from support.peaks import peak

import eqx_ckpt as ec


path = sys.argv[1]
tree = {"w": np.random.default_rng(0).standard_normal((64, 2**20), np.float32)}
save = lambda tree: ec.tree_serialise_leaves(
    path, tree, compression="lz4", max_bytes=2**24, durable=False
)
save({"w": tree["w"][0, : 2**16]})
print(peak(lambda: save(tree))[0])
