"""The signals that mean that a run has to stop."""

import signal
from collections.abc import Callable, Iterable
from typing import Any


class Signals:
    """Handlers for signals, until `forget`; those that were there are called too."""

    def __init__(self, numbers: Iterable[int]):
        self._is_told = False
        self._have_come = False
        self._before: dict[int, Any] = {}
        try:
            for number in numbers:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)
        except BaseException:
            self.forget()
            raise

    def have_come(self, in_any: Callable[[bool], bool]) -> bool:
        """Whether one has come to any process, by what each of them has been told."""
        if not self._have_come:
            self._have_come = in_any(self._is_told)
        return self._have_come

    def forget(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._is_told = True
        before = self._before.get(number)
        # Python's own for Ctrl-C ends the run immediately.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
