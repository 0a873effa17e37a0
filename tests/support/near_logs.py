"""A process of a run of `near_kills` writes a log beside the disks, saves slowly, and
is killed with the others."""

import json
import logging
import os
import re
import threading
import time
import warnings

import numpy as np

from eqx_ckpt._kernel._save import _serialise
from support.member import meet, path, rank


class Logs:
    """The log of this process: `logN-RANK` for attempt N."""

    def __init__(
        self,
        attempt: int,
        whole: str,
        delays: list[float],
        after: int,
        slow_near: float,
        slow_root: float,
    ):
        # A line is one call of the system: it is there whichever process is killed.
        how = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._log = os.open(path / f"log{attempt}-{rank}", how)
        self._after = after
        self._ending = path / f"ending{attempt}"
        warnings.showwarning = lambda message, *_: self._say("warning", str(message))
        log = logging.getLogger("eqx_ckpt")
        log.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: self._hear(record, whole)
        log.addHandler(handler)
        write = _serialise.write

        def write_slowly(plan, *rest):
            time.sleep(slow_near if "eqx_ckpt.near" in str(plan.root) else slow_root)
            return write(plan, *rest)

        _serialise.write = write_slowly
        meet("begun")
        threading.Thread(target=self._end, args=[delays[rank]], daemon=True).start()
        if after == 0:
            self._ending.touch()

    def _say(self, *words) -> None:
        os.write(self._log, (json.dumps(words) + "\n").encode())

    def _hear(self, record: logging.LogRecord, whole: str) -> None:
        if re.match(f"{whole} to near disks", record.getMessage()):
            self._say("whole", getattr(record, "step"))

    def _end(self, delay: float) -> None:
        while not self._ending.exists():
            time.sleep(0.002)
        time.sleep(delay)
        os.kill(os.getpid(), 9)

    def begin(self, at: int, own, state) -> None:
        """Says from which step, own states and values the run goes on."""
        self._at = at
        whose = own if isinstance(own, list) else [own]
        parts = [np.asarray(state[name].addressable_data(0)) for name in ("w", "m")]
        numbers = [int(x) for part in parts for x in part.ravel()]
        self._say("from", at, whose, numbers)

    def save(self, step: int) -> None:
        """Says that a step was saved, and lets all end after the last one."""
        self._say("saved", step)
        if step == self._at + self._after:
            self._ending.touch()
