"""Children of a process with a manager are ended by signals: `RUN`."""

import multiprocessing
import signal
import sys
import time
import warnings

import eqx_ckpt as ec


warnings.simplefilter("ignore")
fork = multiprocessing.get_context("fork")
with ec.CheckpointManager(sys.argv[1], signals=[signal.SIGTERM]) as manager:
    there = fork.Event()
    child = fork.Process(target=lambda: there.set() or time.sleep(60))
    child.start()
    there.wait()  # Python forgets a signal that comes while it forks.
    child.terminate()
    child.join(30)
    print(child.exitcode)
    started = fork.Semaphore(0)
    with fork.Pool(2, started.release) as pool:
        for _ in range(2):
            started.acquire()
        pool.map_async(time.sleep, [60, 60])
    print(manager.should_stop())
