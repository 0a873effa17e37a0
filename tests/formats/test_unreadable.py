"""A leaf of another format that cannot be read: it is listed with its name and what it
is, reading it says why, and all else of the file is as it would be without it.
"""

import collections
import datetime
import json
import pickle
import re
import struct

import equinox as eqx
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from attacks import pickles
from attacks.foreign import FOREIGN
from support.command import main

import eqx_ckpt as ec


def _safetensors(path):
    rows = {"w": ("F32", [2], 8), "bad": ("F6_E3M2", [4, 2], 6), "z": ("U8", [1], 1)}
    head, at = {}, 0
    for name, (dtype, shape, size) in rows.items():
        offsets = [at, at + size]
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += size
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def _npz(bad):
    return lambda path: np.savez(path, w=np.zeros(2, "f4"), bad=bad, z=np.uint8(0))


def _torch(bad):
    def make(path):
        good = pickles.state(w=pickles.tensor((2,)), z=b"K\0")
        made = pickle.dumps(bad, 2)[2:-1] if not isinstance(bad, bytes) else bad
        rows = good[:-2] + pickles.text("bad") + made + good[-2:]
        pickles.write(path, rows)

    return make


def _old(kind, view):
    """A tensor of an old file, before whose storages another one lies."""

    def make(path):
        of = {x: pickles.storage(x, 2) for x in "ab"}
        of["a"] = pickles.storage("a", 3, kind)[:-2] + view + b"tQ"
        of["b"] = of["b"][:-2] + b"NtQ"
        rows = {"bad": pickles.tensor((2,), of=of["a"])}
        rows |= {"w": pickles.tensor((2,), of=of["b"]), "z": b"K\0"}
        stored = {"a": struct.pack("<Q3i", 3, 1, 2, 3)}
        stored["b"] = struct.pack("<Q2f", 2, 0, 0)
        path.write_bytes(pickles.old_file(pickles.state(**rows), stored))

    return make


def _msgpack(bad):
    def make(path):
        w = msgpack.ExtType(1, msgpack.packb(((2,), "float32", bytes(8))))
        path.write_bytes(msgpack.packb({"w": w, "bad": bad, "z": 0}))

    return make


def _orbax(path):
    FOREIGN["orbax"](path)
    (path / "net.weight").rename(path / "bad")
    (path / "net.bias").rename(path / "w")
    (path / "step").rename(path / "z")
    text = (path / "_METADATA").read_text()
    for old, new in (("'net', 'weight'", "'bad',"), ("'net', 'bias'", "'w',")):
        text = text.replace(old, new)
    value = json.loads(text.replace("'step'", "'z'"))
    for name, entry in value["tree_metadata"].items():
        entry["key_metadata"] = [{"key": name.split("'")[1], "key_type": 2}]
    (path / "_METADATA").write_text(json.dumps(value))
    array = json.loads((path / "bad/zarr.json").read_text())
    (path / "bad/zarr.json").write_text(json.dumps({**array, "data_type": "r16"}))


class _Other:
    def __reduce__(self):
        return _Other, ()


class _New(dict):
    pass


