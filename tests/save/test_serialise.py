import array
import collections
import dataclasses
import functools as ft
import itertools
import json
import random
import types
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from support import inside
from support.helpers import assert_alike, files_of, run_program

import eqx_ckpt as ec


@pytest.fixture(params=["ocdbt", "zarr"])
def layout(request):
    return request.param


def test_dtype_casts_floats_leaf_by_leaf(tmp_path, layout):
    tree = {
        "f32": jnp.linspace(0, 1, 5),
        "f64": np.linspace(0, 1, 5),
        "half": jnp.ones(2, jnp.float16),
        "int": jnp.arange(3),
        "bool": np.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "scalar": 0.1,
        "weak": jnp.asarray(1.5),
    }
    ec.tree_serialise_leaves(tmp_path / "a", tree, dtype=jnp.bfloat16, layout=layout)
    leaves = ec.open(tmp_path / "a").leaves
    dtypes = {name: str(leaf.dtype) for name, leaf in leaves.items()}
    for name in ("f32", "f64", "half", "weak"):
        assert dtypes[name] == "bfloat16"
        expected = np.asarray(tree[name]).astype(jnp.bfloat16)
        assert np.array_equal(leaves[name], expected)
    assert dtypes["int"] == "int32" and dtypes["bool"] == "bool"
    assert dtypes["complex"] == "complex64"
    assert leaves["scalar"].read() == 0.1
    for bad in (jnp.int32, "complex64", object):
        with pytest.raises(ValueError, match="`dtype` must be a floating dtype"):
            ec.tree_serialise_leaves(tmp_path / "b", tree, dtype=bad)
    assert not (tmp_path / "b").exists()


def test_chunks(tmp_path, layout):
    x = np.arange(6 * 20 * 10, dtype=np.float32).reshape(6, 20, 10)
    cases = {
        "bytes": (800, (1, 20, 10)),
        "tiny": (1, (1, 1, 1)),
        "all": (2**30, (6, 20, 10)),
        "shape": (lambda name, shape, dtype: (4, 16, 7), (4, 16, 7)),
        "default": (lambda name, shape, dtype: None, (6, 20, 10)),
    }
    for name, (chunks, expected) in cases.items():
        path = tmp_path / name
        ec.tree_serialise_leaves(path, {"x": x}, chunks=chunks, layout=layout)
        lazy = ec.open(path)["x"]
        assert lazy.store.chunk_layout.read_chunk.shape == expected
        assert np.array_equal(lazy.read(), x)
        for view in (np.s_[4, 5:15], np.s_[1:5, ::3, 2], np.s_[..., 3]):
            assert np.array_equal(lazy[view].read(), x[view])
            assert np.array_equal(lazy[view].read(verify=False), x[view])
    for bad in (0, -1, lambda *_: (1, 2), lambda *_: (0, 1, 1)):
        with pytest.raises(ValueError, match="`chunks`"):
            ec.tree_serialise_leaves(tmp_path / "bad", {"x": x}, chunks=bad)
    assert not (tmp_path / "bad").exists()


def test_large_leaves_span_files(tmp_path, monkeypatch):
    inside.limit(monkeypatch, min_file_bytes=2**20, max_files=1000)
    rng = np.random.default_rng(0)
    tree = {f"x{i}": rng.standard_normal((900, 177)) for i in range(5)}
    tree["s"] = np.arange(3)
    tree["tied"] = tree["x3"]
    ec.tree_serialise_leaves(tmp_path / "a", tree, chunks=2**17)
    index = json.loads((tmp_path / "a" / "eqx_ckpt.json").read_bytes())
    runs = [inside.runs_of(tmp_path / "a", name) for name in tree]
    assert len(index["files"]) == 7 and sum(map(len, runs)) >= len(tree) + 4
    ckpt = ec.open(tmp_path / "a")
    for name, x in tree.items():
        assert np.array_equal(ckpt[name], x)
        assert np.array_equal(ckpt[name].store.read().result(), x)
    for start in range(0, 890, 23):
        for name in ("x1", "x3", "tied"):
            part = ckpt[name][start : start + 10].read(verify=False)
            assert np.array_equal(part, tree[name][start : start + 10])


