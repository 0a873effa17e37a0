"""`verify`: every byte of a save, compared with what was saved; and a save, compared
with the base that another one names.

A room around the kernel: a run asks it by a hook which of its steps are
whole. It imports `_load` and what is below it. Begin with `_verify`.
"""

from .._kernel import _rooms


@_rooms.verify.provide
def _():
    from ._verify import verify

    return verify


@_rooms.base_facts.provide
def _():
    from ._base import facts

    return facts


@_rooms.check_base.provide
def _():
    from ._base import check_base

    return check_base
