"""A fork of a process with a manager saves nothing, and waits for no save: `RUN`."""

import os
import sys
import threading
import warnings
from collections.abc import Callable

import numpy as np

import eqx_ckpt as ec


def status_of_a_child(act: Callable[[], object]) -> int:
    if (child := os.fork()) == 0:
        act()
        sys.exit(0)
    return os.waitpid(child, 0)[1]


def wait_in_a_child() -> None:
    try:
        manager.wait()
    except RuntimeError as e:
        assert "spawn" in str(e)
        os._exit(0)
    os._exit(1)


warnings.simplefilter("ignore")
tree = {"x": np.ones(2)}
with ec.CheckpointManager(sys.argv[1], every=10) as manager:
    manager.save(5, tree)
    assert status_of_a_child(lambda: None) == 0
    assert manager.steps() == []
assert manager.steps() == [5]
begun, go_on = threading.Event(), threading.Event()
keep_if = lambda step: bool(begun.set() or go_on.wait())
with ec.CheckpointManager(sys.argv[1], keep=1, keep_if=keep_if) as manager:
    manager.save(6, tree)
    assert begun.wait(60)
    # The save is over here, and is followed up.
    assert status_of_a_child(wait_in_a_child) == 0
    go_on.set()
