"""A page to look into checkpoints and runs, in a browser or as one file; and plots.

Begin with `_site`.
"""

from .. import _extensions
from . import _plots


_extensions.add("plot", _plots.plot)
