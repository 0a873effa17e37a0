"""What a save and a load cost on an object store that is far away.

    python benchmarks/stores.py [--delay SECONDS] [--rounds N] [--out DIRECTORY]

A real S3 server on this machine, behind a proxy that keeps back each request for the
delay. `in a row` is the longest chain of requests in which each comes after the answer
to the one before. `raw` is TensorStore with a value for each leaf, all of them asked
for at once: no names, no shapes, no index, no digests, no commit. The server computes
on the same cores. Seconds are medians.

The second table is of the bytes: leaves of 16 MiB without a proxy or a delay, in GB/s.
Some leaves lie in one file, and are read as ranges of it: this server reads all of a
file for each of them. `raw: the same ranges` asks for those, and looks at nothing.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
import pages
import tensorstore as ts
from support import servers

import eqx_ckpt as ec


_CREDENTIALS = {"type": "environment"}
_Tree = dict[str, jax.Array]
_Work = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="one round of less")
    parser.add_argument("--out", type=pathlib.Path, help="where stores.json goes")
    args = parser.parse_args()
    rounds = 1 if args.short else args.rounds
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with servers.s3() as port:
        with servers.Proxy(port) as proxy:
            latency = _latency(proxy, args.delay, rounds)
        count = 2 if args.short else 16
        speed = _throughput(f"http://127.0.0.1:{port}", count, rounds)
    done = {"delay": args.delay, "rounds": rounds, "cores": os.cpu_count()}
    done |= {"latency": latency, "throughput": speed}
    pages.keep("stores", done, args.out, "latency", "throughput")


def _layers(count: int) -> _Tree:
    """As many leaves as a model of 20 layers has, of 4 kB each."""
    return {f"w{i}": jnp.full((32, 32), float(i)) for i in range(count)}


def _store(url: str, name: str, region: str = "us-east-1") -> ec.Store:
    options = {"endpoint": url, "aws_region": region, "aws_credentials": _CREDENTIALS}
    return ec.Store(f"s3://bucket/{name}", **options)


def _latency(proxy: servers.Proxy, delay: float, rounds: int) -> dict[str, Any]:
    tree = _layers(247)
    raw = _Raw(proxy.url, "raw")
    # What is compiled and imported is not waited for.
    ec.tree_serialise_leaves(_store(proxy.url, "warm"), tree)
    ec.tree_deserialise_leaves(_store(proxy.url, "warm"), tree)
    raw.write(tree), raw.read(tree)
    proxy.delay = delay
    rows: dict[str, list[tuple[int, int, float]]] = {}
    for turn in range(rounds):
        # A store of its own region is one of which nothing is known yet.
        store = _store(proxy.url, f"ckpt{turn}", f"us-east-{turn + 2}")
        opened: list[ec.Checkpoint] = []
        work: dict[str, _Work] = {
            "first save of a process, 247 leaves": lambda: ec.tree_serialise_leaves(
                store, tree
            ),
            "save over it": lambda: ec.tree_serialise_leaves(store, tree),
            "load": lambda: ec.tree_deserialise_leaves(store, tree),
            "open": lambda: opened.append(ec.open(store)),
            "one leaf after that": lambda: opened[0]["w7"].read(),
            "raw: 247 values written": lambda: raw.write(tree),
            "raw: 247 values read": lambda: raw.read(tree),
        }
        for name, call in work.items():
            proxy.requests.clear()
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds = time.perf_counter() - start
            trips = len(servers.in_a_row(proxy.requests))
            rows.setdefault(name, []).append((len(proxy.requests), trips, seconds))
    proxy.delay = 0
    return {
        name: dict(
            zip(("requests", "trips", "seconds"), map(statistics.median, zip(*some)))
        )
        for name, some in rows.items()
    }


def _throughput(url: str, count: int, rounds: int) -> dict[str, float]:
    tree = {f"w{i}": jnp.full((4096, 1024), float(i), "f4") for i in range(count)}
    nbytes = sum(x.nbytes for x in tree.values())
    store, raw = _store(url, "large"), _Raw(url, "raw-large")
    load = lambda verify: ec.tree_deserialise_leaves(store, tree, verify=verify)
    work: dict[str, _Work] = {
        "save": lambda: ec.tree_serialise_leaves(store, tree),
        "raw: values written": lambda: raw.write(tree),
        "load": lambda: load(True),
        "load, unverified": lambda: load(False),
        "raw: the same ranges": lambda: _read_ranges(store, tree),
        "raw: values read": lambda: raw.read(tree),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, call in work.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    # The first round warms up.
    return {
        name: nbytes / 1e9 / statistics.median(some[1:])
        for name, some in seconds.items()
    }


def _read_ranges(store: ec.Store, names: Iterable[str]) -> list[bytes]:
    """The bytes of leaves, as `load` asks for them."""
    source = ec.open(store)._source
    kv, leaves = source.root.kv(), source.index.leaves
    done = []
    for name in names:
        record = leaves.record(leaves.places[name])
        key, start, _ = source.where(record, 0)
        stop = source.where(record, record.template.chunk_count - 1)[2]
        done.append(kv.read(key, byte_range=slice(start, stop)))
    return [future.result().value for future in done]


class _Raw:
    """A value for each leaf."""

    def __init__(self, url: str, name: str):
        spec = {"driver": "s3", "bucket": "bucket", "path": f"{name}/"}
        more = {"endpoint": url, "aws_credentials": _CREDENTIALS}
        self._store = ts.KvStore.open({**spec, **more}).result()

    def write(self, tree: _Tree) -> None:
        done = [self._store.write(k, np.asarray(x).tobytes()) for k, x in tree.items()]
        for future in done:
            future.result()

    def read(self, tree: _Tree) -> list[bytes]:
        done = [self._store.read(name) for name in tree]
        return [future.result().value for future in done]


if __name__ == "__main__":
    main()
