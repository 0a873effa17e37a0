"""The first calls of a process in many threads have one memory."""

import threading
import time

import numpy as np
import tensorstore as ts

import eqx_ckpt as ec


make = ts.Context
ts.Context = lambda *args, **kwargs: time.sleep(0.1) or make(*args, **kwargs)
barrier = threading.Barrier(8)


def first(number):
    barrier.wait()
    ec.tree_serialise_leaves(f"memory://run/{number}/default", {"x": np.ones(2)})


threads = [threading.Thread(target=first, args=(n,)) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert ec.CheckpointManager("memory://run").steps() == [*range(8)]
