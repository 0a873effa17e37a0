"""The signals that mean that a run has to stop."""

import signal
from collections.abc import Iterable
from typing import Any


class Signals:
    """Handlers for signals, until `forget`; those that were there are called too."""

    def __init__(self, numbers: Iterable[int]):
        self.is_told = False
        self._before: dict[int, Any] = {}
        try:
            for number in numbers:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.is_told = True
        before = self._before.get(number)
        # Python's own for Ctrl-C ends the run immediately.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
