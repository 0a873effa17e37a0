"""Reads all of the checkpoint of PyTorch at `PATH` without an import of PyTorch."""

import sys

import eqx_ckpt as ec


ec.materialise(ec.open(sys.argv[1]).tree)
assert "torch" not in sys.modules and "pickle" not in dir(ec)
