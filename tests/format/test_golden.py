"""Every version of the format that was released loads, for ever."""

import equinox as eqx
import jax
import numpy as np
import pytest
from support import golden
from support.helpers import assert_alike, files_of
from test_format import read_checkpoint

import eqx_ckpt as ec


_versions = sorted(path.name for path in golden.GOLDEN.iterdir())


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
    assert _versions


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


def test_compressed_chunks(version):
    assert ec.verify(version / "zstd") == []
    weights = ec.open(version / "zstd").tree["weights"].read()
    assert np.array_equal(weights, golden.compressible())


def test_a_save_of_two_processes(version):
    path = version / "processes"
    assert ec.verify(path) == []
    out = ec.materialise(ec.open(path).tree)
    assert out.pop("step") == 3
    for name, x in golden.shards().items():
        assert np.array_equal(np.asarray(out[name]), x)


@pytest.mark.parametrize("name", ["ocdbt", "zarr", "processes"])
def test_by_the_reader_of_format_md(version, name):
    _, out = read_checkpoint(version / name)
    assert set(out) == set(ec.open(version / name).leaves)
