"""Records that the processes of a run share: each sends its own, and gets all of them.
They are checked on arrival, as some become paths.
"""

import json
from typing import Any

from .._format import _schema
from .._runtime._processes import Processes


def share_records(
    processes: Processes, own: object, what: str, kind: object
) -> list[Any]:
    """Sends this process's `own` record to all. Returns the records of all processes,
    in their order: one round of the call that they make together.

    **Raises:** `DamagedError` for a record that is not of this `kind`. Its error says
    that it should have been `what`.
    """
    together = lambda words: b"[%s]" % b",".join(words)
    # Not by `_schema.read`: it refuses texts longer than the record of any file.
    said = json.loads(processes.round(json.dumps(own).encode(), together))
    return _schema.checked(said, what, (kind,) * processes.count)
