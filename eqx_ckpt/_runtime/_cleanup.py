"""Clean-ups at the end of a block, whatever ends it.

Ctrl-C raises `KeyboardInterrupt` between any two steps of Python: also before a `try`
that is to undo what was just done, and in the `finally` that undoes it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def surely(undo: Callable[[], Any]) -> Iterator[None]:
    """Calls `undo` at the end, and again, as the first call may be interrupted. What it
    undoes is done inside."""
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()
