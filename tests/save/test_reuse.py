"""`reuse`: what has not changed since another save is not written again."""

import gc
import os
import pathlib
import shutil
import threading
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import inside

import eqx_ckpt as ec


def _written() -> int:
    text = pathlib.Path("/proc/self/io").read_text()
    return int(text.split("wchar: ")[1].split()[0])


needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/io"), reason="counts written bytes with Linux"
)


def _files(path) -> dict[str, os.stat_result]:
    (own,) = pathlib.Path(path, "d").iterdir()
    return {file.name: file.stat() for file in own.iterdir()}


def _shared(path, other) -> int:
    """The bytes of files that two checkpoints have in common."""
    mine = {s.st_ino: s.st_size for s in _files(path).values()}
    return sum(s.st_size for s in _files(other).values() if s.st_ino in mine)


def _holds(path, tree):
    assert ec.verify(path) == []
    loaded = ec.tree_deserialise_leaves(path, tree)
    assert eqx.tree_equal(loaded, tree, typematch=True)


def _lora(value, base):
    adapters = [{"a": jnp.full((8, 64), value), "b": jnp.ones(8) * value}] * 4
    return {"base": base, "adapters": adapters, "step": int(value)}


def _base():
    return [jr.normal(jr.key(i), (512, 512)) for i in range(4)]


@needs_proc
def test_a_frozen_base_is_not_written_at_every_step(tmp_path):
    base = _base()
    with ec.CheckpointManager(tmp_path) as manager:
        counts = []
        for step in range(1, 6):
            before = _written()
            # The same values, also where they are other arrays.
            here = base if step % 2 else jax.tree.map(jnp.copy, base)
            manager.save(step, _lora(step, here))
            manager.wait()
            counts.append(_written() - before)
    full = sum(x.nbytes for x in base)
    assert counts[0] > full and counts[1] > full
    assert max(counts[2:]) < 20_000 < full / 100
    for step in range(1, 6):
        _holds(manager.path(step), _lora(step, base))
    # Each is whole without those before, and elsewhere.
    shutil.copytree(tmp_path / "5", tmp_path / "copy")
    for step in range(1, 5):
        manager.delete(step)
        _holds(manager.path(5), _lora(5, base))
    _holds(tmp_path / "copy" / "default", _lora(5, base))
    # A run that goes on does not begin anew.
    with ec.CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore(_lora(0, base))
        before = _written()
        manager.save(6, {**state, "step": 6})
        manager.wait()
        assert _written() - before < 20_000
    with ec.CheckpointManager(tmp_path, reuse=False) as manager:
        manager.restore(_lora(0, base))
        manager.save(7, _lora(7, base))
    assert _shared(manager.path(6), manager.path(7)) == 0
    with ec.CheckpointManager(tmp_path) as manager:
        # Not all of it has been seen to be whole.
        manager.restore(base, source="base")
        manager.save(8, _lora(8, base))
    assert _shared(manager.path(7), manager.path(8)) == 0


def test_a_lossy_cast_is_told_beside_leaves_that_are_linked(tmp_path):
    """Leaves that are linked are not staged: they have no value to look at."""
    frozen = jnp.full((300, 300), 1.5)
    with ec.CheckpointManager(tmp_path, dtype="float16") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"a": frozen, "b": jnp.full((300, 300), step), "c": 1.5})
            manager.wait()
        with pytest.raises(ValueError, match="  b: 1000000.0 does not fit") as info:
            manager.save(4, {"a": frozen, "b": jnp.full((300, 300), 1e6), "c": 1.5})
            manager.wait()
    assert "  a:" not in str(info.value) and manager.steps() == [1, 2, 3]


@pytest.mark.parametrize("frozen, is_linked", [(63, False), (65, True)])
def test_little_is_written_again(tmp_path, frozen, is_linked):
    path = [tmp_path / str(step) for step in range(3)]
    tree = {"frozen": [jnp.full(16, i) for i in range(frozen)]}
    for step, before in enumerate([None, *path[:2]]):
        tree["trained"] = jnp.full(16 * (64**2 - 64), step)
        ec.tree_serialise_leaves(path[step], tree, reuse=before, durable=False)
        _holds(path[step], tree)
    # The frozen ones lie in a file of their own from the second save on.
    assert (_shared(path[1], path[2]) >= 64 * frozen) == is_linked


