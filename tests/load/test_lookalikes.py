"""Leaves that are called as files of ours: no call takes one for such a file."""

import random
import secrets

import numpy as np
import pytest
from support.helpers import assert_alike, files_of

import eqx_ckpt as ec


_SAVE = "0123456789abcdef"
_NAMES = [
    *("eqx_ckpt", "eqx_ckpt.json", "eqx_ckpt.digests", "eqx_ckpt.saving"),
    *("eqx_ckpt.pins", "eqx_ckpt.json.new", "eqx_ckpt.files", f"eqx_ckpt-{_SAVE}"),
    *(f".eqx_ckpt-{_SAVE}", f"a.eqx_ckpt-{_SAVE}", f"ck.eqx_ckpt-{_SAVE}"),
    *("d", f"d/{_SAVE}", f"d.{_SAVE}", _SAVE, "part-1", "digests", "tree", "data"),
    *("manifest", "manifest.ocdbt", "ocdbt", "ocdbt.process_0", "inline", "file"),
    *("zarr", "zarr.json", "json", "c", "c/0", "0", "1", "5", ".zarray", "%~"),
    *("_METADATA", "_sharding", "_strings", "_strings.json", "_CHECKPOINT_METADATA"),
    *("array_metadatas", "process_0", "descriptor", "default", "default.damaged-1"),
    *("", ".", "..", "%root", "%", "ck"),
]
# TensorStore keeps names that end so for itself.
_LOCKS = ["lock", "__lock", ".__lock", "a.__lock"]
_GROUPS = [*(_NAMES[at::3] for at in range(3)), _LOCKS]


def _leaf(r):
    value = r.randrange(100)
    kinds = (np.full(3, value), np.asarray(float(value)), value, f"{value}")
    return r.choice([*kinds, np.zeros((0, 2), np.int8), np.full((4, 5), value)])


def _tree(r, names):
    """A tree with leaves called so at its top, and at other depths."""
    out = {name: _leaf(r) for name in names}
    out["below"] = {name: _leaf(r) for name in names}
    out["list"] = [{name: [_leaf(r)]} for name in names]
    for _ in range(len(names)):
        node = out
        for _ in range(r.randrange(3)):
            below = node.setdefault(r.choice(names), {})
            node = below if isinstance(below, dict) else node
        node[r.choice(names)] = _leaf(r)
    return out


def _save(path, tree, layout):
    """Whether it is saved: some names are refused."""
    try:
        ec.tree_serialise_leaves(
            path, tree, lambda _: True, layout=layout, durable=False
        )
    except ValueError as e:
        assert layout == "zarr" and ".__lock" in str(e)
        return False
    return True


def _check(path, tree):
    assert ec.exists(path)
    assert ec.verify(path) == []
    assert_alike(ec.tree_deserialise_leaves(path, tree, lambda _: True), tree)


def _try(base, r, names, layout):
    """Does all that may take a leaf for something else."""
    first, other = _tree(r, names), _tree(r, names)
    tree = first
    path, beside = f"{base}/run/ck", f"{base}/run/ck2"
    if not _save(path, tree, layout):
        return
    assert _save(beside, tree, "ocdbt")
    for place in (path, f"{base}/run", base):
        assert ec.clean(place, idle=True) == []
        _check(path, tree)
    is_fixed = "://" in base and layout == "zarr"
    if not is_fixed and _save(path, other, layout):
        tree = other
        assert ec.clean(path, idle=True) == []
    _check(path, tree)
    ec.delete(path)
    assert not ec.exists(path)
    _check(beside, first)


_places = pytest.mark.parametrize("where", ["local", "memory"])
_layouts = pytest.mark.parametrize("layout", ["ocdbt", "zarr"])


def _base(tmp_path, where, number):
    far = f"memory://{secrets.token_hex(8)}"
    return str(tmp_path / str(number)) if where == "local" else far


@_places
@_layouts
def test_every_call(tmp_path, layout, where):
    for number, names in enumerate(_GROUPS):
        base = _base(tmp_path, where, number)
        _try(base, random.Random(number), names, layout)


@pytest.mark.long
@_places
@_layouts
def test_every_call_with_every_name(tmp_path, layout, where):
    names = [*_NAMES, *_LOCKS]
    for number in range(300):
        r = random.Random(number)
        some = r.sample(names, r.randint(1, 4))
        _try(_base(tmp_path, where, number), r, some, layout)
    print("300 trees")


@pytest.mark.parametrize("gone", ["eqx_ckpt.json", "eqx_ckpt.digests", "zarr.json"])
def test_leaves_stay_where_a_file_of_ours_is_gone(tmp_path, gone):
    """As what is left can still be rescued."""
    for number, names in enumerate(_GROUPS[:3]):
        path = tmp_path / str(number) / "ck"
        assert _save(path, _tree(random.Random(number), names), "zarr")
        (path / gone).unlink()
        before = files_of(path)
        ec.clean(path)
        ec.clean(path.parent)
        assert files_of(path) == before


def test_a_manager(tmp_path):
    manager = ec.CheckpointManager(tmp_path, keep=2, layout="zarr")
    for step, names in enumerate(_GROUPS[:3]):
        tree = {"model": _tree(random.Random(step), names), "step": step}
        manager.save(step, tree, force=True)
        manager.wait()
        assert ec.clean(tmp_path) == []
        found, at = manager.restore(tree)
        assert at == step and len(manager.steps()) <= 2
        assert_alike(found, tree)
