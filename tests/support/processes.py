"""Real processes of one run, joined by JAX's distributed runtime on this machine.

`run_team_program(n, name, path)` runs a program of tests/programs in each of them;
what it prints is given back.
"""

import atexit
import contextlib
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
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


def end_last(directory: str, size: int) -> None:
    """Has process 0 end after the others: there is a file of each that is over."""

    def put_off() -> None:
        state = distributed.global_state
        if state.service is not None:
            ends = [f"{directory}/{rank}.over" for rank in range(1, size)]
            state.service = _Last(state.service, ends)

    # It comes before what JAX does at the end: JAX was imported before it.
    atexit.register(put_off)


_END_LAST = "from support import processes; processes.end_last({!r}, {})\n"


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
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(free_port())
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        pool = stack.enter_context(futures.ThreadPoolExecutor(size))
        first = _END_LAST.format(directory, size) + program
        team = [
            stack.enter_context(
                scripts.start(
                    program if rank else first,
                    *(rank, size, port, path, *given),
                    **environment,
                )
            )
            for rank in range(size)
        ]

        def wait(rank: int) -> Done:
            begin = time.monotonic()
            done = team[rank].communicate(timeout)
            assert time.monotonic() - begin < timeout, f"not over in {timeout} seconds"
            pathlib.Path(directory, f"{rank}.over").touch()
            return Done(rank, *done)

        return list(pool.map(wait, range(size)))


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
