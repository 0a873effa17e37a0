"""`.safetensors` files, against the library of the format."""

import io
import json
import os
import pathlib
import shutil
import struct
import tempfile
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from hypothesis import given, settings, strategies as st
from support import scripts
from support.stores import StoredFiles

import eqx_ckpt as ec


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e8m0fnu",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
    "complex64",
    "float64",
    "int64",
    "uint64",
]


def _dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


# Names of tensors that are others here.
NAMES = {
    "head.weight%2Eabsmax": "head.weight.absmax",
    "%C3%A9%20x%2Fy": "é x/y",
}


def _tensors():
    rng = np.random.default_rng(0)
    out = {
        f"layers.{i}.w": rng.integers(0, 2, (3, 5)).astype(_dtype(name))
        for i, name in enumerate(DTYPES)
    }
    out["head.big"] = rng.normal(size=(3001, 401)).astype(np.float32)
    out["head.weight"] = np.ones(3, np.float32)
    out["head.weight.absmax"] = np.full((), 7, np.float32)
    out["é x/y"] = np.zeros((2, 0), np.float32)
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    safetensors.numpy.save_file(_tensors(), path, {"format": "pt"})
    return path


def _bytes_read():
    line = pathlib.Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


def test_every_tensor_is_what_the_library_wrote(file):
    ckpt = ec.open(file)
    assert ckpt.metadata == {"format": "pt"}
    assert ckpt.layout == "safetensors"
    tensors = _tensors()
    assert len(ckpt) == len(tensors)
    for name, lazy in ckpt.leaves.items():
        saved = tensors[NAMES.get(name, name)]
        for value in (lazy.read(), np.asarray(lazy), lazy.store.read().result()):
            assert value.dtype == saved.dtype and value.shape == saved.shape
            assert np.asarray(value).tobytes() == saved.tobytes()
        wide = saved.dtype in (np.float64, np.int64, np.uint64)
        assert isinstance(lazy.read(), np.ndarray if wide else jax.Array)
    assert ckpt.nbytes == sum(x.nbytes for x in tensors.values())


def test_the_tree_has_nodes(file):
    ckpt = ec.open(file)
    assert ckpt.tree.layers[2].w.dtype == np.int8
    assert len(ckpt.tree.layers) == len(DTYPES)
    assert ckpt.tree.head.weight.shape == (3,)
    assert ckpt.tree.head["weight.absmax"].read() == 7
    plain = ec.materialise(ckpt.tree.layers)
    assert [str(node["w"].dtype) for node in plain] == DTYPES
    assert "i8[3,5]" in repr(ckpt) and "%C3%A9%20x%2Fy" in repr(ckpt)


def test_views_read_what_they_touch(file):
    lazy, saved = ec.open(file)["head.big"], _tensors()["head.big"]
    views = [
        np.s_[5:9],
        np.s_[7],
        np.s_[::3, 2],
        np.s_[:, ::-1],
        np.s_[1000:2900],
        np.s_[-1, 3:7],
    ]
    for view in views:
        assert np.array_equal(np.asarray(lazy[view]), saved[view])
    assert np.array_equal(np.asarray(lazy.T), saved.T)
    lazy[0].read()
    before = _bytes_read()
    lazy[5:9].read()
    assert _bytes_read() - before < saved[5:9].nbytes + 2000
    before = _bytes_read()
    lazy.read()
    assert _bytes_read() - before >= saved.nbytes


def test_opening_reads_the_header_only(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(2**22, np.uint8)}, path)
    before = _bytes_read()
    assert ec.open(path)["w"].shape == (2**22,)
    assert _bytes_read() - before < 10_000


def test_loads_into_a_model(tmp_path, getkey):
    model = eqx.nn.MLP(4, 4, 8, 2, key=getkey())
    names = jax.tree.leaves(ec.leaf_names(eqx.filter(model, eqx.is_array)))
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    path = tmp_path / "m.safetensors"
    safetensors.flax.save_file(dict(zip(names, arrays)), path)
    like = eqx.filter_eval_shape(eqx.nn.MLP, 4, 4, 8, 2, key=getkey())
    assert eqx.tree_equal(ec.tree_deserialise_leaves(path, like), model)
    other = eqx.filter_eval_shape(eqx.nn.MLP, 4, 5, 8, 2, key=getkey())
    with pytest.raises(RuntimeError, match="of another shape"):
        ec.tree_deserialise_leaves(path, other)
    wide = eqx.tree_at(lambda m: m.layers[0].weight, like, np.zeros((8, 4), np.float64))
    loaded = ec.tree_deserialise_leaves(path, wide, cast=True)
    assert loaded.layers[0].weight.dtype == np.float64
    lazy = ec.open(path).splice(like)
    assert eqx.tree_equal(ec.materialise(lazy), model)


