"""Rows by number: index arrays and masks on lazy leaves, as in NumPy, wherever the leaf
lies; and what reads of rows take, in files that are opened and bytes that are read."""

import gc
import os
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file
from support import inside
from support.helpers import BytesRead, examples

import eqx_ckpt as ec


EMB = np.arange(3000 * 6 * 2, dtype=np.float32).reshape(3000, 6, 2)
# By the chunks: one; slabs of rows; single rows; rows that are cut, too; cut along two
# axes, so that no run of chunks is a run of rows.
CHUNKS = {
    "one": (3000, 6, 2),
    "slabs": (701, 6, 2),
    "single": (1, 6, 2),
    "cut": (1, 3, 2),
    "grid": (300, 4, 2),
}


@pytest.fixture(scope="module")
def leaves(tmp_path_factory):
    """The same array wherever one can lie."""
    path = tmp_path_factory.mktemp("rows")
    tree = {name: EMB + 0 for name in CHUNKS}
    chunks = lambda name, *_: CHUNKS[name]
    ec.tree_serialise_leaves(path / "ours", tree, chunks=chunks)
    ec.tree_serialise_leaves(path / "blosc", tree, chunks=chunks, compression="lz4")
    few = {name: tree[name] for name in ("one", "slabs", "grid")}
    ec.tree_serialise_leaves(path / "zarr", few, chunks=chunks, layout="zarr")
    ec.tree_serialise_leaves(path / "ours.zip", tree, chunks=chunks)
    ec.tree_serialise_leaves("memory://rows", tree, chunks=chunks)
    save_file({"x": EMB}, str(path / "x.safetensors"))
    np.savez(path / "x.npz", x=EMB)
    np.save(path / "x.npy", np.asfortranarray(EMB))
    out = {}
    for at in ("ours", "blosc", "zarr", "ours.zip", "memory://rows"):
        ckpt = ec.open(at if "memory" in at else path / at)
        out |= {f"{at} {name}": ckpt[name] for name in ckpt.leaves}
    for at in ("x.safetensors", "x.npz", "x.npy"):
        ckpt = ec.open(path / at)
        out[at] = ckpt[next(iter(ckpt.leaves))]
    doubled = ec.lazy(lambda x: x + x)(out["ours slabs"])
    return out | {"computed": doubled}


def keys(array):
    numbers = st.lists(st.integers(-3000, 2999), max_size=40)
    rows = st.one_of(
        numbers,
        numbers.map(lambda x: np.array([x, x[::-1]], int)),
        st.integers(1, 2000).map(lambda n: np.arange(3000) % n == 0),
        st.slices(3000),
    )
    rest = st.sampled_from(
        [(), (..., 1), (slice(None, None, -2),), ([5, 0],), (slice(1, 3), 0)]
    )
    return st.tuples(rows, rest)


@examples(240)
@given(key=keys(EMB), verify=st.booleans(), number=st.integers(0, 10**6))
def test_rows_are_as_in_numpy(leaves, key, verify, number):
    rows, rest = key
    name = list(leaves)[number % len(leaves)]
    lazy, array = leaves[name], EMB * (2 if name == "computed" else 1)
    # One after the other, each index array picks along its own axis.
    for own in (rows, (slice(None), *rest)):
        lazy, array = lazy[own], array[own]
    assert lazy.shape == array.shape
    np.testing.assert_array_equal(lazy.read(verify=verify), array)
    np.testing.assert_array_equal(np.asarray(lazy.T), array.T)


def test_what_is_not_read_need_not_be_whole(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"emb": EMB}, chunks=480)  # 10 rows.
    ckpt = ec.open(tmp_path / "x")
    (file,) = (tmp_path / "x").glob("d/*/0")
    data = bytearray(file.read_bytes())
    data[data.index(EMB[200:210].tobytes()) + 5] ^= 1
    file.write_bytes(data)
    # It is between two chunks that are read as one run.
    for rows in ([195, 215], slice(195, 216, 20)):
        np.testing.assert_array_equal(ckpt["emb"][rows].read(), EMB[rows])
    for rows in ([195, 209, 215], slice(195, 216, 7), slice(None)):
        with pytest.raises(RuntimeError, match="emb: its bytes are not those"):
            ckpt["emb"][rows].read()
        ckpt["emb"][rows].read(verify=False)


