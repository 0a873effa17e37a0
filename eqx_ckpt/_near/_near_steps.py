"""Near steps: each process saves its part to its own node's disk, and a copy of it to
the disk of another.

A part is written in the background. Copies move through the devices, so all processes
send them in one of the calls that they make anyway, once all parts are written. A near
step is whole once all have confirmed their parts and copies. Only then are older ones
deleted. On a restore each process says what its disk holds; neither its
number nor its host's name does.
"""

import contextlib
import dataclasses
import functools as ft
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from .._kernel._errors import DamagedError
from .._kernel._format._schema import COUNT, DIGEST
from .._kernel._run import _own
from .._kernel._run._attempts import Attempt
from .._kernel._run._near_interface import NearSteps
from .._kernel._run._pending import PendingState
from .._kernel._run._saves import Saves
from .._kernel._run._words import said_by_all
from .._kernel._runtime import _log, _processes, _threads
from .._kernel._runtime._processes import Processes
from .._kernel._save import _async, _plan, _serialise
from .._kernel._save._background import SaveHandle
from .._kernel._save._plan import Plan
from .._kernel._storage import _root
from . import _disk, _exchange, _near_search
from ._disk import Disk, Incoming, NearPart
from ._exchange import Move
from ._near_search import Search
from ._whole import Passed


# What processes say, which is checked before any of it becomes a path.
_OF_PART = "what a process says of its part of a near step"
_WRITTEN = str, COUNT, DIGEST
_GOT = [(COUNT, DIGEST)]
# An id of no run and no save.
_NONE = "0" * 16


@dataclasses.dataclass(eq=False)
class NearSaving:
    """A near save that goes on. When all parts are written: the one of this process,
    what is said of all, and the call of `offer` in which copies are sent."""

    step: int
    handle: SaveHandle
    part: NearPart | None = None
    rows: list[Any] = dataclasses.field(default_factory=list)
    call: int | None = None


