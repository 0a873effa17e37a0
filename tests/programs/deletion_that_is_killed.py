"""Deletes step 1 of the run at `PATH`, and is killed at its deletion number `AT`."""

import os
import sys

import eqx_ckpt as ec


path, at = sys.argv[1], int(sys.argv[2])
count = 0


def hook(event, _):
    global count
    if event in ("os.remove", "os.rmdir", "os.rename"):
        if count == at:
            os._exit(9)
        count += 1


sys.addaudithook(hook)
ec.CheckpointManager(path).delete(1)
