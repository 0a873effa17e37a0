"""TensorStore's key-value stores of backends, and what their errors mean."""

import functools as ft
import re
from typing import Any

import tensorstore as ts

from .._errors import DamagedError, MissingError
from . import _context, _local_files


def open(backend: Any) -> ts.KvStore:
    _context.check_fork()
    try:
        spec = backend.spec()
        return ts.KvStore.open(spec, context=_context.context()).result()
    except Exception as e:
        raise backend.explain(e) from e


@ft.lru_cache(maxsize=256)
def known(backend: Any) -> ts.KvStore:
    """The open store of a backend, which is kept."""
    return open(backend)


def is_missing(error: Exception) -> bool:
    """Whether an error says that a file, or the end of it, is not there."""
    if isinstance(error, OSError) and error.errno in _local_files.NOWHERE:
        return True
    return isinstance(error, (MissingError, FileNotFoundError, IsADirectoryError))


# How TensorStore's errors begin and, where the system has refused a call, end.
_status = re.compile(r"([A-Z_]+): ")
_number = re.compile(r"(.*?) ?\[os_error_code='(\d+)'", re.DOTALL)
_MISSING = frozenset(["NOT_FOUND", "OUT_OF_RANGE"])
_DAMAGED = frozenset(["DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT"])


def explain(place: str, error: Exception, said: OSError | None = None) -> Exception:
    """See `Backend.explain`. `said`: what a server's own answer says."""
    if isinstance(error, (OSError, DamagedError)):
        return error
    text = str(error)
    refused = _number.match(text)
    if refused:
        return OSError(int(refused[2]), _status.sub("", refused[1], 1))
    if said is not None:
        return said
    status = _status.match(text)
    if status is None or status[1] in _DAMAGED:
        return error
    if status[1] in _MISSING:
        return MissingError(text)
    return OSError(f"`{place}` cannot be reached: {text}")
