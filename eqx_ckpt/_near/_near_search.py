"""Near steps in a restore: which there are, by what all disks hold, and their load."""

import contextlib
import functools as ft
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from .._kernel._format import _text
from .._kernel._format._schema import COUNT, DIGEST, ID, optional
from .._kernel._run import _attempts, _own
from .._kernel._run._near_interface import LoadRequest, NearSearch, Restored
from .._kernel._run._shared_records import share_records
from .._kernel._runtime import _log, _processes
from .._kernel._runtime._processes import Processes
from .._kernel._storage import _backend
from .._kernel._storage._backend import Backend
from . import _disk, _exchange, _part_choice, _whole
from ._disk import Disk, Incoming
from ._exchange import Move
from ._near_parts import Parts
from ._part_choice import PartReport
from ._whole import NearStep, PartCopy, Passed


# What processes say, which is checked before any of it becomes a path.
_CHOSEN = optional((COUNT, ID, ID, [[COUNT]], bool)), [(COUNT, str)], [str]
_DIGEST = re.compile(f"{DIGEST.pattern}|")
_REPORTS = [(COUNT, (COUNT, _DIGEST, _DIGEST, [COUNT]))]
_OF_PART = "what a process says of a part of a near step"
_OF_OWN = "what is said of own states"


class Chosen(NamedTuple):
    """The near step to restore, if there is one; those that are passed over; and notes
    on disks and files that should have near steps, and have none that can be read."""

    step: NearStep | None = None
    passed: list[Passed] = []
    notes: list[str] = []

    @property
    def has_near(self) -> bool:
        """Whether the last attempt has near steps of its own."""
        return self.step is not None and self.step.is_own

    def warn(self, head: str, above: int) -> None:
        """Warns, below a head, of near steps that are passed over, and newer than one;
        and of the notes. Without a head the former are only logged."""
        for x in self.passed:
            _log.say(_log.WARNING if x.step > above else _log.INFO, f"Skipped {x}")
        newer = [str(x) for x in sorted(self.passed) if x.step > above]
        if not _processes.leads():
            return
        if head and newer:
            _log.warn("\n  ".join([head, *newer]))
        if self.notes:
            notes = "\n  ".join(self.notes)
            _log.warn(
                f"Near disks have less than they had:\n  {notes}",
            )


def choose(
    root: Backend, reports: Iterable[bytes], bad: Set[PartCopy] = frozenset()
) -> Chosen:
    """The newest near step of the run at a root that is whole, by the reports of all
    processes, without copies that are `bad`."""
    attempt = _attempts.last(root)
    if attempt is None:
        return Chosen()
    disks = [_disk.read_report(report, index) for index, report in enumerate(reports)]
    known = {part.save for disk in disks for part in disk.parts}
    notes = []
    for index, (parts, problems, path) in enumerate(disks):
        where = f"on the near disk of process {index}, `{path}`"
        runs = [*(part.run for part in parts), *(x[0] for x in problems)]
        if attempt.run not in runs:
            notes.append(
                f"nothing of this run is {where}: it is new, or not mounted, or not "
                "the one of before"
            )
        for id, save, why in problems:
            text = _text.escape(f"a part {where} is of no use: {why}")
            _log.say(_log.WARNING, f"Skipped {text}")
            if id == attempt.run and save not in known:
                notes.append(text)
    held_parts = [disk.parts for disk in disks]
    return Chosen(*_whole.choose(attempt, held_parts, bad), notes)


