"""The signals that mean that a run has to stop."""

import itertools as it
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jax._src import distributed

from .._runtime import _handlers


# Numbers of the calls that ask JAX, over all managers: they must never go back.
_asked = it.count(1)

# What listens to each signal. Managers overlap, and end in any order, or never.
_listening: dict[int, weakref.WeakSet["Signals"]] = {}


class Signals:
    """Listens to signals, until `forget`; handlers that were there are called too.

    SIGTERM alone is left to JAX's preemption service, where that has the handler: it
    tells all processes at which of their next calls they stop, without a message in
    each call.
    """

    def __init__(self, numbers: Iterable[int]):
        self._is_told = False
        self._have_come = False
        # Runs are not those of forked children.
        self._process = os.getpid()
        numbers = {*numbers}
        # Python does not know of JAX's handler. If it has its own, one of the two has
        # taken the place of the other.
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        service = distributed.global_state.preemption_sync_manager
        is_served = numbers == {signal.SIGTERM} and is_free and service is not None
        self._service = service if is_served else None
        self._numbers = set() if is_served else numbers
        try:
            for number in self._numbers:
                _listening.setdefault(number, weakref.WeakSet()).add(self)
                found = _handlers.behind(signal.getsignal(number))
                if not isinstance(found, _Handler):
                    signal.signal(number, _Handler(found))
        except BaseException:
            self.forget()
            raise
        # Where a manager is never ended.
        weakref.finalize(self, _end, self._numbers).atexit = False

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
        for number in self._numbers:
            if number in _listening:
                _listening[number].discard(self)
        _end(self._numbers)


class _Handler:
    """A handler in the place of another, for all that listens to its signal. Where
    nothing does any more, it does what that would."""

    def __init__(self, before: Any):
        self.before = before

    def __call__(self, number: int, frame: object) -> None:
        listening = _that_listen(number)
        for signals in listening:
            signals._is_told = True
        if self.before is signal.SIG_DFL and not listening:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Python's own for Ctrl-C ends the run immediately.
        is_of_run = listening and self.before is signal.default_int_handler
        if callable(self.before) and not is_of_run:
            self.before(number, frame)


def _that_listen(number: int) -> list[Signals]:
    signals = [*_listening.get(number, ())]
    return [each for each in signals if each._process == os.getpid()]


def _end(numbers: Iterable[int]) -> None:
    """Puts back the handlers of signals that nothing listens to any more, which the
    main thread may; but not in the place of one that the program has put over ours."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            found = _handlers.behind(signal.getsignal(number))
            if isinstance(found, _Handler) and not _that_listen(number):
                signal.signal(number, found.before or signal.SIG_DFL)


os.register_at_fork(after_in_child=lambda: _end([*_listening]))