FILES = {
    "a.safetensors": (_safetensors, r"F6_E3M2\[4,2\]", "the dtype 'F6_E3M2'"),
    "text.npz": (_npz(np.array(["a"])), r"U1\[1\]", "of texts"),
    "object.npz": (_npz(np.array([{}], object)), r"O\[1\]", "Python's objects"),
    "date.npz": (_npz(np.zeros(2, "M8[s]")), r"M8\[s\]\[2\]", "of dates"),
    "fields.npz": (_npz(np.zeros(2, [("a", "f4")])), r"V\[2\]", "records with fields"),
    "letters.npz": (_npz(np.zeros(2, [("é", "f4")])), r"V\[2\]", "records with"),
    "long.npz": (_npz(np.zeros(2, np.longdouble)), r"f16\[2\]", "longdouble|float128"),
    "axes.npz": (_npz(np.zeros((1,) * 40, "f4")), "float32", "40 axes, and at most 32"),
    "date.pt": (
        _torch(datetime.timedelta(1)),
        "datetime.timedelta",
        r"an object of `datetime.timedelta`",
    ),
    "reduce.pt": (_torch(_Other()), ".*_Other", "_Other"),
    "new.pt": (_torch(_New(a=1)), ".*_New", "_New"),
    "class.pt": (_torch(_Other), ".*_Other", "_Other"),
    "long.pt": (_torch(2**3000), "int", "an integer of 376 bytes"),
    "repeated.pt": (
        _torch(pickles.tensor((2**26,), (0,))),
        "float32 tensor",
        r"x.clone\(\)",
    ),
    "function.pt": (_torch(pickles.storage()), "storage", "no tensor"),
    "axes.pt": (_torch(pickles.tensor((1,) * 40, (1,) * 40)), "float32", "40 axes"),
    "generator.pt": (_torch(np.random.default_rng()), "numpy", "numpy.random"),
    "array.pt": (_torch(np.ones(2)), "numpy", "_reconstruct"),
    "quantised.pth": (_old("QInt32Storage", b"N"), "quantised", "x.dequantize"),
    "view.pth": (
        _old("FloatStorage", b"(" + pickles.text("c") + b"K\1K\2t"),
        "tensor",
        "part of a storage",
    ),
    "type.msgpack": (_msgpack(msgpack.ExtType(9, b"abc")), "msgpack type 9", "type 9"),
    "dtype.msgpack": (
        _msgpack(msgpack.ExtType(1, msgpack.packb(((2,), "object", b"12")))),
        r"object\[2\]",
        "the dtype 'object'",
    ),
    "pieces.msgpack": (
        _msgpack({"__msgpack_chunked_array__": True, "shape": {}, "chunks": {"0": 1}}),
        "an array in pieces",
        "1 GiB",
    ),
    "text.msgpack": (_msgpack("é" * 2**20), "a text", "it has 2097152 bytes"),
    "bytes.msgpack": (_msgpack(bytes(2**21)), "bytes", "it has 2097152 bytes"),
    "orbax": (_orbax, "array", "unknown dtype 'r16'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_leaf_that_cannot_be_read(tmp_path, name, capsys):
    make, what, why = FILES[name]
    path = tmp_path / name
    make(path)
    ckpt = ec.open(path)
    assert set(ckpt) == {"w", "bad", "z"}
    shown = [str(ckpt)]
    for command in (["ls"], ["ls", "--sort", "size"], ["ls", "--json"], ["info"]):
        assert main([*command, str(path)]) == 0
        shown.append(capsys.readouterr().out)
    for text in shown[:3]:
        assert re.search(rf"bad +{what}.* \(unreadable\)|{what}.*bad", text), text
    assert re.search(why, shown[3])
    assert "(unreadable)" in repr(ckpt["bad"]) and "(unreadable)" in ckpt._repr_html_()
    assert "(unreadable)" in ckpt["bad"]._repr_html_() + repr(ckpt.tree)
    # Reading it says why; nothing else changes.
    reads = [
        ckpt["bad"].read,
        lambda: np.asarray(ckpt["bad"]),
        lambda: ckpt["bad"].store,
        lambda: ckpt["bad"][:1],
        lambda: ec.materialise(ckpt.tree),
        lambda: ec.tree_serialise_leaves(tmp_path / "out", ckpt.tree, lambda x: True),
        lambda: ec.convert(path, tmp_path / "out"),
        lambda: ec.export_safetensors(tmp_path / "out.safetensors", ckpt.tree),
    ]
    assert "(unreadable)" in str(ec.stats(path))
    for number, read in enumerate(reads):
        with pytest.raises(ValueError, match=rf"bad.*{why}"):
            print(number, read())
    assert not list(tmp_path.glob("out*"))
    assert np.asarray(ckpt["w"].read()).tobytes() == np.asarray(ckpt["w"]).tobytes()
    # So it is in a load.
    like = {"w": np.zeros(ckpt["w"].shape, "f4"), "z": ckpt["z"].read()}
    for bad in (np.ones(2), jnp.ones(2), 1, "text", b"", np.zeros(0, "u1")):
        with pytest.raises(RuntimeError, match=rf"(?s){why}.*cannot be read.*bad  "):
            ec.tree_deserialise_leaves(path, {**like, "bad": bad}, lambda x: True)
    loaded = ec.tree_deserialise_leaves(
        path, {**like, "bad": 1}, where=lambda t: [t["w"], t["z"]]
    )
    assert loaded["bad"] == 1 and loaded["z"] == like["z"]
    rest = ec.tree_deserialise_leaves(path, like, unexpected="ignore")
    assert eqx.tree_equal(rest, {"w": loaded["w"], "z": loaded["z"]})


def test_integers_of_any_size(tmp_path):
    """As the state of a generator of NumPy's has them."""
    state = np.random.PCG64(3).state
    numbers = [2**63, 2**64, 2**127, 2**128 - 1, -(2**63) - 1, -(2**128)]
    value = {"rng": state, "numbers": numbers}
    pickles.write(tmp_path / "a.pt", pickle.dumps(value, 2))
    tree = ec.materialise(ec.open(tmp_path / "a.pt").tree)
    assert tree["numbers"] == numbers
    assert tree["rng"]["state"]["state"] == state["state"]["state"]
    ec.convert(tmp_path / "a.pt", tmp_path / "out")
    assert ec.diff(tmp_path / "a.pt", tmp_path / "out").same


@pytest.mark.parametrize(
    "value, leaves",
    [
        (collections.Counter({30: 1, 80: 2}), {"bad.30": 1, "bad.80": 2}),
        (bytearray(b"a\xffc"), {"bad": b"a\xffc"}),
        (bytearray(), {"bad": b""}),
        (2**127 - 1, {"bad": 2**127 - 1}),
        (-(2**80), {"bad": -(2**80)}),
    ],
)
def test_values_of_states(tmp_path, value, leaves):
    """Those of schedulers, generators and data loaders in files of PyTorch."""
    _torch(value)(tmp_path / "a.pt")
    ckpt = ec.open(tmp_path / "a.pt")
    assert {name: ckpt[name].read() for name in ckpt if name[:3] == "bad"} == leaves
