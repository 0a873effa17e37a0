"""Prints if a save ends in time though `CALL` comes after process 0 has failed."""

import sys
import time

import pytest
from support import inside
from support.member import meet, path

import eqx_ckpt as ec


call = sys.argv[5]

tree = ec.open(path / "damaged").tree

waited = []


def late(told):
    def wait(*arguments):
        waited.append(meet("process 0 has failed"))
        return told(*arguments)

    return wait


with pytest.MonkeyPatch.context() as patch:
    inside.wrap(patch, call, late)
    start = time.monotonic()
    try:
        ec.tree_serialise_leaves(path / "b", tree)
    except RuntimeError as e:
        print("layers.0" in str(e) or e)
    finally:
        if not waited:
            meet("process 0 has failed")
print(time.monotonic() - start < 20)
