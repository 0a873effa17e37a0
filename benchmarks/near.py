"""How long near steps hold up the loop of a run: `python benchmarks/near.py [copies]`.

Processes on this machine have 64 MiB each. A step of the loop sleeps, as one on an
accelerator would leave the host free. It prints the longest and the median call of
`save` that was due, the longest that was not, and the time until all were whole.
"""

import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time


_SIZE, _MIB, _STEPS, _EVERY = 4, 64, 41, 10


def _train(rank: int, port: str, copies: int, path: pathlib.Path) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import eqx_ckpt as ec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", _SIZE, rank)
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    shape = (_SIZE * 16, _MIB * 2**20 // (16 * 16 * 4))
    part = np.random.default_rng(rank).standard_normal(shape[1], np.float32)
    make = lambda index: np.tile(part, (index[0].stop - index[0].start, 1))
    state = {
        str(i): jax.make_array_from_callback(shape, sharding, make) for i in range(16)
    }
    near = path / f"disk{rank}"
    how = {"near_every": _EVERY, "every": 10_000, "copies": copies}
    manager = ec.CheckpointManager(path / "run", near=near, **how)
    due, others = [], []
    began = time.perf_counter()
    for step in range(1, _STEPS):
        time.sleep(0.1)
        start = time.perf_counter()
        manager.save(step, state)
        (others if step % _EVERY else due).append(time.perf_counter() - start)
    manager.wait()
    total = time.perf_counter() - began
    if rank == 0:
        median, held = statistics.median(due), sum(due) + sum(others)
        print(
            f"{copies} copies: due {max(due):.3f} s at most, {median:.3f} s in the "
            f"median; not due {max(others):.3f} s at most; all held {held:.2f} s of "
            f"{total:.1f} s"
        )


def _main() -> None:
    if len(sys.argv) > 2:
        rank, port, copies, path = sys.argv[1:]
        _train(int(rank), port, int(copies), pathlib.Path(path))
        return
    for copies in sys.argv[1:] or ["0", "1"]:
        with socket.socket() as s, tempfile.TemporaryDirectory() as path:
            s.bind(("localhost", 0))
            port = str(s.getsockname()[1])
            s.close()
            run = lambda rank: subprocess.Popen(
                [sys.executable, __file__, str(rank), port, copies, path],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            for process in [run(rank) for rank in range(_SIZE)]:
                process.wait()


if __name__ == "__main__":
    _main()