class Near(NearSteps):
    """The near steps of a run: multiples of `every`, each process's part on its own
    `disk`, with so many `copies` on the disks of others."""

    def __init__(self, saves: Saves, disk: Disk, every: int, copies: int):
        super().__init__(saves)
        self._disk, self._every, self._copies = disk, every, copies
        # Once it has begun, and whether it may be another since a restore.
        self._attempt: Attempt | None = None
        self._is_asked = True
        self._going: NearSaving | None = None
        # Calls of `offer` that have begun. Who holds the lock knows that none begins.
        self._calls = 0
        self._lock = _threads.Lock()

    def search(self) -> Search:
        return Search(self._saves.steps.root, self._disk)

    def restored(self) -> None:
        self._is_asked = True

    def wait(self) -> None:
        """Waits until the near save that goes on is whole. All processes do.

        **Raises:** what went wrong with it.
        """
        going, self._going = self._going, None
        if going is None:
            return
        with _noted(going.step):
            going.handle.result()
            self._send(going)

    def latest(self) -> int | None:
        self.wait()
        return super().latest()

    def _report(self) -> bytes:
        return self._disk.report()

    def _latest(self, words: list[bytes]) -> bytes:
        steps = self._saves.steps
        chosen = _near_search.choose(steps.root, words)
        known = [steps.latest(chosen.is_begun), chosen.step and chosen.step.step]
        latest = max((s for s in known if s is not None), default=None)
        if latest is None:
            steps.check_readable()
        chosen.warn(
            f"The latest step of `{steps.root}` is {latest}, as newer ones cannot "
            "be restored:",
            above=-1 if latest is None else latest,
        )
        return json.dumps(latest).encode()

    def _count(self) -> None:
        self._calls += 1

    def offer(self, offer: PendingState) -> None:
        """Saves a state if it is due; and sends copies of the one before, if that is
        due: at the latest before the next is saved."""
        self._lock.run(self._count)
        is_due = offer.step % self._every == 0
        going = self._going
        # All processes know of the call before it comes.
        call = None if going is None else going.call
        try:
            if is_due or (call is not None and self._calls >= call):
                self.wait()
        finally:
            if is_due:
                self._begin(offer)

    def _begin(self, offer: PendingState) -> None:
        """Begins to save a state. It may be changed once this returns."""
        step, what = offer.step, f"Saving step {offer.step} to near disks"
        if self._is_asked:
            self._settle(offer)
        processes = self._saves.processes("save a near step", what, step)
        with _noted(step):
            with _log.timed("near") as timer, processes.share_errors():
                plan = _async.stage(self._plan(offer), frozenset())
                assert self._attempt is not None
                file = self._disk.place(self._attempt.run, _NONE, 0)
                self._disk.make_room(file.parent)
            going = NearSaving(step, SaveHandle(plan.root, is_apart=True))
            write = lambda: self._write_part(going, plan, processes)
            _async.start_staged(going.handle, plan, write, processes)
            self._going = going
            going.handle.staged()
        steps = self._saves.steps
        steps.say(_log.DEBUG, "Copied to memory", step, seconds=timer.seconds)

    def _settle(self, offer: PendingState) -> None:
        """Begins an attempt, if this step does, and nothing is wrong with the state of
        any process. If nothing was restored, it says which near steps are passed over
        thereby."""
        saves, step = self._saves, offer.step
        root, start = saves.steps.root, saves.start

        def decide(words: list[bytes]) -> bytes:
            saves.check_begin()
            if start.attempt is None and not start.has_restored:
                chosen = _near_search.choose(root, words)
                if chosen.step is not None:
                    chosen.passed.append(Passed(chosen.step.step, "it can be restored"))
                chosen.warn(
                    f"Step {step} is the first that this attempt at the run in "
                    f"`{root}` saves, and it has restored none. Newer near steps stay "
                    "until one is as new:",
                    above=step,
                )
            attempt = start.begin_if_due(step, saves.damaged, is_near=True)
            assert attempt is not None
            return attempt.encode()

        def report() -> bytes:
            with _noted(step):
                self._plan(offer)
            return self._disk.report()

        what = f"Beginning an attempt with step {step}"
        processes = saves.processes("begin near steps", what, step)
        self._attempt = Attempt.decode(processes.decide(decide, report))
        self._is_asked = False
        start.warn_of_passed_steps(step)

    def _plan(self, offer: PendingState) -> Plan:
        options = self._saves.options._replace(
            layout="ocdbt",
            durable=False,
            orbax=False,
            functions="drop",
            processes="own",
            own=_own.encode(offer.own),
        )
        # Where it will be is said later.
        root = _root.resolve(str(self._disk.place(_NONE, _NONE, 0)))
        root.check_writable()
        return _plan.plan(root, offer.tree, options)

    def _write_part(self, going: NearSaving, plan: Plan, processes: Processes) -> None:
        """Writes the part of this process, from a thread of its own."""
        assert self._attempt is not None
        with _log.timed("near") as timer, processes.share_errors():
            processes.gather()
            save = processes.broadcast(secrets.token_hex(8).encode()).decode()
            run, number, *_ = self._attempt
            count, index = processes.count, processes.index
            part = NearPart(run, number, going.step, save, count, index)
            if not _disk.is_part(list(part)):
                raise DamagedError("The save id of a near step is no id of a save.")
            file = self._disk.file(part)
            self._disk.make_room(file)
            where = {"near": list(part), "root": str(self._saves.steps.root)}
            options = plan.options._replace(metadata=where)
            root = _root.resolve(str(file))
            _serialise.write(plan._replace(root=root, options=options), Processes())
            own = [_host(), file.stat().st_size, _disk.digest(file)]
            going.rows = said_by_all(processes, own, _OF_PART, _WRITTEN)
            going.part = part
            if self._copies and count > 1:
                # No process begins a call before all know which is the next of all.
                going.call = self._lock.run(lambda: self._next_call(processes))
        steps, seconds = self._saves.steps, timer.seconds
        if going.call is None:
            self._disk.keep(part)
        steps.say(_log.INFO, "Saved to near disks", going.step, seconds=seconds)

    def _next_call(self, processes: Processes) -> int:
        return max(said_by_all(processes, self._calls, _OF_PART, COUNT)) + 1

    def _send(self, going: NearSaving) -> None:
        """Sends copies, if there are to be some, and deletes what is older."""
        if going.call is None or going.part is None:
            return
        step, what = going.step, f"Copying step {going.step} to near disks"
        processes = self._saves.processes("copy a near step", what, step)
        with _log.timed("near") as timer, processes.share_errors():
            processes.gather()
            processes.broadcast()
            own = self._copy(going.part, going.rows, processes)
            for index, got in enumerate(said_by_all(processes, own, _OF_PART, _GOT)):
                _check_copies(index, got, going.rows)
        # All have it.
        self._disk.keep(going.part)
        steps, seconds = self._saves.steps, timer.seconds
        steps.say(_log.INFO, "Copied to near disks", step, seconds=seconds)

    def _copy(
        self, part: NearPart, rows: list[Any], processes: Processes
    ) -> list[tuple[int, str]]:
        """Sends copies of all parts to other disks. Returns the processes of those that
        came here, and the digests of what came."""
        count, here = part.processes, part.process
        got: list[tuple[int, str]] = []
        # Whatever is wrong with one, all take part in the others.
        errors: list[Exception] = []
        for shift in _exchange.shifts([row[0] for row in rows], self._copies):
            moves = [
                Move(i, i, (i + shift) % count, row[1]) for i, row in enumerate(rows)
            ]
            origin = (here - shift) % count
            read = ft.partial(_disk.read_into, self._disk.file(part))
            into = Incoming(self._disk, self._disk.file(part._replace(process=origin)))
            unread, unwritten = _exchange.exchange(moves, read, into.write, processes)
            try:
                got.append((origin, into.finish(unwritten, rows[origin][2])))
            except Exception as e:
                errors.append(e)
            errors += [] if unread is None else [unread]
        if errors:
            raise errors[0]
        return got


@contextlib.contextmanager
def _noted(step: int) -> Iterator[None]:
    """An error in the block has a note that a near step is not saved."""
    try:
        yield
    except Exception as e:
        e.add_note(
            f"Step {step} is not saved to near disks. The near step before it stays, "
            "and so do the steps at the root."
        )
        raise


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


def near_steps(
    saves: Saves,
    near: str | os.PathLike[str] | None,
    near_every: int | None,
    copies: int | None,
) -> NearSteps:
    for name, value in (("near_every", near_every), ("copies", copies)):
        if near is None and value is not None:
            raise ValueError(f"`{name}` is for near disks: say where, with `near`.")
    if near is None:
        return NearSteps(saves)
    if near_every is None:
        raise ValueError("With `near`, `near_every` must be an integer >= 1.")
    others = _processes.count() - 1
    if copies is not None and copies > max(1, others):
        raise ValueError(
            f"`copies` is {copies}, and there are {others} other processes whose disks "
            "could have one."
        )
    return Near(saves, Disk(near), near_every, 1 if copies is None else copies)
