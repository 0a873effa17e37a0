"""Handlers of signals that the program has, while a call goes on.

A handler may raise anything, between any two steps of Python: so also a `TimeoutError`
where a call expects an `OSError` of the system. What it raises passes through the call
as Ctrl-C does, and leaves it as it was raised.
"""

import _signal  # pyright: ignore
import functools as ft
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from . import _cleanup


P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0]
# Whose code a call runs beside its own. Other code is the program's, which may expect
# what its handlers raise.
_LIBRARIES = {
    *("click", "equinox", "huggingface_hub", "jax", "jaxlib", "jaxtyping", "ml_dtypes"),
    *("numpy", "obstore", "tensorstore", "tqdm"),
    *sys.stdlib_module_names,
} - {"__main__"}
_NUMBERS = sorted(map(int, signal.valid_signals()))
# What handlers have raised in the call of the main thread that goes on, if one does;
# and what they have raised there in functions of the program.
_raised: list[Exception] | None = None
_raised_in_program: list[Exception] = []


class _Raised(BaseException):
    """Is raised in the place of what a handler has raised."""


class _Guard:
    """In the place of a handler of the program, while a call goes on."""

    def __init__(self, handler: Callable[[int, Any], Any]):
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        try:
            return self.handler(number, frame)
        except Exception as e:
            if _raised is None:
                raise
            if not _is_in_call(frame):
                _raised_in_program.append(e)
                raise
            _raised.append(e)
        # Python would ignore it there, and a file would stay open.
        if not _is_in_finaliser(frame):
            raise _Raised


def _is_in_call(frame: FrameType | None) -> bool:
    """Whether the package runs, below what is here, and no function of the program."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        top = name.partition(".")[0]
        is_of_library = top in _LIBRARIES or top.startswith("namedtuple_")
        if not is_of_library and name != _cleanup.__name__:
            return top == _PACKAGE and name != __name__
        frame = frame.f_back
    return False


def _is_in_finaliser(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _swallowed() -> list[Exception]:
    """Exceptions of the program's functions that the package has caught."""
    # The first frame of a traceback is the one that has caught the error.
    places = [(x, x.__traceback__) for x in _raised_in_program]
    names = [(x, at.tb_frame.f_globals.get("__name__")) for x, at in places if at]
    return [x for x, name in names if str(name).partition(".")[0] == _PACKAGE]


def behind(handler: object) -> Any:
    """The handler of the program that a handler stands for."""
    return handler.handler if isinstance(handler, _Guard) else handler


def pass_through(call: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a public call: lets what handlers raise pass through it."""

    @ft.wraps(call)
    def passed(*args: P.args, **kwargs: P.kwargs) -> T:
        global _raised
        is_main = threading.current_thread() is threading.main_thread()
        if _raised is not None or not is_main:
            return call(*args, **kwargs)
        found = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS))
        own = signal.default_int_handler
        handlers = [(n, x) for n, x in found if callable(x) and x is not own]
        if not handlers:
            return call(*args, **kwargs)
        guards: dict[int, _Guard] = {}
        raised: list[Exception] = []
        with _cleanup.surely(lambda: _put_back(guards)):
            try:
                _raised = raised
                for number, handler in handlers:
                    guards[number] = _Guard(behind(handler))
                    _signal.signal(number, guards[number])
                result = call(*args, **kwargs)
                # Python ignores what is raised in a finaliser.
                if not (raised := raised or _swallowed()):
                    return result
            except _Raised:
                pass
            except Exception as e:
                # It may be about what was caught.
                raised = raised or _swallowed()
                if not raised or e in raised:
                    raise
        raise raised[0]

    return passed


def _put_back(guards: dict[int, _Guard]) -> None:
    global _raised
    for number, guard in guards.items():
        if _signal.getsignal(number) is guard:
            _signal.signal(number, guard.handler)
    _raised = None
    _raised_in_program.clear()
