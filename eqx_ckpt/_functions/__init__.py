"""Functions of trees: stored beside the leaves, and lazy arrays computed by them.

A room around the kernel, which does not import it: what saves and open checkpoints need
of it, it adds to them. It imports `_save` and what is below it. Begin with
`_function`.
"""

from .. import _extensions
from . import _exporting
from ._stored_function import Functions


_extensions.add("functions_of", Functions)
_extensions.add("plan_functions", _exporting.plan)
