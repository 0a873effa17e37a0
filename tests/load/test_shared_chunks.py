"""Views that share chunks: each chunk is read and verified once, by every call."""

import io
import itertools as it
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from support.helpers import enable_x64

import eqx_ckpt as ec


COUNT, SHAPE = 16, (16, 96, 128)
W = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def unstack(c, to):
    model = {"b": [{"w": jnp.zeros(SHAPE[1:])} for _ in range(COUNT)]}
    pair = (lambda m: m["b"], lambda c: c.b, ec.adapters.unstack())
    return [x["w"] for x in ec.graft(model, c, [pair])[0]["b"]]


def saved(save):
    """The door of a save: the leaves are read after what is counted."""

    def door(c, to):
        save(to, layers(c))
        return lambda: [ec.open(to)[f"l.{i}"].read() for i in range(COUNT)]

    return door


def layers(c):
    return {"l": [c["b.w"][i] for i in range(COUNT)]}


def mean(tree):
    return ec.merge([tree, tree], ec.merging.average())


def to_manager(to, tree):
    with ec.CheckpointManager(to) as manager:
        manager.save(1, tree)


def differences(c, to):
    assert not ec.diff(layers(c), {"l": list(W)}, values=True)
    return list(W)


DOORS: dict[str, Callable[..., Any]] = {
    "unstack": unstack,
    "materialise": lambda c, to: ec.materialise(layers(c))["l"],
    "merge": lambda c, to: ec.materialise(mean(layers(c)))["l"],
    "diff": differences,
    "save": saved(ec.tree_serialise_leaves),
    "zarr": saved(lambda to, t: ec.tree_serialise_leaves(to, t, layout="zarr")),
    "zip": saved(lambda to, t: ec.tree_serialise_leaves(f"{to}.zip", t)),
    "async": saved(lambda to, t: ec.async_tree_serialise_leaves(to, t).result()),
    "compressed": saved(
        lambda to, t: ec.tree_serialise_leaves(to, t, compression="zstd")
    ),
    "save of a merge": saved(lambda to, t: ec.tree_serialise_leaves(to, mean(t))),
    "manager": saved(to_manager),
    "export": saved(ec.export_safetensors),
    "export of a merge": saved(lambda to, t: ec.export_safetensors(to, mean(t))),
    "shards": saved(lambda to, t: ec.export_safetensors(to, t, shard_bytes=2**17)),
}


STORED = {
    "one chunk": {},
    "chunks": {"chunks": 2**17},
    "zstd": {"compression": "zstd", "chunks": 2**17},
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("door", DOORS)
def test_each_chunk_is_read_once(door, stored, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"b": {"w": W}}, **STORED[stored])
    c = ec.open(tmp_path / "x")
    with ec.counting() as everything:
        ec.materialise(c.tree)
    to = tmp_path / ("to.safetensors" if door.startswith("export") else "to")
    with ec.counting() as count:
        found = DOORS[door](c, to)
    # What is written is read back, but for the leaves.
    assert count() < 1.2 * everything() + 20_000
    if callable(found):
        if door == "zip":
            to.with_suffix(".zip").rename(to)
        found = found()
    for layer, wanted in zip(found, W, strict=True):
        np.testing.assert_array_equal(layer, wanted)


def test_a_whole_leaf_and_its_parts_are_read_once(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"w": W}, chunks=2**17)
    w = ec.open(tmp_path / "x")["w"]
    tree = [w, w[3], w[:, 5:7], w[[2, 1, 2]], w.T, w[..., ::-1].astype(np.float64)[1]]
    with ec.counting() as count:
        values = ec.materialise(tree)
    # Another dtype is another read.
    assert count() < 2.2 * W.nbytes
    for value, wanted in zip(
        values, [W, W[3], W[:, 5:7], W[[2, 1, 2]], W.T, W[1][:, ::-1]], strict=True
    ):
        np.testing.assert_array_equal(value, wanted)


def test_one_array_as_several_dtypes_is_refused_as_each_is(tmp_path):
    with enable_x64(True):
        x = jnp.arange(6.0, dtype=np.float64)
    ec.tree_serialise_leaves(tmp_path / "x", {"x": x}, chunks=16)
    x = ec.open(tmp_path / "x")["x"]
    good = [x.astype(np.float32), x[:3].astype(np.float32), x[2:].astype(np.float16)]
    for some in it.permutations(good, 2):
        for one, read in zip(some, ec.materialise(list(some))):
            assert read.dtype == one.dtype and (read == one.read()).all()
    # Without a cast JAX would narrow them.
    for one, bad in it.product(good, [x, x[1:]]):
        for some in ([one, bad], [bad, one]):
            with pytest.raises(RuntimeError, match="JAX would narrow"):
                ec.materialise(some)


@st.composite
def views(draw):
    def pick(n):
        low = draw(st.integers(0, n - 1))
        return draw(
            st.sampled_from(
                [
                    low,
                    slice(low, None),
                    slice(None, low),
                    slice(None, None, -1 - low % 3),
                    np.array([low, 0, n - 1]),
                    slice(None),
                ]
            )
        )

    axis = draw(st.integers(0, 2))
    keys = [slice(None)] * 3
    keys[axis] = pick((8, 6, 5)[axis])
    return tuple(keys), draw(st.sampled_from([None, None, np.float64]))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(views(), min_size=1, max_size=6),
    st.integers(30, 700),
    st.sampled_from([None, "zstd"]),
)
def test_any_views_together(several, chunk, codec):
    w = np.random.default_rng(0).random((8, 6, 5), np.float32)
    ec.tree_serialise_leaves("memory://w", {"w": w}, chunks=chunk, compression=codec)
    lazy = ec.open("memory://w")["w"]
    some = [lazy[k] if d is None else lazy[k].astype(d) for k, d in several]
    wanted = [w[k] if d is None else w[k].astype(d) for k, d in several]
    buffer = io.BytesIO()
    ec.tree_serialise_leaves(buffer, some)
    buffer.seek(0)
    again = ec.materialise(ec.open(buffer).tree)
    for found in (ec.materialise(some), again):
        for x, y in zip(found, wanted, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("door", ["materialise", "save", "export", "merge"])
def test_damage_in_a_shared_chunk_is_found(door, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"b": {"w": W}}, chunks=2**17)
    (file,) = (tmp_path / "x" / "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    to = tmp_path / ("to.safetensors" if door == "export" else "to")
    with pytest.raises(ec.DamagedError, match=r"b\.w|`%root`"):
        DOORS[door](ec.open(tmp_path / "x"), to)


def test_chunks_are_kept_no_longer_than_a_save(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"b": {"w": W}})
    c = ec.open(tmp_path / "x")
    for _ in range(2):
        with ec.counting() as count:
            ec.tree_serialise_leaves(tmp_path / "to", layers(c))
        assert count() >= W.nbytes
