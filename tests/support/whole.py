"""Imports all of the package, for processes that are forked: or each fork does it."""

from eqx_ckpt import *  # noqa: F403
