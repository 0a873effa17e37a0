"""Saves below a directory whose names may not be read."""

import os
import shutil
import tempfile

import eqx_ckpt as ec


if os.geteuid() == 0:
    ec.tree_serialise_leaves(f"{tempfile.mkdtemp()}/imports", {"v": 0})
    os.setgid(65534)
    os.setuid(65534)
shared = tempfile.mkdtemp()
os.mkdir(f"{shared}/ck")
os.chmod(shared, 0o311)
for layout in ("ocdbt", "ocdbt", "zarr"):
    ec.tree_serialise_leaves(f"{shared}/ck", {"v": 1}, layout=layout)
with ec.CheckpointManager(f"{shared}/run", keep=1) as manager:
    manager.save(1, {"v": 1})
    manager.save(2, {"v": 2})
    manager.pin(2)
assert manager.steps() == [2]
ec.delete(f"{shared}/ck")
os.chmod(shared, 0o700)
assert os.listdir(shared) == ["run"]
shutil.rmtree(shared)
