"""What it costs to edit and merge checkpoints that are not loaded.

    python benchmarks/editing.py [--short] [--scratch DIRECTORY] [--out DIRECTORY]

Each case is a process of its own, with files in the page cache and saves that are not
durable. `cp` copies the result; where there is none, or only an index, the source.
`cpu` is the seconds of all threads. `read` and `written` are bytes that system calls
and memory maps have given and taken; `peak` is resident memory over that of the process
before the case. The `whole` rows do the same by loading everything; `NumPy` loads
everything too, and averages it leaf by leaf in a loop. It fails beyond a limit.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import counters
import jax
import jax.numpy as jnp
import numpy as np
import program

import eqx_ckpt as ec


# Bytes of each checkpoint.
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
        "TIES of 2": ties,
        "diff of values": diff,
        "diff of two steps of LoRA": lora,
    }


def _numpy_average(scratch: pathlib.Path) -> _Tree:
    """A merge in a loop, as one would write it."""
    trees = [_whole(scratch / name) for name in _RUNS]
    return jax.tree.map(lambda a, b, c: (a + b + c) / np.float32(3), *trees)


# The most seconds of all threads that the lazy average takes for one of the loop, whose
# loads are this package's too. The first call of a process takes a second more.
_CPU, _FIRST = 1.35, 1.0
WAYS = {
    "lazy": _lazily(_tree),
    "whole": _lazily(_whole),
    "NumPy": {"average of 3": _numpy_average},
}
# What a case with a result of its own may not exceed, lazily: of bytes read and
# written over the size, and of memory.
LIMITS = {
    "prune": {"read": 0.35, "written": 0.35, "peak": 400 * 2**20},
    "metadata": {"read": 0.001, "written": 0.001},
    "average of 3": {"read": 3.05, "written": 1.05, "peak": 400 * 2**20},
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
    for name in dir(ec):  # Imported when they are first asked for: not in a case.
        getattr(ec, name)
    resident = counters.reset_peak()
    before, written = counters.reads(), counters.written()
    start, cpu = time.perf_counter(), time.process_time()
    tree = WAYS[way][case](scratch)
    if tree is not None:
        ec.tree_serialise_leaves(out, tree, **options)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "read": counters.reads_since(before)["read"],
        "written": counters.written() - written,
        "peak": counters.peak() - resident,
    }


def _copied(source: pathlib.Path, target: pathlib.Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def measure(short: bool, scratch: pathlib.Path) -> Any:
    size = SHORT if short else SIZE
    _make(size, scratch)
    return {"size": size, "cases": _cases(scratch)}


def _cases(scratch: pathlib.Path) -> dict[str, dict[str, _Row]]:
    """Counts of each case in each way."""
    cases: dict[str, dict[str, _Row]] = {}
    for case in WAYS["lazy"]:
        for way in [way for way in WAYS if case in WAYS[way]]:
            os.sync()
            got = program.call(__file__, "--case", way, case, str(scratch))
            out = scratch / "out"
            os.sync()
            copied = out if out.exists() else scratch / "a"
            got["cp"] = _copied(copied, scratch / "copy")
            shutil.rmtree(out, ignore_errors=True)
            cases.setdefault(case, {})[way] = got
    return cases


def _problems(size: int, cases: dict[str, dict[str, _Row]]) -> list[str]:
    """Sentences on what exceeds a limit."""
    problems: list[str] = []
    for case, ways in cases.items():
        for key, limit in LIMITS.get(case, {}).items():
            # An index of a small checkpoint is not nothing.
            most = limit if limit > 1000 else limit * size + 2**20
            if (got := ways["lazy"][key]) > most:
                problems.append(f"{case}: `{key}` is {got:,}, over {most:,.0f}")
    lazy, loop = (cases["average of 3"][way]["cpu"] for way in ("lazy", "NumPy"))
    if lazy > _CPU * loop + _FIRST:
        problems.append(f"average of 3: `cpu` is over {_CPU} of the loop's")
    return problems


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        way, case, scratch = sys.argv[2:]
        print(json.dumps(_measure(way, case, pathlib.Path(scratch))))
    else:
        problems = _problems(**program.run("editing", measure, ["edits"]))
        print("\n".join(problems) or "All limits are kept.")
        sys.exit(bool(problems))
