"""Arrays whose memory is also that of NumPy or another framework, and is changed."""

import itertools as it
import threading
import weakref
from typing import Any

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
import pytest
from support import inside

import eqx_ckpt as ec


# Bytes: of small leaves, and of one with some blocks of digests.
_SIZES = (64, 2**13, 2**21)


def _at(size: int, offset: int) -> np.ndarray:
    """Float32 numbers at an address of this offset to a multiple of 64."""
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + size].view(np.float32)


def _mapped(size, path):
    return np.memmap(path, np.float32, "w+", shape=size // 4)


def _sharded(host):
    mesh = jax.make_mesh((8,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jax.device_put(host, rows)


_WAYS = {
    "device_put": jax.device_put,
    "asarray": jnp.asarray,
    "may_alias": lambda host: jax.device_put(host, may_alias=True),
    "dlpack": jax.dlpack.from_dlpack,
    "sharded": _sharded,
    # What JAX makes of one without a copy.
    "jit": lambda host: jax.jit(lambda x: x)(jax.device_put(host)),
    "reshaped": lambda host: jax.device_put(host).reshape(-1, 8),
    "key": lambda host: jax.random.wrap_key_data(
        jax.device_put(host).view(jnp.uint32).reshape(-1, 2)
    ),
}


def _hosts(tmp_path):
    for size, offset in it.product(_SIZES, (0, 16)):
        yield _at(size, offset)
    yield _mapped(2**16, tmp_path / "mapped")


def _aliased(tmp_path):
    """Arrays on CPU, and the memory that they may share."""
    tree, hosts = {}, []
    for number, host in enumerate(_hosts(tmp_path)):
        host[:] = number
        hosts.append(host)
        for name, way in _WAYS.items():
            tree[f"{name}{number}"] = way(host)
    return tree, hosts


def _bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_replicated:
        # What JAX has put together once, it keeps.
        return np.concatenate([np.array(shard.data) for shard in x.addressable_shards])
    return np.array(x)


def _now(tree):
    return {name: _bits(x) for name, x in tree.items()}


def _saved(path):
    ckpt = ec.open(path)
    return {name: _bits(ckpt[name].read()) for name in ckpt.leaves}


def _same(found, expected):
    assert found.keys() == expected.keys()
    return all(np.array_equal(found[name], expected[name]) for name in found)


def _changed(tree, hosts):
    """How many of the arrays change with the memory."""
    before = _now(tree)
    for host in hosts:
        host += 1
    after = _now(tree)
    return sum(not np.array_equal(before[name], after[name]) for name in tree)


@pytest.mark.parametrize("name", ["ocdbt", "zarr", "zip"])
def test_changed_after_staged(tmp_path, name):
    tree, hosts = _aliased(tmp_path)
    path = tmp_path / f"a.{name}"
    layout = "zarr" if name == "zarr" else "ocdbt"
    aside = ec.async_tree_serialise_leaves(tmp_path / "aside", tree)
    expected = _now(tree)
    handle = ec.async_tree_serialise_leaves(path, tree, layout=layout)
    handle.staged()
    # Else this tests nothing.
    assert _changed(tree, hosts) > len(hosts)
    handle.result()
    aside.result()
    for place in (path, tmp_path / "aside"):
        assert ec.verify(place) == []
        assert _same(_saved(place), expected)


def test_changed_between_steps(tmp_path):
    tree, hosts = _aliased(tmp_path)
    tree["frozen"] = jnp.ones(2**19)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 6):
            expected = _now(tree)
            manager.save(step, tree)
            # Also while the save goes on.
            if step != 3:
                _changed(tree, hosts)
            manager.wait()
            assert ec.verify(manager.path(step)) == []
            assert _same(_saved(manager.path(step)), expected)


def test_changed_between_saves(tmp_path):
    tree, hosts = _aliased(tmp_path)
    handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree)
    handle.result()
    _changed(tree, hosts)
    expected = _now(tree)
    ec.tree_serialise_leaves(tmp_path / "b", tree, reuse=handle)
    (tmp_path / "c.zip").write_bytes(ec.to_bytes(tree))
    _changed(tree, hosts)
    for name in ("b", "c.zip"):
        assert _same(_saved(tmp_path / name), expected)


def test_what_is_the_same_is_not_copied(tmp_path, monkeypatch):
    """A look at it takes less than a copy, and no memory."""
    tree, _ = _aliased(tmp_path)
    staged = []
    inside.watch(monkeypatch, "stage", lambda leaf, _: staged.append(leaf))
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 4):
            staged.clear()
            manager.save(step, {**tree, "large": jnp.full(2**16, step)})
            manager.wait()
    # It goes on with the memory of each.
    assert len([leaf for leaf in staged if isinstance(leaf, jax.Array)]) == 1


def test_a_copy_is_not_kept(tmp_path, monkeypatch):
    copies = []

    def make(stage):
        def staged(leaf, template):
            out = stage(leaf, template)
            copies.append(weakref.ref(out))
            return out

        return staged

    inside.wrap(monkeypatch, "stage", make)
    tree = {"x": jnp.ones(2**20)}
    handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree)
    handle.result()
    assert copies and all(copy() is None for copy in copies)


_FORMS = {
    "one database": {},
    "zarr": {"layout": "zarr"},
    "compressed": {"compression": "lz4"},
    "zip": {"name": "c.zip"},
    "in memory": {"root": "memory://written-to"},
    "padded chunks": {"chunks": lambda name, shape, dtype: [n // 2 + 3 for n in shape]},
    "cast": {"dtype": "float16"},
    "beside the save before": {},
}


@pytest.mark.parametrize("form", _FORMS)
def test_what_a_thread_writes_to_meanwhile_can_be_loaded(tmp_path, form):
    """As a replay buffer: its values may be torn, and its checkpoint may not."""
    options: dict[str, Any] = dict(_FORMS[form])
    path = f"{options.pop('root', tmp_path)}/{options.pop('name', 'c')}"
    memory = np.zeros((150, 1000, 10), np.float32)
    tree = {
        "rows": memory,
        "columns": memory.T,
        "some": memory[:, :3],
        "view": memory[:40].view(),
        "big-endian": memory[:30].view(">f4"),
        "small": memory[0],
        "flags": memory.view(np.bool_)[:50],
    }
    # Of this array only the older views can be written to.
    locked = np.zeros(2**20, np.float32)
    tree["locked"], memories = locked, [memory, locked[:]]
    locked.flags.writeable = False
    is_over = False

    def write():
        for number in it.count():
            if is_over:
                return
            # The bytes of what is true, also.
            for view in memories:
                view.view(np.uint8)[...] = number % 2

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3):
            ec.tree_serialise_leaves(path, tree, durable=False, **options)
            if form == "beside the save before":
                options = {"reuse": path}
            like = jax.tree.map(np.zeros_like, tree)
            ec.tree_deserialise_leaves(path, like, cast=form == "cast")
            assert ec.verify(path) == []
    finally:
        is_over = True
        thread.join()
