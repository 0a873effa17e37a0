"""Which near steps are whole, and count for the last attempt at the run.

So what an older attempt has left on a near disk is not taken for a step of this one.
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from .._kernel._run._attempts import Attempt
from .._kernel._runtime import _messages
from ._disk import NearPart


class PartCopy(NamedTuple):
    """A copy of a part: its save, the process on whose disk it is, and the process that
    saved it."""

    save: str
    disk: int
    process: int


class NearStep(NamedTuple):
    """A near step that is whole. Part `i` is on the disks of the processes
    `sources[i]`. `is_own`: it is of the last attempt."""

    step: int
    save: str
    run: str
    sources: list[list[int]]
    is_own: bool


class Passed(NamedTuple):
    """A near step that is passed over, and why."""

    step: int
    why: str

    def __str__(self) -> str:
        return f"near step {self.step}: {self.why}"


def counts(attempt: Attempt, part: NearPart) -> bool:
    """Whether a part on a disk is of an attempt, or of the step that the attempt began
    from."""
    if part.run != attempt.run:
        return False
    return part.attempt == attempt.number or part.save == attempt.near_save


def choose(
    attempt: Attempt, disks: Iterable[Sequence[NearPart]], bad: Set[PartCopy]
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
            if part.save == attempt.near_save:
                base = part
            found = saves.setdefault(part._replace(process=0), {})
            sources = found.setdefault(part.process, [])
            if PartCopy(part.save, index, part.process) not in bad:
                sources.append(index)
    whole, passed = [], []
    for part, found in saves.items():
        if not (counts(attempt, part) or _is_before(part, base)):
            if len(found) == part.processes:
                why = f"it is of attempt {part.attempt} at this run, and attempt "
                why += f"{attempt.number} did not go on from it"
                passed.append(Passed(part.step, why))
        elif len(found) < part.processes:
            there = _messages.list_text(found)
            why = f"{part.processes} processes have saved it; near disks have only the "
            passed.append(Passed(part.step, f"{why}parts of {there}"))
        # Which copies are bad is told elsewhere.
        elif all(found.values()):
            sources = [found[process] for process in sorted(found)]
            is_own = part.attempt == attempt.number
            whole.append(NearStep(part.step, part.save, part.run, sources, is_own))
    # Of one step, the later attempt's.
    order = lambda x: (x.step, x.save != attempt.near_save)
    return max(whole, key=order, default=None), passed


def _is_before(part: NearPart, base: NearPart | None) -> bool:
    """Whether the attempt that has saved the base of this one has saved a step before
    that: it counts where the base is lost."""
    if base is None:
        return False
    return part.attempt == base.attempt and part.step < base.step
