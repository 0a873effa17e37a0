"""Whether a server heeds the conditions of a write, which the commit of a save is."""

import json

from . import _kv, _store
from ._backend import Backend


# The generation of what is not there. An empty one would be any.
ABSENT = b"\x02"
# Stores of which it is known that they heed conditions.
_heeding: set[str] = set()


def check(backend: Backend, key: str) -> None:
    """Writes a small file, and again on conditions that do not hold.

    **Raises:** `RuntimeError` if the store does not heed them, as not all servers of S3
    do: of two saves at the same instant one would delete what the other has written.
    """
    options = backend.spec()
    del options["path"]
    store = json.dumps(options, sort_keys=True)
    is_asked = options.get("use_conditional_write", options["driver"] == "gcs")
    if not is_asked or store in _heeding:
        return
    kv = _kv.known(backend)
    found = _store.finish_write(backend, key, kv.write(key, b"1"))
    wrong = [ABSENT, _another(found)]
    tries = [kv.write(key, b"2", if_equal=generation) for generation in wrong]
    if any(_store.answer(backend, key, stamp).generation for stamp in tries):
        is_s3 = options["driver"] == "s3"
        names = "`If-Match`, `If-None-Match`" if is_s3 else "`ifGenerationMatch`"
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
