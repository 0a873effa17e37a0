"""Near steps: each process saves its part to its own node's disk, and a copy of it to
the disk of another.

A part is written in the background. Copies move through the devices, so all processes
send them in one of the calls that they make anyway, once all parts are written. A near
step is whole once all have confirmed their parts and copies. Only then are older ones
deleted. On a restore each process reads its disk and reports what is there: a disk is
not known by the number of its process, or by the name of its host.
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
from typing import Any, NamedTuple

from .._kernel._errors import DamagedError
from .._kernel._format._schema import COUNT, DIGEST
from .._kernel._run import _own
from .._kernel._run._attempts import Attempt
from .._kernel._run._near_interface import NearSteps
from .._kernel._run._pending import PendingState
from .._kernel._run._place import Place
from .._kernel._run._saves import Saves
from .._kernel._run._shared_records import share_records
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


class WrittenPart(NamedTuple):
    """The report of a process on the part that it has written."""

    host: str
    nbytes: int
    digest: str


@dataclasses.dataclass(eq=False)
class NearSaving:
    """A near save that is not whole yet. Once all parts are written, `part` is that of
    this process, and `written` has a report on each. `call` is the number of the call
    of `save_if_due` that sends the copies."""

    step: int
    handle: SaveHandle
    part: NearPart | None = None
    written: list[WrittenPart] = dataclasses.field(default_factory=list)
    call: int | None = None


class Near(NearSteps):
    """The near steps of a run: multiples of `every`, each process's part on its own
    `disk`, with so many `copies` on the disks of others."""

    def __init__(self, saves: Saves, disk: Disk, every: int, copies: int):
        super().__init__(saves)
        self._disk, self._every, self._copies = disk, every, copies
        self._place = Place(disk.root)
        # The attempt, once it has begun; and whether the next near save has to ask for
        # it: at first, and after a restore.
        self._attempt: Attempt | None = None
        self._must_ask_attempt = True
        self._saving: NearSaving | None = None
        # The step that was due when Ctrl-C came, and that others may begin.
        self._not_begun: int | None = None
        # Calls of `save_if_due` that have begun. None begins while the lock is held.
        self._calls = 0
        self._lock = _threads.Lock()

    def search(self) -> Search:
        return Search(self._saves.steps.root, self._disk)

    def note_restored(self) -> None:
        self._must_ask_attempt = True

    def wait(self) -> None:
        """Waits until the near save that goes on is whole. All processes do.

        **Raises:** what went wrong with it.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with _noted(saving.step):
            try:
                saving.handle.result()
            except Exception:
                raise  # It is over.
            except BaseException:
                self._saving = saving  # After Ctrl-C it goes on.
                raise
            self._send(saving)

    def end_after(self, error: BaseException) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.handle.result()
            except Exception as e:
                if e is not error:
                    error.add_note(
                        f"Step {saving.step} is not saved to near disks: {e}"
                    )
            # The others may wait for this process already.
            if saving.call is not None:
                self._of_copy(saving.step).tell_failed(error)
            if self._not_begun is not None:
                self._of_part(self._not_begun).tell_failed(error)

    def latest(self) -> int | None:
        self.wait()
        return super().latest()

    def _latest(self, reports: list[bytes]) -> bytes:
        steps = self._saves.steps
        chosen = _near_search.choose(steps.root, reports)
        known = [steps.latest(chosen.has_near), chosen.step and chosen.step.step]
        latest = max((s for s in known if s is not None), default=None)
        if latest is None:
            steps.orbax.check_readable()
        chosen.warn(
            f"The latest step of `{steps.root}` is {latest}, as newer ones cannot "
            "be restored:",
            above=-1 if latest is None else latest,
        )
        return json.dumps(latest).encode()

    def _count(self, calls: int) -> None:
        self._calls += calls

    def save_if_due(self, state: PendingState) -> None:
        """Saves a state if it is due. Sends the copies of the near step before, if that
        is due: at the latest before the next near step is saved."""
        self._lock.run(lambda: self._count(1))
        is_due = state.step % self._every == 0
        saving = self._saving
        # No process makes the agreed call before all know its number: `_agree_on_call`
        # holds the lock, and a call counts itself first.
        call = None if saving is None else saving.call
        waits = is_due or (call is not None and self._calls >= call)
        try:
            if waits:
                self.wait()
        finally:
            # Also after an error of the step before: the others begin this one.
            self._not_begun = None
            was_interrupted = waits and saving is not None and self._saving is saving
            if was_interrupted:
                # Ctrl-C came before this process has told the others that it copies the
                # step before. They wait until it makes this call again.
                self._lock.run(lambda: self._count(-1))
                self._not_begun = state.step if is_due else None
            elif is_due:
                self._begin(state)

    def _begin(self, state: PendingState) -> None:
        """Begins to save a state. It may be changed once this returns."""
        step = state.step
        if self._must_ask_attempt:
            self._begin_attempt(state)
        processes = self._of_part(step)
        with _noted(step):
            with _log.timed("near") as timer, processes.share_errors():
                plan = _async.stage(self._plan(state), frozenset())
                assert self._attempt is not None
                # This makes the directory of the run, so that an error of the disk is
                # raised by this call and not in the thread. No save has the id `_NONE`.
                file = self._disk.place(self._attempt.run, _NONE, 0)
                self._disk.make_room(file.parent)
            saving = NearSaving(step, SaveHandle(plan.root, is_apart=True))
            write = lambda: self._write_part(saving, plan, processes)
            _async.start_staged(saving.handle, plan, write, processes)
            self._saving = saving
            saving.handle.staged()
        steps = self._saves.steps
        steps.log_step(_log.DEBUG, "Copied to memory", step, seconds=timer.seconds)

    def _of_part(self, step: int) -> Processes:
        what = f"Saving step {step} to near disks"
        return self._saves.run_processes.of_call("save a near step", what, step)

    def _of_copy(self, step: int) -> Processes:
        what = f"Copying step {step} to near disks"
        return self._saves.run_processes.of_call("copy a near step", what, step)

    def _begin_attempt(self, state: PendingState) -> None:
        """Begins an attempt if the step needs one. Before that, each process checks its
        state. If nothing was restored, warns of the near steps that are passed over."""
        saves, step = self._saves, state.step
        root, start = saves.steps.root, saves.attempt_start

        def decide(reports: list[bytes]) -> bytes:
            saves.check_place_of_run()
            if start.attempt is None and not start.has_restored:
                chosen = _near_search.choose(root, reports)
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
                self._plan(state)
            return self._disk.report()

        what = f"Beginning an attempt with step {step}"
        processes = saves.run_processes.of_call("begin near steps", what, step)
        self._attempt = Attempt.decode(processes.decide(decide, report))
        self._must_ask_attempt = False
        start.warn_of_passed_steps(step)

    def _plan(self, state: PendingState) -> Plan:
        options = self._saves.options._replace(
            layout="ocdbt",
            durable=False,
            orbax=False,
            functions="drop",
            processes="own",
            own=_own.encode(state.own),
        )
        # `_write_part` replaces the path: it has the id of the save.
        root = _root.resolve(str(self._disk.place(_NONE, _NONE, 0)))
        root.check_writable()
        return _plan.plan(root, state.tree, options)

    def _write_part(self, saving: NearSaving, plan: Plan, processes: Processes) -> None:
        """Writes the part of this process, from a thread of its own."""
        assert self._attempt is not None
        with _log.timed("near") as timer, processes.share_errors():
            make_id = lambda _: secrets.token_hex(8).encode()
            save = processes.round(choose=make_id).decode()
            run, number, *_ = self._attempt
            count, index = processes.count, processes.index
            part = NearPart(run, number, saving.step, save, count, index)
            if not _disk.is_part(list(part)):
                raise DamagedError("The save id of a near step is no id of a save.")
            file = self._disk.file(part)
            self._disk.make_room(file)
            where = {"near": list(part), "root": str(self._saves.steps.root)}
            options = plan.options._replace(metadata=where)
            root = _root.resolve(str(file))
            _serialise.write(plan._replace(root=root, options=options), Processes())
            own = WrittenPart(_host(), file.stat().st_size, _disk.digest(file))
            self._place.note(saving.step, self._disk.key(file))
            reports = share_records(processes, own, _OF_PART, _WRITTEN)
            saving.written = [WrittenPart(*report) for report in reports]
            saving.part = part
            if self._copies and count > 1:
                # No process begins a call before all know which is the next of all.
                self._lock.run(lambda: self._agree_on_call(saving, processes))
        steps, seconds = self._saves.steps, timer.seconds
        if saving.call is None:
            self._disk.keep(part)
        steps.log_step(_log.INFO, "Saved to near disks", saving.step, seconds=seconds)

    def _agree_on_call(self, saving: NearSaving, processes: Processes) -> None:
        """Sets the call that sends the copies: the next of the process that has made
        the most."""
        saving.call = max(share_records(processes, self._calls, _OF_PART, COUNT)) + 1

    def _send(self, saving: NearSaving) -> None:
        """Sends copies, if there are to be some, and deletes what is older."""
        if saving.call is None or saving.part is None:
            return
        step = saving.step
        processes = self._of_copy(step)
        with _log.timed("near") as timer, processes.share_errors():
            processes.round()
            own = self._copy(saving.part, saving.written, processes)
            for index, got in enumerate(share_records(processes, own, _OF_PART, _GOT)):
                _check_copies(index, got, saving.written)
        # All have it.
        self._disk.keep(saving.part)
        steps, seconds = self._saves.steps, timer.seconds
        steps.log_step(_log.INFO, "Copied to near disks", step, seconds=seconds)

    def _copy(
        self, part: NearPart, written: list[WrittenPart], processes: Processes
    ) -> list[tuple[int, str]]:
        """Sends copies of all parts to other disks. Returns the processes of those that
        came here, and the digests of what came."""
        count, here = part.processes, part.process
        got: list[tuple[int, str]] = []
        # If one exchange fails, this process still takes part in the others.
        errors: list[Exception] = []
        for shift in _exchange.shifts([x.host for x in written], self._copies):
            moves = [
                Move(i, i, (i + shift) % count, x.nbytes) for i, x in enumerate(written)
            ]
            origin = (here - shift) % count
            read = ft.partial(_disk.read_into, self._disk.file(part))
            into = Incoming(self._disk, self._disk.file(part._replace(process=origin)))
            unread, unwritten = _exchange.exchange(moves, read, into.write, processes)
            try:
                got.append((origin, into.finish(unwritten, written[origin].digest)))
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
    """The id of this machine: processes on one machine fail together."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _check_copies(
    index: int, got: Sequence[Any], written: Sequence[WrittenPart]
) -> None:
    for origin, digest in got:
        if digest != written[origin].digest:
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
    """The near steps of a run, as its manager was given them.

    **Raises:** `ValueError` for arguments that make no sense together.
    """
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
