"""Calls that all processes of a run make together."""

import dataclasses
from collections.abc import Callable

from .._runtime import _processes
from .._runtime._arguments import Together
from .._runtime._processes import Processes
from .._storage._backend import Backend


class RunProcesses:
    """All processes of the run at a root, and how they wait for each other."""

    def __init__(self, root: Backend, together: Together):
        self._root, self.together = root, together

    def of_call(self, kind: str, what: str, tag: object = None) -> Processes:
        """The processes, for one call that all of them make. It meets calls of the same
        `kind` and `tag` at this root; `what` tells people of it."""
        together = dataclasses.replace(self.together, tag=tag)
        what = f"{what}, in `{self._root}`"
        return _processes.of_run(kind, self._root, together, what)

    def do_in_process_0(self, what: str, act: Callable[[], None]) -> None:
        """Process 0 acts; an error of it is one of all processes."""
        self.of_call(what, what).decide(lambda _: act() or b"")

    def any_was_told(self, is_told: bool) -> bool:
        """Whether any process was told to stop."""
        processes = self.of_call("stop", "Asking whether to stop")
        return bool(processes.decide(b"".join, lambda: b"1" if is_told else b""))
