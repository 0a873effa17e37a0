"""Calls where no thread can be started, in the working directory: `WHEN`."""

import atexit
import sys
import threading

import jax.numpy as jnp
import numpy as np

import eqx_ckpt as ec


tree = {"a": np.ones(10**6, np.float32), "b": [np.full(5, 2)] * 3, "c": jnp.ones(300)}
ec.tree_serialise_leaves("before", tree, compression="lz4", chunks=2**18)
manager = ec.CheckpointManager("run")


def calls():
    try:
        ec.tree_serialise_leaves("a", tree)
        ec.async_tree_serialise_leaves("b", tree).result()
        ec.tree_serialise_leaves("c.zip", tree)
        ec.tree_serialise_leaves("d", tree, layout="zarr", compression="zstd")
        ec.export_safetensors("e.safetensors", {"c": tree["c"]})
        manager.save(1, tree)
        assert manager.restore(tree)[1] == 1
        for path in ("a", "b", "c.zip", "d", "before"):
            assert ec.tree_deserialise_leaves(path, tree)["a"].sum() == 10**6
            assert ec.verify(path) == [] and not ec.diff(path, "a", values=True)
        assert ec.open("d")["a"][5:7].read().tolist() == [1, 1]
        ec.stats("a")
        ec.convert("d", "f")
        ec.clean(".")
        ec.delete("a")
        print("all")
    except BaseException as e:
        print(repr(e))


def late():
    threading.main_thread().join()
    calls()


def refuse(*args, **kwargs):
    raise RuntimeError("can't start new thread")


when = sys.argv[1]
if when == "as the process ends":
    atexit.register(calls)
elif when == "after the main thread":
    threading.Thread(target=late).start()
else:
    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            setattr(threading, name, refuse)
    calls()
