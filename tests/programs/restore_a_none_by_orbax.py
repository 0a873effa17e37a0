"""Restores a None and an array by Orbax from `PATH` and prints them."""

import sys

import orbax.checkpoint as ocp


got = ocp.PyTreeCheckpointer().restore(sys.argv[1])
print(got["n"], got["w"].sum())
