"""Functions of trees: stored beside the leaves, and lazy arrays computed by some.

A room around the kernel, which does not import it: what saves and open checkpoints need
of it, it adds to them. It imports `_save` and what is below it. Begin with `_function`.
Lazy arrays are in `_computed`: the kernel reads them by what they override of
`LeafBody`.
"""

from .._kernel import _rooms


@_rooms.parse_functions.provide
def _():
    from ._index_functions import parse

    return parse


@_rooms.open_functions.provide
def _():
    from ._stored_function import Functions

    return Functions


@_rooms.plan_functions.provide
def _():
    from ._exporting import plan

    return plan


@_rooms.check_functions.provide
def _():
    from ._exporting import check_functions

    return check_functions


@_rooms.as_read.provide
def _():
    from ._computed import as_read

    return as_read