def test_verify_says_that_it_cannot(file):
    with pytest.raises(ValueError, match="safetensors has no digests"):
        ec.verify(file)
    with pytest.raises(ValueError, match="safetensors has no digests"):
        ec.verify(ec.open(file))
    with pytest.raises(ValueError, match="has no URL"):
        ec.open(file)["head.big"].url


def test_a_file_that_is_replaced_is_never_mixed(tmp_path):
    path = tmp_path / "m.safetensors"
    save = lambda x: safetensors.numpy.save_file({"w": np.full(100000, x)}, path)
    save(1.0)
    ckpt = ec.open(path)
    assert ckpt["w"].read()[0] == 1
    save(2.0)
    with pytest.raises(RuntimeError, match="was replaced or deleted"):
        ckpt["w"].read()
    path.unlink()
    with pytest.raises(RuntimeError, match="was replaced or deleted"):
        ckpt["w"][:3].read()


def test_our_save_never_replaces_one(file):
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="is a file, not a checkpoint"):
        ec.tree_serialise_leaves(file, {"w": 1})
    assert file.read_bytes() == before


def test_links(file, tmp_path):
    # The cache of Hugging Face: a link to a file whose name is a digest.
    blob = tmp_path / "blobs" / "0123abcd"
    blob.parent.mkdir()
    blob.write_bytes(file.read_bytes())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to("../blobs/0123abcd")
    assert len(ec.open(snapshot / "model.safetensors")) == len(_tensors())
    with pytest.raises(ValueError, match="symbolic link"):
        ec.open(snapshot)
    ckpt = ec.open(snapshot, follow_symlinks=True)
    assert ckpt["head.weight"].read()[0] == 1


# ---- Several files.


def _sharded(path, **shards):
    path.mkdir()
    weight_map = {}
    for file, tensors in shards.items():
        safetensors.numpy.save_file(
            tensors, path / f"{file}.safetensors", {"format": "pt"}
        )
        weight_map.update(dict.fromkeys(tensors, f"{file}.safetensors"))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def _shards():
    return {
        "a": {"x.0": np.arange(3.0), "x.1": np.zeros((2, 2), np.float32)},
        "b": {"x.2": np.ones((600, 600), np.float32), "y": np.zeros(2, np.int8)},
    }


def test_shards(tmp_path):
    _sharded(tmp_path / "m", **_shards())
    for path in (tmp_path / "m", tmp_path / "m" / "model.safetensors.index.json"):
        ckpt = ec.open(path)
        assert ckpt.metadata == {"format": "pt"}
        tree = ec.materialise(ckpt.tree)
        assert tree["x"][0].tolist() == [0, 1, 2]
        assert float(tree["x"][2].sum()) == 360000


@pytest.mark.parametrize(
    ("alter", "match"),
    [
        (lambda m: m.pop("y"), "do not agree on where 'y' is"),
        (lambda m: m.update(z="a.safetensors"), "do not agree on where 'z' is"),
        (lambda m: m.update(y="a.safetensors"), "do not agree on where 'y' is"),
        (lambda m: m.update(y="../a.safetensors"), "no file beside it"),
        (lambda m: m.update(y="/etc/x.safetensors"), "no file beside it"),
        (lambda m: m.update(y="c.safetensors"), "names is missing: .*`c.safetensors`"),
        (lambda m: m.update(y=3), "no `weight_map`"),
    ],
)
def test_shards_that_do_not_fit(tmp_path, alter, match):
    index = _sharded(tmp_path / "m", **_shards())
    alter(index["weight_map"])
    file = tmp_path / "m" / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    # Not what says that there is nothing.
    with pytest.raises(ValueError, match=match):
        ec.open(tmp_path / "m")


