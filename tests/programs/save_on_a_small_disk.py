"""Saves that do not fit on a disk, and saves at its mount point: `DIRECTORY`."""

import os
import sys

import numpy as np

import eqx_ckpt as ec


os.chdir(sys.argv[1])
big, small = {"a": np.ones(100_000)}, {"a": np.ones(10)}


def run():
    with ec.CheckpointManager("run") as manager:
        manager.save(1, big)


def fails(call, number, *words):
    try:
        call()
    except OSError as e:
        assert e.errno == number, e
        assert all(word in str(e) for word in words), e
    else:
        raise AssertionError(words)


# A mount point cannot be renamed.
said = os.getcwd(), "mount point", "left as it is", 'layout="ocdbt"'
fails(lambda: ec.tree_serialise_leaves(".", small, layout="zarr"), 16, *said)
ec.tree_serialise_leaves("good", small)
said = "Nothing was saved", "path is as it was before", "Make room"
for name, save in {
    "big": lambda: ec.tree_serialise_leaves("big", big),
    "good": lambda: ec.tree_serialise_leaves("good", big),
    "z": lambda: ec.tree_serialise_leaves("z", big, layout="zarr"),
    "b.zip": lambda: ec.tree_serialise_leaves("b.zip", big),
    "later": lambda: ec.async_tree_serialise_leaves("later", big).result(),
    "run/1/default": run,
}.items():
    fails(save, 28, "No space left", f"{os.getcwd()}/{name}`", "781.2 KiB", *said)
assert os.listdir() == ["good"], os.listdir()
assert ec.verify("good") == []
ec.delete("good")
ec.tree_serialise_leaves(".", small)
ec.delete(".")
assert os.listdir() == [] and not ec.exists(".")
ec.tree_serialise_leaves(".", small)
assert ec.verify(".") == []
