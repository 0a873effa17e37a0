"""One process saves its part alone; both save a step with an own state of each."""

import os
import shutil

from support import golden
from support.member import columns, copies, path, rank, rows, spread

import eqx_ckpt as ec


specs = {"rows": rows, "columns": columns, "copies": copies}
tree = {name: spread(x, specs[name]) for name, x in golden.shards().items()}
if rank == 1:
    ec.tree_serialise_leaves(path / "part", tree, processes="own")
manager = ec.CheckpointManager(path / "run")
manager.save(3, tree, own={"at": 10 + rank, "file": f"{rank}.txt"})
manager.wait()
if rank == 0:
    os.rename(path / "run/3/default", path / "own")
    shutil.rmtree(path / "run")
