"""Deletion of old steps once another is saved. Many are not looked at each time."""

from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

from .._runtime import _log
from . import _removal, _step_facts
from ._attempts import Attempt, Lineage
from ._policy import Policy
from ._steps import SavedStep, Signature, Steps


# All steps are looked at again after so many saves.
_SAVES = 64
# On a disk, where a look is cheap, they are looked at after each save if they are at
# most so many, after each second save if they are twice as many, and so on.
_STEPS_PER_SAVE = 256
# A run that keeps all steps looks only for what killed saves have left: in the same
# way, after each save if they are at most so many.
_KEPT_STEPS_PER_SAVE = 4
# After one save, steps are picked and deleted at most so often: anew, if others have
# changed one meanwhile.
_TRIES = 3


class SeenStep(NamedTuple):
    """The signature of a complete step as it was looked at, and its metrics."""

    signature: Signature
    metrics: dict[str, Any]


class Retention:
    """Deletes the steps of a run that need not stay.

    On a disk, all steps of a run that deletes some are looked at after each save, as
    long as there are at most 256. Of more, and in a store, all are looked at after the
    first save, and now and then. In between only new ones are: in an object store,
    where it takes requests to list them, only the one that was saved. A step goes only
    if it still is what was seen, and so is each step because of which it may go; else
    all are looked at again.
    """

    def __init__(self, steps: Steps, policy: Policy):
        self._steps, self._policy = steps, policy
        # The complete steps as they were last looked at, and whether that look and what
        # followed it went well.
        self._seen: dict[int, SeenStep] = {}
        self._is_sure = False
        # At that look, the attempt that had been begun here, and the one that counted.
        self._attempt: Attempt | None = None
        self._lineage = Lineage(None, lambda *_: False)
        # When steps were saved, in seconds, by step and signature, if the policy needs
        # that.
        self._times: dict[tuple[int, Signature], int | None] = {}
        # How many changes of metrics were known at that look.
        self._changes = 0
        # Saves since all of them were looked at.
        self._saves = 0
        # What was not deleted after the last save, and why.
        self._failures: list[str] = []

    def delete_outdated(
        self,
        saved: SavedStep,
        damaged: Set[int],
        attempt: Attempt | None,
        await_mark: Callable[[], Any],
    ) -> list[str]:
        """Deletes steps that need not stay once a step is `saved`, which is known as it
        was written, and files that killed saves have left. Steps that are `damaged` are
        neither counted nor deleted. No step is deleted before `await_mark` returns.

        **Returns:** what was not deleted, and why.
        """
        new, deletes = saved.row.step, self._policy.keep is not None
        if not deletes and not self._steps.is_local:
            return []
        if attempt is not self._attempt:  # What was seen counts otherwise in it.
            self._attempt, self._is_sure = attempt, False
        self._saves += 1
        is_due = self._is_due()
        if not deletes and not is_due:
            return []
        self._is_sure = False  # If anything goes wrong.
        self._look_and_clean({} if is_due else self._seen, new, saved)
        for _ in range(_TRIES if deletes else 0):
            outdated, superseding = self._outdated(new, damaged)
            if self._delete_steps(outdated, superseding, await_mark):
                break
            self._look_and_clean({}, new)
        self._is_sure = not self._failures
        return self._failures

    def _is_due(self) -> bool:
        """Whether all steps are to be looked at."""
        if not self._is_sure:
            return True
        if self._policy.keep is None:
            return self._saves * _KEPT_STEPS_PER_SAVE >= len(self._seen)
        if self._steps.is_local and self._saves * _STEPS_PER_SAVE >= len(self._seen):
            return True
        return self._saves >= _SAVES

    def _look_and_clean(
        self, before: dict[int, SeenStep], new: int, saved: SavedStep | None = None
    ) -> None:
        """Looks at all steps if none was seen `before`; else at those whose metrics
        have changed, at the new one and, on a disk, at all that were not seen. If
        `saved` is given, it tells what the new one is, unless its metrics have changed.
        What killed saves have left of older steps that it looks at is deleted."""
        deletes = self._policy.keep is not None
        listing = None
        if not before:
            self._saves = 0
        if self._steps.is_local or not before:
            listing = self._steps.listing()
            self._lineage = self._steps.lineage(listing)
        else:
            self._lineage.note_saved(new)
        listed = listing.steps if listing else dict.fromkeys([*before, new])
        if self._policy.has_rank:
            self._steps.history.refresh_added(listing and listing.history)
        changes = self._steps.history.changes.copy()
        changed, self._changes = {*changes[self._changes :]}, len(changes)
        holds = lambda step: step in listed and step not in changed and step != new
        seen = self._seen = {step: x for step, x in before.items() if holds(step)}
        if saved is not None and new in listed and new not in changed:
            seen[new] = SeenStep(saved.signature, saved.row.metrics)
        self._failures = []
        some = {step: save for step, save in listed.items() if step not in seen}
        looks = _step_facts.survey(self._steps, some, metrics=deletes)
        for step, (signature, metrics, error) in looks.items():
            if error is not None:
                # It is neither counted nor deleted, and may be the next time.
                self._failures.append(f"step {step} cannot be looked at: {error}")
            elif signature is None:
                if step < new:
                    _removal.clean_step(self._steps, step)
            elif metrics is not None or not deletes:
                # One that cannot be opened is neither counted nor deleted.
                seen[step] = SeenStep(signature, metrics or {})

    def _is_still(self, steps: Iterable[int]) -> bool:
        """Whether steps are what they were when they were seen."""
        seen = self._seen
        looks = _step_facts.survey(self._steps, [s for s in steps if s in seen], False)
        return all(look.signature == seen[s].signature for s, look in looks.items())

    def _outdated(self, new: int, damaged: Set[int]) -> tuple[set[int], set[int]]:
        """The steps that need not stay, and the steps that let them go."""
        seen = self._seen
        # The metrics of steps.
        known = {s: x.metrics for s, x in seen.items() if s not in damaged}
        counting = {s: x for s, x in known.items() if not self._lineage.is_left(s)}
        ours = {step for step in known if seen[step].signature.is_ours}
        times = self._times_of() if self._policy.needs_times else {}
        own_count = sum(map(self._lineage.is_own, known))
        superseding = self._policy.superseding(counting, new)
        stay = self._policy.stay(known, counting, new, times, own_count)
        outdated = {*filter(self._may_go, ours - superseding - stay)}
        if self._policy.best is not None and not self._policy.has_metric(counting):
            metric, root = self._policy.best[0], self._steps.root
            text = f"Nothing is deleted in `{root}`: no step has the metric `{metric}`"
            _log.say(_log.WARNING, text)
        return outdated, superseding

    def _is_behind(self) -> bool:
        """Whether steps have got metrics by which another step would go."""
        history = self._steps.history
        # Another thread may have added some, or read them.
        is_new = len(history.changes) > self._changes
        return self._policy.has_rank and (is_new or history.is_behind())

    def _may_go(self, step: int) -> bool:
        """Whether the caller's own rule does not keep a step, and has not failed."""
        if (rule := self._policy.keep_if) is None:
            return True
        try:
            signature, metrics = self._seen[step]
            as_step = _step_facts.as_step(self._steps, step, signature, metrics)
            return not rule(as_step)
        except Exception as e:
            why = f"`keep_if` raises {type(e).__name__}: {e}"
            self._failures.append(f"step {step} was not deleted: {why}")
            return False

    def _times_of(self) -> dict[int, int | None]:
        """When each seen step was saved, in seconds since 1970; None if that is not
        known, as of a step of Orbax."""
        times, self._times = self._times, {}
        for step, (signature, _) in self._seen.items():
            key = step, signature
            self._times[key] = (
                times[key] if key in times else _step_facts.time_of(self._steps, *key)
            )
        return {step: time for (step, _), time in self._times.items()}

    def _delete_steps(
        self, outdated: Set[int], superseding: Set[int], await_mark: Callable[[], Any]
    ) -> bool:
        """Deletes steps. Returns whether each of them and the `superseding` ones were
        still what was seen. It ends at the first that was not."""
        for step in sorted(outdated):
            # A save that goes on may read it: then it goes after a later save.
            is_read = _removal.is_read(self._steps, step)
            if not (is_read or self._delete_step(step, superseding, await_mark)):
                return False
        return True

    def _delete_step(
        self, step: int, superseding: Set[int], await_mark: Callable[[], Any]
    ) -> bool:
        """Deletes a step, if it and the `superseding` ones are still what was seen.
        Returns whether they were, each time."""
        looks: list[bool] = []

        def may_still_go() -> bool:
            looks.append(self._is_still({step, *superseding}))
            await_mark()
            return looks[-1]

        try:
            is_deleted = _removal.remove_step(
                self._steps,
                step,
                may_still_go=may_still_go,
                unless=self._is_behind,
                seen=self._seen[step].signature,
            )
            if is_deleted:
                del self._seen[step]
            elif self._is_behind() or not self._is_still({step}):
                return False
            # Else it has a pin, and stays; or a `superseding` one has changed.
        except (OSError, ValueError) as e:
            # Another may have deleted it, or saved something else there.
            if may_still_go():
                self._failures.append(f"step {step} was not deleted: {e}")
        return False not in looks
