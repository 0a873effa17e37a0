"""The modes of files: what is written beside a path is for its owner only until it gets
the mode of what it replaces.
"""

import json
import os
import pathlib
import re
import stat
import struct
import tempfile

import numpy as np
import pytest
from support import audits
from support.helpers import run_program
from support.stores import StoredFiles

import eqx_ckpt as ec


_CALLS = {"open", "os.rename", "os.chmod"}
TREE = {"w": np.ones(3)}
WAYS = {
    "a.zip": {},
    "a.safetensors": {},
    "zarr": {"layout": "zarr"},
    "ocdbt": {"layout": "ocdbt"},
}


def save(path, how):
    if path.suffix == ".safetensors":
        ec.export_safetensors(path, TREE)
    else:
        ec.tree_serialise_leaves(path, TREE, **how)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def open_to_others(directory):
    """The files in a directory that others can read."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            bits = entry.stat(follow_symlinks=False).st_mode
            if entry.is_dir(follow_symlinks=False):
                if bits & 0o055:
                    found += open_to_others(entry.path)
            elif bits & 0o044:
                found.append(entry.path)
    return found


@pytest.mark.parametrize("name", WAYS)
def test_what_replaces_something_is_private_meanwhile(tmp_path, name):
    path = tmp_path / name
    save(path, WAYS[name])
    private = 0o700 if path.is_dir() else 0o600
    os.chmod(path, private)
    wrong, calls, is_listing = [], [], False

    def hear(event, _):
        nonlocal is_listing
        # To list opens directories too.
        if event in _CALLS and not is_listing:
            is_listing = True
            calls.append(0)
            try:
                wrong.extend(open_to_others(tmp_path))
            except FileNotFoundError:
                pass
            is_listing = False

    with audits.heard(hear):
        save(path, WAYS[name])
    assert calls and not wrong and mode(path) == private
    # A new one has the mode that any new file has.
    save(tmp_path / f"new-{name}", WAYS[name])
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    like = "directory" if path.is_dir() else "file"
    assert mode(tmp_path / f"new-{name}") == mode(tmp_path / like)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_the_modes_of_an_empty_directory_and_of_an_index_stay(tmp_path, layout):
    path = tmp_path / "c"
    path.mkdir(0o700)
    os.chmod(path, 0o2750)
    ec.tree_serialise_leaves(path, TREE, layout=layout)
    assert mode(path) == 0o2750
    if layout == "ocdbt":
        os.chmod(path / "eqx_ckpt.json", 0o600)
        ec.tree_serialise_leaves(path, TREE, layout=layout)
        assert mode(path / "eqx_ckpt.json") == 0o600


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_signature_goes_with_what_is_signed(tmp_path, layout):
    """OpenSSF's model signing has it as `model.sig` in the directory."""
    path = tmp_path / "c"
    ec.tree_serialise_leaves(path, TREE, layout=layout)
    (path / "model.sig").write_text("{}")
    assert ec.verify(path) == [] and ec.open(path)["w"].shape == (3,)
    for other in (layout, "zarr", "ocdbt", "ocdbt"):
        ec.tree_serialise_leaves(path, TREE, layout=other)
        assert not (path / "model.sig").exists()
        assert ec.verify(path) == []
        (path / "model.sig").write_text("{}")
    ec.delete(path)
    assert not path.exists()


