"""Partial reads, each in a new process, which is this file: it opens a checkpoint,
makes one jax array of a part of it, and prints what that took.

Equinox and flax msgpack are missing: they can only be read whole.
"""

import sys
import time


if __name__ == "__main__":
    started = time.perf_counter()

import importlib
import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from counters import reads, reads_since


Path = pathlib.Path


class Case(NamedTuple):
    """A leaf of a tree or some rows of it, and where the bytes are in a raw file."""

    leaf: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    rows: tuple[int, int] | None

    def slice(self, array: Any) -> Any:
        return array if self.rows is None else array[slice(*self.rows)]


class Part(NamedTuple):
    """`open` opens what the peer `saved_by` saved. Before that, `modules` are imported,
    also those that the library imports only when it is first used."""

    name: str
    how: str
    saved_by: str
    modules: tuple[str, ...]
    open: Callable[[Path], Any]
    read: Callable[[Any, Case], Any]
    maps: bool = False


def _ours_open(path: Path) -> Any:
    import eqx_ckpt as ec

    return ec.open(path)


def _ours_read(verify: bool) -> Callable[[Any, Case], Any]:
    return lambda ckpt, case: case.slice(ckpt[case.leaf]).read(verify=verify)


def _raw_read(fd: int, case: Case) -> Any:
    import jax
    import numpy as np

    start, stop = case.rows or (0, case.shape[0])
    out = np.empty((stop - start, *case.shape[1:]), case.dtype)
    view = memoryview(out).cast("B")
    at = case.offset + start * (view.nbytes // (stop - start))
    while view.nbytes:
        size = os.preadv(fd, [view], at)
        view, at = view[size:], at + size
    return jax.device_put(out)


def _safetensors_open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path.with_suffix(".safetensors"), framework="flax")


def _safetensors_read(file: Any, case: Case) -> Any:
    if case.rows is None:
        return file.get_tensor(case.leaf)
    return case.slice(file.get_slice(case.leaf))


def _npz_open(path: Path) -> Any:
    import numpy as np

    return np.load(path.with_suffix(".npz"))


def _npz_read(file: Any, case: Case) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(case.slice(file[case.leaf]))


def _orbax_like(case: Case) -> Any:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct(case.shape, case.dtype, sharding=sharding)
    return {case.leaf: leaf}


def _orbax_v0_open(path: Path) -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()), path


def _orbax_v0_read(opened: Any, case: Case) -> Any:
    import orbax.checkpoint as ocp

    checkpointer, path = opened
    like = _orbax_like(case)
    args = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    return case.slice(checkpointer.restore(path, args=args)[case.leaf])


def _orbax_v1_read(path: Path, case: Case) -> Any:
    from orbax.checkpoint import v1

    trees = v1.options.PyTreeOptions
    loading = trees.Loading(partial_load=True)
    with v1.Context(pytree_options=trees(loading=loading)):
        return case.slice(v1.load(path, _orbax_like(case))[case.leaf])


_whole_leaf = "Rows are taken of the leaf, which it reads whole."

PARTS = [
    Part(
        "eqx_ckpt",
        "`open`, then `ckpt[leaf][rows].read()`.",
        "eqx_ckpt",
        ("eqx_ckpt",),
        _ours_open,
        _ours_read(True),
    ),
    Part(
        "eqx_ckpt, unverified",
        "The same with `verify=False`.",
        "eqx_ckpt",
        ("eqx_ckpt",),
        _ours_open,
        _ours_read(False),
    ),
    Part(
        "raw",
        "`os.preadv` of the bytes, whose place it is told, and `device_put`.",
        "raw, one thread",
        ("numpy", "jax"),
        lambda path: os.open(path / "0", os.O_RDONLY),
        _raw_read,
    ),
    Part(
        "safetensors.flax",
        "`safe_open`, then `get_tensor` or `get_slice`; it memory-maps.",
        "safetensors.flax",
        ("safetensors.flax", "flax"),
        _safetensors_open,
        _safetensors_read,
        maps=True,
    ),
    Part(
        "np.savez",
        "`np.load`, then one member and `jnp.asarray`. " + _whole_leaf,
        "np.savez",
        ("numpy", "jax.numpy"),
        _npz_open,
        _npz_read,
    ),
    Part(
        "Orbax v0",
        "A `Checkpointer`, then `PyTreeRestore(partial_restore=True)`. " + _whole_leaf,
        "Orbax v0",
        ("orbax.checkpoint",),
        _orbax_v0_open,
        _orbax_v0_read,
    ),
    Part(
        "Orbax v1",
        "`v1.load` with `partial_load=True`: it has no step that opens. " + _whole_leaf,
        "Orbax v1",
        ("orbax.checkpoint.experimental.v1",),
        lambda path: path,
        _orbax_v1_read,
    ),
]


def main(name: str, path: str, fields: str) -> None:
    case = Case(**json.loads(fields))
    (part,) = (part for part in PARTS if part.name == name)
    for module in part.modules:
        importlib.import_module(module)
    import jax
    import jax.numpy as jnp
    import numpy as np

    # Everyone needs a JAX that has started; that is no part of opening.
    jax.device_put(np.zeros(1, case.dtype)).block_until_ready()
    jnp.asarray(np.zeros(1, case.dtype)).block_until_ready()
    ready = time.perf_counter()
    before = reads()
    opened = part.open(Path(path))
    after = time.perf_counter()
    array = part.read(opened, case).block_until_ready()
    end = time.perf_counter()
    out = {
        "imports": ready - started,
        "open": after - ready,
        "first": end - after,
        **reads_since(before),
        "crc": zlib.crc32(np.asarray(array).tobytes()),
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
