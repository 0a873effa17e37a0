"""Trees made of a checkpoint alone, of the classes that a caller allows.

A room around the kernel: a save finds what records the nodes of its tree, `_recorder`,
by the table of additions. It imports `_load` and what is below it. Begin with
`_rebuild`.
"""

from .. import _extensions
from . import _recorder


_extensions.add("structure", _recorder.record)