class Search(NearSearch):
    """The near steps in one search for the newest step: the one that is chosen, and
    copies of parts that are bad, of which step, and why."""

    schema = _CHOSEN

    def __init__(self, root: Backend, disk: Disk):
        self._root, self._disk = root, disk
        self._chosen = Chosen()
        self._bad: dict[PartCopy, Passed] = {}
        # The parts that this process opens, those that it loads, and the processes on
        # whose disks they were.
        self._parts: Parts | None = None
        self._wanted: list[int] = []
        self._from: dict[int, int] = {}

    def report(self) -> bytes:
        """Report of this process on its disk."""
        return self._disk.report()

    def look(self, reports: Sequence[bytes]) -> None:
        self._chosen = choose(self._root, reports, self._bad.keys())
        self.has_near = self._chosen.has_near

    def choose(self, at_root: int | None) -> Chosen:
        """Choice that process 0 sends to all: the near step, if it is not older than
        the one at the root."""
        chosen = self._chosen
        is_old = chosen.step is not None and chosen.step.step < (at_root or 0)
        return chosen._replace(step=None) if is_old else chosen

    def take(self, choice: Any) -> None:
        step, passed, notes = choice
        step = None if step is None else NearStep(*step)
        self._chosen = Chosen(step, [Passed(*x) for x in passed], notes)
        self.step = step and step.step
        self.near_save = step.save if step else ""
        self.notes = notes

    def fetch(self, processes: Processes, request: LoadRequest) -> None:
        """Moves the parts of the chosen step to the processes that need them."""
        step, here, count = self._chosen.step, processes.index, processes.count
        assert step is not None
        file = ft.partial(self._disk.place, step.run, step.save)
        self._parts = parts = Parts(request, file)
        # Of each part the first that has it says what is in it.
        own = [i for i, disks in enumerate(step.sources) if disks[0] == here]
        reports = [(i, parts.report(i, count)) for i in own]
        said = share_records(processes, reports, _OF_PART, _REPORTS)
        found = {i: PartReport(*report) for some in said for i, report in some}
        needed = _part_choice.choose_parts(step.sources, count, found)
        self._wanted, self._from = needed[here], dict.fromkeys(own, here)
        moves: list[Move] = []
        for to, some in enumerate(needed):
            for i in some:
                disks = step.sources[i]
                source = to if to in disks else disks[to % len(disks)]
                if source != to:
                    moves.append(Move(i, source, to, found[i].nbytes))
                if to == here:
                    self._from[i] = source
        for some in _exchange.in_turns(moves):
            out = next((file(x.part) for x in some if x.source == here), None)
            into = next((file(x.part) for x in some if x.to == here), None)
            read = ft.partial(_disk.read_into, out)
            incoming = Incoming(self._disk, into)
            errors = _exchange.exchange(some, read, incoming.write, processes)
            if errors.read is not None and _backend.is_exhausted(errors.read):
                raise errors.read
            # What has not come is not whole, which is seen as it is opened.
            with contextlib.suppress(FileNotFoundError):
                incoming.finish(errors.write)

    def load(self, process: int, request: LoadRequest) -> Restored:
        """Loads the parts that this process needs. Own states come by their numbers, as
        they are stored: of those parts that it speaks for, or its own."""
        step, parts = self._chosen.step, self._parts
        assert step is not None and parts is not None
        tree = parts.load(self._wanted)
        if request.own is None:
            return Restored(tree, None, step.step)
        own = [i for i, disks in enumerate(step.sources) if disks[0] == process]
        if not _own.is_all(request.own):
            _own.check_count(self._disk.root.url, len(step.sources))
            own = [process]
        return Restored(tree, {i: parts.own_state(i) for i in own}, step.step)

    def finish(self, processes: Processes, data: Any, request: LoadRequest) -> Any:
        """Own states as they are asked for, once all processes have loaded theirs: the
        processes tell each other where those of all are."""
        own = request.own
        if own is None:
            return None
        if not _own.is_all(own):
            return _own.decode(data[processes.index], own)
        rows = [(i, state.hex()) for i, state in data.items()]
        said = share_records(processes, rows, _OF_OWN, [(COUNT, str)])
        rows = sorted(row for some in said for row in some)
        return [_own.decode(bytes.fromhex(state), own) for _, state in rows]

    @property
    def blamed(self) -> list[tuple[int, int]]:
        """The disks and numbers of parts that could not be read here."""
        unreadable = () if self._parts is None else self._parts.unreadable
        return [(self._from[i], i) for i in sorted(unreadable)]

    def exclude(self, why: str, copies: Sequence[tuple[int, int]]) -> None:
        """Excludes copies of parts of the chosen step, which could not be loaded."""
        step = self._chosen.step
        assert step is not None
        if not copies:
            for i, disks in enumerate(step.sources):
                for disk in disks:
                    self._bad[PartCopy(step.save, disk, i)] = Passed(step.step, why)
        for disk, i in copies:
            about = f"part {i} on the disk of process {disk}: {why}"
            self._bad[PartCopy(step.save, disk, i)] = Passed(step.step, about)

    def knows_lost(self) -> bool:
        """Whether there is a near step, though none can be restored."""
        return bool(self._bad)

    def skip_reasons(self, above: int) -> list[str]:
        """Why near steps above one are not restored."""
        passed = dict.fromkeys([*self._chosen.passed, *self._bad.values()])
        return [str(x) for x in passed if x.step > above]

    def warn(self, above: int) -> None:
        """Logs what is passed over, and warns of the notes."""
        self._chosen.passed.extend(self._bad.values())
        self._bad = {}
        self._chosen.warn("", above)
