"""Clean-ups at the end of a block, whatever ends it.

Ctrl-C raises `KeyboardInterrupt` between any two steps of Python: also before a `try`
that is to undo what was just done, and in the `finally` that undoes it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def surely(undo: Callable[[], Any]) -> Iterator[None]:
    """Calls `undo` at the end of the block, and again, as the first call may be
    interrupted. Do inside the block whatever it undoes."""
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()
