"""Near steps: each process saves its part to its own node's disk, and a copy of it to
the disk of another.

A near step is whole once all processes have confirmed their parts and copies. Only then
are older ones deleted. On a restore each process says what its disk holds; neither its
number nor its host's name does.
"""

import json
import os
import pathlib
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from .. import _extensions
from .._format import _schema
from .._format._schema import COUNT, DIGEST, ID, optional
from .._run import _own
from .._run._pending import PendingState
from .._run._saves import Saves
from .._runtime import _log, _processes
from .._runtime._processes import Processes
from .._save import _plan, _serialise
from .._storage import _root
from . import _attempts, _disk, _exchange, _near_search, _superseded
from ._attempts import Attempt, Passed
from ._disk import Disk, Incoming, NearPart, Outgoing
from ._exchange import Move
from ._near_search import Chosen, NearRun, Search


# What processes say, which is checked before any of it becomes a path.
_OF_PART = "what a process says of its part of a near step"
_OF_LATEST = "what process 0 says of the latest step"
_BEGUN = _attempts.ATTEMPT, ID
_WRITTEN = str, COUNT, DIGEST
_GOT = [(COUNT, DIGEST)]
_LATEST = optional(COUNT)


class Near:
    """The near steps of a run."""

    def __init__(self, run: NearRun):
        self._run = run

    def search(self) -> Search:
        return Search(self._run)

    def latest(self) -> int | None:
        """The newest complete step, of those at the root too."""
        saves = self._run.saves
        processes = saves.processes("latest", "Looking for the latest step")
        with processes.heard():
            words = processes.gather(_near_search.held(self._run.disk))
            word = b""
            if processes.leads:
                chosen = _near_search.choose(self._run, words)
                known = [saves.steps.latest(), chosen.step and chosen.step.step]
                latest = max((s for s in known if s is not None), default=None)
                chosen.warn(
                    f"The latest step of `{saves.steps.root}` is {latest}, as newer "
                    "ones cannot be restored:",
                    above=-1 if latest is None else latest,
                    stacklevel=3,
                )
                word = json.dumps(latest).encode()
            return _schema.read(processes.broadcast(word), _OF_LATEST, _LATEST)

    def offer(self, offer: PendingState) -> None:
        """Saves a state if it is due."""
        if offer.step % (self._run.every) == 0:
            try:
                with _log.timed("near") as timer:
                    self._save(offer)
            except Exception as e:
                e.add_note(
                    f"Step {offer.step} is not saved to near disks. The near step "
                    "before it stays, and so do the steps at the root."
                )
                raise
            steps, seconds = self._run.saves.steps, timer.seconds
            steps.say(_log.INFO, "Saved to near disks", offer.step, seconds=seconds)

    def _save(self, offer: PendingState) -> None:
        step, what = offer.step, f"Saving step {offer.step} to near disks"
        processes = self._run.saves.processes("save a near step", what, step)
        with processes.heard():
            part = self._agreed(processes, step)
            file = self._run.disk.file(part)
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
        self._run.disk.keep(part)

    def _agreed(self, processes: Processes, step: int) -> NearPart:
        """The part of this process, of a save that process 0 has named."""
        words = processes.gather(
            _near_search.held(self._run.disk) if self._run.attempt is None else b""
        )
        word = b""
        if processes.leads:
            if self._run.attempt is None:
                self._warn_of_unused(_near_search.choose(self._run, words), step)
                self._run.attempt = _attempts.begin(self._run.saves.steps.root, "")
            said = [self._run.attempt, secrets.token_hex(8)]
            word = json.dumps(said).encode()
        word = processes.broadcast(word)
        attempt, save = _schema.read(word, _OF_PART, _BEGUN)
        self._run.attempt = Attempt(*attempt)
        run, number, _ = self._run.attempt
        return NearPart(run, number, step, save, processes.count, processes.index)

    def _write(self, offer: PendingState, part: NearPart) -> None:
        options = self._run.saves.options._replace(
            metadata={"near": list(part), "root": str(self._run.saves.steps.root)},
            layout="ocdbt",
            durable=False,
            functions="drop",
            processes="own",
            own=_own.encode(offer.own),
        )
        file = self._run.disk.file(part)
        root = _root.resolve(str(file))
        root.check_writable()
        self._run.disk.make_room(file)
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
        for shift in _exchange.shifts([row[0] for row in rows], self._run.copies):
            moves = [Move(i, (i + shift) % count, row[1]) for i, row in enumerate(rows)]
            origin = (here - shift) % count
            out = Outgoing(self._run.disk.file(part))
            file = self._run.disk.file(part._replace(process=origin))
            into = Incoming(self._run.disk, file)
            _exchange.exchange(moves, out.read, into.write, processes)
            try:
                got.append((origin, into.finish(rows[origin][2])))
            except Exception as e:
                errors.append(e)
            errors += [] if out.error is None else [out.error]
        if errors:
            raise errors[0]
        return got

    def _warn_of_unused(self, chosen: Chosen, step: int) -> None:
        """Says which near steps a run does not go on from that has restored none."""
        if chosen.step is not None:
            own = Passed(chosen.step.step, "it can be restored")
            chosen.passed.append(own)
        root = self._run.saves.steps.root
        chosen.warn(
            f"Step {step} is the first that this attempt at the run in `{root}` saves, "
            "and it has restored none. Newer near steps stay until one is as new:",
            above=step,
            stacklevel=7,
        )


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


def _open(
    saves: Saves,
    near: str | os.PathLike[str] | None,
    near_every: int | None,
    copies: int | None,
) -> Near | None:
    for name, value in (("near_every", near_every), ("copies", copies)):
        if near is None and value is not None:
            raise ValueError(f"`{name}` is for near disks: say where, with `near`.")
    if near is None:
        return None
    if near_every is None:
        raise ValueError("With `near`, `near_every` must be an integer >= 1.")
    others = _processes.count() - 1
    if copies is not None and copies > max(1, others):
        raise ValueError(
            f"`copies` is {copies}, and there are {others} other processes whose disks "
            "could have one."
        )
    return Near(NearRun(saves, Disk(near), near_every, 1 if copies is None else copies))


_extensions.add("near_steps", _open)
_extensions.add("superseded", _superseded.paths)
