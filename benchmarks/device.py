"""Saves and loads of arrays on an accelerator, beside peers, the bus and the disk.

    python benchmarks/device.py [--short] [--minutes 8] [--scratch DIRECTORY]
                                [--out FILE] [--no-tests]

It copies arrays out of the device and into it in each way that JAX has, writes and
reads the disk, saves and loads trees with every peer, and runs the tests that are
marked `gpu`. It writes JSON with the name of the card, and prints tables. What no
longer fits into the minutes is left out, and said so. Without an accelerator it runs
all of this on the CPU, whose figures say nothing of a card.
"""

import argparse
import functools as ft
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any


os.environ.setdefault(
    "JAX_PLATFORMS", "cuda" if pathlib.Path("/dev/nvidia0").exists() else "cpu"
)
# The tests are another process, which needs memory of the card as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import equinox as eqx
import jax
import jax.numpy as jnp
import measure
import models
import numpy as np
import workloads
from counters import evict
from jax.sharding import SingleDeviceSharding
from measure import Settings
from peers import ASYNCHRONOUS, Peer, PEERS
from workloads import Tree


GIB, MIB = 2**30, 2**20


# ---- The bus: each way out of the device and into it.


def _seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of some calls, after one that is not counted."""
    return statistics.median(timeit.repeat(call, number=1, repeat=rounds + 1)[1:])


def _sharding(kind: str) -> jax.sharding.Sharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _fresh(arrays: list[jax.Array]) -> list[jax.Array]:
    """Other jax.Arrays of the same memory: each keeps its copy on the host."""
    make = jax.make_array_from_single_device_arrays
    return [make(x.shape, x.sharding, [x]) for x in arrays]


def _pageable_out(arrays: list[jax.Array]) -> list[np.ndarray]:
    arrays = _fresh(arrays)
    for x in arrays:
        x.copy_to_host_async()
    return [np.asarray(x) for x in arrays]


def _pinned_out(arrays: list[jax.Array]) -> list[np.ndarray]:
    pinned = _sharding("pinned_host")
    return [np.asarray(x) for x in [jax.device_put(x, pinned) for x in arrays]]


def _pinned_out_in_one_call(arrays: list[jax.Array]) -> list[np.ndarray]:
    moved = jax.device_put(arrays, [_sharding("pinned_host")] * len(arrays))
    return [np.asarray(x) for x in moved]


@jax.jit
def _stack(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack(arrays)


def _joined_out(arrays: list[jax.Array], together: int = 64) -> list[np.ndarray]:
    parts = [arrays[i : i + together] for i in range(0, len(arrays), together)]
    return _pinned_out([_stack(part) for part in parts])


def _pageable_in(arrays: list[np.ndarray]) -> list[jax.Array]:
    return jax.block_until_ready(jax.device_put(arrays))


def _pinned_in(arrays: list[jax.Array]) -> list[jax.Array]:
    """Of arrays that lie in pinned memory already."""
    device = _sharding("device")
    return jax.block_until_ready([jax.device_put(x, device) for x in arrays])


def _through_pinned_in(arrays: list[np.ndarray]) -> list[jax.Array]:
    pinned = _sharding("pinned_host")
    return _pinned_in([jax.device_put(x, pinned) for x in arrays])


def _stacked_in(arrays: list[np.ndarray]) -> list[jax.Array]:
    return [jax.block_until_ready(_unstack(jax.device_put(np.stack(arrays))))]


@jax.jit
def _unstack(array: jax.Array) -> list[jax.Array]:
    return [array[i] for i in range(64)]


def bus(short: bool) -> dict[str, Any]:
    """Seconds of each way, for large and for many small arrays."""
    large = [jnp.full(16 * MIB, i, jnp.float32) for i in range(2 if short else 16)]
    small = [jnp.full(256, i, jnp.float32) for i in range(512 if short else 8192)]
    out: dict[str, Any] = {}
    for name, arrays in (("large", large), ("small", small)):
        jax.block_until_ready(arrays)
        host = [np.asarray(x).copy() for x in arrays]
        pinned = jax.device_put(arrays, [_sharding("pinned_host")] * len(arrays))
        ways: dict[str, Callable[[], Any]] = {
            "out, pageable": ft.partial(_pageable_out, arrays),
            "out, pinned": ft.partial(_pinned_out, arrays),
            "out, pinned, in one call": ft.partial(_pinned_out_in_one_call, arrays),
            "in, pageable": ft.partial(_pageable_in, host),
            "in, pinned": ft.partial(_pinned_in, jax.block_until_ready(pinned)),
            "in, through pinned": ft.partial(_through_pinned_in, host),
        }
        if name == "small":
            ways["out, joined, pinned"] = ft.partial(_joined_out, arrays)
            groups = [host[i : i + 64] for i in range(0, len(host), 64)]
            ways["in, joined"] = lambda: [*map(_stacked_in, groups)]
        nbytes = sum(x.nbytes for x in arrays)
        row = {way: _seconds(call, 3) for way, call in ways.items()}
        out[name] = {"bytes": nbytes, "arrays": len(arrays), "seconds": row}
    return out


# ---- The disk.


def disk(scratch: pathlib.Path, nbytes: int) -> dict[str, float]:
    """Seconds to write and sync a file, and to read it from the disk and the cache."""
    path, block = scratch / "raw", memoryview(np.random.bytes(64 * MIB))
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    out = {"bytes": nbytes, "write": time.perf_counter() - start}
    into = bytearray(64 * MIB)
    for name in ("read", "read from the cache"):
        if name == "read":
            evict(scratch)
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.readinto(into):
                pass
        out[name] = time.perf_counter() - start
    path.unlink()
    return out


# ---- The trees and the peers.

_NAMES = (
    "eqx_ckpt|eqx_ckpt, asynchronous|eqx_ckpt, unverified|raw, one thread|"
    "safetensors.flax|Orbax v0|Orbax v1"
).split("|")


def _peers() -> list[Peer]:
    known = {peer.name: peer._replace(durable=(True,)) for peer in PEERS}
    return [known[name] for name in _NAMES] + [
        known[name]._replace(name=f"{name}, asynchronous", save=ASYNCHRONOUS[name])
        for name in ("Orbax v0", "Orbax v1")
    ]


def _of_module(name: str, short: bool, times: int) -> Tree:
    tree = eqx.filter(models.make(name, short, times), eqx.is_array)
    return {f"w{i}": x for i, x in enumerate(jax.tree.leaves(tree))}


def _trees(short: bool) -> dict[str, tuple[Callable[[], Tree], int]]:
    """What makes each tree, and how many rounds count."""
    gpt2, llama = "GPT-2-like with Adam", "Llama-like with AdamW and EMA"
    if short:
        return {
            "16 leaves, 32 MiB": (ft.partial(workloads.sized, 32), 1),
            gpt2: (ft.partial(_of_module, gpt2, True, 1), 1),
        }
    return {
        "64 leaves, 4 GiB": (ft.partial(workloads.sized, 4096), 2),
        "GPT-2-small with Adam": (workloads.gpt2, 2),
        llama: (ft.partial(_of_module, llama, False, 4), 2),
        "10,000 leaves of 1 KiB": (workloads.small, 2),
        "256 leaves, 16 GiB": (ft.partial(workloads.sized, 16 * 1024), 1),
    }


def rows(short: bool, scratch: pathlib.Path, end: float) -> Iterator[tuple[str, Any]]:
    """Each tree with each peer, as long as there is time."""
    device = jax.devices()[0]
    for name, (make, rounds) in _trees(short).items():
        start = time.monotonic()
        if start > end:
            yield name, "left out: the minutes were over"
            continue
        settings = Settings(scratch / "peers", rounds)
        row = measure.whole(make, _peers(), settings)
        stats = device.memory_stats() or {}
        row["peak on the device"] = stats.get("peak_bytes_in_use")
        yield name, row | {"took": time.monotonic() - start}


# ---- Tables.


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / GIB:6.2f} GiB/s  {1e3 * seconds:9.1f} ms"


def _show(found: dict[str, Any]) -> None:
    print(f"\n{found['card']}, jax {found['jax']}, {found['cpus']} CPUs")
    for name, part in found["bus"].items():
        print(f"\n{name}: {part['arrays']} arrays, {part['bytes'] / MIB:.0f} MiB")
        for way, seconds in part["seconds"].items():
            print(f"  {way:28} {_rate(part['bytes'], seconds)}")
    print("\nthe disk")
    for way, seconds in found["disk"].items():
        if way != "bytes":
            print(f"  {way:28} {_rate(found['disk']['bytes'], seconds)}")
    for name, row in found["trees"].items():
        if isinstance(row, str):
            print(f"\n{name}: {row}")
            continue
        print(f"\n{name}: {row['leaves']} leaves, {row['bytes'] / GIB:.2f} GiB")
        for peer, one in row["peers"].items():
            if "error" in one:
                print(f"  {peer:28} {one['error']}")
                continue
            for call, key in (("save", "durable"), ("load", "load")):
                if one[key]:
                    rate = _rate(row["bytes"], statistics.median(one[key]))
                    peak = one[f"{call}_peak"] / MIB
                    print(f"  {peer:28} {call} {rate}  {peak:7.0f} MiB of the host")
    print(f"\ntests: {found['tests']}")


def _tests() -> str:
    """The last line of `pytest -m gpu`."""
    root = pathlib.Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "--tb=short"]
        + ["tests/save/test_accelerators.py", "tests/save/test_async.py"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    print(ran.stdout[-6000:])
    return ran.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a few MiB, for a look")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--scratch", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("device.json"))
    parser.add_argument("--no-tests", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    device = jax.devices()[0]
    short = given.short or device.platform == "cpu"
    found: dict[str, Any] = {
        "card": f"{device.platform}: {device.device_kind}",
        "kinds of memory": [x.kind for x in device.addressable_memories()],
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "bus": bus(short),
        "tests": "not run",
        "trees": {},
    }
    if device.platform == "cpu":
        print("There is no accelerator: all of this is about the CPU, and short.")
    elif not given.no_tests:
        found["tests"] = _tests()
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        there = pathlib.Path(scratch)
        found["disk"] = disk(there, 128 * MIB if short else 4 * GIB)
        for name, row in rows(short, there, end - 30):
            found["trees"][name] = row
            # What was measured is kept, if the minutes end the program.
            given.out.write_text(json.dumps(found, indent=1))
    _show(found)


if __name__ == "__main__":
    main()
