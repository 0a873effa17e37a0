"""A process of a team, as `support.processes` starts it: it has joined JAX's runtime.

Programs of tests/programs that a team runs import what they need of this.
"""

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


rank, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
path = pathlib.Path(sys.argv[4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", size, rank)
mesh = Mesh(np.asarray(jax.devices()), ("x",))
rows, columns, copies = (
    NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x"), P())
)


def spread(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def same(array: jax.Array, x: Any) -> bool:
    """Whether the shards of this process are those of an array."""
    return all(
        np.array_equal(np.asarray(s.data), x[s.index]) for s in array.addressable_shards
    )


def meet(name: str) -> None:
    """All wait for all, not by what is tested."""
    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier(name, 600_000)


def caught(call: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Prints the error of a call in one line, or that there is none."""
    try:
        call(*args, **how)
    except BaseException as e:
        print(f"{type(e).__name__}: {e}".replace("\n", " "))
    else:
        print("nothing")


def read() -> int:
    """What this process has read so far, in bytes."""
    import tensorstore as ts

    text = pathlib.Path(f"/proc/{os.getpid()}/io").read_text()
    found: Any = ts.experimental_collect_matching_metrics(
        "/tensorstore/file/mmap_bytes"
    )
    mapped = sum(v.get("value", 0) for m in found for v in m["values"])
    return int(text.split("rchar: ")[1].split()[0]) + mapped
