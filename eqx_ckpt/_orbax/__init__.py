"""Files with which Orbax restores checkpoints of ours: with a save, or added to one.

It imports `_save`, `_load` and what is below them; a save takes it from what is added
here. Begin with `_metadata`.
"""

from .._kernel import _rooms


@_rooms.orbax_files.provide
def _():
    from ._write import files_of_save

    return files_of_save
