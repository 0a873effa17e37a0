"""Decides whether a save of a manager begins a new attempt at its run."""

from collections.abc import Collection, Sequence, Set

from .._runtime import _log
from . import _attempts, _step_facts
from ._attempts import Attempt, Lineage
from ._listing import Listing
from ._steps import Steps


class AttemptStart:
    """Decides in process 0 whether the next save of a manager begins an attempt: by the
    step that was restored and the last one whose save was begun.

    The first save of a manager, and the first after each restore, begins an attempt if
    the run has newer steps. If you restore a step only to look at it, and then save
    above the last step whose save this manager has begun, no attempt begins.
    """

    def __init__(self, steps: Steps):
        self._steps = steps
        # The attempt that this manager has begun.
        self.attempt: Attempt | None = None
        # The number of the attempt that counts, once a save has begun.
        self.number = 0
        # Whether the next save may begin an attempt: nothing was saved since the start
        # or the last restore.
        self._is_open = True
        # The last step whose save was begun.
        self._last_step: int | None = None
        # Newer steps that an attempt passes over, until the warning about them.
        self._passed: Sequence[int] = ()
        # The restored step; the id of its near save, if it is a near step; and whether
        # the last attempt had near steps of its own when that was restored.
        self._restored: int | None = None
        self._near_save = ""
        self._had_near = False

    @property
    def has_restored(self) -> bool:
        return self._restored is not None

    def note_restored(
        self, step: int, near_save: str = "", has_near: bool = False
    ) -> None:
        self._restored, self._near_save, self._had_near = step, near_save, has_near
        self._is_open = True

    def begin_if_due(
        self, step: int, damaged: Set[int], is_near: bool = False
    ) -> Attempt | None:
        """Begins an attempt if the save of this step needs one. `damaged` steps do not
        count. A near step always belongs to an attempt.

        Returns the attempt, if this manager has begun one.
        """
        # Above the last step the run goes on: what was restored since then was only
        # looked at.
        goes_on = self._last_step is not None and step > self._last_step
        is_open = self._is_open and not goes_on
        if is_open or (is_near and self.attempt is None):
            self._begin(step, damaged, is_near)
        self._is_open, self._last_step = False, step
        return self.attempt

    def _begin(self, step: int, damaged: Set[int], is_near: bool) -> None:
        listing = self._steps.listing()
        lineage = self._steps.lineage(listing, self._had_near)
        newest = self._steps.first_to_restore(listing, lineage, damaged)
        counting, self.number = lineage.attempt, lineage.number
        numbers = self._steps.attempts.numbers(listing.attempts)
        last_number = max(numbers, default=0)
        # Training from a restored step gives only later steps.
        restored = self._restored
        origin = restored if restored is not None and restored < step else None
        is_left = origin is not None and lineage.is_left(origin)
        if newest is not None and (step < newest or is_left):  # The run goes back.
            after, earlier = origin, self._leave_steps(listing, lineage, origin)
            self._passed = [s for s, _ in earlier if s > step]
        elif is_near or last_number != self.number:
            # Near steps need an attempt. Or the newest attempt has saved nothing, and
            # another one counts: its steps, or those from before the first attempt,
            # count in the new one too.
            inherited = counting or Attempt("")
            after, earlier = inherited.after, inherited.earlier
        else:
            return
        root = self._steps.root
        self.attempt = _attempts.begin(root, self._near_save, after, earlier, counting)
        self.number = self.attempt.number

    def _leave_steps(
        self, listing: Listing, lineage: Lineage, origin: int | None
    ) -> list[tuple[int, str]]:
        """The steps that do not count for an attempt which goes on from `origin`, with
        the ids of their saves. What it leaves gets into the history before."""
        complete = self._steps.complete(listing)
        saves = {s: self._steps.save_of(s, listing) or "" for s in complete}
        new = [s for s in complete if not self._steps.history.has(s, saves[s])]
        # Once that attempt has begun, nothing else says which attempt they are of.
        _step_facts.add_to_history(self._steps, new, lineage.number)
        return [(s, saves[s]) for s in _left(lineage, complete, origin)]

    def how_to_go_on(self) -> str:
        """A sentence for the error of a step that is there, if it is the first that is
        saved since the start or the last restore, and that was not of the newest."""
        newest = max(self._steps.complete(), default=None)
        if not self._is_open or newest in (None, self._restored):
            return ""
        is_latest = newest == self._steps.latest()
        how = "restore(like)" if is_latest else f"restore(like, step={newest})"
        return f" The run has steps up to {newest}: to go on from there, call `{how}`."

    def warn_of_passed_steps(self, step: int) -> None:
        """Warns that an attempt which began with this step passes over newer steps."""
        passed, self._passed = self._passed, ()
        if not passed:
            return
        what = self._restored
        how = "anew" if what is None else f"with what was restored of step {what}"
        newer, root = shown(passed), self._steps.root
        self._steps.log_step(
            _log.WARNING, "Began an attempt with", step, f"newer {newer}"
        )
        _log.warn(
            f"Step {step} begins an attempt at the run in `{root}`, {how}. Newer "
            f"{newer} of an earlier attempt, and a restart passes over them. They stay "
            "until this attempt has as many as `keep` says.",
        )


def _left(lineage: Lineage, steps: Collection[int], after: int | None) -> list[int]:
    """The steps that do not count for an attempt that goes on from one of them."""
    left = lineage.left(steps)
    if after is None:
        return sorted(steps)
    if after in left:  # It goes on from an earlier attempt than the last.
        ours = {step for step in steps if lineage.is_own(step)}
        return sorted(ours | {step for step in left if step > after})
    return sorted(left | {step for step in steps if step > after})


def shown(steps: Sequence[int]) -> str:
    """Some steps in words, with their verb."""
    first, last = min(steps), max(steps)
    if len(steps) == 1:
        return f"step {first} is"
    return f"steps, {len(steps)} from {first} to {last}, are"
