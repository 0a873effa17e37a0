"""Near steps: each process saves its part to its own node's disk, and a copy of it to
the disk of another.

A near step is whole once all processes have confirmed their parts and copies. Only then
are older ones deleted. On a restore each process says what its disk holds; neither its
number nor its host's name does.
"""

import contextlib
import functools as ft
import json
import pathlib
import secrets
import socket
import warnings
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._errors import DamagedError, ReplacedError
from .._format import _schema, _text
from .._format._schema import COUNT, DIGEST, Either, ID, NONE
from .._load import _checkpoint, _deserialise
from .._load._options import FilteredKeywords
from .._runtime import _exchange, _log, _processes
from .._runtime._exchange import Move
from .._runtime._processes import Processes
from .._save import _plan, _serialise
from .._storage import _root
from . import _attempts, _disk, _own
from ._attempts import Attempt, Copy, NearStep, Passed
from ._disk import Disk, Incoming, NearPart, Outgoing
from ._offer import Offer
from ._saves import Saves


_OF_PART = "what a process says of its part of a near step"


class Asked(NamedTuple):
    """What is restored: a tree, with the options of a load, and own states, if `own` is
    not None. See `CheckpointManager.restore`."""

    like: PyTree
    own: PyTree
    options: FilteredKeywords


class Held(NamedTuple):
    """What a process says that its disk holds; of what cannot be used, the run, the
    save, and why; and where the disk is."""

    parts: list[NearPart]
    problems: list[tuple[str, str, str]]
    path: str

    @staticmethod
    def decode(word: bytes, index: int) -> "Held":
        said = f"what process {index} says of its near disk"
        parts, problems, path = _schema.read(word, said, _HELD)
        return Held([NearPart(*part) for part in parts], problems, path)


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


# What processes say, which is checked before any of it becomes a path.
_HELD = [_disk.is_part], [(str, str, str)], str
_BEGUN = _attempts.ATTEMPT, ID
_WRITTEN = str, COUNT, DIGEST
_GOT = [(COUNT, DIGEST)]
_SIZES = [(COUNT, COUNT)]
_MOVES = [(COUNT, COUNT, COUNT)]
CHOSEN = Either([(COUNT, ID, ID, [COUNT]), NONE]), [(COUNT, str, bool)], [str]


def of(saves: Saves) -> "Near | None":
    """The near steps of a run, if it has a near disk."""
    path = saves.policy.near
    return None if path is None else Near(saves, Disk(path))


