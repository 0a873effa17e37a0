"""`open`, and reads into NumPy, start no backend of JAX: `CHECKPOINT`."""

import sys

import numpy as np
from jax._src import xla_bridge

import eqx_ckpt as ec


ckpt = ec.open(sys.argv[1])
print(ckpt, ckpt.tree.model, ckpt["model.head.weight"], ckpt["s"].read())
np.asarray(ckpt["model.head.weight"])
assert not xla_bridge.backends_are_initialized()
