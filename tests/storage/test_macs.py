"""What Macs, and others who write beside a checkpoint, make different: as far as Linux
can play them. `.github/workflows` runs all tests on a Mac."""

import contextlib
import fcntl
import os
import pathlib
import runpy
import sys

import numpy as np
import pytest
from support import inside
from support.helpers import run_program

import eqx_ckpt as ec


TREE = {"x": np.arange(3.0), "y": {"z": 1}}
# Finder, copies to disks of other systems, NFS, Jupyter.
FILES = [".DS_Store", "._eqx_ckpt.json", ".nfs000000000012ab", ".ipynb_checkpoints/"]


def _put(file, *directories):
    for directory in map(pathlib.Path, directories):
        directory.mkdir(parents=True, exist_ok=True)
        if file.endswith("/"):
            (directory / file).mkdir()
        else:
            (directory / file).write_bytes(b"\0\0\0\1Bud1")


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("file", FILES)
def test_files_of_the_system_are_nobodys(tmp_path, file, layout):
    path = tmp_path / "a"
    _put(file, path)
    ec.tree_serialise_leaves(path, TREE, layout=layout)
    _put(file, *(x for x in path.rglob("*") if x.is_dir()))
    assert ec.verify(path) == []
    ec.tree_serialise_leaves(path, {**TREE, "y": {"z": 2}}, layout=layout)
    assert ec.tree_deserialise_leaves(path, TREE)["y"]["z"] == 2
    ec.delete(path)
    assert not path.exists()


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("file", FILES)
def test_steps_with_files_of_the_system_are_deleted(tmp_path, file, layout):
    with ec.CheckpointManager(tmp_path, keep=1, layout=layout) as manager:
        manager.save(1, TREE)
        manager.wait()
        _put(file, tmp_path, tmp_path / "1", tmp_path / "1/default")
        manager.save(2, TREE)
    assert not (tmp_path / "1").exists() and manager.steps() == [2]


def test_files_of_others_are_still_theirs(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", TREE)
    (tmp_path / "a/.secret").write_text("mine")
    with pytest.raises(ValueError, match=r"`\.secret` in it"):
        ec.delete(tmp_path / "a")


@pytest.mark.parametrize("name", ["a", "a.zip", "a.safetensors"])
@pytest.mark.parametrize("has_it", [True, False])
def test_durable_saves_empty_the_cache_of_the_drive(
    tmp_path, monkeypatch, name, has_it
):
    """`F_FULLFSYNC` of macOS; where a file system has none, `fsync`."""
    full, plain = [], []

    def control(fd, command, *args):
        assert command == 51
        if not has_it:
            raise OSError(45, "Operation not supported")
        full.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda fd: plain.append(fd))
    # Linux has a call that a Mac has not.
    inside.replace(monkeypatch, "syncs report errors", False)
    save = ec.export_safetensors if "safe" in name else ec.tree_serialise_leaves
    save(tmp_path / name, {"x": np.arange(3.0)})
    assert bool(full) is has_it and bool(plain) is not has_it
    if has_it:
        assert str(tmp_path) in full and {*full} > {str(tmp_path)}
    full.clear()
    plain.clear()
    save(tmp_path / name, {"x": np.arange(3.0)}, durable=False)
    assert not full and not plain


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [
        ("linux", "x86_64", None),
        ("darwin", "arm64", None),
        ("darwin", "x86_64", "works on Macs with Apple's"),
        ("win32", "AMD64", "Subsystem for Linux"),
    ],
)
def test_other_systems_are_refused(monkeypatch, system, machine, said):
    platform = str(pathlib.Path(ec.__file__).with_name("_platform.py"))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result([*"abcd", machine]))
    raises = (
        pytest.raises(ImportError, match=said) if said else contextlib.nullcontext()
    )
    with raises:
        runpy.run_path(platform)


def test_directories_without_o_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_program("without_o_path")