class Near:
    """The near steps of a run."""

    def __init__(self, saves: Saves, disk: Disk):
        self._saves, self._disk = saves, disk
        self._attempt: Attempt | None = None

    # ---- Saves.

    def offer(self, offer: Offer) -> None:
        """Saves a state if it is due."""
        if offer.step % (self._saves.policy.near_every or 1) == 0:
            try:
                with _log.timed("near") as timer:
                    self._save(offer)
            except Exception as e:
                e.add_note(
                    f"Step {offer.step} is not saved to near disks. The near step "
                    "before it stays, and so do the steps at the root."
                )
                raise
            steps, seconds = self._saves.steps, timer.seconds
            steps.say(_log.INFO, "Saved to near disks", offer.step, seconds=seconds)

    def _save(self, offer: Offer) -> None:
        step, what = offer.step, f"Saving step {offer.step} to near disks"
        processes = self._saves.processes("save a near step", what, step)
        with processes.heard():
            part = self._agreed(processes, step)
            file = self._disk.file(part)
            self._write(offer, part)
            own = [_host(), file.stat().st_size, _disk.digest(file)]
            words = processes.gather(json.dumps(own).encode())
            rows = [_schema.read(word, _OF_PART, _WRITTEN) for word in words]
            word = processes.broadcast(json.dumps(rows).encode())
            rows = _schema.read(word, _OF_PART, [_WRITTEN])
            got = self._copy(part, rows, processes)
            words = processes.gather(json.dumps(got).encode())
            for index, word in enumerate(words):
                _check_copies(index, _schema.read(word, _OF_PART, _GOT), rows)
            processes.broadcast()
        # All have it.
        self._disk.keep(part)

    def _agreed(self, processes: Processes, step: int) -> NearPart:
        """The part of this process, of a save that process 0 has named."""
        words = processes.gather(self.held() if self._attempt is None else b"")
        word = b""
        if processes.leads:
            if self._attempt is None:
                self._warn_of_unused(self.choose(words), step)
                self._attempt = _attempts.begin(self._saves.steps.root, "")
            said = [self._attempt, secrets.token_hex(8)]
            word = json.dumps(said).encode()
        word = processes.broadcast(word)
        attempt, save = _schema.read(word, _OF_PART, _BEGUN)
        self._attempt = Attempt(*attempt)
        run, number, _ = self._attempt
        return NearPart(run, number, step, save, processes.count, processes.index)

    def _write(self, offer: Offer, part: NearPart) -> None:
        options = self._saves.options._replace(
            metadata={"near": list(part), "root": str(self._saves.steps.root)},
            layout="ocdbt",
            durable=False,
            functions="drop",
            processes="own",
            own=_own.encode(offer.own),
        )
        file = self._disk.file(part)
        root = _root.resolve(str(file))
        root.check_writable()
        self._disk.make_room(file)
        _serialise.write(_plan.plan(root, offer.tree, options), Processes())

    def _copy(
        self, part: NearPart, rows: list[Any], processes: Processes
    ) -> list[tuple[int, str]]:
        """Sends copies of all parts to other disks. Returns the processes of those that
        came here, and the digests of what came."""
        count, here = part.processes, part.process
        got: list[tuple[int, str]] = []
        # Whatever is wrong with one, all take part in the others.
        errors: list[Exception] = []
        for shift in _exchange.shifts(
            [row[0] for row in rows], self._saves.policy.copied
        ):
            moves = [Move(i, (i + shift) % count, row[1]) for i, row in enumerate(rows)]
            origin = (here - shift) % count
            out = Outgoing(self._disk.file(part))
            file = self._disk.file(part._replace(process=origin))
            into = Incoming(self._disk, file)
            _exchange.exchange(moves, out.read, into.write, processes)
            try:
                got.append((origin, into.finish(rows[origin][2])))
            except Exception as e:
                errors.append(e)
            errors += [] if out.error is None else [out.error]
        if errors:
            raise errors[0]
        return got

    # ---- Restores.

    def held(self) -> bytes:
        """What the disk of this process holds."""
        parts, problems = self._disk.find()
        rows = [(f.parts[-3], f.parts[-2], str(e)) for f, e in problems.items()]
        return json.dumps([parts, rows, self._disk.root.url]).encode()

    def choose(self, words: Iterable[bytes], bad: Set[Copy] = frozenset()) -> Chosen:
        """The newest near step that is whole, of what all processes hold, without
        copies that are `bad`."""
        attempt, count = _attempts.last(self._saves.steps.root), _processes.count()
        if attempt is None:
            return Chosen()
        disks = [Held.decode(word, index) for index, word in enumerate(words)]
        known = {part.save for held in disks for part in held.parts}
        notes = []
        for index, held in enumerate(disks):
            where = f"on the near disk of process {index}, `{held.path}`"
            runs = [*(part.run for part in held.parts), *(x[0] for x in held.problems)]
            if attempt.run not in runs:
                notes.append(
                    f"nothing of this run is {where}: it is new, or not mounted, or "
                    "not the one of before"
                )
            for run, save, why in held.problems:
                text = _text.escape(f"a part {where} is of no use: {why}")
                _log.say(_log.WARNING, f"Skipped {text}")
                if run == attempt.run and save not in known:
                    notes.append(text)
        parts = [held.parts for held in disks]
        return Chosen(*_attempts.choose(attempt, count, parts, bad), notes)

    def _warn_of_unused(self, chosen: Chosen, step: int) -> None:
        """Says which near steps a run does not go on from that has restored none."""
        if chosen.step is not None:
            own = Passed(chosen.step.step, "it can be restored", True)
            chosen.passed.append(own)
        root = self._saves.steps.root
        chosen.warn(
            f"Step {step} is the first that this attempt at the run in `{root}` saves, "
            "and it has restored none. Newer near steps stay until one is as new:",
            above=step,
            stacklevel=7,
        )

    def load(
        self, process: int, found: NearStep, asked: Asked
    ) -> tuple[PyTree, bytes | None]:
        """The part of this process, and its own state, once it is here."""
        load = _deserialise.tree_deserialise_leaves
        options: FilteredKeywords = {**asked.options, "processes": "own"}
        options.pop("reshard", None)
        try:
            ckpt = _checkpoint.open(self._disk.place(found.run, found.save, process))
            tree = load(ckpt, asked.like, **options)
            if asked.own is None:
                return tree, None
            return tree, _own.bytes_of(ckpt, 0)
        except (OSError, ReplacedError) as e:
            raise DamagedError(str(e)) from e

    def fetch(self, processes: Processes, found: NearStep) -> None:
        """Moves parts to the processes that they are of."""
        here = processes.index
        wanted = [(i, to) for to, i in enumerate(found.sources) if i != to]
        if not wanted:
            return
        file = ft.partial(self._disk.place, found.run, found.save)
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
            incoming = Incoming(self._disk, into)
            _exchange.exchange(some, Outgoing(out).read, incoming.write, processes)
            # What has not come is not whole, which is seen as it is opened.
            with contextlib.suppress(Exception):
                incoming.finish()

    def begin(self, base: str) -> None:
        """Begins an attempt: near steps of older ones but its `base` are void."""
        processes = self._saves.processes("begin an attempt", "Restoring")
        root = self._saves.steps.root
        word = processes.decide(lambda: _attempts.begin(root, base).encode())
        self._attempt = Attempt.decode(word)


def _host() -> str:
    """The same for processes that fail together: those of one machine."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _check_copies(index: int, got: Sequence[Any], rows: list[Any]) -> None:
    for origin, digest in got:
        if digest != rows[origin][2]:
            raise RuntimeError(
                f"The copy of the part of process {origin} is not what came to the "
                f"near disk of process {index}. The near step is not used."
            )
