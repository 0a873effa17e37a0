"""Cleans a disk, and lists the runs on it, where only root may look at all of it."""

import os
import shutil
import tempfile

import eqx_ckpt as ec


disk = tempfile.mkdtemp()
with ec.CheckpointManager(f"{disk}/run") as manager:
    manager.save(1, {"v": 1})
os.makedirs(f"{disk}/killed/d/0123456789abcdef")
os.mkdir(f"{disk}/lost+found", 0o700)
user = os.geteuid()
if user == 0:
    for name in ("", "killed", "killed/d", "killed/d/0123456789abcdef"):
        os.chmod(f"{disk}/{name}", 0o777)
    os.seteuid(65534)
else:
    os.chmod(f"{disk}/lost+found", 0)
try:
    assert [run.latest and run.latest.number for run in ec.runs(disk)] == [1]
    assert ec.clean(disk) == [f"{disk}/killed/d/0123456789abcdef"]
    assert sorted(os.listdir(disk)) == ["lost+found", "run"]
finally:
    os.seteuid(user)
    os.chmod(f"{disk}/lost+found", 0o700)
    shutil.rmtree(disk)
