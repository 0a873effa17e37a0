"""What Python tells its audit hooks. No test is here."""

import contextlib
import functools as ft
import sys
from collections.abc import Callable, Iterator
from typing import Any


Hear = Callable[[str, tuple[Any, ...]], None]
_hearing: list[Hear] = []


def _tell(event: str, args: tuple[Any, ...]) -> None:
    for hear in _hearing:
        hear(event, args)


@ft.cache
def _begin() -> None:
    # A hook cannot be taken away again, and each test after it pays for it.
    sys.addaudithook(_tell)


@contextlib.contextmanager
def heard(hear: Hear) -> Iterator[None]:
    """Calls a function with each event, and what belongs to it, within a block."""
    _begin()
    _hearing.append(hear)
    try:
        yield
    finally:
        _hearing.remove(hear)