def test_a_directory_of_several_files_is_not_guessed(tmp_path):
    for name in ("a", "b"):
        safetensors.numpy.save_file(
            {"w": np.zeros(1)}, tmp_path / f"{name}.safetensors"
        )
    with pytest.raises(ValueError, match="give the path of one of them"):
        ec.open(tmp_path)


def test_one_shard_is_not_taken_for_all(tmp_path):
    for name in ("m-00002-of-00010", "m-00001-of-00001"):
        path = tmp_path / name
        path.mkdir()
        file = path / f"{name}.safetensors"
        safetensors.numpy.save_file({"w": np.zeros(1)}, file)
        assert list(ec.open(file).leaves) == ["w"]
    assert list(ec.open(path).leaves) == ["w"]
    with pytest.raises(ValueError, match="one of several files, and there is no"):
        ec.open(tmp_path / "m-00002-of-00010")


def test_a_file_of_nothing(tmp_path):
    safetensors.numpy.save_file({}, tmp_path / "m.safetensors")
    ckpt = ec.open(tmp_path / "m.safetensors")
    assert len(ckpt.tree) == 0 and list(ckpt.tree) == []
    assert ec.materialise(ckpt.tree) == {}
    assert str(ckpt)


# ---- Files that mean harm.


def _file(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def _tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "a header of 2^62 bytes": (_file(b"{}", size=2**62), "would have"),
    "a header of 100 MB that is not there": (_file(b"{}", size=10**8), "would have"),
    "a header that ends after the file": (_file(b"{}", size=1000), "end of"),
    "no header at all": (b"123", "the end of"),
    "not JSON": (_file(b"{'a':1}"), "not JSON"),
    "no object": (_file(b"[1]"), "not a JSON object"),
    "a nest that no parser can take": (_file(b'{"a":' + b"[" * 10**6), "not JSON"),
    "a name twice": (
        _file(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
            b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        ),
        "a key twice",
    ),
    "bytes past the end": (_file({"a": _tensor()}, b"123"), "the end of"),
    "bytes that nobody has": (_file({"a": _tensor()}, bytes(5)), "more bytes"),
    "two tensors at one place": (
        _file({"a": _tensor(), "b": _tensor()}, bytes(4)),
        "do not begin",
    ),
    "a hole": (
        _file({"a": _tensor(), "b": _tensor(offsets=(5, 9))}, bytes(9)),
        "do not begin",
    ),
    "a shape that is larger than its bytes": (
        _file({"a": _tensor(shape=[2**40])}, bytes(4)),
        "not of the size",
    ),
    "a shape that overflows to its size": (
        _file({"a": _tensor(shape=[2**32, 2**32, 1], offsets=(0, 0))}),
        "not of the size",
    ),
    "lengths below zero": (
        _file({"a": _tensor(shape=[-1, -1])}, bytes(4)),
        "impossible shape",
    ),
    "offsets below zero": (
        _file({"a": _tensor(offsets=(-4, 0))}, bytes(4)),
        "impossible",
    ),
    "a length that is no integer": (
        _file({"a": _tensor(shape=[1.0])}, bytes(4)),
        "impossible shape",
    ),
    "a length that is a bool": (
        _file({"a": _tensor(shape=[True])}, bytes(4)),
        "impossible shape",
    ),
    "33 axes": (
        _file({"a": _tensor(shape=[1] * 33)}, bytes(4)),
        "33 axes, and at most",
    ),
    "an unknown dtype": (_file({"a": _tensor("object")}, bytes(4)), "dtype 'object'"),
    "a dtype that is a list": (_file({"a": _tensor([])}, bytes(4)), "is malformed"),
    "metadata that is not strings": (
        _file({"__metadata__": {"a": 1}}),
        "not an object of strings",
    ),
    "a name of 1000 nodes": (
        _file({"a." * 999 + "a": _tensor()}, bytes(4)),
        "more than 256 parts",
    ),
    "names of millions of nodes": (
        _file({f"{i}" + ".a" * 250: _tensor("U8", [0], (0, 0)) for i in range(9000)}),
        "more components",
    ),
    "an infinite number": (_file(b'{"__metadata__":{"a":1e999}}'), "1e999"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_open(tmp_path, name):
    data, match = HOSTILE[name]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match):
        ec.open(path)


@pytest.mark.parametrize("store", ["local", "memory"])
def test_bytes_after_the_tensors(tmp_path, store):
    data = safetensors.numpy.save({"w": np.ones(3)})
    place = str(tmp_path) if store == "local" else "memory://after"
    for more in (b"", b"\0"):
        name = f"{len(more)}.safetensors"
        StoredFiles(place)[name] = data + more
        path = f"{place}/{name}"
        if not more:
            assert ec.open(path)["w"].shape == (3,)
            continue
        with pytest.raises(ValueError, match="more bytes than its header says"):
            ec.open(path)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "\x1b[2J", "", ".", "..", "a..b", "%root", "_METADATA"]
)
def test_names_are_data(tmp_path, name):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({name: np.ones(2, np.float32)}, path)
    ckpt = ec.open(path)
    (ours,) = ckpt.leaves
    assert "\x1b" not in repr(ckpt)
    assert ckpt[ours].read().tolist() == [1, 1]
    ec.export_safetensors(tmp_path / "out.safetensors", ckpt)
    assert (tmp_path / "out.safetensors").read_bytes() == path.read_bytes()
    ec.materialise(ckpt.tree)


