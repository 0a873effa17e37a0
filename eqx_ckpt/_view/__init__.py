"""A page to look into checkpoints and runs, in a browser or as one file; and plots.

Begin with `_site`.
"""

from .. import _rooms


@_rooms.plot.provide
def _():
    from ._plots import plot

    return plot
