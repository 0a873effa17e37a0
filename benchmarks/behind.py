"""What an asynchronous save costs the program that it runs behind.

    python benchmarks/behind.py [directory] [rounds]

Times are medians in ms. `behind a loop`: how many small jitted steps a second there are
while the save runs, over how many there are just before and after it. `behind dd`: the
same while another process of the lowest priority writes as many bytes there: what disk
and system take, whoever writes. `/dev/shm` as the directory shows what remains of it.
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from workloads import large, small, Tree

import eqx_ckpt as ec


def _blocking(path: pathlib.Path, tree: Tree) -> tuple[float, float]:
    start = time.perf_counter()
    ec.tree_serialise_leaves(path, tree)
    seconds = time.perf_counter() - start
    return seconds, seconds


def _behind(
    path: pathlib.Path, tree: Tree, busy: Callable[[Callable[[], bool]], object]
) -> tuple[float, float]:
    """Seconds until the call returned, and until the save was over."""
    start = time.perf_counter()
    handle = ec.async_tree_serialise_leaves(path, tree)
    called = time.perf_counter() - start
    busy(handle.done)
    handle.result()
    return called, time.perf_counter() - start


def _idle(done: Callable[[], bool]) -> None:
    pass


def _python(done: Callable[[], bool]) -> None:
    while not done():
        sum(range(100))


weight = jnp.eye(64)
step = jax.jit(lambda x: jnp.tanh(x @ weight), donate_argnums=0)


def _steps(done: Callable[[], bool]) -> float:
    """Jitted steps a second until `done`."""
    x = jnp.ones((64, 64))
    count, start = 0, time.perf_counter()
    while not done():
        x = step(x).block_until_ready()
        count += 1
    return count / (time.perf_counter() - start)


def _dd(path: pathlib.Path, nbytes: int) -> Callable[[], bool]:
    """Writes so many bytes to the disk, as a save does. Says when it is over."""
    what = [f"of={path}", "if=/dev/zero", "bs=4M", f"count={nbytes}", "status=none"]
    flags = ["iflag=count_bytes", "conv=fsync"]
    writing = subprocess.Popen(["nice", "-n", "19", "dd", *what, *flags])
    return lambda: writing.poll() is not None


def _for(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def main(scratch: pathlib.Path, rounds: int) -> None:
    manners = {"idle": _idle, "busy Python": _python}
    for title, make in {"1 GiB in 16 leaves": large, "10,000 leaves": small}.items():
        original = make()
        times: dict[str, list[tuple[float, float]]] = {}
        speeds: dict[str, list[float]] = {"a loop": [], "dd": []}
        for _ in range(rounds + 1):
            # Arrays whose copies on the host are not known yet.
            tree = jax.block_until_ready({k: x + 0 for k, x in original.items()})
            times.setdefault("blocking", []).append(_blocking(scratch / "a", tree))
            for name, busy in manners.items():
                tree = jax.block_until_ready({k: x + 0 for k, x in original.items()})
                took = _behind(scratch / "a", tree, busy)
                times.setdefault(f"async, {name}", []).append(took)
            size = sum(x.nbytes for x in tree.values())
            begin = {
                "a loop": lambda: (
                    ec.async_tree_serialise_leaves(scratch / "a", tree).done
                ),
                "dd": lambda: _dd(scratch / "dd", size),
            }
            for name, start in begin.items():
                before = _steps(_for(0.5))
                during = _steps(start())
                speeds[name].append(2 * during / (before + _steps(_for(0.5))))
        print(title)
        # The first round warms up.
        for name, rows in times.items():
            called, over = (statistics.median(row) for row in zip(*rows[1:]))
            print(f"  {name:20} call {called * 1e3:8.1f}   over {over * 1e3:8.1f}")
        for name, ratios in speeds.items():
            ratio = statistics.median(ratios[1:])
            print(f"  behind {name:13} {ratio:.2f}x the speed of the loop")


if __name__ == "__main__":
    base = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        main(pathlib.Path(directory), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
