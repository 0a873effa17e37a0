"""Work that follows the save of a step: it is marked, it gets its row of the history,
and steps that need not stay are deleted."""

import functools as ft
import threading
import time
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from .._format._history import HistoryRow
from .._runtime import _log, _threads
from .._save import _background
from .._save._background import SaveHandle
from .._storage import _store
from . import _marks
from ._attempt_start import AttemptStart
from ._place import Place
from ._policy import Policy
from ._retention import Retention
from ._step_journal import index_of
from ._steps import SavedStep, Signature, Steps


class RunningSave(NamedTuple):
    """A save that goes on. If it `may_delete`, older steps go once it is over. `over`
    is set once it is followed up too."""

    step: int
    handle: SaveHandle
    metrics: dict[str, Any]
    may_delete: bool
    over: _threads.Event


class FollowUp:
    """The work of process 0 after each save of a run: in the thread of the save; or in
    that of the caller, if the save is over by then. `failures` are those of which
    nobody was warned yet."""

    def __init__(self, steps: Steps, policy: Policy, attempt_start: AttemptStart):
        self._steps, self._attempt_start = steps, attempt_start
        self._retention = Retention(steps, policy)
        self.failures: list[str] = []
        self._place = Place(steps.root)
        # The thread that deletes older steps now.
        self._thread: int | None = None

    def do(self, saving: RunningSave, damaged: Set[int]) -> None:
        """Marks the step, and adds it to the history. If it may delete, older steps go,
        those that are `damaged` not among them, and the step is noted for the journal.
        Last, `Place` warns if the directory of the run is another one than before.
        If the save has failed, a step that it was to replace is marked again."""
        step = saving.step
        try:
            committed = _background.committed_by(saving.handle)
            marked: _threads.Outcome[None] = _threads.Outcome()
            mark = ft.partial(self._mark, step, committed is not None, marked)
            jobs: list[Callable[[], Any]] = [mark]
            if committed is not None:
                # As it was written, without a look at it.
                number, when = self._attempt_start.number, round(time.time(), 3)
                facts = number, when, saving.handle.progress.total, saving.metrics
                row = HistoryRow(step, committed.save_id, *facts)
                new = SavedStep(Signature(committed.stamp), row)
                self._steps.note_committed(step)
                jobs.append(ft.partial(self._add_to_history, new))
                if saving.may_delete:
                    delete = ft.partial(self._delete_older, new, damaged)
                    jobs.append(ft.partial(delete, marked.result))
                jobs.append(ft.partial(self._place.note, step, index_of(step)))
            # In a directory these are done in turn, and an error ends them: no step is
            # deleted before the new one has its mark and its row. In a store all begin
            # now, together: so there the deletion awaits the mark.
            for job in _store.ahead(self._steps.root, jobs):
                job()
        except Exception as e:
            self.failures.append(f"after step {step}: {type(e).__name__}: {e}")

    def _mark(self, step: int, is_saved: bool, marked: _threads.Outcome[None]) -> None:
        """Marks a step as complete, if there is one. `marked` is done as soon as the
        mark is there, before it is looked whether another has deleted the step."""
        done = ft.partial(marked.set_result, None)
        try:
            _marks.mark_complete(self._steps, step, is_saved, done)
        except BaseException as e:
            marked.set_exception(e)
            raise
        finally:
            # If nothing was marked: what an outcome was given first counts.
            done()

    def _add_to_history(self, new: SavedStep) -> None:
        self._steps.history.append([new.row])
        self._steps.note_saved(new)

    def _delete_older(
        self, new: SavedStep, damaged: Set[int], await_mark: Callable[[], Any]
    ) -> None:
        # Orbax finds no step without its mark: older ones stay until that is there.
        attempt, delete = self._attempt_start.attempt, self._retention.delete_outdated
        self._thread = threading.get_ident()
        try:
            self.failures.extend(delete(new, damaged, attempt, await_mark))
        finally:
            self._thread = None
        self._steps.journal.note_saved(new.row.step)

    def warn_of_failures(self) -> None:
        """Warns once of what was not done."""
        if self.failures:
            failures, self.failures = self.failures, []
            text = "\n  ".join(failures)
            _log.say(_log.WARNING, f"The work after a save was not all done:\n  {text}")
            _log.warn(f"The work after a save was not all done:\n  {text}")

    def check_thread(self) -> None:
        """**Raises:** `RuntimeError` in `keep_if`, which is a part of a save: it would
        wait for itself."""
        if self._thread == threading.get_ident():
            raise RuntimeError(
                "`keep_if` is called as a part of a save, and a manager's `save`, "
                "`wait`, `restore`, `pin` and `delete` would wait for that save for "
                "ever. Read the step by its `path`, and return whether to keep it."
            )
