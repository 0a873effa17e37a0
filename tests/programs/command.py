"""Runs the command line with `ARGUMENTS...`."""

import runpy


runpy.run_module("eqx_ckpt", run_name="__main__")