def test_a_signature_in_a_store():
    files = StoredFiles("memory://signed")
    for _ in range(2):
        ec.tree_serialise_leaves("memory://signed", TREE)
        assert "model.sig" not in files
        files.update({"model.sig": b"{}", "model.sig/thesis": b"{}"})
        with pytest.raises(ValueError, match="model.sig/thesis"):
            ec.delete("memory://signed")
        ec.tree_serialise_leaves("memory://signed", TREE)
        assert "model.sig/thesis" in files and "model.sig" not in files
        del files["model.sig/thesis"]
        files["model.sig"] = b"{}"
    ec.delete("memory://signed")
    assert not files


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_what_is_only_called_like_a_signature_is_left(tmp_path, layout):
    path = tmp_path / "c"
    ec.tree_serialise_leaves(path, TREE, layout=layout)
    (path / "model.sig").mkdir()
    (path / "model.sig/thesis").touch()
    if layout == "zarr":
        with pytest.raises(FileExistsError, match="model.sig/thesis"):
            ec.tree_serialise_leaves(path, TREE, layout=layout)
    else:
        ec.tree_serialise_leaves(path, TREE, layout=layout)
    with pytest.raises(ValueError, match="model.sig/thesis"):
        ec.delete(path)
    assert (path / "model.sig/thesis").exists()
    # A leaf may have this name.
    tree = {"model": {"sig": np.ones(3)}}
    for _ in range(2):
        ec.tree_serialise_leaves(tmp_path / "leaf", tree, layout=layout)
    ec.delete(tmp_path / "leaf")


def test_below_a_directory_that_may_not_be_read():
    """Its names cannot be synced, and nothing else is amiss."""
    run_program("save_below_unreadable")


# As `setfacl -m u:1234:r` makes it.
_LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in [
        (1, 6, 2**32 - 1),
        (2, 4, 1234),
        (4, 0, 2**32 - 1),
        (16, 4, 2**32 - 1),
        (32, 0, 2**32 - 1),
    ]
)
_needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


@_needs_root
@pytest.mark.parametrize("name", WAYS)
def test_the_group_and_the_access_list_stay(tmp_path, name):
    path = tmp_path / name
    save(path, WAYS[name])
    os.chown(path, -1, 12345)
    os.chmod(path, 0o750)
    try:
        os.setxattr(path, "system.posix_acl_access", _LIST)
        has_list = True
    except OSError:
        has_list = False
    bits = mode(path)
    save(path, WAYS[name])
    assert os.stat(path).st_gid == 12345 and mode(path) == bits
    if has_list:
        assert os.getxattr(path, "system.posix_acl_access") == _LIST


@_needs_root
@pytest.mark.parametrize("name", ["a.zip", "zarr"])
def test_a_group_that_cannot_be_had_gets_nothing(name):
    """Else the group that the new one has could read it."""
    # Above `tmp_path` each pytest that starts lets in its own user only.
    with tempfile.TemporaryDirectory() as open_to_all:
        path = pathlib.Path(open_to_all, "in", name)
        path.parent.mkdir()
        save(path, WAYS[name])
        above = pathlib.Path(open_to_all)
        for place in (above, *above.rglob("*")):
            os.chown(place, 65534, 65534)
            os.chmod(place, 0o755)
        os.chown(path, 65534, 12345)
        os.chmod(path, 0o750)
        run_program(
            "save_as_nobody", path, json.dumps(WAYS[name]), PYTHONDONTWRITEBYTECODE="1"
        )
        assert os.stat(path).st_gid == 65534 and mode(path) == 0o700


@_needs_root
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_what_cannot_be_deleted_is_told(layout):
    """A directory of another user is in what was there before."""
    with tempfile.TemporaryDirectory() as directory:
        told = run_program(
            "delete_as_nobody", directory, layout, PYTHONDONTWRITEBYTECODE="1"
        )
        found = json.loads(told)
        results = {name: result for name, (result, _) in found.items()}
        assert results == {"deleted": None, "replaced": None, "run": [2], "clean": []}
        for name, (_, texts) in found.items():
            assert texts, name
            for text in texts:
                path, why = re.findall("`(.*)` is of no use any more, (.*)", text)[0]
                assert os.path.exists(path) and "Permission denied: '/" in why


def test_no_file_takes_the_place_of_a_standard_stream(tmp_path):
    """What C code says on stderr would be written into it."""
    for name, how in WAYS.items():  # Nobody hears an error of the other process.
        save(tmp_path / f"here-{name}", how)
    run_program("save_without_streams", tmp_path, json.dumps(WAYS), check=False)
    assert (tmp_path / "found").read_text() == "[]"
