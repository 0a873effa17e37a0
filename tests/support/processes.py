"""Real processes of one run, joined by JAX's distributed runtime on this machine.

`run_team(n, code)` runs the code in each of them; what it prints is given back.
"""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap
from typing import NamedTuple


_HEAD = """
import os, sys, time, signal, pathlib
rank, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", size, rank)
import equinox as eqx
import eqx_ckpt as ec
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
path = pathlib.Path(sys.argv[4])
mesh = Mesh(np.asarray(jax.devices()), ("x",))
rows, columns, copies = (
    NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x"), P())
)
def spread(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
def same(array, x):
    return all(np.array_equal(np.asarray(s.data), x[s.index])
               for s in array.addressable_shards)
"""


class Done(NamedTuple):
    rank: int
    status: int
    out: str
    err: str


def run_team(
    size: int, code: str, path: pathlib.Path, devices: int = 2, timeout: float = 120
) -> list[Done]:
    """Runs code in each of `size` processes. It has `rank`, `size`, `path`, a mesh of
    all devices, and the names above."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    program = textwrap.dedent(_HEAD) + textwrap.dedent(code)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(size), str(port), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    out = []
    try:
        for rank, process in enumerate(processes):
            stdout, stderr = process.communicate(timeout=timeout)
            out.append(Done(rank, process.returncode, stdout, stderr))
    finally:
        for process in processes:
            process.kill()
    return out


def good(team: list[Done]) -> list[str]:
    """What each process has printed; all of them must have ended well."""
    for done in team:
        assert done.status == 0, f"process {done.rank}:\n{done.out}{done.err}"
    return [done.out for done in team]
