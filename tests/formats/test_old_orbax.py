"""Directories that releases of Orbax and flax wrote: see `foreign/write_orbax.py`."""

import pathlib
import zipfile

import numpy as np
import pytest

import eqx_ckpt as ec


HERE = pathlib.Path(__file__).parents[1] / "foreign" / "orbax"
TREES = "tree files aggregate mixed mixed-files flax/checkpoint_5".split()
TREES += ["flax-legacy/checkpoint_5", "manager/3/state"]


def _unpacked(path, to):
    with zipfile.ZipFile(path) as archive:
        archive.extractall(to)
    return {x.split("/")[0] for x in archive.namelist()}


@pytest.mark.parametrize("release", sorted(x.stem for x in HERE.glob("*.zip")))
def test_every_leaf_of_a_release(tmp_path, release):
    written = _unpacked(HERE / f"{release}.zip", tmp_path)
    assert written >= {"tree", "files", "flax-legacy", "manager"}
    for name in TREES:
        if name.split("/")[0] not in written:
            continue
        ckpt = ec.open(tmp_path / name)
        values = {
            "params.dense.kernel": [[0, 1, 2], [3, 4, 5]],
            "params.dense.bias": [0, 1, 2],
            "opt.0": [0.5, 0.5],
            "opt.1.mu": [[1, 1]],
            "step": 7,
            "rate": 0.25,
        }
        got = {x: np.asarray(lazy.read()).tolist() for x, lazy in ckpt.items()}
        assert got == values, (release, name)
        assert ckpt["opt.0"].read().dtype == "bfloat16"
        out = ckpt.tree["opt"][1]["mu"].read()
        assert out.shape == (1, 2) and out.dtype == np.float32
    ec.convert(tmp_path / "mixed", tmp_path / "out")
    assert ec.diff(tmp_path / "mixed", tmp_path / "out").same
    for name, match in (
        ("flax", "directory of steps: open one, such as `checkpoint_5`"),
        ("flax-legacy", "directory of steps: open one, such as `checkpoint_5`"),
        ("manager", "directory of steps: open one, such as `3/state`"),
        ("manager/3", "several trees in it: open one, such as `state`"),
    ):
        if name in written:
            with pytest.raises(ValueError, match=match):
                ec.open(tmp_path / name)
