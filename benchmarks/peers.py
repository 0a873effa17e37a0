"""Who is measured: each saves a flat dict of arrays to a path, and loads it whole.

A load returns jax arrays, but for those that say so. What a load is told to load into
(`like`) is made before the clock starts.
"""

import concurrent.futures as cf
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from counters import sync
from workloads import nbytes, Tree

import eqx_ckpt as ec


Path = pathlib.Path


def _like(tree: Tree) -> Any:
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in tree.items()}


class Peer(NamedTuple):
    """`save` takes whether it must be durable; `durable` says what it can be told. It
    may return what waits for the rest, which does not count.

    `maps`: it reads through memory maps of its own, whose bytes nobody counts.
    """

    name: str
    how: str
    save: Callable[[Path, Tree, bool], Any]
    load: Callable[[Path, Any], Any]
    durable: tuple[bool, ...] = (False, True)
    like: Callable[[Tree], Any] = _like
    maps: bool = False


def _then_sync(
    save: Callable[[Path, Tree], None],
) -> Callable[[Path, Tree, bool], None]:
    """A save that has no say on durability: what it wrote is synced after it."""

    def run(path: Path, tree: Tree, durable: bool) -> None:
        save(path, tree)
        if durable:
            sync(path.parent)

    return run


# ---- Ours.


def _ours(layout: str = "ocdbt") -> Callable[[Path, Tree, bool], None]:
    return lambda path, tree, durable: ec.tree_serialise_leaves(
        path, tree, durable=durable, layout=layout
    )


def _ours_asynchronous(path: Path, tree: Tree, durable: bool) -> Callable[[], None]:
    return ec.async_tree_serialise_leaves(path, tree, durable=durable).result


def _ours_load(verify: bool) -> Callable[[Path, Any], Any]:
    return lambda path, like: ec.tree_deserialise_leaves(path, like, verify=verify)


# ---- Raw writes and reads of the same bytes.


def _views(tree: Tree) -> list[memoryview]:
    return [memoryview(np.asarray(x).reshape(-1).view(np.uint8)) for x in tree.values()]


def _write(path: Path, views: list[memoryview], durable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for start in range(0, len(views), 1000):
        part = views[start : start + 1000]
        size = sum(v.nbytes for v in part)
        if size < 2**30:
            assert os.writev(fd, part) == size
        else:
            for view in part:
                while view.nbytes:
                    view = view[os.write(fd, view) :]
    if durable:
        os.fsync(fd)
    os.close(fd)


def _raw_save(threads: int) -> Callable[[Path, Tree, bool], None]:
    def save(path: Path, tree: Tree, durable: bool) -> None:
        path.mkdir()
        views = _views(tree)
        if threads == 1:
            _write(path / "0", views, durable)
            return
        # 16 files of about the same size.
        parts: list[list[memoryview]] = [[]]
        limit, size = nbytes(tree) / 16, 0
        for view in views:
            if size >= limit * len(parts) and len(parts) < 16:
                parts.append([])
            parts[-1].append(view)
            size += view.nbytes
        with cf.ThreadPoolExecutor(threads) as pool:
            jobs = [
                pool.submit(_write, path / str(i), part, durable)
                for i, part in enumerate(parts)
            ]
            [job.result() for job in jobs]

    return save


def _read(file: Path) -> np.ndarray:
    buffer = np.empty(file.stat().st_size, np.uint8)
    view = memoryview(buffer)
    with open(file, "rb", buffering=0) as f:
        while view.nbytes:
            view = view[f.readinto(view) :]
    return buffer


def _raw_load(threads: int) -> Callable[[Path, Any], Any]:
    def load(path: Path, like: Any) -> Any:
        files = sorted(path.iterdir())
        with cf.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(_read, files))

    return load


# ---- Equinox, safetensors, flax, NumPy.


def _eqx_save(path: Path, tree: Tree) -> None:
    eqx.tree_serialise_leaves(path.with_suffix(".eqx"), tree)


def _eqx_load(path: Path, like: Any) -> Any:
    return eqx.tree_deserialise_leaves(path.with_suffix(".eqx"), like)


def _safetensors_save(path: Path, tree: Tree) -> None:
    from safetensors.flax import save_file

    # It puts NumPy arrays into the dict that it is given.
    save_file(dict(tree), path.with_suffix(".safetensors"))


def _safetensors_load(path: Path, like: Any) -> Any:
    from safetensors.flax import load_file

    return load_file(path.with_suffix(".safetensors"))


def _safetensors_numpy_save(path: Path, tree: Tree) -> None:
    from safetensors.numpy import save_file

    host = {k: np.asarray(x) for k, x in tree.items()}
    save_file(host, path.with_suffix(".safetensors"))


def _safetensors_numpy_load(path: Path, like: Any) -> Any:
    from safetensors.numpy import load_file

    return load_file(path.with_suffix(".safetensors"))


def _msgpack_save(path: Path, tree: Tree) -> None:
    from flax.serialization import to_bytes

    path.with_suffix(".msgpack").write_bytes(to_bytes(tree))


def _msgpack_load(path: Path, like: Any) -> Any:
    from flax.serialization import msgpack_restore

    data = msgpack_restore(path.with_suffix(".msgpack").read_bytes())
    return {k: jnp.asarray(x) for k, x in data.items()}


