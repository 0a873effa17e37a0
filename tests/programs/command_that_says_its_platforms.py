"""Runs the command line with `ARGUMENTS...`. Prints which platforms JAX may start."""

import atexit
import sys

import jax
from support import command


atexit.register(lambda: print(jax.config.values["jax_platforms"]))
sys.exit(command.main([*sys.argv[1:]]))
