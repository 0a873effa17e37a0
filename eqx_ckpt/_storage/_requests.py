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
    _run(future, call, *args)
    return future


def start_after(
    first: Any, is_wrong: Callable[[Exception], bool], call: Callable[[], Any]
) -> cf.Future[Any]:
    """The result of a call to TensorStore; or of another call, which a thread makes, if
    the first one fails with such an error."""
    future: cf.Future[Any] = cf.Future()

    def done(reading: Any) -> None:
        try:
            future.set_result(reading.result())
        except Exception as e:
            if is_wrong(e):
                _run(future, call)
            else:
                future.set_exception(e)

    first.add_done_callback(done)
    return future


def _run(future: cf.Future[Any], call: Callable[..., Any], *args: Any) -> None:
    def run() -> None:
        with _LIMIT:
            try:
                future.set_result(call(*args))
            except BaseException as e:
                future.set_exception(e)

    threading.Thread(target=run, name="eqx_ckpt", daemon=True).start()
