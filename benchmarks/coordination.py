"""What it costs that many processes agree: `python benchmarks/coordination.py`.

Light processes, of which each is a real client of JAX's coordination service, and has
no devices, make the calls of the library: a barrier, and a save of a small tree. They
share the cores of this machine, so the seconds of a call are those of all of them. What
process 0 and the service in it compute for each of the others is measured apart. That
grows with the processes of a real run, in which each has a host of its own. So do the
messages that come to the service, and the bytes of their keys and values, which each
client counts.
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
import pages
from jax._src import distributed

import eqx_ckpt as ec
from eqx_ckpt._kernel._runtime import _processes


TIMEOUT = 300


def barrier(_: str, number: int) -> None:
    """One round: process 0 gathers a word of each, and broadcasts an answer."""
    together = ec.Together(number, TIMEOUT)
    team = _processes.of_run("barrier", "benchmark", together, "Measuring")
    team.decide(lambda _: b"")


def save(path: str, number: int) -> None:
    """The account of all, their notes, and the commit: two rounds."""
    tree = {"x": np.arange(1000.0), "step": number}
    place = pathlib.Path(path, str(number))
    together = ec.Together(number, TIMEOUT)
    ec.tree_serialise_leaves(place, tree, durable=False, processes=together)


CALLS = {"barrier": barrier, "save": save}


class Counting:
    """A client of the service that counts its messages, and the bytes of their keys and
    values, both ways."""

    def __init__(self, client: Any):
        self.client, self.messages, self.nbytes = client, 0, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def call(*args: Any) -> Any:
            self.messages += 1
            self.nbytes += _size(args)
            result = method(*args)
            self.nbytes += _size(result)
            return result

        return call if name.startswith(("key_value", "blocking")) else method


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, (tuple, list)) else 0


def client(index: int, count: int, port: int, path: str, times: int) -> None:
    """One process: it makes all calls; process 0 writes down what they took."""
    jax.distributed.initialize(
        f"localhost:{port}", count, index, initialization_timeout=TIMEOUT
    )
    state = distributed.global_state
    state.client = counting = Counting(state.client)  # pyright: ignore
    found: dict[str, list[float]] = {}
    for name, call in CALLS.items():
        rows = []
        for number in range(times + 1):
            barrier("", -1)
            wall, cpu = time.perf_counter(), time.process_time()
            before = counting.messages, counting.nbytes
            call(path, number)
            own = counting.messages - before[0], counting.nbytes - before[1]
            rows.append([time.perf_counter() - wall, time.process_time() - cpu, *own])
        # The first connects.
        found[name] = [statistics.median(column) for column in zip(*rows[1:])]
    pathlib.Path(path, f"{index}.json").write_text(json.dumps(found))
    barrier("", -2)
    if index == 0:
        time.sleep(1)  # The others have heard the answer.
    # At the end JAX has a barrier of its own.
    os._exit(0)


def measure(count: int, times: int = 10) -> dict[str, list[float]]:
    """For each call the seconds until it is over, and those that process 0 computes;
    and the messages of all to the service, and their bytes."""
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
        files = [pathlib.Path(path, f"{index}.json") for index in range(count)]
        found = [json.loads(file.read_text()) for file in files]
    return {
        name: found[0][name][:2]
        + [sum(x) for x in zip(*(one[name][2:] for one in found))]
        for name in CALLS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="*", default=[8, 64, 256])
    given = parser.parse_args()
    lines = []
    for count in given.processes:
        for name, (wall, cpu, messages, nbytes) in measure(count).items():
            times = f"{wall:.3f} s", f"{cpu:.3f} s", f"{1e3 * cpu / (count - 1):.2f} ms"
            sizes = f"{messages:,.0f}", f"{nbytes / 1024:,.0f} KiB"
            lines.append([f"{count}", name, *times, *sizes])
    head = "processes, call, seconds, in process 0, for each other process"
    print(pages.table([*head.split(", "), "messages to it", "bytes"], lines, 7))


if __name__ == "__main__":
    main()