@given(st.sets(st.text("ab.0é%", max_size=8), min_size=1, max_size=12))
def test_names_have_an_inverse(names):
    data = safetensors.numpy.save({n: np.full(1, i) for i, n in enumerate(names)})
    ckpt = ec.open(io.BytesIO(data))
    assert len(ckpt) == len(names)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "m.safetensors")
        ec.export_safetensors(path, ckpt)
        exported = safetensors.numpy.load_file(path)
    assert {n: x.tolist() for n, x in exported.items()} == {
        n: [i] for i, n in enumerate(names)
    }


# ---- Writing.


def test_what_goes_in_comes_out(file, tmp_path):
    out = tmp_path / "out.safetensors"
    ckpt = ec.open(file)
    for max_bytes in (2**28, 2**18):
        ec.export_safetensors(out, ckpt, max_bytes=max_bytes)
        assert out.read_bytes() == file.read_bytes()
    ec.export_safetensors(
        out, ec.materialise(ckpt.tree), rename=_own_names(ckpt), metadata=ckpt.metadata
    )
    assert out.read_bytes() == file.read_bytes()
    assert os.listdir(tmp_path) == ["out.safetensors"]


def _own_names(ckpt):
    # Out of plain dicts the names are the same; this goes through a rename as well.
    return ec.rename([]).inverse(ckpt)


class Block(eqx.Module):
    weight: jax.Array
    scale: jax.Array


class Model(eqx.Module):
    blocks: list[Block]
    head: jax.Array
    dropout: eqx.nn.Dropout


def test_a_rename_there_and_back(tmp_path, getkey):
    path, out = tmp_path / "hf.safetensors", tmp_path / "out.safetensors"
    rng = np.random.default_rng(0)
    tensors = {
        f"encoder.layer.{i}.{name}": rng.normal(size=4).astype(ml_dtypes.bfloat16)
        for i in range(12)
        for name in ("attention.self.weight", "LayerNorm.gamma")
    }
    tensors["cls.weight"] = rng.normal(size=3).astype(np.float16)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    zeros = lambda: jnp.zeros(4, jnp.bfloat16)
    blocks = [Block(zeros(), zeros()) for _ in range(12)]
    model = Model(blocks, jnp.zeros(3, jnp.float16), eqx.nn.Dropout(0.1))
    rules = [
        (r"^encoder[.]layer[.]", "blocks."),
        (r"attention[.]self[.]weight$", "weight"),
        (r"LayerNorm[.]gamma$", "scale"),
        (r"^cls[.]weight$", "head"),
    ]
    there = ec.rename(rules)
    pair = (lambda m: m, lambda c: c, there)
    loaded, _ = ec.graft(model, path, [pair])
    assert np.asarray(loaded.blocks[11].scale).tobytes() == (
        tensors["encoder.layer.11.LayerNorm.gamma"].tobytes()
    )
    back = there.inverse(path)
    about = ec.open(path).metadata
    ec.export_safetensors(out, loaded, eqx.is_array, rename=back, metadata=about)
    assert out.read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="`extra` is none"):
        ec.export_safetensors(out, {"extra": jnp.ones(1)}, rename=back)
    assert out.read_bytes() == path.read_bytes()


