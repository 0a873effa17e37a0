"""What it costs that many processes agree: `python benchmarks/coordination.py`.

Light processes, of which each is a real client of JAX's coordination service, and has
no devices, make the calls of the library: a barrier, and a save of a small tree. They
share the cores of this machine, so the seconds of a call are those of all of them. What
process 0 and the service in it compute for each of the others is measured apart: that
is what grows with the processes of a real run, in which each has a host of its own.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import socket
import statistics
import tempfile
import time
from typing import Any


os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import eqx_ckpt as ec
from eqx_ckpt._runtime import _processes
from eqx_ckpt._runtime._processes import Call


TIMEOUT = 300


def barrier(_: str, number: int) -> None:
    """One round: process 0 gathers a word of each, and broadcasts an answer."""
    call = Call("barrier", "benchmark", ec.Together(number, TIMEOUT), "Measuring")
    _processes.of_run(call).decide(bytes)


def save(path: str, number: int) -> None:
    """The account of all, their notes, and the commit: two rounds."""
    tree = {"x": np.arange(1000.0), "step": number}
    place = pathlib.Path(path, str(number))
    together = ec.Together(number, TIMEOUT)
    ec.tree_serialise_leaves(place, tree, durable=False, processes=together)


CALLS = {"barrier": barrier, "save": save}


def client(index: int, count: int, port: int, path: str, times: int) -> None:
    """One process: it makes all calls; process 0 writes down what they took."""
    jax.distributed.initialize(
        f"localhost:{port}", count, index, initialization_timeout=TIMEOUT
    )
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        rows = []
        for number in range(times + 1):
            barrier("", -1)
            wall, cpu = time.perf_counter(), time.process_time()
            call(path, number)
            rows.append([time.perf_counter() - wall, time.process_time() - cpu])
        # The first connects.
        found[name] = [statistics.median(column) for column in zip(*rows[1:])]
    if index == 0:
        pathlib.Path(path, "found.json").write_text(json.dumps(found))
    barrier("", -2)
    if index == 0:
        time.sleep(1)  # The others have heard the answer.
    # At the end JAX has a barrier of its own.
    os._exit(0)


def measure(count: int, times: int) -> dict[str, list[float]]:
    """For each call the seconds until it is over, and those that process 0 computes."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    # What is imported is shared; nothing has begun to compute, or to connect.
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as path:
        processes = [
            forks.Process(target=client, args=(index, count, port, path, times))
            for index in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(pathlib.Path(path, "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="*", default=[8, 64, 128])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--short", action="store_true", help="4 processes, 2 calls")
    given = parser.parse_args()
    counts, times = given.processes, given.times
    if given.short:
        counts, times = [4], 2
    print("| processes | call | seconds | in process 0 | for each other process |")
    print("|---|---|---|---|---|")
    found = {count: measure(count, times) for count in counts}
    for count, calls in found.items():
        for name, (wall, cpu) in calls.items():
            each = 1e3 * cpu / (count - 1)
            print(f"| {count} | {name} | {wall:.3f} | {cpu:.3f} | {each:.2f} ms |")
    if len(counts) > 1:
        few, many = counts[-2:]
        for name in CALLS:
            slope = (found[many][name][1] - found[few][name][1]) / (many - few)
            cpu = found[many][name][1] + slope * (512 - many)
            print(
                f"| 512, extrapolated | {name} | | {cpu:.3f} | {1e3 * slope:.2f} ms |"
            )


if __name__ == "__main__":
    main()