@pytest.mark.parametrize("kind", ["jax", "bfloat16", "turned", "numpy"])
def test_files_that_hold_one_chunk_of_a_leaf(tmp_path, monkeypatch, kind):
    """Such a chunk is written together with small leaves, whose memory is stored."""
    inside.limit(monkeypatch, min_file_bytes=4 * 1024, max_files=1000)
    rng, tree = np.random.default_rng(0), {}
    for i in range(30):
        x = rng.integers(0, 100, (4 * (1 + i % 5), 64)).astype("float32")
        if kind != "numpy":
            x = jnp.asarray(x, "bfloat16" if kind == "bfloat16" else None)
        if kind == "turned" and i == 15:  # It follows one chunk.
            layouts = pytest.importorskip("jax.experimental.layout")
            if not hasattr(layouts, "Format"):
                pytest.skip("This JAX calls it otherwise.")
            turned = layouts.Format(layouts.Layout((1, 0)), x.sharding)
            x = jax.device_put(x, turned)
        tree[f"x{i:02}"] = x
    ec.tree_serialise_leaves(tmp_path / "a", tree, chunks=1024)
    runs = [inside.runs_of(tmp_path / "a", name) for name in tree]
    assert any(len(own) > 1 for own in runs)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)


def test_large_leaves_are_aligned(tmp_path):
    tree = {f"x{i}": np.zeros(10_000 + 7 * i, np.float32) for i in range(9)}
    tree["one"] = np.int8(1)
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    runs = [inside.runs_of(tmp_path / "a", name) for name in tree]
    assert all(offset % 64 == 0 for ((_, _, _, offset),) in runs)


def test_where_saves_a_part(tmp_path, getkey, layout):
    model = eqx.nn.MLP(3, 2, 8, 2, key=getkey())
    ec.tree_serialise_leaves(
        tmp_path / "a", model, where=lambda m: m.layers[1], layout=layout
    )
    assert list(ec.open(tmp_path / "a").leaves) == ["layers.1.weight", "layers.1.bias"]
    ec.tree_serialise_leaves(
        tmp_path / "a",
        model,
        where=lambda m: m.layers,
        filter_spec=lambda x: eqx.is_array(x) and x.ndim == 2,
        layout=layout,
    )
    assert [n.rpartition(".")[2] for n in ec.open(tmp_path / "a").leaves] == (
        ["weight"] * 3
    )


def test_unknown_layout(tmp_path):
    with pytest.raises(ValueError, match="`layout` must be"):
        ec.tree_serialise_leaves(tmp_path / "a", jnp.ones(2), layout="n5")


def test_metadata_comes_back_exactly(tmp_path, layout):
    metadata = {"a": [1, 2.5, None, True, -0.0, 2**80], "b": {"": "ü\n"}, "c": []}
    ec.tree_serialise_leaves(
        tmp_path / "a", jnp.ones(2), metadata=metadata, layout=layout
    )
    assert repr(ec.open(tmp_path / "a").metadata) == repr(metadata)
    for bad, part in [
        ((1, 2), "`metadata` is of type `tuple`"),
        ({"x": {1: 2}}, r"`metadata\['x'\]` has the key 1"),
        ({"x": [float("nan")]}, r"`metadata\['x'\]\[0\]` is nan"),
        (np.ones(2), "Store arrays in the tree"),
        (np.float64(1), "of type `float64`"),
    ]:
        with pytest.raises(ValueError, match=part):
            ec.tree_serialise_leaves(tmp_path / "b", jnp.ones(2), metadata=bad)
    assert not (tmp_path / "b").exists()


