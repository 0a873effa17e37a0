"""Each call on a checkpoint in a fork, and its error: `SIZE LAYOUT PATH`."""

import os
import sys
import warnings
from typing import Any

import numpy as np

import eqx_ckpt as ec


warnings.simplefilter("ignore")
size, layout, path = sys.argv[1:]
like = {"x": np.ones(int(size))}
options: dict[str, Any] = {} if layout == "memory" else {"layout": layout}
ec.tree_serialise_leaves(path, like, **options)
ckpt = ec.open(path)
lazy, spliced = ckpt["x"], ckpt.splice(like)
lazy.read()
load = lambda **options: ec.tree_deserialise_leaves(ckpt, like, **options)
uses = [
    lambda: ec.open(ckpt.path),
    lazy.read,
    lambda: lazy.store,
    load,
    lambda: load(verify=False),
    lambda: ec.materialise(spliced),
    lambda: ec.load_or_init(lambda: like, ckpt),
    lambda: ec.verify(ckpt.path),
    lambda: ec.tree_serialise_leaves(ckpt.path, like),
    lambda: ec.graft(like, ckpt, [(lambda t: t, lambda c: c)]),
]
for use in uses:
    if (pid := os.fork()) == 0:
        try:
            use()
        except RuntimeError as e:
            print("spawn" in str(e), type(e).__name__, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
