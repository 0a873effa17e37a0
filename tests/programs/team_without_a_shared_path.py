"""Each process has its own directory of one name, as on hosts without a shared disk."""

import os

import pytest
from support import inside
from support.leaves_of_all import tree
from support.member import caught, path, rank

import eqx_ckpt as ec


patch = pytest.MonkeyPatch()
inside.limit(patch, directory_seconds=1)
mine = path / str(rank)
mine.mkdir()
os.chdir(mine)
make = lambda lines: lambda *args: lines(*args) | {"the path": "same"}
inside.wrap(patch, "account of a save", make)
inside.replace(patch, "URL of a place", str)
caught(ec.tree_serialise_leaves, "c", tree, processes=ec.Together(timeout=60))