def test_what_cannot_be_written(tmp_path):
    out = tmp_path / "m.safetensors"
    bad = [
        ({"k": jax.random.key(0)}, r"k  \(key\)\n.*`skip=\[\"k\"\]` leaves them out"),
        ({"c": np.ones(2, np.complex128)}, "c  complex128"),
        ({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, "both get the name `a.b`"),
        ({"__metadata__": jnp.ones(1)}, "cannot have the name"),
        ({"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, "`a` cannot be written"),
        ({"a": 3}, r"a  \(int\)"),
        ({"a": print}, "Nothing to write"),
        (jnp.ones(1), "The tree is one array, which has no name"),
        ({"\ud800": jnp.ones(1)}, "not Unicode"),
    ]
    for tree, match in bad:
        with pytest.raises((ValueError, TypeError), match=match):
            ec.export_safetensors(out, tree)
    with pytest.raises(ValueError, match="a dict of strings"):
        ec.export_safetensors(out, {"a": jnp.ones(1)}, metadata={"width": 3})
    for metadata in ({1: "1"}, {"a": "\ud800"}):
        with pytest.raises(ValueError, match="a dict of strings"):
            ec.export_safetensors(out, {"a": jnp.ones(1)}, metadata=metadata)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "spec", [eqx.is_array, eqx.is_array_like, eqx.is_inexact_array, np.shape]
)
def test_a_filter_sees_what_was_saved(tmp_path, spec):
    """Of a checkpoint the same is written as of the tree."""
    tree = {
        "jax": jnp.ones(3),
        "ints": jnp.arange(3),
        "numpy": np.ones(3),
        "generic": np.float32(2),
        "float": 0.5,
        "flag": True,
        "text": "abc",
    }
    chosen = {name for name, x in tree.items() if spec(x)}
    skip = sorted(chosen & {"float", "flag"})
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    for n, what in enumerate([tree, ec.open(tmp_path / "c")]):
        ec.export_safetensors(tmp_path / f"{n}.safetensors", what, spec, skip=skip)
        assert set(ec.open(tmp_path / f"{n}.safetensors")) == chosen - {*skip}


@pytest.mark.parametrize("there", [False, True])
def test_a_save_to_the_name_of_a_file(tmp_path, there):
    """No save makes a directory of that name; the error has the call that writes it."""
    path, tree = tmp_path / "model.safetensors", {"w": jnp.ones(3)}
    if there:
        ec.export_safetensors(path, tree)

    def manager():
        with ec.CheckpointManager(path) as manager:
            manager.save(1, tree)

    for save in (
        lambda: ec.tree_serialise_leaves(path, tree),
        lambda: ec.tree_serialise_leaves(path.as_uri(), tree, layout="zarr"),
        lambda: ec.async_tree_serialise_leaves(path, tree),
        manager,
    ):
        error = FileExistsError if there else ValueError
        with pytest.raises(error, match="nothing was saved.*`ec.export") as e:
            save()
        assert path.exists() == there
    eval(str(e.value).split("`")[-2], {"ec": ec, "tree": tree})
    assert list(ec.open(path)) == ["w"]


def test_what_is_there_stays(tmp_path):
    tree = {"a": jnp.ones(1)}
    (tmp_path / "notes.safetensors").write_text("These are my notes.")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").write_text("mine")
    ec.tree_serialise_leaves(tmp_path / "ckpt", tree)
    ec.export_safetensors(tmp_path / "good.safetensors", tree)
    (tmp_path / "empty").mkdir()
    for name in ("notes.safetensors", "directory", "ckpt", "empty"):
        with pytest.raises(FileExistsError):
            ec.export_safetensors(tmp_path / name, tree)
    with pytest.raises(FileExistsError, match="overwrite=False"):
        ec.export_safetensors(tmp_path / "good.safetensors", tree, overwrite=False)
    assert (tmp_path / "notes.safetensors").read_text() == "These are my notes."


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path, source = tmp_path / "m.safetensors", tmp_path / "source"
    ec.export_safetensors(path, {"a": jnp.ones(1)})
    ec.tree_serialise_leaves(source, {"w": jnp.ones(10**6)}, durable=False)
    (data,) = [p for p in source.glob("d/*/0")]
    data.write_bytes(bytes(data.stat().st_size))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="its bytes are not those"):
        ec.export_safetensors(path, ec.open(source))
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "source"]


