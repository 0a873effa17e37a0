"""Runs the command line with `ARGUMENTS...`. SIGINT interrupts it, though a job that a
shell runs in the background ignores SIGINT, and so do its children."""

import runpy
import signal


signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("eqx_ckpt", run_name="__main__")
