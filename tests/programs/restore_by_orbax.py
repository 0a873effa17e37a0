"""Orbax restores a checkpoint: `PATH`."""

import sys

import orbax.checkpoint as ocp


got = ocp.PyTreeCheckpointer().restore(sys.argv[1])
print(got.keys(), got["head"].sum())
