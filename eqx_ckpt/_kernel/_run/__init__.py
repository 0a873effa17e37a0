"""The directory of a training run: which steps are saved, restored and kept.

It imports `_save`, `_load` and what is below them. Begin with `_manager`.
"""

from .. import _rooms


@_rooms.stands_for.provide
def _():
    from ._run_path import stands_for

    return stands_for


@_rooms.delete_run.provide
def _():
    from ._delete_run import delete_run

    return delete_run


@_rooms.may_go.provide
def _():
    from ._pins import may_checkpoint_go

    return may_checkpoint_go
