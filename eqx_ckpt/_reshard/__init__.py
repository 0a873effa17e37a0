"""Loads in which each process reads a share, and the devices move it: `reshard=`.

It imports `_load` and what is below it. Begin with `_loads`.
"""

from .. import _extensions


_extensions.add("reshard", _extensions.later(__name__, "_loads", "plan"))