def test_a_leaf_without_elements_keeps_no_file_from_being_shared(tmp_path):
    tree = {"a": np.arange(5), "z": np.zeros((0, 3))}  # It lies after the end.
    ec.tree_serialise_leaves(tmp_path / "1", tree)
    ec.tree_serialise_leaves(tmp_path / "2", tree, reuse=tmp_path / "1")
    assert _shared(tmp_path / "1", tmp_path / "2") == tree["a"].nbytes
    _holds(tmp_path / "2", tree)


def test_damage_of_a_file_is_of_all_that_share_it(tmp_path):
    base = _base()
    with ec.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, _lora(step, base))
    (file,) = pathlib.Path(manager.path(3), "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    broken = [bool(ec.verify(manager.path(step))) for step in (1, 2, 3)]
    assert broken == [False, True, True]
    with pytest.warns(UserWarning, match="Restored step 1"):
        _, step = manager.restore(_lora(0, base))
    # What is saved from here on has nothing of those.
    assert step == 1
    manager.save(4, _lora(4, base))
    manager.wait()
    _holds(manager.path(4), _lora(4, base))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("seed", range(2))
def test_any_leaves_may_change(tmp_path, seed, compression, monkeypatch):
    # Many files, over which leaves are split.
    inside.limit(monkeypatch, min_file_bytes=1 << 16)
    rng = np.random.default_rng(seed)

    def fresh(i):
        kind = i % 7
        if kind == 0:
            return int(rng.integers(100))
        if kind == 1:
            return jnp.zeros((0, 3))
        if kind == 2:
            return jr.key(int(rng.integers(100)))
        rows = (3, 50, 700)[i % 3]
        if kind == 3:
            return rng.normal(size=(rows, 40))
        return jnp.asarray(rng.integers(0, 50, (rows, 40)).astype(np.float32))

    tree = {f"x{i}": fresh(i) for i in range(20)}
    before = None
    for step in range(6):
        for i in range(20):
            if rng.random() < 0.15:
                tree[f"x{i}"] = fresh(i)
        tree["alias"] = tree[f"x{rng.integers(20)}"]
        if rng.random() < 0.3:
            tree.pop(f"y{step - 1}", None)
            tree[f"y{step}"] = fresh(5)
        if isinstance(tree["x3"], np.ndarray) and rng.random() < 0.5:
            tree["x3"][0] += 1
        path = tmp_path / str(step)
        ec.tree_serialise_leaves(
            path,
            tree,
            reuse=before,
            chunks=lambda name, shape, dtype: (
                (min(64, shape[0]), *shape[1:]) if shape and shape[0] else None
            ),
            compression=compression,
        )
        _holds(path, tree)
        before = path


def test_in_place(tmp_path):
    base = _base()
    for step in (1, 2, 3):
        before = None if step == 1 else set(_inodes(tmp_path))
        ec.tree_serialise_leaves(tmp_path, _lora(step, base), reuse=tmp_path)
        _holds(tmp_path, _lora(step, base))
    assert before is not None and before & set(_inodes(tmp_path))


def _inodes(path):
    return [s.st_ino for s in _files(path).values()]


@pytest.mark.parametrize("reason", ["nothing", "links", "damage", "zarr", "short"])
def test_where_it_cannot_be_all_is_written(tmp_path, reason, monkeypatch):
    base = _base()
    a, b, c = (tmp_path / name for name in "abc")
    if reason != "nothing":
        how = {"layout": "zarr"} if reason == "zarr" else {"reuse": a}
        ec.tree_serialise_leaves(a, base)
        ec.tree_serialise_leaves(b, base, **how)
        assert reason == "zarr" or _shared(a, b) >= 2**22
    if reason == "links":

        def link(*_):
            raise OSError(18, "no links")

        monkeypatch.setattr(os, "link", link)
    if reason == "damage":
        (file,) = b.glob("d/*/digests")
        file.write_bytes(bytes(file.stat().st_size))
    if reason == "short":
        (file,) = b.glob("d/*/0")
        os.truncate(file, 1000)
    ec.tree_serialise_leaves(c, base, reuse=b)
    _holds(c, base)
    assert all(s.st_nlink == 1 for s in _files(c).values())


def test_what_only_looks_alike_is_written(tmp_path):
    x = jnp.arange(6, dtype=jnp.float32)
    trees = [
        {"x": x},
        {"x": x.reshape(2, 3)},
        {"x": np.asarray(x.reshape(2, 3))},
        {"y": np.asarray(x.reshape(2, 3))},
        {"y": np.asarray(x.reshape(2, 3)).view(np.int32)},
    ]
    for i, tree in enumerate(trees):
        ec.tree_serialise_leaves(tmp_path / str(i), tree, reuse=tmp_path / str(i - 1))
        _holds(tmp_path / str(i), tree)


# ---- Arrays that are the very same. Those on CPU may have changed: `test_aliased.py`.


@pytest.fixture
def looked_at(monkeypatch):
    """The shapes of the arrays of which bytes have been asked for, to hash or write."""
    shapes = []
    look = lambda leaf, template, *_: shapes.append(template.shape)
    for call in ("bytes of an array", "bytes of regions"):
        inside.watch(monkeypatch, call, look)
    return shapes


@pytest.fixture
def device(monkeypatch):
    """The arrays are taken for those of an accelerator. Whatever is copied from there
    is counted."""
    copied = []
    inside.replace(monkeypatch, "is on the CPU", lambda sharding: False)
    inside.watch(monkeypatch, "stage a part", lambda part: copied.append(part.shape))

    def make(send):
        def watched(leaves, template):
            sent = send(leaves, template)
            copied.extend([template.shape] * len(sent or ()))
            return sent

        return watched

    inside.wrap(monkeypatch, "send small leaves", make)
    return copied


_shape = (512, 512)


def test_the_very_same_arrays_are_not_looked_at(tmp_path, looked_at, device):
    base = _base()
    with ec.CheckpointManager(tmp_path) as manager:
        for step in range(1, 5):
            looked_at.clear()
            # Others of the same values are compared.
            here = [jnp.copy(base[0]), *base[1:]] if step == 4 else base
            manager.save(step, _lora(step, here))
            manager.wait()
            # The second save writes them apart. Shards are counted twice.
            assert looked_at.count(_shape) == {1: 8, 2: 8, 3: 0, 4: 2}[step]
    assert _shared(manager.path(3), manager.path(4)) >= sum(x.nbytes for x in base)
    for step in (3, 4):
        _holds(manager.path(step), _lora(step, base))


def test_nor_copied_from_their_devices(tmp_path, device):
    base = [*_base(), jnp.arange(5), jr.key(1)]
    with ec.CheckpointManager(tmp_path, keep=1) as manager:
        for step in range(1, 6):
            device.clear()
            tree = {**_lora(step, base), "p": 0.1, "numpy": np.arange(6)}
            manager.save(step, tree)
            manager.wait()
            assert device.count(_shape) == (4 if step < 3 else 0)
            _holds(manager.path(step), tree)
    assert (8, 64) in device


@pytest.mark.parametrize("lost", ["deleted", "copied", "replaced"])
def test_what_is_held_is_not_lost(tmp_path, device, lost, monkeypatch):
    """The step that it is taken from goes while it is being saved."""
    base = _base()
    a, b = tmp_path / "a", tmp_path / "b"
    ec.tree_serialise_leaves(tmp_path / "0", base)
    tree = {"base": base, "step": 0}
    first = ec.async_tree_serialise_leaves(a, tree)
    first.result()
    second = ec.async_tree_serialise_leaves(a, {**tree, "step": 1}, reuse=first)
    second.result()
    begin = threading.Event()
    inside.watch(monkeypatch, "keep files of the last save", lambda *_: begin.wait())
    device.clear()
    handle = ec.async_tree_serialise_leaves(b, {**tree, "step": 2}, reuse=second)
    handle.staged()
    assert device.count(_shape) == 0
    if lost == "copied":

        def link(*_):
            raise OSError(18, "no links")

        monkeypatch.setattr(os, "link", link)
    elif lost == "deleted":
        shutil.rmtree(a)
    else:
        ec.tree_serialise_leaves(a, {"base": [x + 1 for x in base], "step": 0})
    # Nor does it matter what becomes of the arrays.
    expected = [np.asarray(x).copy() for x in base]
    for x in base:
        x.delete()
    begin.set()
    handle.result()
    assert ec.verify(b) == []
    loaded = ec.materialise(ec.open(b).tree)
    assert all(np.array_equal(x, y) for x, y in zip(loaded["base"], expected))
    assert loaded["step"] == 2


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize(
    "change", ["deleted", "replaced", "short", "cast", "alias", "failed"]
)
def test_the_very_same_arrays_of_another_save(tmp_path, change, where, request):
    """They are the same, and what is at the path, or is to be saved, is not."""
    if where == "device":
        request.getfixturevalue("device")
    a, b = tmp_path / "a", tmp_path / "b"
    base = _base()
    how = {}
    tree = {"base": base}
    handle = ec.async_tree_serialise_leaves(a, tree)
    handle.result()
    if change == "deleted":
        ec.delete(a)
    elif change == "replaced":
        ec.tree_serialise_leaves(a, {"base": [x + 1 for x in base]})
    elif change == "short":
        (file,) = a.glob("d/*/0")
        os.truncate(file, 1000)
    elif change == "cast":
        how = {"dtype": jnp.bfloat16}
    elif change == "alias":
        tree = {"base": [base[1], base[0], base[0], base[3]]}
    else:
        # What this one wrote nobody knows.
        (tmp_path / "c").write_text("in the way")
        with pytest.raises((OSError, RuntimeError)):
            handle = ec.async_tree_serialise_leaves(tmp_path / "c" / "d", tree)
            handle.result()
    second = ec.async_tree_serialise_leaves(b, tree, reuse=handle, **how)
    second.result()
    assert ec.verify(b) == []
    loaded = ec.materialise(ec.open(b).tree)["base"]
    for x, y in zip(loaded, tree["base"]):
        assert np.array_equal(x, y.astype(x.dtype))
    ec.tree_serialise_leaves(b, tree, reuse=second, **how)
    assert ec.verify(b) == []


def test_what_can_change_is_compared(tmp_path):
    x, small = np.zeros(10**5), np.zeros(5)
    with ec.CheckpointManager(tmp_path) as manager:
        for step in range(1, 5):
            x[7] = small[3] = step
            tree = {"x": x, "small": small, "frozen": jnp.ones(10)}
            manager.save(step, tree)
            manager.wait()
            _holds(manager.path(step), tree)


def test_sharded_arrays_are_the_very_same_too(tmp_path, looked_at, device):
    mesh = jax.make_mesh((8,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    base = [jax.device_put(x, rows) for x in _base()]
    with ec.CheckpointManager(tmp_path) as manager:
        for step in range(1, 5):
            looked_at.clear()
            if step == 4:
                base[0] = jax.device_put(base[0], jax.devices()[0])
            manager.save(step, _lora(step, base))
            manager.wait()
            if step == 3:
                assert _shape not in looked_at
            assert ec.verify(manager.path(step)) == []
            loaded = ec.materialise(ec.open(manager.path(step)).tree.base)
            assert all(np.array_equal(x, y) for x, y in zip(loaded, base))


def test_no_array_is_kept_alive(tmp_path):
    handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree := {"x": jnp.ones(9)})
    handle.result()
    alive = weakref.ref(tree.pop("x"))
    gc.collect()
    assert alive() is None
    ec.tree_serialise_leaves(tmp_path / "b", {"x": jnp.zeros(9)}, reuse=handle)
    _holds(tmp_path / "b", {"x": jnp.zeros(9)})


@pytest.mark.parametrize("count", [30_000, 3 * 2**20])
def test_a_lazy_leaf_beside_the_array_that_it_was(tmp_path, count):
    """Each saved leaf is compared with one leaf, and an array with its own."""
    x = jnp.arange(float(count))
    with ec.CheckpointManager(tmp_path / "run", keep=3) as manager:
        manager.save(1, {"a": x})
        manager.wait()
        lazy = ec.open(manager.path(1))["a"]
        manager.save(2, {"a": x, "b": lazy, "c": lazy})
        manager.wait()
    out = ec.tree_deserialise_leaves(manager.path(2), {k: 0 * x for k in "abc"})
    assert all(jnp.array_equal(out[k], x) for k in "abc")
    assert not ec.verify(manager.path(2))


def test_a_lazy_leaf_that_has_the_name_of_another(tmp_path):
    old = {"a": np.zeros(30_000, "f4"), "b": np.ones(30_000, "f4")}
    ec.tree_serialise_leaves(tmp_path / "a", old)
    for pick in ({"b": "a"}, {"a": "b", "b": "a"}, {"a": "b"}, {"c": "a", "a": "b"}):
        tree = {new: ec.open(tmp_path / "a")[name] for new, name in pick.items()}
        ec.tree_serialise_leaves(tmp_path / "b", tree, reuse=tmp_path / "a")
        assert not ec.verify(tmp_path / "b")
        like = {new: np.full(30_000, 7, "f4") for new in pick}
        out = ec.tree_deserialise_leaves(tmp_path / "b", like)
        assert all(np.array_equal(out[new], old[name]) for new, name in pick.items())
