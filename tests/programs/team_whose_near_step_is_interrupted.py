"""A process, `WHICH`, is interrupted as it waits for its part of near step 2, in its
save of step 4. `HOW`: it then saves that `again`, or it `ends`. Prints what went wrong,
or what is restored."""

import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from support import inside
from support.helpers import until
from support.member import meet, path, rank, rows, spread

import eqx_ckpt as ec


which, how = int(sys.argv[5]), sys.argv[6]
patch = pytest.MonkeyPatch()
is_saving, has_raised = threading.Event(), threading.Event()


def make(write):
    def interrupt(*args):
        if not has_raised.is_set():
            assert is_saving.wait(60)
            time.sleep(0.3)  # Till it waits.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert has_raised.wait(60)
        return write(*args)

    return interrupt


if rank == which:
    # In the background of a shell it may be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    inside.wrap(patch, "write a save", make)
trees = [{"x": spread(np.full(8, i, np.float32), rows)} for i in range(6)]
meet("begin")
try:
    with ec.CheckpointManager(
        path / "run",
        every=100,
        near=path / f"disk{rank}",
        near_every=2,
        processes=ec.Together(timeout=60),
    ) as manager:
        manager.save(2, trees[2])
        manager.save(3, trees[3])
        is_saving.set()
        try:
            manager.save(4, trees[4])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            has_raised.set()
            if how == "ends":
                raise
            manager.save(4, trees[4])
        saving: Any = vars(manager._near)["_saving"]
        until(lambda: saving.call is not None)
        manager.save(5, trees[5])
        # All have copied it in the same call.
        meet("copied")
        manager.wait()
        tree, step = manager.restore(trees[0])
        print([float(s.data[0]) for s in tree["x"].addressable_shards], step)
except BaseException as e:
    print(type(e).__name__, e)