def test_rows_stay_lazy_and_come_as_what_they_are(tmp_path):
    ec.tree_serialise_leaves(
        tmp_path / "x", {"emb": jnp.asarray(EMB), "key": jr.key(0)}
    )
    ckpt = ec.open(tmp_path / "x")
    tokens = jr.randint(jr.key(0), (4, 5), 0, 3000)
    with BytesRead() as read:
        rows = ckpt["emb"][tokens]
        assert rows.shape == (4, 5, 6, 2) and rows.dtype == jnp.float32
        assert rows[0, 1:].astype(jnp.float16).T.shape == (2, 6, 4)
    assert read.total == 0
    assert isinstance(rows.read(), jax.Array)
    assert jnp.array_equal(rows.read(), jnp.asarray(EMB)[tokens])
    assert jnp.array_equal(rows.store.read().result(), EMB[np.asarray(tokens)])
    # They are saved, and cut into shards, as any other lazy leaf is.
    ec.tree_serialise_leaves(tmp_path / "y", {"rows": rows, "same": rows})
    assert np.array_equal(ec.open(tmp_path / "y")["same"], rows)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    cut = rows.update(sharding=NamedSharding(mesh, P("x"))).read()
    assert cut.sharding.num_devices == 2 and jnp.array_equal(cut, rows.read())
    with pytest.raises(TypeError, match="`key` is a key: read it to index it"):
        ckpt["key"][[0]]


@pytest.fixture
def opens(monkeypatch):
    """The files that are opened."""
    paths, opened = [], os.open

    def open(path, *args, **kwargs):
        paths.append(path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open)
    return paths


def test_sizes_take_no_time_for_each_leaf(tmp_path, monkeypatch):
    leaf = np.ones(3, np.float32)
    ec.tree_serialise_leaves(tmp_path / "x", {"a": [leaf + i for i in range(2000)]})
    ckpt, made = ec.open(tmp_path / "x"), []
    see = lambda leaves, place, **_: made.append(place)
    inside.watch(monkeypatch, "make a record", see)
    assert ckpt.nbytes == 2000 * 12
    assert ckpt._repr_html_() and len(made) == 2000  # A line for each, once.


def test_what_rows_take(tmp_path, opens):
    x = np.arange(16384 * 64, dtype=np.float32).reshape(16384, 64)  # 4 MiB.
    ec.tree_serialise_leaves(tmp_path / "x", {"x": x, "small": x + 0}, chunks=4096)
    lazy = ec.open(tmp_path / "x")["x"]
    lazy[0].read()
    rng = np.random.default_rng(0)
    row, reads = 256, {}
    for name, key, most in [
        ("a row", 77, row),
        ("rows by a stride", np.s_[::1024], 16 * row),
        ("rows by number", rng.integers(0, 16384, 100), 100 * row + 40 * 4096),
        ("a part of a row", (77, slice(3, 5)), 8),
        ("a column", np.s_[:, 3], x.nbytes),
    ]:
        opens.clear()
        with BytesRead() as read:
            assert np.array_equal(lazy[key].read(verify=False), x[key])
        reads[name] = read.total
        assert read.total <= most and len(opens) <= 1 + read.total // 2**21, name
        opens.clear()
        with BytesRead() as verified:
            assert np.array_equal(lazy[key].read(), x[key])
        # Never less is read if it is verified, and never from more files.
        assert verified.total >= read.total, name
        assert len(opens) <= 1 + verified.total // 2**21, name
    assert reads["a row"] == row and reads["a part of a row"] == 8


def _calls(read):
    """How many calls of functions of the package a read takes."""
    calls, package = [], os.path.dirname(ec.__file__)

    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame)

    sys.setprofile(see)
    try:
        read()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_what_rows_take_of_python(tmp_path):
    x = np.zeros((16384, 64), np.float32)
    ec.tree_serialise_leaves(tmp_path / "x", {"x": x}, chunks=4096)
    lazy = ec.open(tmp_path / "x")["x"]
    for verify, most, more in ((False, 215, 75), (True, 275, 80)):
        reads = [lambda i=i: lazy[i].read(verify=verify) for i in (77, np.s_[::1024])]
        one, rows = [_calls(read) for read in (*reads, *reads)][2:]
        assert one <= most and rows - one <= more


def test_many_chunks_are_verified_without_looks_for_cycles(tmp_path):
    x = np.arange(16384 * 64, dtype=np.float32).reshape(16384, 64)
    ec.tree_serialise_leaves(tmp_path / "x", {"x": x}, chunks=1024)
    lazy = ec.open(tmp_path / "x")["x"]
    for key in (np.s_[:], np.s_[::7]):
        lazy[key].read()
        gc.collect()
        before = sum(x["collections"] for x in gc.get_stats())
        assert np.array_equal(lazy[key].read(), x[key])
        assert sum(x["collections"] for x in gc.get_stats()) - before <= 2
