"""The peers that are measured: each saves a flat dict of arrays to a path, and loads it
whole; some load a part. Loads return jax arrays, but for the raw bytes of `raw`.

What a load is told to load into (`like`) is made before the clock starts.
"""

import functools as ft
import importlib
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
from counters import sync
from workloads import Tree

import eqx_ckpt as ec


Path = pathlib.Path
# They take a second to import, which programs that save by another do not need.
ocp = ft.partial(importlib.import_module, "orbax.checkpoint")
v1 = ft.partial(importlib.import_module, "orbax.checkpoint.experimental.v1")
_flax = ft.partial(importlib.import_module, "flax.serialization")


def _like(tree: Tree) -> Any:
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in tree.items()}


class Case(NamedTuple):
    """A leaf of a tree or some rows of it, and where the bytes are in a raw file."""

    leaf: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    rows: tuple[int, int] | None

    def slice(self, array: Any) -> Any:
        return array if self.rows is None else array[slice(*self.rows)]


class PartialRead(NamedTuple):
    """How a peer opens what it has saved, and makes one jax array of a part of it."""

    open: Callable[[Path], Any]
    read: Callable[[Any, Case], Any]


class Peer(NamedTuple):
    """`save` takes whether it must be durable; `durable` says what it can be told. It
    may return what waits for the rest, which does not count.

    `maps`: it reads through memory maps of its own, whose bytes nobody counts.
    """

    name: str
    save: Callable[[Path, Tree, bool], Any]
    load: Callable[[Path, Any], Any]
    part: PartialRead | None = None
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


def _ours_part(verify: bool) -> PartialRead:
    return PartialRead(
        ec.open, lambda ckpt, case: case.slice(ckpt[case.leaf]).read(verify=verify)
    )


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


def _raw_save(path: Path, tree: Tree, durable: bool) -> None:
    _write(path, _views(tree), durable)


def _raw_load(path: Path, like: Any) -> Any:
    buffer = np.empty(path.stat().st_size, np.uint8)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as f:
        while view.nbytes:
            view = view[f.readinto(view) :]
    return [buffer]


def _raw_read(fd: int, case: Case) -> Any:
    start, stop = case.rows or (0, case.shape[0])
    out = np.empty((stop - start, *case.shape[1:]), case.dtype)
    view = memoryview(out).cast("B")
    at = case.offset + start * (view.nbytes // (stop - start))
    while view.nbytes:
        size = os.preadv(fd, [view], at)
        view, at = view[size:], at + size
    return jax.device_put(out)


# ---- Equinox, safetensors, flax.


def _safetensors_save(path: Path, tree: Tree) -> None:
    # It puts NumPy arrays into the dict that it is given.
    safetensors.flax.save_file(dict(tree), path.with_suffix(".safetensors"))


def _safetensors_open(path: Path) -> Any:
    return safetensors.safe_open(path.with_suffix(".safetensors"), framework="flax")


def _safetensors_read(file: Any, case: Case) -> Any:
    if case.rows is None:
        return file.get_tensor(case.leaf)
    return case.slice(file.get_slice(case.leaf))


def _msgpack_save(path: Path, tree: Tree) -> None:
    path.with_suffix(".msgpack").write_bytes(_flax().to_bytes(tree))


def _msgpack_load(path: Path, like: Any) -> Any:
    data = _flax().msgpack_restore(path.with_suffix(".msgpack").read_bytes())
    return {k: jnp.asarray(x) for k, x in data.items()}


# ---- Orbax.


def _orbax_like(tree: Tree) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for k, x in tree.items()
    }


def _orbax_v0_save(path: Path, tree: Tree, durable: bool) -> None:
    with ocp().StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _orbax_v0_load(path: Path, like: Any) -> Any:
    with ocp().StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def _orbax_v0_read(path: Path, case: Case) -> Any:
    like = _orbax_like({case.leaf: jax.ShapeDtypeStruct(case.shape, case.dtype)})
    args = ocp().args.PyTreeRestore(
        item=like,
        restore_args=ocp().checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    with ocp().Checkpointer(ocp().PyTreeCheckpointHandler()) as checkpointer:
        return case.slice(checkpointer.restore(path, args=args)[case.leaf])


def _orbax_v1_read(path: Path, case: Case) -> Any:
    like = _orbax_like({case.leaf: jax.ShapeDtypeStruct(case.shape, case.dtype)})
    loading = v1().options.PyTreeOptions.Loading(partial_load=True)
    with v1().Context(pytree_options=v1().options.PyTreeOptions(loading=loading)):
        return case.slice(v1().load(path, like)[case.leaf])


# ---- Asynchronous saves: until they return. What they return waits for the rest.


@ft.cache
def _orbax_saver() -> Any:
    return ocp().AsyncCheckpointer(ocp().StandardCheckpointHandler())


def _orbax_v0_asynchronous(path: Path, tree: Tree, durable: bool) -> Any:
    _orbax_saver().save(path, args=ocp().args.StandardSave(tree))
    return _orbax_saver().wait_until_finished


def _orbax_v1_asynchronous(path: Path, tree: Tree, durable: bool) -> Any:
    return v1().save_async(str(path), tree).result


def _safetensors_in_a_thread(path: Path, tree: Tree, durable: bool) -> Any:
    thread = threading.Thread(target=_safetensors_save, args=(path, tree))
    thread.start()
    return thread.join


ASYNCHRONOUS: dict[str, Callable[[Path, Tree, bool], Any]] = {
    "eqx_ckpt": _ours_asynchronous,
    "Orbax v0": _orbax_v0_asynchronous,
    "Orbax v1": _orbax_v1_asynchronous,
    "safetensors in a thread": _safetensors_in_a_thread,
}

PEERS = [
    # Digests are written, and verified; files for Orbax are not written.
    Peer("eqx_ckpt", _ours(), _ours_load(True), _ours_part(True)),
    Peer("eqx_ckpt, unverified", _ours(), _ours_load(False), _ours_part(False)),
    Peer("eqx_ckpt, asynchronous", _ours_asynchronous, _ours_load(True)),
    Peer("eqx_ckpt, zarr", _ours("zarr"), _ours_load(True)),
    Peer(
        "raw, one thread",
        _raw_save,
        _raw_load,
        PartialRead(lambda path: os.open(path, os.O_RDONLY), _raw_read),
    ),
    Peer("Equinox", _then_sync(eqx.tree_serialise_leaves), eqx.tree_deserialise_leaves),
    Peer(
        "safetensors.flax",
        _then_sync(_safetensors_save),
        lambda path, _: safetensors.flax.load_file(path.with_suffix(".safetensors")),
        PartialRead(_safetensors_open, _safetensors_read),
        maps=True,
    ),
    Peer("flax msgpack", _then_sync(_msgpack_save), _msgpack_load),
    # It compresses with zstd, its default. TensorStore syncs the arrays, and there is
    # no switch for that; Orbax's own small files are never synced. It reads a leaf
    # whole, and has no step that opens.
    Peer(
        "Orbax v0",
        _orbax_v0_save,
        _orbax_v0_load,
        PartialRead(Path, _orbax_v0_read),
        (True,),
        _orbax_like,
    ),
    Peer(
        "Orbax v1",
        lambda path, tree, durable: v1().save(path, tree),
        lambda path, like: v1().load(path, like),
        PartialRead(Path, _orbax_v1_read),
        (True,),
        _orbax_like,
    ),
]
