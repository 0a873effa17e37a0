"""Near steps in a restore: which there are, by what all disks hold, and their load."""

import contextlib
import dataclasses
import functools as ft
import json
import warnings
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from .._errors import DamagedError, ReplacedError
from .._format import _schema, _text
from .._format._schema import COUNT, ID, optional
from .._load import _checkpoint, _deserialise
from .._load._load_options import FilteredKeywords
from .._run import _own
from .._run._hooks import LoadRequest, Outcome, Restored
from .._run._saves import Saves
from .._runtime import _log, _processes
from .._runtime._processes import Processes
from . import _attempts, _disk, _exchange
from ._attempts import Attempt, Copy, NearStep, Passed
from ._disk import Disk, Incoming, NearPart, Outgoing
from ._exchange import Move


# What processes say, which is checked before any of it becomes a path.
_HELD = [_disk.is_part], [(str, str, str)], str
_CHOSEN = optional((COUNT, ID, ID, [COUNT])), [(COUNT, str, bool)], [str]
_SIZES = [(COUNT, COUNT)]
_MOVES = [(COUNT, COUNT, COUNT)]
_OF_PART = "what a process says of its part of a near step"


@dataclasses.dataclass
class NearRun:
    """The near disk of a run: which steps are saved there, how many copies of a part
    are on the disks of others, and the attempt at the run, once it has begun."""

    saves: Saves
    disk: Disk
    every: int
    copies: int
    attempt: Attempt | None = None


class Chosen(NamedTuple):
    """The near step to restore, if there is one; those that are passed over; and notes
    on disks and files that should have near steps, and have none that can be read."""

    step: NearStep | None = None
    passed: list[Passed] = []
    notes: list[str] = []

    def warn(self, head: str, above: int, stacklevel: int) -> None:
        """Warns, below a head, of near steps that are passed over, and newer than one;
        and of the notes. Without a head the former are only logged."""
        for x in self.passed:
            _log.say(_log.WARNING if x.step > above else _log.INFO, f"Skipped {x}")
        newer = [str(x) for x in sorted(self.passed) if x.step > above]
        if not _processes.leads():
            return
        if head and newer:
            warnings.warn("\n  ".join([head, *newer]), stacklevel=stacklevel + 1)
        if self.notes:
            notes = "\n  ".join(self.notes)
            warnings.warn(
                f"Near disks have less than they had:\n  {notes}",
                stacklevel=stacklevel + 1,
            )


def held(disk: Disk) -> bytes:
    """Report of this process on its disk: the parts; the run, the save and the error of
    each that cannot be used; and where the disk is."""
    parts, problems = disk.find()
    rows = [(f.parts[-3], f.parts[-2], str(e)) for f, e in problems.items()]
    return json.dumps([parts, rows, disk.root.url]).encode()


def _read_held(word: bytes, index: int) -> tuple[list[NearPart], list[list[str]], str]:
    what = f"what process {index} says of its near disk"
    parts, problems, path = _schema.read(word, what, _HELD)
    return [NearPart(*part) for part in parts], problems, path


def choose(
    run: NearRun, words: Iterable[bytes], bad: Set[Copy] = frozenset()
) -> Chosen:
    """The newest near step that is whole, by the reports of all processes, without
    copies that are `bad`."""
    attempt, count = _attempts.last(run.saves.steps.root), _processes.count()
    if attempt is None:
        return Chosen()
    disks = [_read_held(word, index) for index, word in enumerate(words)]
    known = {part.save for parts, _, _ in disks for part in parts}
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
    held_parts = [parts for parts, _, _ in disks]
    return Chosen(*_attempts.choose(attempt, count, held_parts, bad), notes)


