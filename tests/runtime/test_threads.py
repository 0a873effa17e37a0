"""Calls where no thread can be started: they need none. And first calls in many."""

import textwrap

import pytest
from support.helpers import run_python


_CALLS = """
import atexit, threading, time
import jax.numpy as jnp, numpy as np, eqx_ckpt as ec
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
        ec.stats("a"), ec.convert("d", "f"), ec.clean("."), ec.delete("a")
        print("all")
    except BaseException as e:
        print(repr(e))
"""
_WHEN = {
    "as the process ends": "atexit.register(calls)",
    "after the main thread": """
        def late():
            threading.main_thread().join()
            calls()
        threading.Thread(target=late).start()
    """,
    "at the limit of threads": """
        def refuse(*args, **kwargs):
            raise RuntimeError("can't start new thread")
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if hasattr(threading, name):
                setattr(threading, name, refuse)
        calls()
    """,
}


@pytest.mark.parametrize("when", _WHEN)
def test_calls_without_new_threads(tmp_path, monkeypatch, when):
    monkeypatch.chdir(tmp_path)
    assert run_python(_CALLS + textwrap.dedent(_WHEN[when])).split("\n")[-2] == "all"


def test_all_threads_that_are_first_have_one_memory():
    code = """
    import threading, time
    import numpy as np, tensorstore as ts, eqx_ckpt as ec

    make = ts.Context
    ts.Context = lambda *args, **kwargs: time.sleep(0.1) or make(*args, **kwargs)
    barrier = threading.Barrier(8)

    def first(number):
        barrier.wait()
        ec.tree_serialise_leaves(f"memory://run/{number}/default", {"x": np.ones(2)})

    threads = [threading.Thread(target=first, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ec.CheckpointManager("memory://run").steps() == [*range(8)]
    """
    run_python(textwrap.dedent(code))
