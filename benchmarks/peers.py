"""What is measured: each peer saves a flat dict of arrays to a path and loads it back.

`durable` says whether a save returns only once its bytes are synced. A load returns jax
arrays, but for those named `numpy`, and for the raw reads, which return bytes.
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
from workloads import nbytes, Tree

import eqx_ckpt as ec


Path = pathlib.Path


class Peer(NamedTuple):
    name: str
    durable: bool
    save: Callable[[Path, Tree], None]
    load: Callable[[Path, Tree], Any] | None


def _like(tree: Tree) -> Any:
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in tree.items()}


# ---- Ours.


def _ours(durable: bool, layout: str = "ocdbt") -> Callable[[Path, Tree], None]:
    return lambda path, tree: ec.tree_serialise_leaves(
        path, tree, durable=durable, layout=layout
    )


def _ours_load(verify: bool) -> Callable[[Path, Tree], Any]:
    return lambda path, tree: ec.tree_deserialise_leaves(
        path, _like(tree), verify=verify
    )


# ---- Raw writes and reads of the same bytes.


def _views(tree: Tree) -> list[memoryview]:
    return [memoryview(np.asarray(x).reshape(-1).view(np.uint8)) for x in tree.values()]


def _write(path: Path, views: list[memoryview], sync: bool) -> None:
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
    if sync:
        os.fsync(fd)
    os.close(fd)


def _raw_save(threads: int, sync: bool) -> Callable[[Path, Tree], None]:
    def save(path: Path, tree: Tree) -> None:
        path.mkdir()
        views = _views(tree)
        if threads == 1:
            _write(path / "0", views, sync)
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
                pool.submit(_write, path / str(i), p, sync) for i, p in enumerate(parts)
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


def _raw_load(threads: int) -> Callable[[Path, Tree], Any]:
    def load(path: Path, tree: Tree) -> Any:
        files = sorted(path.iterdir())
        with cf.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(_read, files))

    return load


# ---- Equinox, safetensors, flax, NumPy.


def _eqx_save(path: Path, tree: Tree) -> None:
    eqx.tree_serialise_leaves(path.with_suffix(".eqx"), tree)


def _eqx_load(path: Path, tree: Tree) -> Any:
    return eqx.tree_deserialise_leaves(path.with_suffix(".eqx"), _like(tree))


def _safetensors_save(path: Path, tree: Tree) -> None:
    from safetensors.flax import save_file

    save_file(tree, path.with_suffix(".safetensors"))


def _safetensors_load(path: Path, tree: Tree) -> Any:
    from safetensors.flax import load_file

    return load_file(path.with_suffix(".safetensors"))


def _safetensors_numpy_save(path: Path, tree: Tree) -> None:
    from safetensors.numpy import save_file

    host = {k: np.asarray(x) for k, x in tree.items()}
    save_file(host, path.with_suffix(".safetensors"))


def _safetensors_numpy_load(path: Path, tree: Tree) -> Any:
    from safetensors.numpy import load_file

    return load_file(path.with_suffix(".safetensors"))


def _msgpack_save(path: Path, tree: Tree) -> None:
    from flax.serialization import to_bytes

    path.with_suffix(".msgpack").write_bytes(to_bytes(tree))


def _msgpack_load(path: Path, tree: Tree) -> Any:
    from flax.serialization import msgpack_restore

    data = msgpack_restore(path.with_suffix(".msgpack").read_bytes())
    return {k: jnp.asarray(x) for k, x in data.items()}


def _npz_save(path: Path, tree: Tree) -> None:
    # NumPy has no bfloat16: its bits go in as uint16.
    host = {k: np.asarray(x) for k, x in tree.items()}
    bits = {k: x.view("u2") if x.dtype.kind == "V" else x for k, x in host.items()}
    np.savez(path.with_suffix(".npz"), **bits)


def _npz_load(path: Path, tree: Tree) -> Any:
    with np.load(path.with_suffix(".npz")) as file:
        return {
            k: jnp.asarray(
                file[k].view(x.dtype) if x.dtype == jnp.bfloat16 else file[k]
            )
            for k, x in tree.items()
        }


# ---- Orbax, which syncs its files.


def _orbax_target(tree: Tree) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for k, x in tree.items()
    }


def _orbax_v0_save(path: Path, tree: Tree) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _orbax_v0_load(path: Path, tree: Tree) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, _orbax_target(tree))


def _orbax_directories_save(path: Path, tree: Tree) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, tree)


def _orbax_directories_load(path: Path, tree: Tree) -> Any:
    import orbax.checkpoint as ocp

    args = ocp.checkpoint_utils.construct_restore_args(_orbax_target(tree))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        return checkpointer.restore(path, restore_args=args)


def _orbax_v1_save(path: Path, tree: Tree) -> None:
    from orbax.checkpoint import v1

    v1.save(path, tree)


def _orbax_v1_load(path: Path, tree: Tree) -> Any:
    from orbax.checkpoint import v1

    return v1.load(path, _orbax_target(tree))


PEERS = [
    Peer("eqx_ckpt", False, _ours(False), _ours_load(True)),
    Peer("eqx_ckpt, verify=False", False, _ours(False), _ours_load(False)),
    Peer("eqx_ckpt, zarr layout", False, _ours(False, "zarr"), _ours_load(True)),
    Peer("raw, one thread", False, _raw_save(1, False), _raw_load(1)),
    Peer("raw, two threads", False, _raw_save(2, False), _raw_load(2)),
    Peer("Equinox", False, _eqx_save, _eqx_load),
    Peer("safetensors.flax", False, _safetensors_save, _safetensors_load),
    Peer("safetensors.numpy", False, _safetensors_numpy_save, _safetensors_numpy_load),
    Peer("flax msgpack", False, _msgpack_save, _msgpack_load),
    Peer("np.savez", False, _npz_save, _npz_load),
    Peer("eqx_ckpt, durable", True, _ours(True), None),
    Peer("raw + fsync, one thread", True, _raw_save(1, True), None),
    Peer("raw + fsync, two threads", True, _raw_save(2, True), None),
    Peer("Orbax v0", True, _orbax_v0_save, _orbax_v0_load),
    Peer("Orbax v0, no OCDBT", True, _orbax_directories_save, _orbax_directories_load),
    Peer("Orbax v1", True, _orbax_v1_save, _orbax_v1_load),
]
