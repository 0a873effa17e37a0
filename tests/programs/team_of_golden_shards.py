"""Saves arrays that two processes have, in files of `MIN_FILE_BYTES` if it is given."""

import sys

import pytest
from support import golden, inside
from support.member import columns, copies, path, rows, spread

import eqx_ckpt as ec


for size_of_files in sys.argv[5:]:
    inside.limit(pytest.MonkeyPatch(), min_file_bytes=int(size_of_files))
specs = {"rows": rows, "columns": columns, "copies": copies}
tree = {name: spread(x, specs[name]) for name, x in golden.shards().items()}
ec.tree_serialise_leaves(path / "processes", tree | {"step": 3})