def test_in_a_store(tmp_path):
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((100, 100))}
    ec.export_safetensors("memory://formats/m.safetensors", tree)
    ckpt = ec.open("memory://formats/m.safetensors")
    assert ckpt["a"].read().tolist() == [0, 1, 2]
    assert float(ckpt["b"][3:5].read().sum()) == 200
    assert float(ckpt["b"].read().sum()) == 10000
    ec.export_safetensors("memory://formats/m.safetensors", tree)
    with pytest.raises(RuntimeError, match="replaced"):
        ckpt["a"].read()


def test_shards_of_devices(file):
    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.sharding.PartitionSpec(None, "x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    saved = _tensors()["head.big"][:, :400]
    like = jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)
    ec.export_safetensors(file.with_name("sharded.safetensors"), {"w": saved})
    out = ec.tree_deserialise_leaves(
        file.with_name("sharded.safetensors"), {"w": like}, max_bytes=2**20
    )
    assert out["w"].sharding == sharding and np.array_equal(out["w"], saved)
    ec.export_safetensors(file.with_name("again.safetensors"), out)
    again = file.with_name("again.safetensors").read_bytes()
    assert again == file.with_name("sharded.safetensors").read_bytes()


def test_an_open_checkpoint_at_the_end_of_a_process(tmp_path):
    path = tmp_path / "a.safetensors"
    ec.export_safetensors(path, {"w": np.ones(3)})
    code = f"import eqx_ckpt as ec; ckpt = ec.open({str(path)!r}); print(ckpt)"
    done = scripts.run(code)
    assert done.returncode == 0 and "w" in done.stdout and not done.stderr, done.stderr


def _process(path, number, tensors, starts, **metadata):
    """The file of a process, as `torch.distributed.checkpoint` writes it."""
    info = {name: {"saved_offsets": list(start)} for name, start in starts.items()}
    metadata |= {"format": "pt", "DCP_VERSION": "1.0"}
    metadata["DCP_SHARDING_INFO"] = json.dumps(info)
    path.mkdir(exist_ok=True)
    file = path / f"shard-{number:05}-model-00001-of-00001.safetensors"
    safetensors.numpy.save_file(tensors, file, metadata)
    return file


def _processes(path, whole, rows, columns):
    """Files of a grid of processes, with borders along two axes."""
    number = 0
    for a, b in zip([0, *rows], [*rows, len(whole)]):
        for c, d in zip([0, *columns], [*columns, len(whole[0])]):
            number += 1
            tensors = {"a.w": np.ascontiguousarray(whole[a:b, c:d])}
            starts = {"a.w": (a, c)}
            if number == 1:
                tensors["b"], starts["b"] = np.arange(3), (0,)
            _process(path, number, tensors, starts)


_cuts = st.lists(st.integers(0, 9), max_size=3).map(sorted)
_slices = st.slices(9)


@settings(max_examples=25)
@given(_cuts, _cuts, _slices, _slices)
def test_files_of_processes_are_one_checkpoint(rows, columns, i, j):
    whole = np.arange(81, dtype="f4").reshape(9, 9)
    with tempfile.TemporaryDirectory() as path:
        path = pathlib.Path(path)
        _processes(path, whole, rows, columns)
        ckpt = ec.open(path)
        assert [*ckpt] == ["a.w", "b"] and ckpt.metadata == {"format": "pt"}
        assert np.array_equal(ckpt["a.w"].read(), whole)
        assert np.array_equal(ckpt["a.w"][i, j].read(), whole[i, j])
        assert np.array_equal(ckpt["a.w"][4, j].read(), whole[4, j])
        assert np.array_equal(ckpt["a.w"].store.read().result(), whole)
        assert ckpt["b"].read().tolist() == [0, 1, 2]
        ec.convert(path, path / "out")
        assert np.array_equal(ec.open(path / "out")["a.w"].read(), whole)


