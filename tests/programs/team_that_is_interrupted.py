"""Calls of two processes, of which one is interrupted at a line, and the next calls."""

import os
import sys

import numpy as np
from support import interrupts
from support.member import meet, path, rank, rows, spread

import eqx_ckpt as ec


count = int(sys.argv[5])
# Those of calls that all make, and of those that somebody may leave.
long, short = ec.Together(timeout=60), ec.Together(timeout=1)
together = long
tree = {"a": spread(np.arange(64.0, dtype=np.float32), rows), "step": 1}
with ec.CheckpointManager(path / "run", processes=together) as manager:
    manager.save(1, tree)
    manager.wait()
manager = ec.CheckpointManager(path / "run", processes=together)
calls = {
    "restore": lambda: manager.restore(tree, own=None),
    "save": lambda: ec.async_tree_serialise_leaves(
        path / "c", tree, processes=ec.Together("tag", together.timeout)
    ).result(),
    "step": lambda: (manager.save(1, tree, force=True), manager.wait()),
}
files = {
    "restore": ["_restore.py", "_deserialise.py", "_checkpoint.py"],
    "save": ["_async.py", "_background.py"],
    "step": ["_saves.py", "_async.py"],
}


def is_within(how):
    global together
    together = manager._saves.run_processes.together = how


for name, call in calls.items():
    call()
    # No line before the call has told that it is made, which nobody could know of.
    lines = interrupts.lines_of(call, "MainThread")
    begun = next(i for i, (file, _) in enumerate(lines) if "_conversation" in file)
    own = [
        i
        for i, (file, _) in enumerate(lines, 1)
        if i > begun and os.path.basename(file) in files[name]
    ]
    failed = 0
    for i in range(count):
        is_within(short)
        meet(f"{name} {i}")
        try:
            if rank == 1:
                at = own[i * len(own) // count]
                interrupts.interrupt(call, at, "MainThread")
            else:
                call()
        except (Exception, KeyboardInterrupt):
            failed += 1
        is_within(long)
        meet(f"{name} {i} again")
        call()
    assert rank == 0 or failed > count // 2, name
