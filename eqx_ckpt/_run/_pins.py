"""The pins of a run: steps that are never deleted. A pin is a file
`<root>/eqx_ckpt.pins/<step>`.
"""

import contextlib

from .._storage._backend import Backend
from . import _clean


_PLACE = "eqx_ckpt.pins"


class Pins:
    """The pins at the root of a run."""

    def __init__(self, root: Backend):
        self._root = root

    def steps(self) -> set[int]:
        self._check()
        return set(_clean.steps_in(self._root.below(_PLACE).list_top() or {}))

    def add(self, step: int) -> None:
        self._check()
        self._root.make_directories([_PLACE])
        with contextlib.suppress(FileExistsError):
            self._root.write(f"{_PLACE}/{step}", [b"\n"], sync=True)
        self._root.sync_directories([_PLACE, ""])

    def drop(self, step: int) -> None:
        self._check()
        self._root.delete(f"{_PLACE}/{step}")

    def _check(self) -> None:
        if self._root.is_link(_PLACE):
            raise ValueError(
                f"`{_PLACE}` in `{self._root}` is a symbolic link, and a manager "
                "follows none. Which steps are pinned cannot be told, and none is "
                "deleted."
            )
