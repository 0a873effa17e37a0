"""Host memory of loads beside their arrays: `python benchmarks/host_memory.py`.

It prints the table of docs/devices.md. Each load is in a new process, on 8 devices of
the CPU. It is the highest private memory, looked at each 2 ms, less that before and
that of the arrays.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from typing import Any


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import counters
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt as ec


_MIB = 2**20
_ROWS, _COLUMNS = ("x", None), (None, "x")
# In words, how the arrays are wanted, their dtype, and the options.
_LOADS: list[tuple[str, tuple[Any, ...], str, dict[str, Any]]] = [
    ("1 GiB saved by rows, by rows", _ROWS, "f4", {}),
    ("the same, by columns", _COLUMNS, "f4", {}),
    ("the same, by columns", _COLUMNS, "f4", {"max_bytes": 64 * _MIB}),
    (
        'the same, by columns, `reshard="devices"`',
        _COLUMNS,
        "f4",
        {"max_bytes": 64 * _MIB, "reshard": "devices"},
    ),
    ("1 GiB of float32 as bfloat16, by rows", _ROWS, "bfloat16", {"cast": True}),
]


def _tree(spec: tuple[Any, ...], dtype: str, make: Any) -> dict[str, Any]:
    """A small array, and four that have 256 MiB in float32."""
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec(*spec))
    large = {f"w{i}": make((8192, 8192), dtype, sharding) for i in range(4)}
    return large | {"small": make((8, 8), dtype, sharding)}


def _save(path: str) -> None:
    part = np.random.default_rng(0).standard_normal((8192, 8192), np.float32)
    make = lambda shape, dtype, sharding: jax.device_put(
        part[: shape[0], : shape[1]], sharding
    )
    ec.tree_serialise_leaves(path, _tree(_ROWS, "f4", make))


def _load(path: str, number: int) -> None:
    _, spec, dtype, options = _LOADS[number]
    make = lambda *what: jax.ShapeDtypeStruct(*what[:2], sharding=what[2])
    like = _tree(spec, dtype, make)
    # What is imported and compiled at a first load does not count.
    ec.tree_deserialise_leaves(path, like, where=lambda tree: tree["small"], **options)
    done, most = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.002):
            most.append(counters.private())

    counters.reset_peak()
    before = counters.private()
    thread = threading.Thread(target=watch)
    thread.start()
    out = jax.block_until_ready(ec.tree_deserialise_leaves(path, like, **options))
    done.set()
    thread.join()
    arrays = sum(x.nbytes for x in out.values())
    print(max(most) - before - arrays)


def main() -> None:
    if len(sys.argv) == 3:
        return _load(sys.argv[1], int(sys.argv[2]))
    if len(sys.argv) == 2:
        return _save(sys.argv[1])
    print("| load | `max_bytes` | beyond the arrays |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="eqx_ckpt-") as scratch:
        command = [sys.executable, __file__, str(pathlib.Path(scratch) / "c")]
        subprocess.run(command, check=True)
        for number, (words, _, _, options) in enumerate(_LOADS):
            run = [*command, str(number)]
            out = subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout
            most = options.get("max_bytes", 256 * _MIB) // _MIB
            row = words, f"{most} MiB", f"{int(out) / _MIB:.0f} MiB"
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
