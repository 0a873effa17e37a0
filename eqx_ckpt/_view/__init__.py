"""A page to look into checkpoints and runs, in a browser or as one file; and plots.

Begin with `_site`.
"""

from .. import _extensions


_extensions.add("plot", _extensions.later(__name__, "_plots", "plot"))
