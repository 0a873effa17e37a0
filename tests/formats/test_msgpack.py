"""Files of flax in msgpack, against flax."""

import pathlib
import struct

import flax.serialization as fs
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest

import eqx_ckpt as ec


def _tree():
    rng = np.random.default_rng(0)
    return {
        "params": {
            "Dense_0": {
                "kernel": rng.normal(size=(600, 700)).astype(np.float32),
                "bias": np.arange(3).astype(ml_dtypes.bfloat16),
            },
            "a.b": {"": np.ones((2, 0), np.float32), "é": np.array(True)},
        },
        "layers": [np.full(2, i, np.int8) for i in range(12)],
        "wide": np.arange(3.0),
        "scalar": np.float32(1.5),
        "step": 70000,
        "less": -3,
        "large": 2**63 + 1,
        "rate": 1e-3,
        "flag": True,
        "z": 1 - 2j,
        "text": "héllo",
        "bytes": b"\0\1",
        "nothing": None,
        "empty": {},
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("msgpack") / "checkpoint_7"
    path.write_bytes(fs.to_bytes(_tree()))
    return path


def test_what_flax_wrote(file):
    ckpt = ec.open(file)
    assert ckpt.layout == "msgpack"
    tree, saved = ec.materialise(ckpt.tree), _tree()
    for part in ("nothing", "empty"):
        del saved[part]
    assert list(jax.tree.leaves(ec.leaf_names(tree))) == list(
        jax.tree.leaves(ec.leaf_names(saved))
    )
    for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(saved)):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
        if not isinstance(want, (np.ndarray, int)):
            assert type(got) is type(want)
    assert isinstance(tree["layers"], list)
    assert isinstance(tree["params"]["Dense_0"]["kernel"], jax.Array)
    assert isinstance(tree["wide"], np.ndarray)


def test_types_of_few_bits_and_long_names(tmp_path):
    tree = {
        "n" * 300: np.arange(3, dtype=ml_dtypes.uint4),
        "x": np.arange(3).astype(ml_dtypes.float8_e4m3),
    }
    (tmp_path / "a").write_bytes(fs.to_bytes(tree))
    got = ec.materialise(ec.open(tmp_path / "a").tree)
    for name, array in tree.items():
        assert np.asarray(got[name]).dtype == array.dtype
        assert np.asarray(got[name]).tobytes() == array.tobytes()


def test_is_lazy(file):
    count = lambda: int(pathlib.Path("/proc/self/io").read_text().split()[1])
    before = count()
    lazy = ec.open(file).tree.params.Dense_0.kernel
    assert count() - before < 60_000 < 600 * 700
    saved = _tree()["params"]["Dense_0"]["kernel"]
    before = count()
    assert np.array_equal(lazy[30:33].read(), saved[30:33])
    assert count() - before < 12_000
    assert np.array_equal(np.asarray(lazy[:, 5]), saved[:, 5])
    assert np.array_equal(lazy.store[3].read().result(), saved[3])


def test_loads_into_a_tree(file):
    like = {"kernel": jax.ShapeDtypeStruct((600, 700), jnp.float32)}
    like["bias"] = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    out = ec.tree_deserialise_leaves(file, like, source="params.Dense_0")
    assert out["bias"].tolist() == [0, 1, 2]


_good = msgpack.packb(((2,), "float32", bytes(8)))


def _file(body, code=1):
    return msgpack.packb({"w": msgpack.ExtType(code, body)})


def _array(shape=(2,), dtype="float32", data=bytes(8)):
    return _file(msgpack.packb((shape, dtype, data)))


HOSTILE = {
    "half a file": (_file(_good)[:-3], "end of|middle"),
    "more than a map": (_file(_good) + b"x", "more bytes"),
    "a map of 2^32 items": (b"\xdf\xff\xff\xff\xff\xa1a\x01", "middle"),
    "a list of 2^32 items": (b"\x81\xa1a\xdd\xff\xff\xff\xff", "middle"),
    "a text of 4 GB": (b"\x81\xdb\xff\xff\xff\xffabc", "middle"),
    "an array of 4 GB that is not there": (
        b"\x81\xa1w\xc9"
        + struct.pack(">Ib", 2**32 - 1, 1)
        + b"\x93\x91\xce\x7f\xff\xff\xff\xa5uint8\xc6\x7f\xff\xff\xff",
        "another size",
    ),
    "a shape that is larger than its bytes": (_array((2**40,)), "not of the size"),
    "a shape below zero": (_array((-1, -2)), "impossible shape"),
    "a shape of texts": (_array(("a",)), "impossible shape"),
    "an array of 40 axes": (_array([1] * 40, data=bytes(4)), "40 axes, and at most"),
    "objects": (_array(dtype="object"), "the dtype 'object'"),
    "no dtype": (_array(dtype=3), "without a dtype"),
    "no bytes": (_array(data=3), "without bytes"),
    "another type": (_file(b"\x01", 9), "unknown type"),
    "a pickle": (_file(b"\x80\x04.", 1), "malformed array"),
    "a key twice": (b"\x82\xa1a\x01\xa1a\x02", "a key twice"),
    "a key that is a list": (b"\x82\xa1a\x01\x91\x01\x01", "no string"),
    "a nest of 10,000 maps": (b"\x81\xa1a" * 10_000 + b"\x01", "nested more"),
    "a byte that is nothing": (b"\x81\xa1a\xc1", "which is nothing"),
    "a key of 2 MiB": (msgpack.packb({"k" * 2**21: 1}), "no string"),
    "a text that is not UTF-8": (b"\x81\xa1\xff\x01", "not UTF-8"),
    "an array in pieces": (
        msgpack.packb({"w": {"__msgpack_chunked_array__": True}}),
        "Load it with flax",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_open(tmp_path, name):
    data, match = HOSTILE[name]
    path = tmp_path / "m.msgpack"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match):
        ec.open(path)
