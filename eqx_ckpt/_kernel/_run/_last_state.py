"""The state that a manager was given last, which waits for the end of the run."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _rooms
from .._format import _json
from .._runtime import _log, _processes
from .._save import _background, _plan
from .._save._options import SaveOptions
from . import _own
from ._follow_up import RunningSave
from ._pending import KeptState, PendingState
from ._steps import Steps


_NO_WITH = "its manager was used without `with`, at the end of which it is saved"


class LastState:
    """The state that was last given to `save`, if it was not due, or could not be saved
    then. It is *kept*: its copy is saved at the end of the run."""

    def __init__(self, steps: Steps, options: SaveOptions):
        self._steps, self._options = steps, options
        self.kept: KeptState | None = None
        # The last save that was begun since a state was kept: of that or a newer one.
        self.last_begun: RunningSave | None = None
        # The copies of the kept state's arrays: the next ones are made in their memory.
        self._copies: list[Any] = []
        # What the last state that was checked looks like, but for its values: see
        # `KeptState.looks`.
        self._checked: tuple[Any, ...] = ()
        # Whether the last call of `save` has raised: the caller knows that its state is
        # not saved.
        self._has_raised = False

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Notes whether a call of `save`, inside, raises an error."""
        self._has_raised = True
        yield
        self._has_raised = False

    def note_begun(self, saving: RunningSave) -> None:
        """Notes a save that is about to begin, of the kept state or of a newer one."""
        self.last_begun = saving

    def drop(self) -> None:
        """Drops the kept state: a newer one is being saved."""
        self.kept = None

    def unsaved(self) -> KeptState | None:
        """The kept state, unless a save that was begun since goes on or has gone
        well."""
        begun = self.last_begun
        is_saved = begun is not None and _background.error_of(begun.handle) is None
        return None if is_saved else self.kept

    def keep(self, state: PendingState, begun_before: RunningSave | None) -> None:
        """Keeps a copy of a state. `begun_before`: what was `last_begun` when the call
        of `save` came. **Raises:** what is wrong with the state. The one before it then
        stays the kept one."""
        kept = KeptState.of(state, self._options.is_leaf)
        self._check_savable(state, kept)
        self._copy_for_end(kept, begun_before)

    def keep_tried(self, state: PendingState) -> None:
        """Keeps a copy of a state whose save was tried: it is not checked."""
        # A handler of a signal may begin one from here on.
        begun_before = self.last_begun
        kept = KeptState.of(state, self._options.is_leaf)
        self._copy_for_end(kept, begun_before)

    def end(self) -> None:
        """Holds nothing from now on."""
        self.kept, self._copies = None, []

    def _check_savable(self, state: PendingState, kept: KeptState) -> None:
        """**Raises:** the error of a state that can never be saved, as far as this
        process can tell by itself. Of states that are alike one is checked."""
        state.check_metadata()
        _json.check_json(dict(state.metadata or {}))
        if state.functions is not None and state.functions != "drop":
            _rooms.check_functions(state.functions)
        # Of many processes, the others would not hear of it.
        if _processes.count() > 1:
            return
        looks, is_checked = kept.looks(), False
        # Static fields of the caller's may raise whatever they like.
        with contextlib.suppress(Exception):
            is_checked = bool(looks == self._checked)
        if kept.is_gone or not is_checked:  # Of donated arrays the plan raises.
            # The save at the end exports the functions: that takes long.
            options = self._options._replace(functions="drop")
            _plan.plan(self._steps.own_directory(state.step), state.tree, options)
            _own.encode(state.own)
            self._checked = looks

    def _copy_for_end(self, kept: KeptState, begun_before: RunningSave | None) -> None:
        """Keeps a copy, unless a signal handler has meanwhile begun to save the same
        step: `last_begun` is then no longer `begun_before`."""
        copies, self._copies = self._copies, []
        try:
            # The copy of the state before is spoiled as soon as this begins.
            self.kept = None
            self._set(kept.copied(copies), begun_before)
        except BaseException:
            # After Ctrl-C the caller may change the arrays, so the copy is made again
            # now: in new memory, as that of the first may be half written.
            with contextlib.suppress(Exception):
                self._set(kept.copied([]), begun_before)
            raise

    def _set(self, copy: KeptState, begun_before: RunningSave | None) -> None:
        # None: no handler has begun a save during the call.
        newer = None if self.last_begun is begun_before else self.last_begun
        if newer is None or newer.step != copy.state.step:
            self.kept, self.last_begun = copy, None
        # Those of devices are no copies, and would stay in their memory.
        is_copy = lambda x: isinstance(x, np.ndarray)
        self._copies = [x if is_copy(x) else None for x in copy.leaves]

    # ---- What is said of a state that is not saved.

    def not_saved(self, why: str) -> str:
        """Text about the kept state, which is not saved."""
        assert self.kept is not None
        return (
            f"The state of step {self.kept.state.step}, the last that `save` has kept "
            f"for the end, is not saved in `{self._steps.root}`: "
            f"{why.removesuffix('.')}."
        )

    def warn_if_unsaved(self) -> None:
        """Says what is lost, where a manager ends without the end of a `with`."""
        if self.unsaved() is not None and not self._has_raised:
            text = self.not_saved(_NO_WITH)
            _log.say(_log.WARNING, text)
            # Python shows no `ResourceWarning` unless it is asked to.
            _log.warn(text)
