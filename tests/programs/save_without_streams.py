"""Saves with standard streams closed: `DIRECTORY OPTIONS_BY_NAME`."""

import json
import os
import sys


directory, ways = sys.argv[1], json.loads(sys.argv[2])
for number in (0, 1, 2):
    os.close(number)
import numpy as np

import eqx_ckpt as ec


taken = []


def hear(event, args):
    if event == "os.posix_fallocate" or event == "open":
        taken.extend(
            os.readlink(f"/proc/self/fd/{n}")
            for n in range(3)
            if os.path.exists(f"/proc/self/fd/{n}")
        )


sys.addaudithook(hear)
for name, how in ways.items():
    path = directory + "/" + name
    if name.endswith("safetensors"):
        ec.export_safetensors(path, {"w": np.ones(3)})
    else:
        ec.tree_serialise_leaves(path, {"w": np.ones(3)}, **how)
open(directory + "/found", "w").write(
    repr([x for x in taken if x.startswith(directory)])
)
os._exit(0)
