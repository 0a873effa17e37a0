"""How long calls take, on a machine that does other things as well. No test is here."""

import time
from collections.abc import Callable
from typing import TypeVar

from support import inside


_T = TypeVar("_T")


def timed(most: float, call: Callable[[], _T]) -> tuple[_T, float]:
    """What a call gives, and the seconds of the processor's time that it takes. What
    takes more than `most` is called again, a few times, as in a new process: other
    programs make a call slower, and never faster."""
    for attempt in range(5):
        if attempt:
            inside.forget()
        start = time.process_time()
        out = call()
        seconds = time.process_time() - start
        if seconds <= most:
            break
    return out, seconds
