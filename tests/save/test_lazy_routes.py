"""Lazy leaves of every format, saved in every form: whole, or not at all."""

import io
import pathlib
import shutil
import warnings

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support import inside, servers
from support.helpers import damage, long, new_orbax
from support.processes import good, run_team_program

import eqx_ckpt as ec


class _Model(eqx.Module):
    layers: list[np.ndarray]
    half: jax.Array
    heads: int = eqx.field(static=True, default=8)


def _arrays():
    """Some of a few chunks, and some that are small."""
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(n, 700)).astype(np.float32) for n in (3000, 3)]
    return {"layers": layers, "half": jnp.arange(6.0).astype(jnp.bfloat16)}


def _ours(path, **options):
    tree = {**_arrays(), "key": jr.key(3), "step": 10**20, "rate": 0.5}
    ec.tree_serialise_leaves(path, tree, **options)
    return ec.open(path)


def _safetensors(path):
    file = path.with_suffix(".safetensors")
    ec.export_safetensors(file, _arrays())
    return ec.open(file)


def _equinox(path):
    model = _Model(**_arrays())
    eqx.tree_serialise_leaves(path.with_suffix(".eqx"), model)
    return ec.open(path.with_suffix(".eqx"), like=model)


def _flax(path):
    path.write_bytes(flax.serialization.to_bytes({**_arrays(), "step": 7}))
    return ec.open(path)