class Search:
    """The near steps in one search for the newest step: the one that is chosen, and
    copies of parts that are bad, of which step, and why."""

    schema = _CHOSEN

    def __init__(self, run: NearRun):
        self._run = run
        self._chosen = Chosen()
        self._bad: dict[Copy, Passed] = {}

    @property
    def step(self) -> int | None:
        return None if self._chosen.step is None else self._chosen.step.step

    def held(self) -> bytes:
        """Report of this process on its disk."""
        return held(self._run.disk)

    def choose(self, words: Sequence[bytes], at_root: int | None) -> Chosen:
        """Choice that process 0 sends to all: a near step that is not older than the
        one at the root, or none."""
        chosen = choose(self._run, words, self._bad.keys())
        is_old = chosen.step is not None and chosen.step.step < (at_root or 0)
        return chosen._replace(step=None) if is_old else chosen

    def take(self, choice: Any) -> None:
        step, passed, notes = choice
        step = None if step is None else NearStep(*step)
        self._chosen = Chosen(step, [Passed(*x) for x in passed], notes)

    def fetch(self, processes: Processes) -> None:
        """Moves the parts of the chosen step to the processes that they are of."""
        step, here = self._chosen.step, processes.index
        assert step is not None
        wanted = [(i, to) for to, i in enumerate(step.sources) if i != to]
        if not wanted:
            return
        file = ft.partial(self._run.disk.place, step.run, step.save)
        sent = [to for source, to in wanted if source == here]
        own = [(to, Outgoing(file(to)).size()) for to in sent]
        words = processes.gather(json.dumps(own).encode())
        said = [_schema.read(word, _OF_PART, _SIZES) for word in words]
        sizes = dict(pair for pairs in said for pair in pairs)
        word = json.dumps([Move(i, to, sizes.get(to, 0)) for i, to in wanted]).encode()
        word = processes.broadcast(word)
        moves = [Move(*move) for move in _schema.read(word, _OF_PART, _MOVES)]
        for some in _exchange.in_turns(moves):
            out = next((file(move.to) for move in some if move.source == here), None)
            into = next((file(here) for move in some if move.to == here), None)
            incoming = Incoming(self._run.disk, into)
            _exchange.exchange(some, Outgoing(out).read, incoming.write, processes)
            # What has not come is not whole, which is seen as it is opened.
            with contextlib.suppress(Exception):
                incoming.finish()

    def load(self, process: int, request: LoadRequest) -> Restored:
        """The part of this process, and its own state as it is stored."""
        step = self._chosen.step
        assert step is not None
        load = _deserialise.tree_deserialise_leaves
        options: FilteredKeywords = {**request.options, "processes": "own"}
        options.pop("reshard", None)
        try:
            ckpt = _checkpoint.open(self._run.disk.place(step.run, step.save, process))
            tree = load(ckpt, request.like, **options)
            if request.own is None:
                return Restored(tree)
            return Restored(tree, _own.bytes_of(ckpt, 0))
        except (OSError, ReplacedError) as e:
            raise DamagedError(str(e)) from e

    def finish(
        self, processes: Processes, restored: Restored, request: LoadRequest
    ) -> Restored:
        """Own states as they are asked for, once all processes have loaded theirs: the
        processes tell each other where those of all are."""
        data, own = restored.own, request.own
        if own is None:
            return restored
        if not _own.is_all(own):
            return restored._replace(own=_own.decode(data, own))
        words = [word.hex() for word in processes.gather(data)]
        said = json.loads(processes.broadcast(json.dumps(words).encode()))
        # They may be larger than any record.
        words = _schema.checked(said, "what is said of own states", [str])
        states = [_own.decode(bytes.fromhex(word), own) for word in words]
        return restored._replace(own=states)

    def exclude(self, outcome: Outcome) -> None:
        """Excludes copies of the chosen step, which could not be loaded."""
        step = self._chosen.step
        assert step is not None
        is_apart = outcome.kind == "apart"
        for process in range(len(step.sources)) if is_apart else outcome.who:
            source = step.sources[process]
            why = f"part {process} on the disk of process {source}: {outcome.why}"
            self._bad[step.save, source, process] = Passed(step.step, why)

    def knows_lost(self) -> bool:
        """Whether there is a near step, though none can be restored."""
        return bool(self._bad) or any(x.is_whole for x in self._chosen.passed)

    def reasons(self, above: int) -> list[str]:
        """Why near steps above one are not restored."""
        passed = [*self._chosen.passed, *self._bad.values()]
        return [str(x) for x in passed if x.step > above]

    def notes(self) -> list[str]:
        return self._chosen.notes

    def warn(self, above: int, stacklevel: int) -> None:
        """Logs what is passed over, and warns of the notes."""
        self._chosen.passed.extend(self._bad.values())
        self._bad = {}
        self._chosen.warn("", above, stacklevel + 1)

    def begin(self) -> None:
        """Begins an attempt: near steps of older ones are void, but the chosen one."""
        saves, step = self._run.saves, self._chosen.step
        base = "" if step is None else step.save
        processes = saves.processes("begin an attempt", "Restoring")
        root = saves.steps.root
        word = processes.decide(lambda: _attempts.begin(root, base).encode())
        self._run.attempt = Attempt.decode(word)
