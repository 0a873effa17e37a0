"""Checkpoints of Orbax in a store: `DIRECTORY`."""

import pathlib
import sys

from support.helpers import files_of
from support.stores import StoredFiles

import eqx_ckpt as ec


base = pathlib.Path(sys.argv[1])
for name in ("v1", "v0-files-3"):
    StoredFiles(f"memory://orbax/{name}").update(files_of(base / name))
    ckpt = ec.open(f"memory://orbax/{name}")
    assert float(ckpt["model.w"][1, 0].read()) == 32, name
    assert ckpt["step"].read() == 3
try:
    ec.open("memory://orbax/nothing")
except FileNotFoundError:
    print("good")
