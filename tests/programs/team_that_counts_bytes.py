"""Prints the bytes that a save writes and a load reads, of those of an array."""

import pathlib

import jax
import numpy as np
from support.member import (
    columns,
    copies,
    path,
    rows,
    spread,
)

import eqx_ckpt as ec


X = np.arange(2048 * 1024, dtype=np.float32).reshape(2048, 1024)
tree = {"rows": spread(X, rows), "copies": spread(X, copies)}


def io(name):
    text = pathlib.Path("/proc/self/io").read_text()
    return int(text.split(name + ": ")[1].split()[0])


def moved():
    import tensorstore as ts

    found = ts.experimental_collect_matching_metrics("/tensorstore/file/mmap_bytes")
    return io("rchar") + sum(v.get("value", 0) for m in found for v in m["values"])


ec.tree_serialise_leaves(path / "warm", tree)
before = io("wchar")
ec.tree_serialise_leaves(path / "c", tree)
wrote = io("wchar") - before
like = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=columns)
before = moved()
ec.tree_deserialise_leaves(path / "c", {"rows": like}, unexpected="ignore")
print(wrote / X.nbytes, (moved() - before) / X.nbytes)