def _npz_save(path: Path, tree: Tree) -> None:
    # NumPy has no bfloat16: its bits go in as uint16.
    host = {k: np.asarray(x) for k, x in tree.items()}
    bits = {k: x.view("u2") if x.dtype.kind == "V" else x for k, x in host.items()}
    np.savez(path.with_suffix(".npz"), **bits)


def _npz_load(path: Path, like: Any) -> Any:
    with np.load(path.with_suffix(".npz")) as file:
        return {
            k: jnp.asarray(
                file[k].view(x.dtype) if x.dtype == jnp.bfloat16 else file[k]
            )
            for k, x in like.items()
        }


# ---- Orbax.


def _orbax_like(tree: Tree) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for k, x in tree.items()
    }


def _orbax_v0_save(path: Path, tree: Tree, durable: bool) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _orbax_v0_load(path: Path, like: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def _orbax_v0_directories_save(path: Path, tree: Tree, durable: bool) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, tree)


def _orbax_v0_directories_load(path: Path, like: Any) -> Any:
    import orbax.checkpoint as ocp

    args = ocp.checkpoint_utils.construct_restore_args(like)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        return checkpointer.restore(path, restore_args=args)


def _orbax_v1_save(ocdbt: bool) -> Callable[[Path, Tree, bool], None]:
    def save(path: Path, tree: Tree, durable: bool) -> None:
        from orbax.checkpoint import v1

        arrays = v1.options.ArrayOptions
        saving = arrays.Saving(use_ocdbt=ocdbt)
        with v1.Context(array_options=arrays(saving=saving)):
            v1.save(path, tree)

    return save


def _orbax_v1_load(path: Path, like: Any) -> Any:
    from orbax.checkpoint import v1

    return v1.load(path, like)


_synced = "Its files are synced afterwards where the save is to be durable."
_orbax = (
    "zstd, its default. TensorStore syncs the arrays, and there is no switch for that; "
    "Orbax's own small files are never synced."
)

PEERS = [
    Peer(
        "eqx_ckpt",
        "`tree_serialise_leaves` with its `durable=`, `tree_deserialise_leaves`; "
        "digests are written and verified; no files for Orbax are written.",
        _ours(),
        _ours_load(True),
    ),
    Peer(
        "eqx_ckpt, unverified",
        "The same, loaded with `verify=False`.",
        _ours(),
        _ours_load(False),
    ),
    Peer(
        "eqx_ckpt, asynchronous",
        "`async_tree_serialise_leaves`, until it returns: the arrays may be donated "
        "then. Loaded as by the first.",
        _ours_asynchronous,
        _ours_load(True),
    ),
    Peer(
        "eqx_ckpt, zarr",
        'The same as the first, with `layout="zarr"`.',
        _ours("zarr"),
        _ours_load(True),
    ),
    Peer(
        "raw, one thread",
        "`os.write` (`os.writev` for small leaves) of the bytes to one file, and "
        "`fsync`; `readinto` a fresh buffer. No names, no shapes.",
        _raw_save(1),
        _raw_load(1),
    ),
    Peer(
        "raw, two threads",
        "The same, to and from up to 16 files of one size, synced in the threads.",
        _raw_save(2),
        _raw_load(2),
    ),
    Peer(
        "Equinox",
        f"`eqx.tree_serialise_leaves` to a path. {_synced}",
        _then_sync(_eqx_save),
        _eqx_load,
    ),
    Peer(
        "safetensors.flax",
        f"`save_file` and `load_file`, which memory-maps. {_synced}",
        _then_sync(_safetensors_save),
        _safetensors_load,
        maps=True,
    ),
    Peer(
        "safetensors.numpy",
        "The same of NumPy views, loaded into NumPy arrays: there is no step to jax in "
        f"its load. {_synced}",
        _then_sync(_safetensors_numpy_save),
        _safetensors_numpy_load,
        maps=True,
    ),
    Peer(
        "flax msgpack",
        f"`to_bytes` and `msgpack_restore`, one file, then `jnp.asarray`. {_synced}",
        _then_sync(_msgpack_save),
        _msgpack_load,
    ),
    Peer(
        "np.savez",
        "`np.savez` and `np.load` of NumPy views, bfloat16 as its bits, then "
        f"`jnp.asarray`. {_synced}",
        _then_sync(_npz_save),
        _npz_load,
    ),
    Peer(
        "Orbax v0",
        "`StandardCheckpointer`, a new one each time, until it has finished. " + _orbax,
        _orbax_v0_save,
        _orbax_v0_load,
        (True,),
        _orbax_like,
    ),
    Peer(
        "Orbax v0, directories",
        "`PyTreeCheckpointHandler(use_ocdbt=False)` in a `Checkpointer`. " + _orbax,
        _orbax_v0_directories_save,
        _orbax_v0_directories_load,
        (True,),
        _orbax_like,
    ),
    Peer(
        "Orbax v1",
        "`v1.save` and `v1.load` with the defaults. " + _orbax,
        _orbax_v1_save(True),
        _orbax_v1_load,
        (True,),
        _orbax_like,
    ),
    Peer(
        "Orbax v1, directories",
        "The same with `ArrayOptions.Saving(use_ocdbt=False)`. " + _orbax,
        _orbax_v1_save(False),
        _orbax_v1_load,
        (True,),
        _orbax_like,
    ),
]
