"""Imports the package, for processes that are forked: or each fork does it."""

import contextlib

import eqx_ckpt as ec


for name in dir(ec):
    # A copy of the kernel alone lacks rooms.
    with contextlib.suppress(ImportError):
        getattr(ec, name)
