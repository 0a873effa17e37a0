"""The attempts of a run: which near steps count.

Each start of a run is an attempt, with a file `eqx_ckpt.run/<attempt>` at the root. It
has the id of the run, and the near save that the attempt began from. So what an older
attempt has left on a near disk is not taken for a step of this one.
"""

import functools as ft
import json
import re
import secrets
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from .._errors import DamagedError
from .._format import _schema
from .._format._schema import COUNT, ID
from .._run import _numbered
from .._runtime import _messages
from .._storage import _store
from .._storage._backend import Backend
from ._disk import NearPart


_PLACE = "eqx_ckpt.run"
_MAX_BYTES = 4096


# A copy of a part: its save, the process on whose disk it is, and whose part it is.
Copy = tuple[str, int, int]


class NearStep(NamedTuple):
    """A near step that is whole. Part `i` is on the disks of the processes
    `sources[i]`."""

    step: int
    save: str
    run: str
    sources: list[list[int]]


class Passed(NamedTuple):
    """A near step that is passed over, and why."""

    step: int
    why: str

    def __str__(self) -> str:
        return f"near step {self.step}: {self.why}"


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
        """**Raises:** `DamagedError`."""
        said = "what process 0 says of an attempt"
        return Attempt(*_schema.read(word, said, ATTEMPT))


_BASE = re.compile(f"{ID.pattern}|")
ATTEMPT = ID, COUNT, _BASE


def choose(
    attempt: Attempt, disks: Iterable[Sequence[NearPart]], bad: Set[Copy]
) -> tuple[NearStep | None, list[Passed]]:
    """The newest near step that is whole, of the parts on the disk of each process,
    without copies that are `bad`; and those that are passed over. How many processes
    have saved it, and how many there are, is all one."""
    # Of each part the disks that it can be read on: none if all copies are bad.
    saves: dict[NearPart, dict[int, list[int]]] = {}
    base: NearPart | None = None
    for index, parts in enumerate(disks):
        for part in parts:
            if part.run != attempt.run:
                continue
            if part.save == attempt.base:
                base = part
            found = saves.setdefault(part._replace(process=0), {})
            sources = found.setdefault(part.process, [])
            if (part.save, index, part.process) not in bad:
                sources.append(index)
    whole, passed = [], []
    for part, found in saves.items():
        if not (attempt.counts(part) or _is_before(part, base)):
            if len(found) == part.processes:
                why = f"it is of attempt {part.attempt} at this run, and attempt "
                why += f"{attempt.number} did not go on from it"
                passed.append(Passed(part.step, why))
        elif len(found) < part.processes:
            there = _messages.listed(found)
            why = f"{part.processes} processes have saved it; near disks have only the "
            passed.append(Passed(part.step, f"{why}parts of {there}"))
        # Which copies are bad is told elsewhere.
        elif all(found.values()):
            sources = [found[process] for process in sorted(found)]
            whole.append(NearStep(part.step, part.save, part.run, sources))
    # Of one step, the later attempt's.
    order = lambda x: (x.step, x.save != attempt.base)
    return max(whole, key=order, default=None), passed


def _is_before(part: NearPart, base: NearPart | None) -> bool:
    """Whether the attempt that has saved the base of this one has saved a step before
    that: it counts where the base is lost."""
    if base is None:
        return False
    return part.attempt == base.attempt and part.step < base.step


def last(root: Backend) -> Attempt | None:
    """The last attempt of the run at a root.

    **Raises:** `DamagedError` if nobody can tell: if an older one were taken for it,
    near steps would count that do not.
    """
    for number in sorted(_numbered.numbers(root, _PLACE), reverse=True):
        try:
            look = ft.partial(_read, root, number)
            found = _store.look_twice(root, look, lambda found: found is not None)
        except ValueError as e:
            raise DamagedError(
                f"Which near steps of `{root}` count cannot be told: {e}. None is "
                f"read, and nothing was deleted. Delete `{_PLACE}` there to go on "
                "without them."
            ) from e
        if found is not None:
            return found
    return None


def _read(root: Backend, number: int) -> Attempt | None:
    key = f"{_PLACE}/{number}"
    value = root.read(key, limit=_MAX_BYTES)
    # Of one that was killed as it began nothing counts.
    if value is None or not value.data:
        return None
    own = ID, range(number, number + 1), _BASE
    return Attempt(*_schema.read(value.data, f"`{key}`", own))


def begin(root: Backend, base: str) -> Attempt:
    """Begins an attempt, from a near save or without one. **Raises:** as `last`."""
    before = last(root) or Attempt(secrets.token_hex(8))
    numbers = _numbered.numbers(root, _PLACE)
    new = Attempt(before.run, max([0, *numbers]) + 1, base)
    _numbered.write(root, _PLACE, new.number, new.encode())
    for number in numbers:
        if number != before.number:
            _numbered.delete(root, _PLACE, number)
    return new
