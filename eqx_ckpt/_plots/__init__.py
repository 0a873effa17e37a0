"""Leaves, differences and runs drawn with matplotlib, in notebooks.

Begin with `_plot`.
"""

from .._kernel import _rooms


@_rooms.plot.provide
def _():
    from ._plot import plot

    return plot
