"""What a training loop and a notebook wait for, beside what others take for it.

    python benchmarks/felt.py [--short] [--scratch DIRECTORY] [--out DIRECTORY]
    python benchmarks/felt.py --stall [MiB ...]

The first gives milliseconds of CPU, in turns, the least of nine rounds, and fails where
a call takes more of what is beside it than its limit. In the second a loop saves after
each ten steps of 20 ms. The table has the milliseconds by the clock that it loses for a
save, medians of three loops: run it on a machine that does nothing else.
"""

import os
import pathlib
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pages
import program
import workloads
from peers import ASYNCHRONOUS
from safetensors import flax, safe_open
from safetensors.numpy import save_file

import eqx_ckpt as ec


_ROUNDS = 10
_CHUNKS = {"x": (64, 256), "y": (4, 64)}
_Calls = dict[str, tuple[Any, Any, int, float]]


def _calls(at: pathlib.Path, count: int) -> _Calls:
    """Each with what is beside it, how often both are called in a round, and how many
    times as long it may take."""
    both = {"x": np.ones((2**16, 256), "f4"), "y": np.ones((40_000, 64), "f4")}
    ec.tree_serialise_leaves(at / "t", both, chunks=lambda name, *_: _CHUNKS[name])
    x, y = (ec.open(at / "t")[name] for name in both)
    save_file(both, at / "t.safetensors")
    part = safe_open(at / "t.safetensors", "np").get_slice("x")
    put, cut = jax.device_put, np.s_[:: 2**12]
    slices = lambda some: lambda: put(np.concatenate([part[i : i + 1] for i in some]))
    some = np.random.default_rng(0).integers(0, 2**16, 100)
    read = lambda key: lambda: x[key].read(verify=False)
    save = lambda tree: ec.tree_serialise_leaves(at / "s", tree, durable=False)
    load = lambda: ec.materialise(ec.open(at / "s").tree)
    export = lambda: ec.export_safetensors(at / "e", ec.open(at / "s"), durable=False)
    convert = lambda: ec.convert(at / "s", at / "c", durable=False)
    merge = lambda: save(ec.merge([at / "s"] * 2, ec.merging.average()))
    # Each call gets other leaves: JAX keeps what it once copied to the host.
    fresh = iter([workloads.small(count) for _ in range(2 * _ROUNDS)])
    begin = lambda: ASYNCHRONOUS["eqx_ckpt"](at / "a", next(fresh), False)
    blocking = lambda: flax.save_file(dict(next(fresh)), at / "p")
    save(workloads.small(count))
    return {
        "a row": (read(777), slices([777]), 20, 6),
        "a row, verified": (lambda: x[777].read(), slices([777]), 20, 7),
        "16 rows by a stride": (read(cut), slices(range(2**16)[cut]), 20, 5),
        "100 rows by number": (read(some), slices(some.tolist()), 9, 4),
        "chunks of 1 KiB, and unverified": (y.read, lambda: y.read(verify=False), 2, 4),
        "each seventh row of them, and all": (lambda: y[::7].read(), y.read, 2, 1.7),
        "call of an asynchronous save, and safetensors": (begin, blocking, 1, 1.2),
        "merge of two and save, and load and save": (merge, lambda: save(load()), 1, 5),
        "export, and load": (export, load, 1, 2),
        "conversion, and load": (convert, load, 1, 2.4),
        "stats, and load": (lambda: ec.stats(at / "s"), load, 1, 3),
    }


def _cpu(call: Callable[[], Any], times: int) -> float:
    """Milliseconds of CPU, until it returns."""
    start = time.process_time()
    got = [call() for _ in range(times)]
    milliseconds = 1e3 * (time.process_time() - start) / times
    for wait in filter(callable, got):
        wait()
    return milliseconds


def measure(short: bool, scratch: pathlib.Path) -> Any:
    rows = {}
    for name, (*both, times, limit) in _calls(scratch, 500 if short else 5000).items():
        found = [[_cpu(call, times) for call in both] for _ in range(_ROUNDS)]
        rows[name] = [*map(min, zip(*found[1:])), limit]  # The first warms up.
    return {"rows": rows}


def _lost(run: Callable[[], Any], save: Any, tree: Any) -> float:
    """Seconds of 60 steps, after five of which is a save. It waits for the one before,
    as managers do."""
    wait = lambda: None
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        for i in range(60):
            run()
            if save is not None and i % 10 == 9 and i < 50:
                wait()
                wait = save(pathlib.Path(scratch, str(i)), tree, False)
        seconds = time.perf_counter() - start
        wait()
    return seconds


def stall(sizes: list[str]) -> None:
    step = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x @ x / 256, x))
    x, count = jnp.ones((256, 256)), 1
    run = lambda: step(x, count).block_until_ready()
    while min(timeit.repeat(run, number=1, repeat=3)) < 0.02:
        count += 1 + count // 8
    lines = []
    for size in sizes:
        tree, cells = workloads.sized(int(size)), [f"{size} MiB"]
        for save in ASYNCHRONOUS.values():
            turns = [[_lost(run, way, tree) for way in (save, None)] for _ in range(3)]
            lost = statistics.median(saving - alone for saving, alone in turns)
            cells.append(f"{1e3 * lost / 5:.0f}")
        lines.append(cells)
    print(pages.table(["ms that a save costs a loop", *ASYNCHRONOUS], lines, 1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stall"]:
        stall(sys.argv[2:] or ["10", "100", "1000"])
    else:
        done = program.run("felt", measure, ["felt"])["rows"]
        over = [name for name, (own, other, most) in done.items() if own > other * most]
        print("\n".join(f"{x}: over its limit" for x in over) or "All limits are kept.")
        sys.exit(bool(over))
