"""How long near steps hold up the loop of a run: `python benchmarks/near.py [copies]`.

Processes on this machine have 64 MiB each, and begin their loops together. A step
sleeps, as one on an accelerator would leave the host free. It prints the calls of
`save` of all processes: the first, as it begins the attempt and gets fresh memory; the
later ones that were due; and those that were not, in which copies are sent. Beside them
is the time of bare copies of 64 MiB, made by all processes together before the loop.
"""

import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any


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
    bare, due, others = [], [], []
    _meet("bare")
    for _ in range(3):
        start = time.perf_counter()
        held = [shard.copy() for shard in map(_local, state.values())]
        bare.append(time.perf_counter() - start)
        del held
    _meet("loop")
    began = time.perf_counter()
    for step in range(1, _STEPS):
        time.sleep(0.1)
        start = time.perf_counter()
        manager.save(step, state)
        (others if step % _EVERY else due).append(time.perf_counter() - start)
    manager.wait()
    total = time.perf_counter() - began
    found = {"bare": bare, "due": due, "others": others, "total": total}
    (path / f"{rank}.json").write_text(json.dumps(found))


def _meet(name: str) -> None:
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.wait_at_barrier(name, 60_000)


def _local(array: Any) -> Any:
    import numpy as np

    return np.asarray(array.addressable_data(0))


def _print(copies: str, path: pathlib.Path) -> None:
    found = [json.loads(file.read_text()) for file in path.glob("*.json")]
    firsts = [one["due"][0] for one in found]
    later = [seconds for one in found for seconds in one["due"][1:]]
    others = [seconds for one in found for seconds in one["others"]]
    held = max(sum(one["due"]) + sum(one["others"]) for one in found)
    bare = [max(one["bare"][i] for one in found) for i in (0, 2)]
    print(
        f"{copies} copies: first {max(firsts):.3f} s at most, later ones that were due "
        f"{max(later):.3f} s at most, {statistics.median(later):.3f} s in the median; "
        f"not due {max(others):.3f} s at most; all held {held:.2f} s of "
        f"{max(one['total'] for one in found):.1f} s. Bare copies: first "
        f"{bare[0]:.3f} s at most, then {bare[1]:.3f} s"
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
            _print(copies, pathlib.Path(path))


if __name__ == "__main__":
    _main()
