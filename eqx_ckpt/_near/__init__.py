"""Near disks: steps of a run on the disks of its nodes, for `CheckpointManager(near=)`.

It provides a hook of `_run`, which does not import it. Begin with `_near_steps`.
"""

from .._kernel import _rooms


@_rooms.near_steps.provide
def _():
    from ._near_steps import near_steps

    return near_steps


@_rooms.superseded.provide
def _():
    from ._superseded import unneeded_paths

    return unneeded_paths
