"""Near disks, as a run asks them: the room of near disks has these classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._load._load_options import FilteredKeywords
from .._runtime._processes import Processes
from ._pending import PendingState
from ._saves import Saves


class LoadRequest(NamedTuple):
    """Arguments of a restore: a tree, with the options of a load, and own states, if
    `own` is not None. See `CheckpointManager.restore`."""

    like: PyTree
    own: PyTree
    options: FilteredKeywords


class NearSearch:
    """The near steps in one search for the newest step of a run: none, but for what the
    room of near disks makes of it. All processes take the same calls, but `choose`."""

    # The near step that is chosen, and the id of its save, if one is.
    step: int | None = None
    base: str = ""
    # Reasons why disks and files that should have near steps have none.
    notes: Sequence[str] = ()
    # The schema of a choice.
    schema: Any = type(None)

    def held(self) -> bytes:
        """Report on the disk of this process, for process 0."""
        return b""

    def choose(self, words: Sequence[bytes], at_root: int | None) -> Any:
        """Choice that process 0 sends to all: a near step that is not older than the
        one at the root, or none."""
        return None

    def take(self, choice: Any) -> None: ...

    def fetch(self, processes: Processes, request: LoadRequest) -> None:
        """Moves the parts of the chosen step to the processes that need them."""

    def load(self, process: int, request: LoadRequest) -> tuple[PyTree, Any]:
        """The tree of the chosen step, and own states, if they are asked for."""
        raise NotImplementedError

    @property
    def blamed(self) -> list[tuple[int, int]]:
        """The disks and numbers of parts that could not be read here."""
        return []

    def finish(self, processes: Processes, data: Any, request: LoadRequest) -> Any:
        """Own states as they are asked for, once all processes have loaded theirs."""
        raise NotImplementedError

    def exclude(self, why: str, copies: Sequence[tuple[int, int]]) -> None:
        """Excludes copies of parts of the chosen step, each by the process on whose
        disk it is and its number, or all if there are none: they could not be loaded,
        and why."""

    def knows_lost(self) -> bool:
        """Whether there is a near step, though none can be restored."""
        return False

    def reasons(self, above: int) -> list[str]:
        """Why near steps above one are not restored."""
        return []

    def warn(self, above: int, stacklevel: int) -> None:
        """Logs what is passed over, and warns of the notes."""


class NearSteps:
    """The near steps of a run: none, but for what the room of near disks makes of
    it."""

    def __init__(self, saves: Saves):
        self._saves = saves

    def offer(self, offer: PendingState) -> None:
        """Saves a state if it is due."""

    def wait(self) -> None:
        """Waits until the near save that goes on is whole."""

    def latest(self) -> int | None:
        """The newest complete step, of those at the root too."""
        return self._saves.steps.latest()

    def search(self) -> NearSearch:
        return NearSearch()

    def begin(self, base: str = "") -> None:
        """Begins an attempt at the run, from a near save or without one: those of older
        attempts are void."""
