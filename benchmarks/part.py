"""Reads of a part, each in a new process, which is this file: it opens a checkpoint,
makes one jax array of a part of it, and prints the time and the bytes of that."""

import json
import pathlib
import sys
import time
import zlib

import flax  # noqa: F401  What is imported is no part of opening.
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1  # noqa: F401
import safetensors.flax  # noqa: F401
from counters import reads, reads_since
from peers import Case, PEERS


def main(name: str, path: str, fields: str) -> None:
    case = Case(**json.loads(fields))
    (part,) = (peer.part for peer in PEERS if peer.name == name)
    assert part is not None
    # Nor is the start of JAX.
    jax.device_put(np.zeros(1, case.dtype)).block_until_ready()
    jnp.asarray(np.zeros(1, case.dtype)).block_until_ready()
    before = reads()
    start = time.perf_counter()
    opened = part.open(pathlib.Path(path))
    after = time.perf_counter()
    array = part.read(opened, case).block_until_ready()
    end = time.perf_counter()
    crc = zlib.crc32(np.asarray(array).tobytes())
    times = {"open": after - start, "first": end - after}
    print(json.dumps({**times, **reads_since(before), "crc": crc}))


if __name__ == "__main__":
    main(*sys.argv[1:])
