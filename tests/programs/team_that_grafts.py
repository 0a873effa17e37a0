"""Grafts of two processes, of which one fails in process 1 only."""

import time

import jax.numpy as jnp
from support.leaves_of_all import tree
from support.member import columns, path, rank, same, spread
from support.processes import X

import eqx_ckpt as ec


ec.tree_serialise_leaves(path / "c", {"model": {"w": tree["rows"], "n": 3}})
model = {"new": {"w": spread(0 * X, columns), "n": 0}, "head": jnp.zeros(2)}


def graft(how=(), tag=None):
    pairs = [(lambda m: m["new"]["w"], lambda c: c.model.w, *how)]
    pairs += [(lambda m: m["new"]["n"], lambda c: c.model.n)]
    return ec.graft(
        model,
        path / "c",
        pairs,
        fresh=lambda m: m["head"],
        processes=ec.Together(tag, 200),
    )


out, report = graft()
assert same(out["new"]["w"], X) and out["new"]["n"] == 3
assert out["new"]["w"].sharding == columns
assert report.names("fresh") == ["head"]


def broken(saved, like):
    if rank == 1:
        raise OSError("the disk of process 1")
    return saved


def fails(how, tag):
    try:
        graft(how, tag)
    except (RuntimeError, OSError) as e:
        return str(e)


start = time.monotonic()
said = str(fails([broken], "a"))
assert "the disk of process 1" in said, said
assert time.monotonic() - start < 100
out, _ = graft(tag="a")
assert same(out["new"]["w"], X)
print("good")
