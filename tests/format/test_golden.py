"""Every version of the format that was released loads, for ever."""

import shutil

import equinox as eqx
import jax
import numpy as np
import pytest
from support import golden, inside
from support.helpers import assert_alike, files_of
from test_format import read_checkpoint

import eqx_ckpt as ec


_versions = ["1"]
_compressed = sorted(
    str(path.relative_to(golden.GOLDEN))
    for codec in ("lz4", "zstd")
    for path in golden.GOLDEN.glob(f"*/*{codec}")
)


@pytest.fixture(params=_versions)
def version(request):
    path = golden.GOLDEN / request.param
    before = files_of(path)
    yield path
    assert files_of(path) == before


@pytest.fixture(scope="module")
def tree():
    """What was saved. Compiled as it was then: without optimisation, which is how the
    tests compile, the weights of a new model differ in their last bits."""
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield golden.tree()
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
        jax.clear_caches()


def test_there_are_some():
    assert len(_compressed) == 3
    assert {path.name for path in golden.GOLDEN.iterdir()} == set(_versions)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_every_kind_of_leaf(version, layout, tree):
    path = version / layout
    assert ec.verify(path) == []
    assert ec.open(path).metadata == golden.METADATA
    out = ec.tree_deserialise_leaves(path, tree, golden.storable)
    assert_alike(out, tree)
    assert out["model"].tied[0] is out["model"].tied[1]
    other = eqx.tree_at(lambda t: t["model"], tree, golden.Model(heads=2))
    with pytest.raises(RuntimeError, match="model.heads  saved 4, `like` has 2"):
        ec.tree_deserialise_leaves(path, other, golden.storable)


@pytest.mark.parametrize("name", _compressed)
def test_compressed_chunks(name):
    path = golden.GOLDEN / name
    before = files_of(path)
    assert ec.verify(path) == []
    weights = ec.open(path).tree["weights"]
    assert np.array_equal(weights.read(), golden.compressible())
    assert np.array_equal(weights[7:-3].read(), golden.compressible()[7:-3])
    assert files_of(path) == before


def test_several_files(version, tree):
    path = version / "files"
    assert ec.verify(path) == [] and len(list(path.glob("d/*/[0-9]"))) == 3
    out = ec.tree_deserialise_leaves(path, tree, golden.storable)
    assert_alike(out, tree)
    path = version / "lz4-files"
    assert ec.verify(path) == [] and len(list(path.glob("d/*/[0-9]*"))) == 11
    weights = ec.open(path)["weights"][16000:17000].read()
    assert np.array_equal(weights, golden.compressible()[16000:17000])


def test_a_save_of_two_processes(version):
    path = version / "processes"
    assert ec.verify(path) == []
    out = ec.materialise(ec.open(path).tree)
    assert out.pop("step") == 3
    for name, x in golden.shards().items():
        assert np.array_equal(np.asarray(out[name]), x)


def test_a_part_of_one_process():
    ckpt = ec.open(golden.GOLDEN / "1/part")
    assert ec.verify(ckpt) == [] and ckpt["rows"].shape == (32, 16)
    # Process 1 of two, with two devices each.
    parts = inside.parts_of(golden.GOLDEN / "1/part")
    assert parts["rows"] == ((32, 16), ((16, 0), (24, 0)))
    assert parts["columns"] == ((4, 64), ((0, 32), (0, 48)))
    assert np.array_equal(ckpt["copies"].read(), golden.shards()["copies"])
    rows = np.asarray(ckpt["rows"].store.read().result())
    assert np.array_equal(rows, golden.shards()["rows"][16:])


def test_own_states(tmp_path):
    ckpt = ec.open(golden.GOLDEN / "1/own")
    assert ec.verify(ckpt) == []
    shutil.copytree(golden.GOLDEN / "1/own", tmp_path / "3/default")
    like = {name: np.zeros_like(x) for name, x in golden.shards().items()}
    tree, own, step = ec.CheckpointManager(tmp_path).restore(like, own="all")
    assert step == 3 and np.array_equal(tree["rows"], golden.shards()["rows"])
    assert own == [{"at": 10 + i, "file": f"{i}.txt"} for i in (0, 1)]


@pytest.mark.parametrize(
    "name",
    ["1/ocdbt", "1/zarr", "1/processes", "1/files", "1/lz4-files", *_compressed],
)
def test_by_the_reader_of_format_md(name):
    path = golden.GOLDEN / name
    _, out = read_checkpoint(path)
    assert set(out) == set(ec.open(path).leaves)
