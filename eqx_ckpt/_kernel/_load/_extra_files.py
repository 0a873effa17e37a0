"""Files of a save that the index has the size and the digest of: those of functions,
and the own states of processes.
"""

import functools as ft

from .._format import _files, _index
from .._format._index import StoredFunction
from .._storage import _store
from ._source import Source


def function_key(source: Source, stored: StoredFunction) -> str:
    return f"d/{source.index.save}/{_files.function(stored.file)}"


def read_function(source: Source, name: str) -> bytes:
    """The bytes of a stored function, verified.

    **Raises:** `DamagedError`, `ReplacedError`.
    """
    stored = source.index.functions[name]
    what = f"the file of its function `{name}`"
    key, wanted = function_key(source, stored), (stored.nbytes, stored.digest)
    return _read_extra(source, key, wanted, what)


def own_key(source: Source, process: int) -> str:
    return f"d/{source.index.save}/{_files.own(process)}"


def read_own(source: Source, process: int) -> bytes:
    """The own state of a process, verified.

    **Raises:** `DamagedError`, `ReplacedError`.
    """
    what = f"the file of the own state of process {process}"
    return _read_extra(
        source, own_key(source, process), source.index.own[process], what
    )


def own_states(source: Source) -> list[bytes]:
    """The own states of all processes. **Raises:** as `read_own`."""
    return [read_own(source, process) for process in range(len(source.index.own))]


def _read_extra(source: Source, key: str, stored: tuple[int, str], what: str) -> bytes:
    """The bytes of a file, of which the index has the size and the digest."""
    size, digest = stored

    def is_good(data: bytes | None) -> bool:
        return data is not None and _index.digest(data) == digest

    try:
        read = ft.partial(source.read_beside, key, 0, size, size)
        data = _store.look_twice(source.root, read, is_good)
    except ValueError as e:
        raise source.error_for(f"{what} is damaged ({e})") from e
    if data is None:
        raise source.error_for(f"{what} is missing")
    if not is_good(data):
        raise source.error_for(f"{what} is damaged")
    return data
