"""The attempts of a run: which near steps count.

Each start of a run is an attempt, with a file `eqx_ckpt.run/<attempt>` at the root. It
has the id of the run, and the near save that the attempt began from. So what an older
attempt has left on a near disk is not taken for a step of this one.
"""

import contextlib
import json
import secrets
from typing import NamedTuple

from .._storage._backend import Backend
from . import _clean
from ._disk import NearPart


_PLACE = "eqx_ckpt.run"


class Attempt(NamedTuple):
    """`base`: the near save that it began from; "" for none."""

    run: str
    number: int = 0
    base: str = ""

    def counts(self, part: NearPart) -> bool:
        """Whether what a disk holds is of this attempt, or what it began from."""
        if part.run != self.run:
            return False
        return part.attempt == self.number or part.save == self.base

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(word: bytes) -> "Attempt":
        run, number, base = json.loads(word)
        return Attempt(str(run), int(number), str(base))


def last(root: Backend) -> Attempt | None:
    """The last attempt of the run at a root."""
    for number in sorted(_numbers(root), reverse=True):
        # Of one that was killed as it began nothing counts.
        with contextlib.suppress(ValueError, TypeError):
            value = root.read(f"{_PLACE}/{number}", limit=4096)
            if value is not None:
                return Attempt.decode(value.data)
    return None


def begin(root: Backend, base: str) -> Attempt:
    """Begins an attempt, from a near save or without one."""
    before = last(root) or Attempt(secrets.token_hex(8))
    numbers = _numbers(root)
    new = Attempt(before.run, max([0, *numbers]) + 1, base)
    root.make_directories([_PLACE])
    root.write(f"{_PLACE}/{new.number}", [new.encode()], sync=True)
    root.sync_directories([_PLACE, ""])
    for number in numbers:
        if number != before.number:
            root.delete(f"{_PLACE}/{number}")
    return new


def _numbers(root: Backend) -> list[int]:
    return _clean.steps_in(root.below(_PLACE).list_top() or {})
