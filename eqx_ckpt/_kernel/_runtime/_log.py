"""Log of the library: lines to the logger `eqx_ckpt`, and durations to
`jax.monitoring`. See docs/logging.md. What prints an index needs no JAX, which takes
a second to import.

No lock is taken unless somebody listens: a signal or Ctrl-C may come anywhere.
"""

import contextlib
import logging
import sys
import time
import types
import warnings
from collections.abc import Iterator
from logging import DEBUG as DEBUG, ERROR as ERROR, INFO as INFO, WARNING as WARNING
from typing import Any


_logger = logging.getLogger("eqx_ckpt")
# Else Python prints warnings that nobody has asked for.
_logger.addHandler(logging.NullHandler())


def is_on(level: int) -> bool:
    """Whether somebody listens. Only process 0 of a run speaks."""
    # `isEnabledFor` takes a lock.
    is_wanted = level >= _logger.getEffectiveLevel()
    is_wanted = is_wanted and level > _logger.manager.disable
    if not is_wanted:
        return False
    from jax._src import distributed

    return not distributed.global_state.process_id


def say(level: int, text: str, **facts: Any) -> None:
    """Logs a line. The `facts` are attributes of the record."""
    if is_on(level):
        _logger.log(level, "%s", text, extra=facts)


def warn(text: str) -> None:
    """Warns at the line of the program that has called into the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_own(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_own(frame: types.FrameType) -> bool:
    # A decorator of this is between calls.
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    return top in (__name__.partition(".")[0], "contextlib")


@contextlib.contextmanager
def timed(what: str) -> Iterator[types.SimpleNamespace]:
    """Tells `jax.monitoring` how long something took, if it ends well: then what it
    yields has the `seconds`."""
    timer, start = types.SimpleNamespace(seconds=0.0), time.monotonic()
    yield timer
    timer.seconds = time.monotonic() - start
    try:
        import jax.monitoring

        event = f"/eqx_ckpt/{what}/seconds"
        jax.monitoring.record_event_duration_secs(event, timer.seconds)
    except Exception as e:
        # What is done is done, whatever a listener thinks of it.
        say(WARNING, f"A listener of `jax.monitoring` has failed: {e!r}")
