"""Checkpoints of levanter in a store: `DIRECTORY NAME...`."""

import pathlib
import sys

from support.helpers import files_of
from support.stores import StoredFiles

import eqx_ckpt as ec


base = pathlib.Path(sys.argv[1])
for name in sys.argv[2:]:
    StoredFiles(f"memory://foreign/{name}").update(files_of(base / name))
    ckpt = ec.open(f"memory://foreign/{name}")
    assert len(ckpt.leaves) == len(ec.open(base / name).leaves)
    assert float(ckpt["model.big"][1, 0].read()) == 64, name
print("good")
