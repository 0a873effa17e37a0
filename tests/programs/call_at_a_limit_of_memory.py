"""A call where TensorStore cannot start its threads: what it does, or its error."""

import resource
import sys

import numpy as np

import eqx_ckpt as ec


call, path, room = sys.argv[1:]
tree = {name: np.ones(2**22, np.float32) for name in "ab"}
ec.tree_serialise_leaves("memory://small", {"a": np.ones(9)})
ec.verify("memory://small")
ec.tree_deserialise_leaves("memory://small", {"a": np.ones(9)})
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + int(room) * 2**20, hard))
calls = {
    "verify": lambda: ec.verify(path),
    "load": lambda: ec.tree_deserialise_leaves(path, tree),
    "save": lambda: ec.tree_serialise_leaves(path, tree, compression="lz4"),
}
try:
    calls[call]()
    print("done")
except (OSError, MemoryError, RuntimeError) as e:
    print(e)
