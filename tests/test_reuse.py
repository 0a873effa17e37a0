"""`reuse`: what has not changed since another save is not written again."""

import os
import pathlib
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_ckpt as ec
from eqx_ckpt import _deal


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
    monkeypatch.setattr(_deal, "_MIN_FILE", 1 << 16)
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
        layout = "zarr" if reason == "zarr" else "ocdbt"
        ec.tree_serialise_leaves(a, base, layout=layout)
        ec.tree_serialise_leaves(b, base, reuse=a, layout=layout)
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
