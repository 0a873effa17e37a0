"""Checkpoints of one file, and zips of other libraries: the list of what is in them.

It imports the kernel, which finds here how one is saved; `_formats` reads them.
"""

from .._kernel import _rooms


@_rooms.find_source.provide
def _():
    from ._probe import find_source

    return find_source


@_rooms.is_archive.provide
def _():
    from ._probe import is_archive

    return is_archive


@_rooms.save_file.provide
def _():
    from ._archive import save

    return save


@_rooms.check_file.provide
def _():
    from ._archive import check_target

    return check_target
