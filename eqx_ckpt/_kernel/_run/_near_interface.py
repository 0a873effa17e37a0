"""Near disks, as a run asks them. These classes have no near steps: they are for a run
without near disks. The room of near disks has subclasses that have some.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._format import _schema
from .._format._schema import COUNT, optional
from .._load._load_options import FilteredKeywords
from .._runtime._processes import Processes
from ._pending import PendingState
from ._saves import Saves


_OF_LATEST = "what process 0 says of the latest step"
_LATEST = optional(COUNT)


class LoadRequest(NamedTuple):
    """Arguments of a restore: a tree, with the options of a load, and own states, if
    `own` is not None. See `CheckpointManager.restore`."""

    like: PyTree
    own: PyTree
    options: FilteredKeywords


class Restored(NamedTuple):
    """A step that was loaded; `own` is None unless own states were asked for."""

    tree: PyTree
    own: PyTree
    step: int


class NearSearch:
    """The near steps in one search for the newest step of a run. Here there are none.
    All processes make the same calls, but `look` and `choose`: those are for process
    0."""

    # The near step that is chosen, and the id of its save, if one is.
    step: int | None = None
    near_save: str = ""
    # Reasons why disks and files that should have near steps have none.
    notes: Sequence[str] = ()
    # Whether the last attempt of the run has near steps of its own, as process 0 knows.
    has_near: bool = False
    # The schema of a choice.
    schema: Any = type(None)

    def report(self) -> bytes:
        """Report on the disk of this process, for process 0."""
        return b""

    def look(self, reports: Sequence[bytes]) -> None:
        """Looks for the newest near step, by the reports of all processes."""

    def choose(self, at_root: int | None) -> Any:
        """Choice that process 0 sends to all: the near step, if it is not older than
        the one at the root."""
        return None

    def take(self, choice: object) -> None:
        """Takes the choice of process 0 for that of this process."""

    def fetch(self, processes: Processes, request: LoadRequest) -> None:
        """Moves the parts of the chosen step to the processes that need them."""

    def load(self, process: int, request: LoadRequest) -> Restored:
        """Loads the chosen step."""
        raise NotImplementedError

    @property
    def blamed(self) -> list[tuple[int, int]]:
        """The disks and numbers of parts that could not be read here."""
        return []

    def finish(self, processes: Processes, data: object, request: LoadRequest) -> Any:
        """Own states as they are asked for, once all processes have loaded theirs."""
        raise NotImplementedError

    def exclude(self, why: str, copies: Sequence[tuple[int, int]]) -> None:
        """Excludes copies of parts of the chosen step, each by the process on whose
        disk it is and its number, or all if there are none: they could not be loaded,
        and why."""

    def knows_lost(self) -> bool:
        """Whether there is a near step, though none can be restored."""
        return False

    def skip_reasons(self, above: int) -> list[str]:
        """Why near steps above one are not restored."""
        return []

    def warn(self, above: int) -> None:
        """Logs what is passed over, and warns of the notes."""


class NearSteps:
    """The near steps of a run. Here there are none: `latest` is that of the root. With
    `near`, a manager has the subclass in `_near/_near_steps.py`."""

    def __init__(self, saves: Saves):
        self._saves = saves

    def save_if_due(self, state: PendingState) -> None:
        """Here: nothing. With `near`, saves a near step of a state if one is due."""

    def wait(self) -> None:
        """Here: nothing. With `near`, waits until the near step that is being saved is
        whole."""

    def end_after(self, error: BaseException) -> None:
        """Waits, after an error, until this process has written its part. What goes
        wrong with that is added to the error as a note."""

    def latest(self) -> int | None:
        """The newest complete step, of those at the root too: the same in all
        processes, as they may go on by it."""
        processes = self._saves.run_processes.of_call(
            "latest", "Looking for the latest step"
        )
        word = processes.decide(self._latest, self.search().report)
        return _schema.read(word, _OF_LATEST, _LATEST)

    def _latest(self, reports: list[bytes]) -> bytes:
        """The newest step, as process 0 finds it."""
        steps = self._saves.steps
        latest = steps.latest()
        if latest is None:
            steps.orbax.check_readable()
        return json.dumps(latest).encode()

    def search(self) -> NearSearch:
        return NearSearch()

    def note_restored(self) -> None:
        """Is told of each restore: the next near save may be of another attempt."""
