"""Whether a server heeds the conditions of a write, which the commit of a save is."""

from . import _store
from ._objects import ABSENT, ObjectStore


# Stores of which it is known that they heed conditions.
_heeding: set[str] = set()


def check(backend: ObjectStore, key: str) -> None:
    """Writes a small file, and again on conditions that do not hold.

    **Raises:** `RuntimeError` if the store does not heed them, as not all servers of S3
    do: of two saves at the same instant one would delete what the other has written.
    """
    store, names = backend.conditions()
    if not names or store in _heeding:
        return
    found = _store.finish_write(backend, key, backend.start_write(key, b"1"))
    wrong = [ABSENT, _another(found)]
    tries = [backend.start_write(key, b"2", generation) for generation in wrong]
    if any(_store.answer(backend, key, stamp).generation for stamp in tries):
        is_s3 = backend.url.startswith("s3:")
        without = (
            "; or, if never more than one process saves to a path, `ec.Store(url, "
            "use_conditional_write=False)`"
        )
        raise RuntimeError(
            f"The server of `{backend}` ignores the conditions of a write ({names}), "
            "which keep two saves to one path apart. Use a server that heeds them"
            f"{without if is_s3 else ''}."
        )
    _heeding.add(store)


def _another(generation: bytes) -> bytes:
    """A generation that a file does not have, of the same form."""
    at = len(generation) // 2
    return generation[:at] + bytes([generation[at] ^ 1]) + generation[at + 1 :]
