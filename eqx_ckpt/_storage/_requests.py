"""Requests that Python makes rather than TensorStore, with futures as it has them."""

import concurrent.futures as cf
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _context


# So many are under way at a time, as of TensorStore's.
_LIMIT = threading.BoundedSemaphore(64)


class Stamp(NamedTuple):
    """The tag of a version of a file; empty after a write that was refused."""

    generation: bytes


class Answer(NamedTuple):
    """The answer to a read. `state`: "value" or "missing", or "unspecified" where the
    store says neither."""

    value: bytes
    stamp: Stamp
    state: str = "value"


MISSING = Answer(b"", Stamp(b""), "missing")
UNSPECIFIED = Answer(b"", Stamp(b""), "unspecified")


def start(call: Callable[..., Any], *args: Any) -> cf.Future[Any]:
    """Makes a call in a thread, which does not keep the process alive."""
    _context.check_fork()
    _context.watch_forks()
    future: cf.Future[Any] = cf.Future()
    # Who gives it up does not end it.
    future.set_running_or_notify_cancel()

    def run() -> None:
        with _LIMIT:
            try:
                future.set_result(call(*args))
            except BaseException as e:
                future.set_exception(e)

    threading.Thread(target=run, name="eqx_ckpt", daemon=True).start()
    return future
