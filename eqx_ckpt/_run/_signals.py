"""The signals that mean that a run has to stop."""

import itertools as it
import signal
from collections.abc import Callable, Iterable
from typing import Any

from jax._src import distributed


# Numbers of the calls that ask JAX, over all managers: they must never go back.
_asked = it.count(1)


class Signals:
    """Handlers for signals, until `forget`; those that were there are called too.

    SIGTERM alone is left to JAX's preemption service, where that has the handler: it
    tells all processes at which of their next calls they stop, without a message in
    each call.
    """

    def __init__(self, numbers: Iterable[int]):
        self._is_told = False
        self._have_come = False
        self._before: dict[int, Any] = {}
        numbers = {*numbers}
        # A handler of Python's has taken the place of JAX's, or JAX's that of Python's.
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        service = distributed.global_state.preemption_sync_manager
        is_served = numbers == {signal.SIGTERM} and is_free and service is not None
        self._service = service if is_served else None
        try:
            for number in () if is_served else numbers:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)
        except BaseException:
            self.forget()
            raise

    def have_come(self, in_any: Callable[[bool], bool]) -> bool:
        """Whether one has come to any process, by what each of them has been told."""
        if self._have_come:
            return True
        if self._service is None:
            self._have_come = in_any(self._is_told)
        else:
            self._have_come = self._service.reached_sync_point(next(_asked))
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
