"""The saves of a run: one goes on at a time, and older steps are deleted after it.

Each call of `save` gives a state. If it is due, all processes stage it together, and
threads write it. If not, it is kept for the end of the run (`_last_state`). Process 0
decides for all, and does what follows a save.
"""

import contextlib
import functools as ft
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from .._format import _layouts, _schema
from .._runtime import _arguments, _log, _processes, _threads
from .._runtime._processes import Processes
from .._save import _async, _background, _serialise
from .._save._background import SaveHandle
from .._save._options import SaveOptions
from .._storage import _context
from . import _best, _marks, _own, _removal, _step_facts, _step_place
from ._attempt_start import AttemptStart
from ._follow_up import FollowUp, RunningSave
from ._last_state import LastState
from ._pending import PendingState
from ._policy import Policy
from ._run_processes import RunProcesses
from ._steps import Steps


T = TypeVar("T")

_STOPPED = "that was interrupted"
_DONATED = "its arrays were donated or deleted before the run ended"

_DECISION_TEXT = "what process 0 says of the save of a step"
# JSON has no NaN or infinity: they are texts.
_METRIC = lambda x: type(x) in (int, float, str)
# As `_schema.read` takes it: a list of three, the second an object with any names.
_DECISION = bool, {...: _METRIC}, str


class Decision(NamedTuple):
    """The decision of process 0 on a save that is due: whether it may replace a step
    that is there; its metrics; and the error of computing them, or ""."""

    may_replace: bool
    metrics: dict[str, Any]
    metrics_error: str

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, word: bytes) -> "Decision":
        return cls(*_schema.read(word, _DECISION_TEXT, _DECISION))


