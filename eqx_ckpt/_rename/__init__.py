"""`rename=` of a load: the leaves of a checkpoint under other names.

It imports `_load` and what is below it; a load takes it from what is added here. Begin
with `_rename`.
"""

from .._kernel import _rooms


@_rooms.rename_leaves.provide
def _():
    from ._renamed import renamed

    return renamed
