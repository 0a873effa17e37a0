"""Loads that read a share, and move it over the devices: here those of one process."""

import logging
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.helpers import BytesRead

import eqx_ckpt as ec


DTYPES = (
    "bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 bfloat16 float16 "
    "float32 complex64 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()


def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))


def random_bits(name):
    """Random bits, of which many are those of NaNs."""
    dtype = jnp.dtype(name)
    rng = np.random.default_rng(len(name))
    data = rng.integers(0, 256, (16, 8 * dtype.itemsize), np.uint8)
    if dtype.itemsize == 1:
        info = jnp.iinfo if "int" in name else jnp.finfo
        data &= 2 ** (1 if name == "bool" else info(name).bits) - 1
    elif jnp.issubdtype(dtype, jnp.inexact):
        size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        data[1::2, size - 1 :: size] |= 0x7F
        data[1::2, size - 2 :: size] |= 0xF0
    return data.view(dtype)


def bits(x):
    return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize(
    "names, spec",
    [
        (["bool", "int4", "bfloat16", "complex64", "float8_e4m3fn"], P(None, "a")),
        pytest.param(DTYPES, P(), marks=pytest.mark.long),
        pytest.param(DTYPES, P("b"), marks=pytest.mark.long),
    ],
    ids=["some", "all, copies", "all, rows"],
)
def test_every_bit(tmp_path, names, spec):
    want = {name: random_bits(name) for name in names}
    ec.tree_serialise_leaves(tmp_path / "c", want)
    to = NamedSharding(mesh(), spec)
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
        for name, x in want.items()
    }
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, reshard="devices")
    for name, x in want.items():
        assert out[name].sharding == to and out[name].dtype == x.dtype
        for shard in out[name].addressable_shards:
            assert bits(shard.data) == bits(x[shard.index]), name


def test_keys_weak_types_conversions_and_aliases(tmp_path):
    x = jnp.arange(64.0).reshape(8, 8)
    tree = {"key": jr.split(jr.key(3), 8), "weak": x, "cast": x, "x": x + 1}
    tree["y"] = tree["x"]
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    to = NamedSharding(mesh(), P("b"))
    like = {
        name: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=to)
        for name, y in tree.items()
    }
    like["weak"] = like["weak"].update(weak_type=True)
    like["cast"] = like["cast"].update(dtype=jnp.bfloat16)
    out = ec.tree_deserialise_leaves(
        tmp_path / "c", like, cast=True, reshard="devices", max_bytes=1
    )
    assert np.array_equal(jr.key_data(out["key"]), jr.key_data(tree["key"]))
    assert out["weak"].weak_type and out["cast"].dtype == jnp.bfloat16
    first, second = (out[n].addressable_shards[0].data for n in "xy")
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
    for name in ("weak", "cast", "x", "y"):
        assert np.array_equal(out[name], tree[name]) and out[name].sharding == to


def test_each_byte_is_read_once_and_what_stays_is_said(tmp_path, caplog):
    x = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    two = (x[:8, :8] % 2).astype(jnp.int2)
    ec.tree_serialise_leaves(
        tmp_path / "c", {"x": x, "two": two, "tied": x}, chunks=2**16
    )
    to = NamedSharding(mesh(), P(None, "b"))
    like = {
        "x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        "two": jax.ShapeDtypeStruct(two.shape, two.dtype, sharding=to),
        "tied": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
    }
    caplog.set_level(logging.INFO, "eqx_ckpt")
    caplog.clear()
    with BytesRead() as count:
        out = ec.tree_deserialise_leaves(
            tmp_path / "c", like, reshard="devices", max_bytes=1
        )
    assert np.array_equal(out["x"], x) and bits(out["two"]) == bits(two)
    assert np.array_equal(out["tied"], x)
    assert x.nbytes <= count.total < 1.1 * x.nbytes
    (line,) = [record.message for record in caplog.records]
    assert "`two` (devices cannot be relied on to move int2)" in line


def test_damage_and_values_that_do_not_fit(tmp_path):
    x = np.full((1024, 512), 70_000, np.int32)
    ec.tree_serialise_leaves(tmp_path / "c", {"x": x})
    to = NamedSharding(mesh(), P())
    like = {"x": jax.ShapeDtypeStruct(x.shape, "int16", sharding=to)}
    with pytest.raises(RuntimeError, match="x: 70000 does not fit into int16"):
        ec.tree_deserialise_leaves(tmp_path / "c", like, cast=True, reshard="devices")
    (file,) = (tmp_path / "c" / "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)}
    with pytest.raises(ec.DamagedError, match="x: its bytes are not"):
        ec.tree_deserialise_leaves(tmp_path / "c", like, reshard="devices")


def test_arrays_on_their_way_are_waited_for(tmp_path, monkeypatch):
    """What is sent to devices stays in host memory until it is there."""
    tree = {name: np.full(2**18, i, np.float32) for i, name in enumerate("abcd")}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tree.items()}
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, max_bytes=2**21)
    assert len(waited) == 2
    assert {id(x) for (x,) in waited} < {id(x) for x in out.values()}


def test_small_leaves_are_moved_many_at_once(tmp_path):
    """JAX does no more for them than where they are put on devices one by one."""
    x = np.arange(2048, dtype=np.float32).reshape(32, 64)
    saved = {str(i): x + i for i in range(256)}
    ec.tree_serialise_leaves(tmp_path / "c", saved)
    to = NamedSharding(mesh(), P())
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to) for n in saved}
    calls = {}
    for how in ("read", "devices"):
        for _ in range(2):  # The first one compiles.
            files = []
            sys.setprofile(lambda frame, *_: files.append(frame.f_code.co_filename))
            out = ec.tree_deserialise_leaves(tmp_path / "c", like, reshard=how)
            sys.setprofile(None)
        calls[how] = sum("/jax/" in file for file in files)
        for name, array in out.items():
            assert array.sharding == to and bits(array) == bits(saved[name])
    assert 0 < calls["devices"] < calls["read"], calls


def test_another_word(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", {"x": 1})
    with pytest.raises(ValueError, match='must be "auto", "read" or "devices", not'):
        ec.tree_deserialise_leaves(tmp_path / "c", {"x": 0}, reshard="device")
