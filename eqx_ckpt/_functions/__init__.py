"""Functions of trees: stored beside the leaves, and lazy arrays computed by some.

A room around the kernel, which does not import it: what saves and open checkpoints need
of it, it adds to them. It imports `_save` and what is below it. Begin with `_function`.
Lazy arrays are in `_computed`: the kernel reads them by what they override of
`LazyArray`.
"""

from .. import _rooms
from .._format import _index
from . import _index_functions


_index.OPTIONAL["functions"] = {...: dict}, _index_functions.parse


@_rooms.open_functions.provide
def _():
    from ._stored_function import Functions

    return Functions


@_rooms.plan_functions.provide
def _():
    from ._exporting import plan

    return plan
