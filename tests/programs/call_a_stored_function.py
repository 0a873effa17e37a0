"""Calls the function `forward` of the checkpoint at `PATH`. Prints the result."""

import sys

import jax.random as jr
import numpy as np

import eqx_ckpt as ec


f = ec.open(sys.argv[1]).functions["forward"]
x = jr.normal(jr.key(1), (4, 3))
assert "test_functions" not in sys.modules
print(np.asarray(f(x, jr.key(2))).tobytes().hex())
