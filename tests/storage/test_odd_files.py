"""A file system that can do less than others: see `support.oddfs`."""

import os
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from support import inside
from support.helpers import assert_alike, long
from support.oddfs import mounted, SHORT

import eqx_ckpt as ec


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    top = tmp_path_factory.mktemp("odd")
    with mounted(top / "backing", top / "a ü 'mount'") as place:
        yield place


def _tree(step):
    """Leaves of less than a read gives, and of more; also in pieces of more."""
    return {
        "large": np.arange(3 * 2**18) + step,
        "some": [jnp.full(SHORT // 3 + step, float(step)) for _ in range(3)],
        "step": step,
    }


def _check(path, step):
    tree = _tree(step)
    for verify in (True, False):
        assert_alike(ec.tree_deserialise_leaves(path, tree, verify=verify), tree)
    np.testing.assert_array_equal(
        ec.open(path)["large"][5:70_000], tree["large"][5:70_000]
    )
    assert ec.verify(path) == []


@pytest.mark.parametrize("name", ["ocdbt", "zarr", "packed", "a.zip"])
def test_short_reads(odd, name):
    path = odd / name
    how = {"zarr": {"layout": "zarr"}, "packed": {"compression": "zstd"}}.get(name, {})
    for step in (1, 2):
        if name == "zarr" and step == 2:
            with pytest.raises(OSError, match="cannot exchange two directories"):
                ec.tree_serialise_leaves(path, _tree(2), **how)
            _check(path, 1)
            return
        ec.tree_serialise_leaves(path, _tree(step), **how)
        _check(path, step)
    assert ec.clean(odd) == []


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])
def test_a_run(odd, layout, caplog):
    """Files that each step has from the one before are copied; all steps are seen."""
    root = odd / f"run-{layout}"
    tree = {**_tree(0), "kept": jnp.arange(2**20)}
    options = {"keep": 2, "best": ("loss", "min"), "layout": layout}
    with caplog.at_level("WARNING", "eqx_ckpt"):
        with ec.CheckpointManager(root, **options) as manager:
            for step in range(5):
                metrics = {"loss": abs(step - 2)}
                note = {"note": "x" * SHORT}
                manager.save(step, {**tree, "step": step}, metrics, metadata=note)
    assert manager.steps() == [2, 3, 4] and manager.best() == 2
    for step in manager.steps():
        expected = {**tree, "step": step}
        got, _ = ec.CheckpointManager(root).restore(expected, step)
        assert_alike(got, expected)
        assert ec.verify(manager.path(step)) == []
    manager.delete(3)
    assert ec.CheckpointManager(root).steps() == [2, 4]
    said = [text for text in caplog.messages if "cannot sync directories" in text]
    assert len(said) <= 1


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_lower_layer_of_an_overlay(tmp_path, layout):
    """Nothing in it can be renamed, as in the image of a container."""
    lower, merged = tmp_path / "lower", tmp_path / "merged"
    ec.tree_serialise_leaves(lower / "c", _tree(1), layout=layout)
    with ec.CheckpointManager(lower / "run", layout=layout) as manager:
        for step in (1, 2):
            manager.save(step, _tree(step))
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount = ["mount", "-t", "overlay", "overlay", merged, "-o"]
    done = subprocess.run([*mount, f"{layers},redirect_dir=off"], capture_output=True)
    if done.returncode:
        pytest.skip(f"an overlay cannot be mounted: {done.stderr}")
    try:
        ec.delete(merged / "c")
        with ec.CheckpointManager(merged / "run", keep=1, layout=layout) as manager:
            manager.save(3, _tree(3))
        assert manager.steps() == [3]
        assert {"1", "2"}.isdisjoint(os.listdir(merged / "run"))
        _check(manager.path(3), 3)
        ec.delete(merged / "run")
        assert os.listdir(merged) == []
    finally:
        subprocess.run(["umount", merged], check=True)


def test_a_file_that_loses_its_end_while_it_is_copied(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * 2**20))
    fd = os.open(path, os.O_RDONLY)
    parts = inside.parts_of_a_copy(fd)
    os.truncate(path, len(next(parts)) + 5)
    with pytest.raises(OSError, match="has lost its end"):
        next(parts)
    os.close(fd)


def test_names_that_differ_by_case(odd, tmp_path):
    """Wherever it is mounted, and whatever it is called."""
    tree = {"a": np.ones(3), "A": np.zeros(3)}
    for name in ("1/2/3", "x/Y"):
        with pytest.raises(ValueError, match="differ only by case"):
            ec.tree_serialise_leaves(odd / name, tree, layout="zarr")
        ec.tree_serialise_leaves(odd / name, tree)
        assert_alike(ec.tree_deserialise_leaves(odd / name, tree), tree)
    ec.tree_serialise_leaves(tmp_path / "x", tree, layout="zarr")
    # A file of the checkpoint is called so, too.
    tree = {"Zarr": {"json": np.ones(3)}}
    with pytest.raises(ValueError, match="`zarr.json` and `Zarr.json` differ only"):
        ec.tree_serialise_leaves(odd / "z", tree, layout="zarr")
    ec.tree_serialise_leaves(tmp_path / "x", tree, layout="zarr")


def test_what_may_be_memory_mapped(odd, tmp_path):
    """Its files may be those of a network, by whatever path they are reached."""
    if not all(map(inside.is_on_this_machine, ("/", tmp_path))):
        pytest.skip("these directories are not on a disk of this machine")
    ec.tree_serialise_leaves(odd / "far", _tree(1))
    (tmp_path / "far").symlink_to(odd)
    (tmp_path / "near").mkdir()
    (odd.parent / f"{odd.name} beside").mkdir()
    for path in (odd, odd / "far", tmp_path / "far", tmp_path / "far" / "far"):
        assert not inside.is_mapped(path)
    for path in (tmp_path, tmp_path / "near", odd.parent, f"{odd} beside"):
        assert inside.is_mapped(path)
    assert not inside.is_mapped_through_links(tmp_path)


def test_a_descriptor_that_is_closed_in_its_block(tmp_path):
    with inside.directory(tmp_path) as number, inside.directory(tmp_path) as other:
        assert os.path.samestat(os.fstat(number), os.fstat(other))
    closed = inside.directory(tmp_path)
    with closed:
        closed.close()
    assert not closed.is_open
