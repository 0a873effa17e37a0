"""Loads in which each process reads a share, and the devices move it: `reshard=`.

It imports `_load` and what is below it. Begin with `_loads`.
"""

from .._kernel import _rooms


@_rooms.plan_reshard.provide
def _():
    from ._loads import plan

    return plan