class Saves:
    """The saves of a manager, and the state that it was given last."""

    def __init__(self, steps: Steps, policy: Policy, options: SaveOptions):
        self.steps, self._policy, self.options = steps, policy, options
        together = _arguments.together(options.processes)
        self.run_processes = RunProcesses(steps.root, together)
        self.attempt_start = AttemptStart(steps)
        self._follow_up = FollowUp(steps, policy, self.attempt_start)
        self._last = LastState(steps, options)
        self._pid = os.getpid()
        # Only one thread at a time may save.
        self._turn = _threads.Lock()

        # When the last save began, or else this was made: in seconds of
        # `time.monotonic`.
        self._last_begin_time = time.monotonic()
        # The saves that were begun, until `wait` has asked how they went: one, or more
        # where the handler of a signal saves in the middle of a call.
        self._running: list[RunningSave] = []
        # The last step that was saved here, or restored as the newest: it is known to
        # be whole.
        self._last_whole: SaveHandle | str | os.PathLike[str] | None = None
        # Steps that a load has found damaged: the next save of one moves it aside.
        self.damaged: set[int] = set()
        # Whether it was checked that a step has the metric of `best`.
        self._is_metric_checked = False

    # ---- A call of `save`.

    @property
    def last_begun(self) -> RunningSave | None:
        """The last save that was begun since a state was kept; None if none was. To
        keep a state sets it to None (`LastState`)."""
        return self._last.last_begun

    def save_if_due(
        self, state: PendingState, begun_before: RunningSave | None
    ) -> bool:
        """Saves a state if it is due, and keeps it for the end of the run if not.
        `begun_before`: what was `last_begun` when the caller was given the state."""
        return self._run_in_turn(lambda: self._save_if_due(state, begun_before))

    def _run_in_turn(self, act: Callable[[], T]) -> T:
        """Runs a call once no other thread runs one."""
        _context.check_fork()  # Whoever had the turn may not be in a child.
        self._follow_up.check_thread()
        return self._turn.run(act)

    def _save_if_due(
        self, state: PendingState, begun_before: RunningSave | None
    ) -> bool:
        with self._last.noting_errors():
            # Without a time, `is_due` says whether the step may be due, and every
            # process gets the same answer. Process 0 then also asks the clock.
            may_be_due = state.force or self._policy.is_due(state.step)
            if may_be_due and self._try_to_save(state):
                self._last.drop()
                return True
            self.steps.log_step(_log.DEBUG, "Skipped", state.step, "it is not due")
            self._last.keep(state, begun_before)
            return False

    def _try_to_save(self, state: PendingState) -> bool:
        """Saves a state as `_save` does. After an error that another try might not
        have, the state is kept."""
        earlier_saves = [saving.handle for saving in self._running]
        try:
            return self._save(state)
        except BaseException as e:
            may_try_again = self._may_try_again(e, earlier_saves)
            if may_try_again:
                self._last.keep_tried(state)
            if any(_background.error_of(x) is e for x in earlier_saves):
                end = ": it is kept for the end of the run" if may_try_again else ""
                e.add_note(
                    "That is the error of the save before. Step "
                    f"{state.step}, given to this call, is not saved either{end}."
                )
            raise

    def _save(self, state: PendingState, may_delete: bool = True) -> bool:
        """Begins to save a step if it is due. If it `may_delete`, older ones go once it
        is saved. Returns whether it has begun.

        Processes make two calls together: in the first, process 0 decides, and the
        second is the save.
        """
        step = state.step
        call = self.run_processes.of_call("save a step", f"Saving step {step}", step)
        decision = self._decide(state, call)
        if decision is None:
            return False
        given = state.metadata or {}
        may_reuse = self._policy.reuse and self.options.layout in _layouts.PACKED
        options = self.options._replace(
            # The processes of the save itself have a tag of this call alone, so they
            # never meet messages that an interrupted save has left.
            processes=call.for_part(self.run_processes.together, f"step {step}, save"),
            overwrite=decision.may_replace,
            reuse=self._last_whole if may_reuse else None,
            functions=state.functions,
            metadata={**given, "step": step, "metrics": decision.metrics},
        )
        saving = self._begin(state, options, decision.metrics, may_delete)
        try:
            saving.handle.staged()
        except Exception:
            self._finish(saving)  # It is the error of the save, which is over.
            raise
        self.attempt_start.warn_of_passed_steps(step)
        if decision.metrics_error and call.leads:
            why = decision.metrics_error
            _log.warn(f"Step {step} is saved without its metrics: {why}")
        return True

    def _decide(self, state: PendingState, call: Processes) -> Decision | None:
        """The decision of process 0 on a state; None if it is not due. Each process
        checks the metadata that it was given."""

        def check() -> bytes:
            state.check_metadata()
            return b""  # There is nothing to tell but an error.

        try:
            word = call.decide(lambda _: self._prepare(state), check)
        except Exception as e:
            # If the save before has failed in this process, this call tells that too,
            # and no later one has to.
            self._wait_beside(e)
            raise
        return Decision.decode(word) if word else None

    def _prepare(self, state: PendingState) -> bytes:
        """In process 0: makes sure that a state can be saved, and moves a damaged step
        out of its place. Returns the encoded decision; nothing if the state is not due.

        **Raises:** `FileExistsError` for a step that is there and may not be replaced.
        """
        step, force, last_time = state.step, state.force, self._last_begin_time
        if not (force or state.is_last or self._policy.is_due(step, last_time)):
            return b""
        self.wait()
        self.check_place_of_run()
        _step_place.check_not_linked(self.steps, step)
        if state.metrics and not self._is_metric_checked:
            self._is_metric_checked = True
            _best.warn_if_missing(self.steps, self._policy, step, state.metrics)
        if step in self.damaged:
            _removal.set_aside(self.steps, step, force)
        elif force or not self.steps.is_known_absent(step):
            hint = self.attempt_start.how_to_go_on
            _step_place.check_free(self.steps, step, force, hint)
        # The metrics of process 0 count for all.
        metrics, error = state.metrics_as_json()
        why = "" if error is None else str(error) or type(error).__name__
        return Decision(force, metrics, why).encode()

    def check_place_of_run(self) -> None:
        """Checks the place of the run before a save, also to near disks, until a step
        of it is known to be whole. **Raises:** as `_step_place.check_run`."""
        if self._last_whole is None:
            _step_place.check_run(self.steps)

    def _begin(
        self,
        state: PendingState,
        options: SaveOptions,
        metrics: dict[str, Any],
        may_delete: bool,
    ) -> RunningSave:
        """Stages a step, and starts the thread that writes it. The save is put into
        `_running` before its thread starts, so that `wait` finds it even if Ctrl-C
        comes between. If the save fails, its follow-up marks the step again that
        `_make_way` has unmarked."""
        step, path = state.step, self.steps.own_path(state.step)
        writers = _serialise.processes_of(path, state.tree, options)
        saving, is_told = None, False
        try:
            # The other processes may wait in the save by now. An error here is told to
            # them as one of that save.
            with writers.share_errors():
                try:
                    # Process 0 has waited in `_prepare`. Here the others do.
                    self.wait()
                    options = options._replace(own=_own.encode(state.own))
                    tree = state.tree
                    handle, start = _async.stage_save(path, tree, options, writers)
                    over = _threads.Event()
                    made = RunningSave(step, handle, metrics, may_delete, over)
                    handle.add_done_callback(ft.partial(self._after_save, made))
                    # Its follow-up sets `over`, for which `_finish` waits: from here on
                    # an error below has to end the save.
                    saving = made
                    self._last.note_begun(saving)
                    self._running.append(saving)
                    if writers.leads:
                        self._make_way(step, options.overwrite)
                except BaseException:
                    is_told = True  # By `share_errors`, to the other processes.
                    raise
            start()
        except BaseException as e:
            if saving is not None:
                # No thread will run it. The other processes have heard of the error by
                # `share_errors`, unless `start` has raised it.
                if _background.end_unclaimed(saving.handle) and not is_told:
                    writers.tell_failed(e)
                if _background.error_of(saving.handle) is not None:
                    self._finish(saving)
            raise
        self._last_begin_time = time.monotonic()
        return saving

    def _make_way(self, step: int, overwrite: bool) -> None:
        """In process 0, before a step is written: unmarks one that it replaces, and
        begins an attempt if the run went back."""
        if overwrite:
            # With the index, its metrics are about to go.
            _step_facts.add_to_history(self.steps, [step])
            _marks.unmark(self.steps, step)
        self.attempt_start.begin_if_due(step, self.damaged)

    def _after_save(self, saving: RunningSave, _: SaveHandle) -> None:
        """Notes a save that is over. Process 0 does what follows it."""
        try:
            if _background.committed_by(saving.handle) is not None:
                self.damaged.discard(saving.step)
                self._last_whole = saving.handle
            if _processes.leads():
                self._follow_up.do(saving, self.damaged)
        finally:
            saving.over.set()

    def wait(self) -> None:
        """Waits for the saves that go on, and for their follow-ups. **Raises:** the
        error of the first that has failed, which is told once."""
        _context.check_fork()  # In a child nobody ends the save.
        self._follow_up.check_thread()
        for saving in self._running.copy():
            # A handler of a signal would wait for the call that it interrupts.
            if not (_background.has_thread(saving.handle) or saving.over.is_set()):
                continue
            try:
                saving.handle.result()
            except Exception:
                self._finish(saving)
                raise
            # Not in a `finally`: after Ctrl-C the save goes on.
            self._finish(saving)
        self._follow_up.warn_of_failures()

    def _finish(self, saving: RunningSave) -> None:
        """Waits for the follow-up of a save that is over, and then takes the save out
        of `_running`."""
        if not _background.await_event(saving.handle, saving.over):
            self._follow_up.failures.append("The thread of the save has ended.")
        # Another thread may have waited for it too.
        with contextlib.suppress(ValueError):
            self._running.remove(saving)

    def _wait_beside(self, error: BaseException) -> None:
        """Waits as `wait`. What that raises is added to another error as a note."""
        try:
            self.wait()
        except Exception as e:
            if e is not error:
                error.add_note(f"The save before has failed: {type(e).__name__}: {e}")

    def _may_try_again(
        self, error: BaseException, earlier_saves: Sequence[SaveHandle]
    ) -> bool:
        """Whether another try might save a state: if, say, a disk was full, or if the
        error is that of an earlier save. Not if the state was refused, or if its save
        goes on: then the state that was kept before stays. Never with many
        processes."""
        goes_on = any(saving.handle not in earlier_saves for saving in self._running)
        if _processes.count() > 1 or goes_on:
            return False
        is_refused = isinstance(error, (FileExistsError, TypeError, ValueError))
        errors_before = map(_background.error_of, earlier_saves)
        return not is_refused or any(x is error for x in errors_before)

    # ---- The end of a run.

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process of the run, which saves nothing."""
        return os.getpid() != self._pid

    def end(self) -> None:
        """Saves what was last given to `save`, if it is not saved."""
        self._run_in_turn(self._end)

    def _end(self) -> None:
        try:
            # No `wait` before this: `_prepare` waits in a round of all processes, so
            # that the others hear of an error of the save before.
            if why := self._save_last():
                _log.warn(self._last.not_saved(why))
            self.wait()
            self.wait()  # For what a handler of a signal has saved meanwhile.
        except BaseException as e:
            self._end_after(e)
            raise
        self._last.end()

    def end_after(self, error: BaseException) -> None:
        """Saves the kept state after an error, and deletes no step because of it. If
        that cannot be done, the error gets a note that says why."""
        self._run_in_turn(lambda: self._end_after(error))

    def _end_after(self, error: BaseException) -> None:
        why = _STOPPED
        try:
            self._wait_beside(error)
            why = self._save_last_after(error)
        finally:
            if why and self._last.unsaved() is not None:
                error.add_note(self._last.not_saved(why))
            self._last.end()

    def _save_last(self, may_delete: bool = True) -> str:
        """Saves the kept state, if it is not saved. Returns why that cannot be done."""
        kept = self._last.unsaved()
        if kept is None:
            return ""
        if kept.is_gone:
            return _DONATED
        with kept.as_last() as state:
            self._save(state, may_delete)
        return ""

    def _save_last_after(self, error: BaseException) -> str:
        """Saves the kept state after an error, if this is no run of many processes.
        Returns why that cannot be done."""
        if _processes.count() > 1:
            return "the other processes take no part"
        try:
            why = self._save_last(may_delete=False)
            self.wait()
            return why
        except Exception as e:
            is_same = (type(e), str(e)) == (type(error), str(error))
            return "it fails again, as above" if is_same else f"{type(e).__name__}: {e}"

    def warn_if_unsaved(self) -> None:
        """Says what is lost, where a manager ends without the end of a `with`."""
        if not self.is_forked:
            self._last.warn_if_unsaved()

    # ---- A load of the run.

    def note_restored(self, path: Any, is_near: bool, damaged: set[int]) -> None:
        """Notes a load of the newest step: its path, if all of it was read and checked;
        whether that was a near step; and the steps that were found damaged."""
        self.damaged |= damaged
        # The save after the load of a near step reuses nothing: that is on other disks.
        if is_near or path is not None:
            self._last_whole = None if is_near else path