def test_only_what_is_needed_is_read_of_files_of_processes(tmp_path):
    whole = np.arange(2**20, dtype="f4").reshape(1024, 1024)
    _processes(tmp_path / "c", whole, [256, 512, 768], [])
    lazy = ec.open(tmp_path / "c")["a.w"]
    with ec.counting() as count:
        assert np.array_equal(lazy[510:514].read(), whole[510:514])
    assert count() == 4 * 1024 * 4
    with ec.counting() as count:
        loaded = ec.tree_deserialise_leaves(
            tmp_path / "c", {"a": {"w": lazy[:]}}, max_bytes=2**20, unexpected="ignore"
        )
    assert np.array_equal(loaded["a"]["w"], whole) and count() < 1.1 * whole.nbytes


def test_parts_of_tensors_are_never_whole_ones(tmp_path):
    one, path = np.ones((2, 4), "f4"), tmp_path / "c"
    first = _process(path, 1, {"w": one}, {"w": (0, 0)})
    second = _process(path, 2, {"w": one}, {"w": (2, 0)})
    assert ec.open(path)["w"].shape == (4, 4)
    for file in (first, second):
        with pytest.raises(ValueError, match=r"'w'.*parts of larger ones.*DCP_SHARD"):
            ec.open(file)
        with pytest.raises(ValueError, match="DCP_SHARDING_INFO"):
            ec.convert(file, tmp_path / "out")
    # Under any name, alone in a directory, or in an index.
    for name in ("a.safetensors", "model.safetensors"):
        (tmp_path / name).mkdir()
        shutil.copy(second, tmp_path / name / name)
        with pytest.raises(ValueError, match="DCP_SHARDING_INFO"):
            ec.open(tmp_path / name)
    for file in (first, second):
        index = tmp_path / "b" / "model.safetensors.index.json"
        index.parent.mkdir(exist_ok=True)
        shutil.copy(file, index.parent / "a.safetensors")
        index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
        if file == second:
            with pytest.raises(ValueError, match="DCP_SHARDING_INFO"):
                ec.open(index)
        else:  # As one process writes it for all.
            assert ec.open(index)["w"].shape == (2, 4)


def test_a_process_between_others_is_missed(tmp_path):
    """Also where no tensor is in parts."""
    path = tmp_path / "c"
    files = [_process(path, i, {f"w{i}": np.ones(2)}, {f"w{i}": (0,)}) for i in (1, 2)]
    third = _process(path, 3, {"w3": np.ones(2)}, {"w3": (0,)})
    assert [*ec.open(path)] == ["w1", "w2", "w3"]
    files[1].rename(tmp_path / "away")
    with pytest.raises(ValueError, match="no `shard-00002-...` in it.*shard-00003-"):
        ec.open(path)
    (tmp_path / "away").rename(files[1])
    files[0].unlink()
    with pytest.raises(ValueError, match="no `shard-00001-"):
        ec.open(path)
    third.unlink()
    with pytest.raises(ValueError, match="no `shard-00001-"):
        ec.open(path)


def test_an_index_of_one_process_is_refused(tmp_path):
    """Its parts begin at the first elements, and are not the whole tensors."""
    path = tmp_path / "c"
    first = _process(path, 1, {"w": np.ones((4, 2))}, {"w": (0, 0)})
    _process(path, 2, {"w": np.ones((4, 2))}, {"w": (4, 0)})
    assert ec.open(path)["w"].shape == (8, 2)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": first.name}}))
    for name in (path, index):
        with pytest.raises(ValueError, match="names `shard-00001-.* one process"):
            ec.open(name)


