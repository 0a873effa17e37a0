"""Process `WHO` is killed `before`, `during` or `after` its writes, as `WHEN` says."""

import os
import signal
import sys

import pytest
from support import inside
from support.leaves_of_all import tree
from support.member import caught, meet, path, rank

import eqx_ckpt as ec


who, when = int(sys.argv[5]), sys.argv[6]

ec.tree_serialise_leaves(path / "c", {"old": 1})


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(change, key):
    if (when, change) == ("during", "write") and key.rpartition("/")[2].isdigit():
        die()


def after(change, key):
    is_last = "part-" in key or key.endswith("tree")
    if (when, change) == ("after", "write") and is_last:
        die()


if when != "before":
    meet("begin")
if rank == who:
    if when == "before":
        die()
    inside.watch_store(pytest.MonkeyPatch(), path, before, after)
caught(ec.tree_serialise_leaves, path / "c", tree, processes=ec.Together(timeout=5))
sys.stdout.flush()
os._exit(0)  # The runtime waits for all at the end.
