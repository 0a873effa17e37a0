"""The pins of a run: steps that are never deleted. A pin is a file
`<root>/eqx_ckpt.pins/<step>`.
"""

import contextlib

from .._storage._backend import Backend
from . import _numbered


_PLACE = "eqx_ckpt.pins"


class Pins:
    """The pins at the root of a run."""

    def __init__(self, root: Backend):
        self._root = root

    def steps(self) -> set[int]:
        return set(_numbered.numbers(self._root, _PLACE))

    def add(self, step: int) -> None:
        with contextlib.suppress(FileExistsError):
            _numbered.write(self._root, _PLACE, step, b"\n")

    def drop(self, step: int) -> None:
        _numbered.delete(self._root, _PLACE, step)
