"""A run whose process 1 is told to end at step 7; it handles that by `HANDLER`."""

import os
import signal
import sys
import time

import pytest
from support.member import path, rank

import eqx_ckpt as ec


handler = sys.argv[5]

if handler == "Python":
    signal.signal(signal.SIGTERM, lambda *_: print("handled"))
manager = ec.CheckpointManager(path / "run", every=1000, signals=[signal.SIGTERM])
messages = []
tell = manager._saves.run_processes.any_was_told
count = lambda told: messages.append(told) or tell(told)
pytest.MonkeyPatch().setattr(manager._saves.run_processes, "any_was_told", count)
step = 0
with manager:
    for step in range(1, 20_000):
        time.sleep(0.01 * (1 + rank))
        manager.save(step, {"step": step})
        if step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if manager.should_stop():
            break
    assert manager.should_stop()
print(step, len(messages), manager.steps())
