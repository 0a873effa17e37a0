"""What `compression="zstd"` saves of real weights, and what it costs.

    python benchmarks/compressed.py FILE.safetensors [rounds]

Sizes are of all files, over the bytes of the arrays. Times are of saves that are not
durable, and of verified loads from the page cache; medians of rounds in turns, over
those without compression.
"""

import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

import eqx_ckpt as ec


def main(weights: dict[str, jax.Array], scratch: pathlib.Path, rounds: int) -> None:
    ways = (None, "zstd")
    for dtype in (jnp.float32, jnp.bfloat16):
        tree = {
            name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in weights.items()
        }
        saves: dict[str | None, list[float]] = {way: [] for way in ways}
        loads: dict[str | None, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                path = scratch / str(way)
                start = time.perf_counter()
                ec.tree_serialise_leaves(path, tree, compression=way, durable=False)
                saved = time.perf_counter()
                jax.block_until_ready(ec.tree_deserialise_leaves(path, tree))
                saves[way].append(saved - start)
                loads[way].append(time.perf_counter() - saved)
        stored = sum(
            x.stat().st_size for x in (scratch / "zstd").rglob("*") if x.is_file()
        )
        size = stored / sum(x.nbytes for x in tree.values())

        def ratio(times: dict[str | None, list[float]]) -> float:
            return statistics.median(times["zstd"]) / statistics.median(times[None])

        print(
            f"{jnp.dtype(dtype).name:9} {size:.2f} of the size, "
            f"save {ratio(saves):.1f}x, load {ratio(loads):.1f}x as long"
        )


if __name__ == "__main__":
    read = ec.materialise(dict(ec.open(sys.argv[1]).leaves))
    with tempfile.TemporaryDirectory() as directory:
        count = int(sys.argv[2]) if len(sys.argv) > 2 else 7
        main(read, pathlib.Path(directory), count)
