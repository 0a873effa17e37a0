"""Real processes of one run, joined by JAX's distributed runtime on this machine.

`run_team_program(n, name, path)` runs a program of tests/programs in each of them;
what it prints is given back.
"""

import atexit
import contextlib
import multiprocessing
import os
import pathlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax._src import distributed

from support import scripts


class Done(NamedTuple):
    rank: int
    status: int
    out: str
    err: str


# Processes are forks of one that has imported what all of them need: that takes longer
# than most of what they do. Nothing in it has begun to compute.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["jax.numpy", "equinox", "support.whole"])


class _Last:
    """JAX's service in process 0, which ends after the other processes have: JAX aborts
    one that hears of its end while it ends itself."""

    def __init__(self, service: Any, others: list[str]):
        self._service = service
        self._others = others

    def shutdown(self) -> None:
        end = time.monotonic() + 600
        while not all(map(os.path.exists, self._others)) and time.monotonic() < end:
            time.sleep(0.005)
        self._service.shutdown()


def _run(
    program: str, arguments: list[str], environment: dict[str, str], output: list[str]
) -> None:
    """Runs a program as `python -c` does, with its output in two files."""
    for number, name in enumerate(output, 1):
        with open(name, "w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, buffering=1)
    try:
        exec(program, {"__name__": "__main__"})
    finally:
        # `multiprocessing` would end the process without these.
        threading._shutdown()
        state = distributed.global_state
        if state.service is not None:
            directory = os.path.dirname(output[0])
            others = range(1, int(arguments[1]))
            ends = [f"{directory}/{rank}.over" for rank in others]
            state.service = _Last(state.service, ends)
        atexit._run_exitfuncs()
        # A fork of Python 3.13 lacks the exit functions of what was imported before it.
        with contextlib.suppress(Exception):
            state.shutdown()
        sys.stdout.flush()


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port that JAX's service shares with a socket, and that nobody else is given."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("localhost", 0))
        yield held.getsockname()[1]


def run_team_program(
    size: int,
    name: str,
    path: pathlib.Path,
    *given: object,
    devices: int = 2,
    timeout: float = 600,
) -> list[Done]:
    """Runs a program of tests/programs in each of `size` processes, with what is given
    after the path as further arguments."""
    program = scripts.program(name)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    with free_port() as port, tempfile.TemporaryDirectory() as directory:
        files = [[f"{directory}/{rank}.{n}" for n in (1, 2)] for rank in range(size)]
        processes = []
        for rank in range(size):
            arguments = list(map(str, [rank, size, port, path, *given]))
            process = _forks.Process(
                target=_run,
                args=(program, arguments, dict(environment), files[rank]),
                daemon=True,
            )
            process.start()
            processes.append(process)
        end = time.monotonic() + timeout
        running = {process.sentinel: rank for rank, process in enumerate(processes)}
        try:
            while running:
                over = connection.wait(running, max(0, end - time.monotonic()))
                assert over, f"not over in {timeout} seconds"
                for sentinel in over:
                    rank = running.pop(sentinel)
                    processes[rank].join()
                    pathlib.Path(f"{directory}/{rank}.over").touch()
        finally:
            for process in processes:
                process.kill()
        texts = [[pathlib.Path(file).read_text() for file in two] for two in files]
    return [
        Done(rank, process.exitcode, *texts[rank])
        for rank, process in enumerate(processes)
    ]


def good(team: list[Done]) -> list[str]:
    """What each process has printed; all of them must have ended well."""
    for done in team:
        assert done.status == 0, f"process {done.rank}:\n{done.out}{done.err}"
    return [done.out for done in team]


# ---- A tree of many kinds of leaves that processes save and load together.

X = np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)


def expected():
    return {
        "rows": X,
        "columns": 2 * X,
        "copies": 3 * X,
        "small": np.arange(64.0, dtype=np.float32),
        "weak": jnp.asarray(2.5),
        "keys": jr.split(jr.key(0), 8),
        "empty": np.zeros((0, 8), np.float32),
        "without columns": np.zeros((8, 0), np.int8),
        "numpy": np.arange(10),
        "step": 7,
        "local": jnp.arange(3.0),
    }