def _orbax(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.StandardCheckpointer() as saver:
            saver.save(path, {**_arrays(), "step": 7})
    return ec.open(path)


OURS = {
    "ours": _ours,
    "zarr": lambda path: _ours(path, layout="zarr"),
    "lz4": lambda path: _ours(path, compression="lz4"),
    "zip": lambda path: _ours(path.with_suffix(".zip")),
}
SOURCES = {
    **OURS,
    "memory": lambda path: _ours(f"memory://routes/{path.parent.name}"),
    "bytes": lambda path: ec.open(io.BytesIO(ec.to_bytes(_arrays()))),
    "safetensors": _safetensors,
    "equinox": _equinox,
    "flax": _flax,
    "orbax": _orbax,
}


def _to_file(path, tree):
    with open(path, "wb") as file:
        ec.tree_serialise_leaves(file, tree)


def _in_background(path, tree):
    ec.async_tree_serialise_leaves(path, tree).result()


def _managed(path, tree):
    with ec.CheckpointManager(path.parents[1], every=1) as manager:
        manager.save(3, tree)


def _arrays_only(path, tree):
    others = [name for name in ("key", "step", "rate") if name in tree]
    ec.export_safetensors(path, tree, skip=others)


ROUTES = {
    "directory": ec.tree_serialise_leaves,
    "zarr": lambda p, tree: ec.tree_serialise_leaves(p, tree, layout="zarr"),
    "zstd": lambda p, tree: ec.tree_serialise_leaves(p, tree, compression="zstd"),
    "one.zip": ec.tree_serialise_leaves,
    "file.zip": _to_file,
    "bytes.zip": lambda p, tree: p.write_bytes(ec.to_bytes(tree)),
    "background": _in_background,
    "background.zip": _in_background,
    "run/3/default": _managed,
    "arrays.safetensors": _arrays_only,
}


@pytest.mark.parametrize(
    "source",
    [
        *["ours", "zip", "safetensors", pytest.param("orbax", marks=new_orbax)],
        *long("zarr", "lz4", "memory", "bytes", "equinox", "flax"),
    ],
)
def test_every_format_to_every_form(source, tmp_path):
    was = SOURCES[source](tmp_path / "source").tree
    for name, save in ROUTES.items():
        save(tmp_path / name, was)
        saved = ec.open(tmp_path / name)
        difference = ec.diff(was, saved.tree)
        if name.endswith(".safetensors"):
            # It has no kinds of arrays, and arrays only.
            assert set(difference.removed) <= {"key", "step", "rate"}
            assert {x.what for x in difference.changed.values()} <= {("kind",)}
        else:
            assert not difference, difference
            assert ec.verify(saved.path) == []
        rows = np.asarray(saved.tree.layers[0][7:9, ::100])
        np.testing.assert_array_equal(rows, _arrays()["layers"][0][7:9, ::100])
    # Into a store, beside what is in memory.
    store = f"memory://routes/{tmp_path.name}/out"
    ec.tree_serialise_leaves(store, {"lazy": was, "now": jnp.ones(3)})
    assert not ec.diff(was, ec.open(store).tree.lazy)


@pytest.mark.parametrize("source", OURS)
def test_damage_is_saved_nowhere(source, tmp_path):
    path = SOURCES[source](tmp_path / "source").path
    damage(pathlib.Path(path))
    ckpt = ec.open(path)
    halved = ec.lazy(lambda w: w / 2, elementwise=True)
    mean = ec.merge([ckpt.tree.layers, ckpt.tree.layers], ec.merging.average())
    trees = [
        ckpt.tree,
        {"layers": [halved(ckpt.tree.layers[0])]},
        {"layers": mean},
        {"layers": [ckpt.tree.layers[0].T]},
    ]
    for name, save in ROUTES.items():
        for tree in trees if name == "directory" else [ckpt.tree]:
            with pytest.raises(ec.DamagedError, match=r"layers\.0"):
                save(tmp_path / name, tree)
            path = tmp_path / name
            assert name == "file.zip" or not path.exists() or not ec.exists(path)
    for name in ("converted", "converted.zip"):
        with pytest.raises(ec.DamagedError, match=r"layers\.0"):
            ec.convert(ckpt, tmp_path / name)
        assert not ec.exists(tmp_path / name)


@pytest.mark.parametrize("source", ["ours", "zip", "safetensors", "flax"])
def test_a_source_that_is_gone_is_named(source, tmp_path):
    ckpt = SOURCES[source](tmp_path / "source")
    path = pathlib.Path(ckpt.path)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("directory", "one.zip", "background", "arrays.safetensors"):
        with pytest.raises(RuntimeError, match=r"The leaf `layers\.0` cannot be saved"):
            ROUTES[name](tmp_path / name, {"layers": [ckpt.tree.layers[0]]})
        assert not ec.exists(tmp_path / name)


def test_a_store_that_does_not_answer(tmp_path):
    _ours(tmp_path / "a")
    with servers.static(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/a"
        tree = ec.open(ec.Store(url, http_request_retries={"max_retries": 1})).tree
        ec.tree_serialise_leaves(tmp_path / "b", tree)
    assert not ec.diff(ec.open(tmp_path / "a"), ec.open(tmp_path / "b"))
    for name in ("directory", "one.zip", "background"):
        with pytest.raises(
            ConnectionError, match=r"`layers\.0` cannot be saved: The sto"
        ):
            ROUTES[name](tmp_path / name, {"w": tree.layers[0]})
        assert not ec.exists(tmp_path / name)


def test_a_disk_that_fails_is_not_that_of_the_target(tmp_path, monkeypatch):
    ckpt = _ours(tmp_path / "source")
    tree = {"w": ckpt.tree.layers[0]}

    def fetch(*args):
        raise OSError(28, "Input/output error")

    inside.replace(monkeypatch, "read leaves", fetch)
    with pytest.raises(OSError, match="`layers.0` cannot be saved: .*output err"):
        ec.tree_serialise_leaves(tmp_path / "b", tree)


def test_two_processes(tmp_path):
    _ours(tmp_path / "a")
    _ours(tmp_path / "other")
    _ours(tmp_path / "damaged")
    damage(tmp_path / "damaged")
    # Process 0 reads and writes what is no array of all.
    out = good(run_team_program(2, "team_that_saves_lazy_leaves", tmp_path))
    assert out == ["True\nTrue\nTrue\n", "False\nTrue\nTrue\n"]
    lazy = ec.open(tmp_path / "a").tree
    for name in "bc":
        saved = ec.open(tmp_path / name)
        assert not ec.diff(lazy, saved.tree.lazy) and ec.verify(saved.path) == []
        np.testing.assert_array_equal(saved["halved"], _arrays()["layers"][0] / 2)
    assert not ec.exists(tmp_path / "d")


@pytest.mark.parametrize("call", ["find where others write", "tell what was written"])
def test_who_comes_late_has_the_error_of_process_0(tmp_path, call):
    _ours(tmp_path / "damaged")
    damage(tmp_path / "damaged")
    assert (
        good(run_team_program(2, "team_that_hears_of_an_error_late", tmp_path, call))
        == ["True\nTrue\n"] * 2
    )