def test_sharded_arrays(tmp_path, layout):
    """Saved from any mesh, loaded onto that of `like`."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec
    rows = jax.sharding.NamedSharding(mesh, spec("x", None))
    both = jax.sharding.NamedSharding(mesh, spec("y", "x"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    x = jnp.arange(64 * 1000.0).reshape(64, 1000)
    tree = {"rows": jax.device_put(x, rows), "plain": x}
    ec.tree_serialise_leaves(tmp_path / "a", tree, layout=layout)
    for sharding in (rows, both, one):
        like = {
            "rows": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            "plain": jax.device_put(jnp.zeros_like(x), sharding),
        }
        out = ec.tree_deserialise_leaves(tmp_path / "a", like)
        assert out["rows"].sharding == out["plain"].sharding == sharding
        assert np.array_equal(out["rows"], x) and np.array_equal(out["plain"], x)
    skeleton = ec.skeleton(lambda: {"rows": jnp.zeros((64, 1000))}, sharding=both)
    out = ec.tree_deserialise_leaves(tmp_path / "a", skeleton, unexpected="ignore")
    assert out["rows"].sharding == both


def test_no_copy_of_the_tree_is_made(tmp_path):
    """Peak memory of a save, over that of the tree: 256 MiB in 8 leaves."""
    out = run_program("peak_of_a_save", tmp_path)
    assert float(out) < 0.05 * 256


def test_names_that_differ_by_case(tmp_path, monkeypatch):
    tree = {"a": jnp.ones(2), "A": jnp.zeros(2)}
    ec.tree_serialise_leaves(tmp_path / "a", tree, layout="zarr")
    assert ec.open(tmp_path / "a")["A"].read().tolist() == [0, 0]
    inside.replace(monkeypatch, "names are folded", lambda _: True)
    with pytest.raises(ValueError, match='differ only by case.*layout="ocdbt"'):
        ec.tree_serialise_leaves(tmp_path / "b", tree, layout="zarr")
    assert not (tmp_path / "b").exists()
    ec.tree_serialise_leaves(tmp_path / "b", tree)


def test_skeleton_keeps_numpy(tmp_path):
    make = lambda: {"j": jnp.ones(2), "n": np.ones(2), "s": np.float64(1.5), "f": 2.0}
    skeleton = ec.skeleton(make)
    assert isinstance(skeleton["j"], jax.ShapeDtypeStruct)
    assert isinstance(skeleton["n"], np.ndarray) and skeleton["n"].dtype == np.float64
    assert type(skeleton["s"]) is np.float64 and skeleton["f"] == 2.0
    ec.tree_serialise_leaves(tmp_path / "a", make())
    out = ec.tree_deserialise_leaves(tmp_path / "a", skeleton)
    assert eqx.tree_equal(out, make(), typematch=True)


def test_leaf_names():
    tree = {"layers": [eqx.nn.Linear(2, 2, key=jax.random.key(0))], "x": (1, None)}
    names = ec.leaf_names(tree)
    assert names["layers"][0].weight == "layers.0.weight"
    assert names["x"] == ("x.0", None)
    assert ec.leaf_names(3) == "%root"
    assert ec.leaf_names({"a": None}, is_leaf=lambda x: x is None) == {"a": "a"}


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_compression(tmp_path, layout, compression):
    tree = {
        "zeros": jnp.zeros((3000, 101)),
        "rows": np.repeat(np.arange(5000), 7).reshape(5000, 7),
        "half": jnp.ones((70_000,), jnp.bfloat16),
        "small": jnp.zeros(10),
        "same": jnp.zeros((3000, 101)),
    }
    chunks = lambda name, shape, dtype: (1000, 7) if name == "rows" else None
    save = lambda path, **options: ec.tree_serialise_leaves(
        path, tree, layout=layout, chunks=chunks, **options
    )
    save(tmp_path / "plain")
    save(tmp_path / "less", compression=compression)
    size = lambda p: sum(map(len, files_of(p).values()))
    assert size(tmp_path / "less") < size(tmp_path / "plain") / 20
    ckpt = ec.open(tmp_path / "less")
    for verify in (True, False):
        loaded = ec.tree_deserialise_leaves(ckpt, tree, verify=verify)
        assert_alike(loaded, tree)
        rows = ckpt["rows"][4990:17:-3, 2].read(verify=verify)
        np.testing.assert_array_equal(rows, tree["rows"][4990:17:-3, 2])
    for name, leaf in tree.items():
        stored = ts.open(ckpt[name].url).result().read().result()
        np.testing.assert_array_equal(stored, leaf)
    with pytest.raises(ValueError, match='must be None, "lz4" or "zstd", not'):
        save(tmp_path / "other", compression="gzip")
    assert not (tmp_path / "other").exists()


def test_leaves_are_aligned_in_their_files(tmp_path):
    tree = {
        f"x{i}": jnp.zeros(size, dtype)
        for i, (size, dtype) in enumerate(
            itertools.product(
                [1, 3, 65_537, 1_500_001], ["int8", "float32", "complex64"]
            )
        )
    }
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    runs = [inside.runs_of(tmp_path / "a", name) for name in tree]
    assert all(offset % 64 == 0 for ((_, _, _, offset),) in runs)


def test_max_bytes(tmp_path):
    """Casts of 256 MiB and of 128 MiB of another order, both ways: part by part."""
    out = run_program("peak_of_casts", tmp_path / "a")
    save, load = map(float, out.split())
    # What is freed goes back to the system a little later.
    assert save < 64 + 48 and load < 64 + 48


def test_a_load_converts_within_max_bytes(tmp_path):
    """The numbers of each leaf are converted to memory that JAX takes as it is."""
    tree = [np.full(2**20, i, np.float32) for i in range(64)]
    ec.tree_serialise_leaves(tmp_path / "a", tree, durable=False)
    assert float(run_program("peak_of_conversions", tmp_path / "a")) < 24


def test_progress_is_shown_of_saves_and_loads(tmp_path, layout, capsys):
    tree = {"a": jnp.zeros((3000, 1000)), "b": np.ones(3), "c": 1.5}
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree, layout=layout, progress=True)
    saved = capsys.readouterr().err
    ec.tree_deserialise_leaves(path, tree, progress=True)
    loaded = capsys.readouterr().err
    ec.materialise(ec.open(path).tree, progress=True)
    fetched = capsys.readouterr().err
    ec.async_tree_serialise_leaves(path, tree, layout=layout, progress=True).result()
    again = capsys.readouterr().err
    ec.tree_serialise_leaves(path, tree, layout=layout, chunks=2**20, progress=True)
    cut = capsys.readouterr().err
    for text, what in [
        (saved, "save"),
        (cut, "save"),
        (loaded, "load"),
        (fetched, "load"),
        (again, "save"),
    ]:
        assert f"{what}: 100%" in text and "3/3 leaves" in text and "11.4M" in text
    ec.tree_serialise_leaves(path, tree, layout=layout)
    ec.tree_deserialise_leaves(path, tree)
    assert capsys.readouterr().err == ""


class _Tensor:
    """As arrays of other libraries are: a leaf, with a shape and a dtype."""

    shape, dtype = (2,), "float32"


class _Table:
    """As tables of pandas are: with two dtypes, and an array when NumPy asks."""

    shape = (2, 2)

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, dtype)


_OTHERS = [
    _Tensor(),
    _Table(),
    array.array("f", [1]),
    memoryview(b"1"),
    np.random.default_rng(0),
    np.random.RandomState(0),
    random.Random(0),
]


# A reference to an array, which `jax.new_ref` makes since JAX 0.7.2.
_ref = getattr(jax, "new_ref", None)


@pytest.mark.parametrize("other", [*([_ref(jnp.ones(2))] if _ref else []), *_OTHERS])
def test_data_of_other_types_is_not_left_out_in_silence(tmp_path, other):
    name = type(other).__name__
    tree = {"x": jnp.ones(2), "r": other, "act": jnp.tanh, "dtype": jnp.float32}
    for spec in (ec.is_storable, {**dict.fromkeys(tree, ec.is_storable)}):
        with pytest.raises(TypeError, match=f"leaf `r` .* a `{name}` cannot be stored"):
            ec.tree_serialise_leaves(tmp_path / "c", tree, spec)
    assert not (tmp_path / "c").exists()
    for where in (lambda t: t["x"], lambda t: [t["x"], t["act"]]):
        ec.tree_serialise_leaves(tmp_path / "c", tree, where=where)
    spec = lambda x: ec.is_storable(x)
    ec.tree_serialise_leaves(tmp_path / "c", tree, spec)
    with pytest.raises(TypeError, match=f"Leaf `r`: `like` has a `{name}` there"):
        ec.tree_deserialise_leaves(tmp_path / "c", tree)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"\br\b"):
        ec.graft({"m": tree}, tmp_path / "c", [(lambda m: m["m"], lambda c: c)])
    assert ec.tree_deserialise_leaves(tmp_path / "c", tree, spec)["r"] is other


class _Holds:
    """An object of which JAX knows no more than that it is a leaf."""

    def __init__(self, held):
        self.held = held

    def __call__(self):
        return self.held


class _HoldsInSlots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


@dataclasses.dataclass
class _HoldsAsField:
    held: Any


_HOLDERS = {
    "object": (_Holds, "held"),
    "slots": (_HoldsInSlots, "held"),
    "dataclass": (_HoldsAsField, "held"),
    "namespace": (lambda x: types.SimpleNamespace(a=x), "a"),
    "deque": (lambda x: collections.deque([1, x]), r"\[1\]"),
    "mapping": (lambda x: types.MappingProxyType({"a": x}), r"\['a'\]"),
    "partial": (lambda x: ft.partial(jnp.add, 1, x), r"args\[1\]"),
    "partial of a keyword": (lambda x: ft.partial(jnp.add, y=x), r"keywords\['y'\]"),
    "deep": (lambda x: _Holds({"a": [_HoldsInSlots((1, x))]}), r"held\['a'\]\[0\]"),
}


def _mlp(size):
    return eqx.nn.MLP(size, size, size, 1, key=jax.random.key(0))


@pytest.mark.parametrize("way", _HOLDERS)
@pytest.mark.parametrize("of", [jnp.ones, _mlp])
def test_arrays_in_what_jax_takes_for_leaves_are_not_left_out(tmp_path, way, of):
    make, place = _HOLDERS[way]
    cure = "tree_util.Partial" if "partial" in way else "register_dataclass"
    tree, path = {"x": jnp.ones(2), "state": make(of(2))}, tmp_path / "c"
    for spec in (ec.is_storable, {**dict.fromkeys(tree, ec.is_storable)}):
        with pytest.raises(TypeError, match=rf"leaf `state` .* holds an .*`\.?{place}"):
            ec.tree_serialise_leaves(path, tree, spec)
    assert not path.exists()
    with pytest.raises(TypeError, match=f"leaf `state` .*{cure}"):
        ec.to_bytes(tree)
    spec = lambda x: ec.is_storable(x)
    ec.tree_serialise_leaves(path, tree, spec)
    with pytest.raises(TypeError, match=f"Leaf `state`: .*{cure}"):
        ec.tree_deserialise_leaves(path, tree)
    assert ec.tree_deserialise_leaves(path, tree, spec)["state"] is tree["state"]


@pytest.mark.parametrize(
    "make", [_Holds, _HoldsInSlots, lambda x: ft.partial(_Holds(x))]
)
def test_arrays_of_numpy_in_objects_of_which_the_class_is_compared(tmp_path, make):
    for held in (np.ones(2), {"deep": [np.ones((), "bfloat16")]}):
        tree = {"x": jnp.ones(2), "state": make(held)}
        with pytest.raises(TypeError, match=r"leaf `state` .* it holds an array, `\."):
            ec.tree_serialise_leaves(tmp_path / "c", tree)
        assert not [*tmp_path.iterdir()]
    ec.tree_serialise_leaves(
        tmp_path / "c", {"state": make("text")} | {"x": np.ones(2)}
    )


def test_what_holds_no_array_of_jax_is_compared_as_ever(tmp_path):
    knot = _Holds([])
    knot.held.append(knot)
    huge = types.SimpleNamespace(vocabulary=dict.fromkeys(range(10**5)))
    others = [knot, huge, _HoldsAsField(np.ones(2))]
    others.append(ft.partial(jnp.add, np.ones(2), b=2))
    others += [jax.sharding.Mesh(np.array(jax.devices()[:1]), "x"), jax.nn.relu, "text"]
    tree = {"x": jnp.ones(2), "others": others}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    like = {"x": jnp.zeros(2), "others": others}
    assert ec.tree_deserialise_leaves(tmp_path / "c", like)["x"].tolist() == [1, 1]


@pytest.mark.skipif(_ref is None, reason="needs JAX 0.7.2")
def test_a_ref_by_the_recipe_of_its_error(tmp_path):
    tree = {"r": jax.new_ref(jnp.arange(2.0))}
    recipe = r"register_leaf\(jax.Ref, lambda ref: ref\[...\], jax.new_ref\)"
    with pytest.raises(TypeError, match=recipe):
        ec.tree_serialise_leaves(tmp_path / "c", tree)
    with ec.register_leaf(jax.Ref, lambda ref: ref[...], jax.new_ref):
        ec.tree_serialise_leaves(tmp_path / "c", tree)
        like = {"r": jax.new_ref(jnp.zeros(2))}
        out = ec.tree_deserialise_leaves(tmp_path / "c", like)
    assert out["r"][...].tolist() == [0, 1]


@pytest.mark.parametrize("count", [10, 70_000])
def test_bools_of_other_bytes_than_0_and_1(tmp_path, layout, count):
    array = np.zeros(count, bool)
    array.view(np.uint8)[-2:] = 2, 255
    ec.tree_serialise_leaves(tmp_path / "c", {"x": array}, layout=layout)
    got = ec.tree_deserialise_leaves(tmp_path / "c", {"x": array})["x"]
    assert got.tolist() == array.tolist()


def test_a_matrix(tmp_path):
    """It is more than its numbers, as all subclasses of NumPy's array are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"x": np.matrix(np.arange(6.0).reshape(2, 3))}
    with pytest.raises(TypeError, match="`x` cannot be saved: it is a `matrix`"):
        ec.tree_serialise_leaves(tmp_path / "c", tree)
    assert not [*tmp_path.iterdir()]


def test_a_leaf_whose_directory_tensorstore_refuses(tmp_path):
    tree = {"x": {"__lock": jnp.ones(3)}}
    with pytest.raises(ValueError, match="leaf `x.__lock` would have a directory"):
        ec.tree_serialise_leaves(tmp_path / "c", tree, layout="zarr")
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    assert ec.open(tmp_path / "c")["x.__lock"].read().tolist() == [1, 1, 1]


def test_chunks_that_are_no_number_of_bytes(tmp_path):
    tree = {"x": np.ones((4, 4))}
    ec.tree_serialise_leaves(tmp_path / "c", tree, chunks=lambda *_: (np.int64(2), 4))
    with pytest.raises(ValueError, match="`chunks` gave 3 for the leaf `x`"):
        ec.tree_serialise_leaves(tmp_path / "c", tree, chunks=lambda *_: 3)
