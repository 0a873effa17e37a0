"""What it costs to edit and merge checkpoints that are not loaded.

    python benchmarks/editing.py [--short] [--size BYTES] [--scratch DIRECTORY]
                                 [--out DIRECTORY]

Each case is a process of its own, with files in the page cache and saves that are not
durable. `cp` copies the result; where there is none, or only an index, the source.
`cpu` is the seconds of all threads.
`read` and `written` are bytes that system calls and memory maps have given and taken;
`peak` is resident memory over that of the process before the case. The `whole` rows do
the same by loading everything; `NumPy` loads everything too, and merges it leaf by leaf
in a loop. Trees of small leaves are merged again and again in one process, and the
least is printed. It fails where a limit is exceeded.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import counters
import jax
import jax.numpy as jnp
import numpy as np
import pages

import eqx_ckpt as ec


# 512 MiB, and 96 MiB in short.
SIZE, SHORT = 2**29, 96 * 2**20
# For all cases but those of the whole.
MAX_BYTES = 2**27
_RUNS = ("base", "a", "b")
_Tree = Any
_Row = dict[str, float]


def _make(size: int, scratch: pathlib.Path) -> None:
    """Three checkpoints of a model with Adam's moments, and two steps of one that is
    frozen but for 1% of it."""
    count = max(1, size // (3 * 2**25))
    shape = (size // (3 * count * 4 * 1024), 1024)
    rng = np.random.default_rng(0)

    def noise() -> np.ndarray:
        return rng.random(shape, np.float32)

    def model() -> dict[str, np.ndarray]:
        return {f"w{i}": noise() for i in range(count)}

    base = {part: model() for part in ("model", "mu", "nu")}
    for name in _RUNS:
        tree = base
        if name != "base":
            tree = {
                k: {n: x + 0.01 * noise() for n, x in m.items()}
                for k, m in base.items()
            }
        ec.tree_serialise_leaves(scratch / name, tree, durable=False)
    small = shape[0] // 100 + 1
    for step in (1, 2):
        lora = {name: x[:small] * step for name, x in base["model"].items()}
        ec.tree_serialise_leaves(
            scratch / f"lora{step}",
            {"frozen": base, "lora": lora},
            durable=False,
            reuse=scratch / "lora1" if step == 2 else None,
        )


# ---- Cases: what they give to be saved, if anything.

_Case = Callable[[pathlib.Path], _Tree]


def _tree(path: pathlib.Path) -> _Tree:
    return ec.open(path).tree


def _whole(path: pathlib.Path) -> _Tree:
    return ec.materialise(ec.open(path).tree)


def _lazily(read: Callable[[pathlib.Path], _Tree]) -> dict[str, _Case]:
    """The cases for trees that are read so."""

    def cast(scratch: pathlib.Path) -> _Tree:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), read(scratch / "a"))

    def average(scratch: pathlib.Path) -> _Tree:
        return ec.merge([read(scratch / x) for x in _RUNS], ec.merging.average())

    def slerp(scratch: pathlib.Path) -> _Tree:
        return ec.merge([read(scratch / x) for x in "ab"], ec.merging.slerp(0.3))

    def ties(scratch: pathlib.Path) -> _Tree:
        trees = [read(scratch / x) for x in ("a", "b")]
        method = ec.merging.ties([1.0, 1.0], 0.2)
        return ec.merge(trees, method, base=read(scratch / "base"))

    def diff(scratch: pathlib.Path) -> None:
        assert ec.diff(read(scratch / "a"), read(scratch / "b"), values=True)

    def lora(scratch: pathlib.Path) -> None:
        both = [read(scratch / f"lora{step}") for step in (1, 2)]
        assert ec.diff(*both, values=True)

    return {
        "prune": lambda scratch: read(scratch / "a")["model"],
        "metadata": lambda scratch: read(scratch / "a"),
        "cast": cast,
        "average of 3": average,
        "slerp of 2": slerp,
        "TIES of 2": ties,
        "diff of values": diff,
        "diff of two steps of LoRA": lora,
    }


# ---- Merges in a loop, as one would write them.

_Arrays = list[np.ndarray]


def _loop(names: tuple[str, ...], merge: Callable[[_Arrays], np.ndarray]) -> _Case:
    def merged(scratch: pathlib.Path) -> _Tree:
        trees = [_whole(scratch / name) for name in names]
        return jax.tree.map(lambda *x: merge([np.asarray(y) for y in x]), *trees)

    return merged


def _average(arrays: _Arrays) -> np.ndarray:
    return (arrays[0] + arrays[1] + arrays[2]) / np.float32(3)


def _slerp(arrays: _Arrays) -> np.ndarray:
    a, b = (x.reshape(-1) for x in arrays)
    cosine = (a @ b) / np.sqrt((a @ a) * (b @ b))
    if cosine > 0.9995:
        return np.float32(0.7) * arrays[0] + np.float32(0.3) * arrays[1]
    angle = np.arccos(cosine)
    one, two = (np.sin(x * angle) / np.sin(angle) for x in (0.7, 0.3))
    return np.float32(one) * arrays[0] + np.float32(two) * arrays[1]


def _ties(arrays: _Arrays) -> np.ndarray:
    base, *trees = arrays
    tasks = []
    for tree in trees:
        task = tree - base
        sizes = np.abs(task)
        place = task.size - round(0.2 * task.size)
        least = np.partition(sizes.reshape(-1), place)[place]
        tasks.append(np.where(sizes >= least, task, np.float32(0)))
    sign = np.sign(sum(tasks))
    total, count = np.zeros_like(base), np.zeros_like(base)
    for task in tasks:
        agrees = task * sign > 0
        total += np.where(agrees, task, np.float32(0))
        count += agrees
    return base + total / np.maximum(count, np.float32(1))


_LOOPS = {
    "average of 3": _loop(_RUNS, _average),
    "slerp of 2": _loop(("a", "b"), _slerp),
    "TIES of 2": _loop(_RUNS, _ties),
}
# The most seconds of all threads that a lazy merge takes for one of the loop, whose
# loads are this package's too.
_FIRST = 1.0  # Second of CPU.
CPU = {"average of 3": 1.35, "slerp of 2": 1.5, "TIES of 2": 1.45}
WAYS = {"lazy": _lazily(_tree), "whole": _lazily(_whole), "NumPy": _LOOPS}
# What a case with a result of its own may not exceed, lazily: of bytes read and
# written over the size, and of memory.
LIMITS = {
    "prune": {"read": 0.35, "written": 0.35, "peak": 400 * 2**20},
    "metadata": {"read": 0.001, "written": 0.001},
    "average of 3": {"read": 3.05, "written": 1.05, "peak": 400 * 2**20},
    "slerp of 2": {"read": 4.05, "written": 1.05, "peak": 400 * 2**20},
    "TIES of 2": {"written": 1.05, "peak": 400 * 2**20},
    "diff of two steps of LoRA": {"read": 0.05},
}


def _measure(way: str, case: str, scratch: pathlib.Path) -> dict[str, float]:
    """Runs a case in this process."""
    out = scratch / "out"
    options: dict[str, Any] = {"durable": False}
    if way == "lazy":
        options["max_bytes"] = MAX_BYTES
    if case == "metadata":
        # In place: the file system does not have it twice.
        out = scratch / "a"
        options |= {"metadata": {"note": way}}
        options |= {"reuse": out} if way == "lazy" else {}
    jax.block_until_ready(jnp.zeros(2) + 1)
    resident = counters.reset_peak()
    before, written = counters.reads(), _written()
    start, cpu = time.perf_counter(), time.process_time()
    tree = WAYS[way][case](scratch)
    if tree is not None:
        ec.tree_serialise_leaves(out, tree, **options)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "read": counters.reads_since(before)["read"],
        "written": _written() - written,
        "peak": counters.peak() - resident,
    }


# ---- Merges of many small leaves, into trees of JAX's arrays.

_LEAVES, _ELEMENTS, _TIMES = 3_000, 256, 7


def _measure_small(scratch: pathlib.Path) -> dict[str, dict[str, float]]:
    """Least CPU of each small merge, lazily and in the loop, which take turns."""
    rng = np.random.default_rng(0)
    for name in _RUNS:
        layers = [
            {f"w{j}": rng.random(_ELEMENTS, np.float32) for j in range(10)}
            for _ in range(_LEAVES // 10)
        ]
        tree = jax.tree.map(jnp.asarray, {"layers": layers})
        ec.tree_serialise_leaves(scratch / name, tree, durable=False)
    ways = {
        "lazy": lambda case: ec.materialise(WAYS["lazy"][case](scratch)),
        "NumPy": lambda case: jax.tree.map(jnp.asarray, _LOOPS[case](scratch)),
    }
    out: dict[str, dict[str, float]] = {}
    for case in _LOOPS:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for way in [*ways] * _TIMES:
            start = time.process_time()
            jax.block_until_ready(ways[way](case))
            found[way].append(time.process_time() - start)
        out[case] = {way: min(some) for way, some in found.items()}
    return out


def _in_process(case: list[str], scratch: pathlib.Path) -> Any:
    """What a case gives in a process of its own."""
    command = [sys.executable, __file__, "--case", *case, "--scratch", str(scratch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _written() -> int:
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("wchar"))


def _copied(source: pathlib.Path, target: pathlib.Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--short", action="store_true", help="96 MiB instead of 512")
    add("--size", type=int, help="bytes of each checkpoint")
    add("--scratch", type=pathlib.Path, help="where to save; on a disk")
    add("--out", type=pathlib.Path, help="where editing.json goes")
    add("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        way, case = given.case
        if way == "small":
            print(json.dumps(_measure_small(given.scratch)))
        else:
            print(json.dumps(_measure(way, case, given.scratch)))
        return
    size = given.size or (SHORT if given.short else SIZE)
    with tempfile.TemporaryDirectory(dir=given.scratch) as directory:
        scratch = pathlib.Path(directory)
        _make(size, scratch)
        cases = _cases(scratch)
        (scratch / "small").mkdir()
        small = _in_process(["small", "all"], scratch / "small")
    sizes = {"leaves": _LEAVES, "bytes": 4 * _ELEMENTS, "rounds": _TIMES}
    done = {"size": size, "cases": cases, "small": {**sizes, "cases": small}}
    pages.keep("editing", done, given.out, "edits", "small-merges")
    problems = _problems(size, cases, small)
    print("\n".join(problems) or "All limits are kept.")
    sys.exit(bool(problems))


def _cases(scratch: pathlib.Path) -> dict[str, dict[str, _Row]]:
    """Counts of each case in each way."""
    cases: dict[str, dict[str, _Row]] = {}
    for case in WAYS["lazy"]:
        for way in [way for way in WAYS if case in WAYS[way]]:
            os.sync()
            got = _in_process([way, case], scratch)
            out = scratch / "out"
            os.sync()
            copied = out if out.exists() else scratch / "a"
            got["cp"] = _copied(copied, scratch / "copy")
            shutil.rmtree(out, ignore_errors=True)
            cases.setdefault(case, {})[way] = got
    return cases


def _problems(
    size: int, cases: dict[str, dict[str, _Row]], small: dict[str, _Row]
) -> list[str]:
    """Sentences on what exceeds a limit."""
    problems: list[str] = []
    for case, ways in cases.items():
        for key, limit in LIMITS.get(case, {}).items():
            # An index of a small checkpoint is not nothing.
            most = limit if limit > 1000 else limit * size + 2**20
            if (got := ways["lazy"][key]) > most:
                problems.append(f"{case}: `{key}` is {got:,}, over {most:,.0f}")
    for case, limit in CPU.items():
        lazy, loop = (cases[case][way]["cpu"] for way in ("lazy", "NumPy"))
        # The first call of a process takes its time, whatever the size.
        if lazy > limit * loop + _FIRST:
            problems.append(f"{case}: `cpu` is over {limit} of the loop's")
        ratio = small[case]["lazy"] / small[case]["NumPy"]
        if ratio > limit:
            problems.append(f"{case}, small leaves: `cpu` is {ratio:.2f} of the loop's")
    return problems


if __name__ == "__main__":
    main()
