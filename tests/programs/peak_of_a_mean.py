"""The peak of memory, in MiB, of a saved mean of three checkpoints: `DIRECTORY`."""

import sys

import numpy as np
from support.peaks import peak

import eqx_ckpt as ec


path = sys.argv[1]
w = np.ones((64, 2**20), np.float32)
for i in range(3):
    ec.tree_serialise_leaves(f"{path}/{i}", {"w": w * i}, durable=False)
del w
lazies = [ec.open(f"{path}/{i}")["w"] for i in range(3)]
mean = ec.lazy(lambda a, b, c: (a + b + c) / 3, elementwise=True)(*lazies)
mean[:4].read()
save = lambda: ec.tree_serialise_leaves(path + "/mean", {"w": mean}, max_bytes=2**26)
print(peak(save)[0])
assert (ec.open(path + "/mean")["w"][30:40, 7].read() == 1).all()
