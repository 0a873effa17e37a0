"""Records that the processes of a run tell each other, which are checked before any of
them becomes a path.
"""

import json
from typing import Any

from .._format import _schema
from .._runtime._processes import Processes


def said_by_all(
    processes: Processes, own: object, what: str, kind: object
) -> list[Any]:
    """The records of all processes, in order and in each of them, of which this one's
    is its `own`: a round of their call.

    **Raises:** `DamagedError` that says `what` one of another kind should have been.
    """
    words = processes.gather(json.dumps(own).encode())
    said = json.dumps([json.loads(word) for word in words])
    # They may be larger than any record of a file.
    said = json.loads(processes.broadcast(said.encode()))
    return _schema.checked(said, what, (kind,) * processes.count)