def test_picks_in_steps_need_no_memory_of_their_own(tmp_path):
    """Of numbers of four bits, 1 MiB in the file, 2**20 are read."""
    entry = {"dtype": "F4", "shape": [2**21], "data_offsets": [0, 2**20]}
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2**20))
    lazy = ec.open(file)["w"][::2]
    tracemalloc.start()
    try:
        assert lazy.read().size == 2**20
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_numbers_of_four_bits(tmp_path):
    """Two in a byte, the first in its lower half, as PyTorch has them."""
    data = bytes(range(0, 252, 21))
    entry = {"dtype": "F4", "shape": [3, 8], "data_offsets": [0, 12]}
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    halves = [half for byte in data for half in (byte & 15, byte >> 4)]
    want = np.array(halves, "u1").reshape(3, 8).view(ml_dtypes.float4_e2m1fn)
    lazy = ec.open(file)["w"]
    for pick in (np.s_[:], np.s_[1], np.s_[:, 3:6], np.s_[::-2, 5], np.s_[1:, ::-3]):
        got = np.asarray(lazy[pick].read())
        assert got.dtype == want.dtype and got.tobytes() == want[pick].tobytes()
    assert lazy.store.read().result().tobytes() == want.tobytes()
    ec.convert(file, tmp_path / "out")
    assert np.asarray(ec.open(tmp_path / "out")["w"].read()).tobytes() == want.tobytes()
    entry["data_offsets"] = [0, 11]
    header = json.dumps({"w": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[:11])
    with pytest.raises(ValueError, match="not of the size of its shape"):
        ec.open(file)


@pytest.mark.parametrize(
    "start, tensor, why",
    [
        ((4, 0), np.ones((2, 4), "f4"), "'w' are missing: the files have 16 of its 24"),
        ((2, 4), np.ones((2, 4), "f4"), "'w' are missing: the files have 16 of its 32"),
        ((1, 0), np.ones((2, 4), "f4"), "parts of 'w' overlap"),
        ((0, 0), np.ones((2, 4), "f4"), "parts of 'w' overlap"),
        ((0, 2), np.ones((4, 4), "f4"), "parts of 'w' overlap"),
        ((2, 0), np.ones((2, 4), "f2"), "'w' are not of one dtype"),
        ((2,), np.ones(2, "f4"), "'w' are not of one dtype"),
        ((2, -1), np.ones((2, 4), "f4"), "'w' in .* begins nowhere"),
        ((2, 2**62), np.ones((2, 4), "f4"), "'w' in .* begins nowhere"),
        ((2,), np.ones((2, 4), "f4"), "does not say where"),
        (("2", 0), np.ones((2, 4), "f4"), "does not say where"),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path, start, tensor, why):
    path = tmp_path / "c"
    _process(path, 1, {"w": np.ones((2, 4), "f4")}, {"w": (0, 0)})
    _process(path, 2, {"w": tensor}, {"w": start})
    with pytest.raises(ValueError, match=why):
        ec.open(path)
    _process(path, 2, {"w": np.ones((2, 4), "f4")}, {"w": (2, 0)})
    lazy = ec.open(path)["w"]
    _process(path, 2, {"w": np.zeros((2, 4), "f4")}, {"w": (2, 0)}, other="x")
    with pytest.raises(RuntimeError, match="replaced or deleted"):
        lazy.read()
    with pytest.raises(ValueError, match="differ in their metadata"):
        ec.open(path)


def test_a_head_that_is_tied_to_its_embedding(tmp_path):
    """It is one array in a checkpoint, and a name of its own in a `.safetensors`, which
    libraries for PyTorch write once; without it, the error of a graft names the
    embedding, whose pair it is."""
    table = jnp.arange(2.0**14).reshape(-1, 4)
    model = {"embed_tokens": {"weight": table}, "lm_head": {"weight": table}}
    ec.tree_serialise_leaves(tmp_path / "a", model)
    assert (
        sum(f.stat().st_size for f in (tmp_path / "a").rglob("*")) < 1.5 * table.nbytes
    )
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", model)
    assert loaded["lm_head"]["weight"] is loaded["embed_tokens"]["weight"]
    ec.convert(tmp_path / "a", tmp_path / "both.safetensors")
    both = safetensors.numpy.load_file(tmp_path / "both.safetensors")
    assert {*both} == {"embed_tokens.weight", "lm_head.weight"}
    ec.convert(tmp_path / "a", tmp_path / "one.safetensors", skip=["lm_head.*"])
    one = safetensors.numpy.load_file(tmp_path / "one.safetensors")
    assert [*one] == ["embed_tokens.weight"]
    like = jax.tree.map(jnp.zeros_like, model)
    whole = (lambda m: m, lambda c: c)
    with pytest.raises(RuntimeError, match=r"lm_head.* `embed_tokens.weight`"):
        ec.graft(like, tmp_path / "one.safetensors", [whole])
    embedding = lambda c: c.embed_tokens
    pairs = [(lambda m, x=x: m[x], embedding) for x in like]
    made, _ = ec.graft(like, tmp_path / "one.safetensors", pairs)
    assert jnp.array_equal(made["lm_head"]["weight"], table)
