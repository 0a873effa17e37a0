"""A run is deleted if all of it is ours, and nothing of others ever is."""

import os
import pathlib

import pytest
from support import inside
from support.command import main
from support.helpers import files_of, fill_run, tree_at
from support.stores import StoredFiles

import eqx_ckpt as ec


@pytest.fixture(params=["directory", "store"])
def root(request, tmp_path):
    is_directory = request.param == "directory"
    root = tmp_path / "run" if is_directory else f"memory:/{tmp_path}/run"
    with ec.CheckpointManager(root, keep=3) as manager:
        fill_run(manager, [1, 2, 3, 4], loss=[4, 3, 2, 1])
    return root


def test_all_of_a_run(root):
    manager = ec.CheckpointManager(root)
    manager.pin(2)
    manager.unpin(2)
    StoredFiles(root)["3/default/eqx_ckpt.json"] = b"damaged"
    StoredFiles(root)["9/default/d/0123456789abcdef/0"] = b"left by a kill"
    ec.delete(root)
    assert not [*StoredFiles(root)]
    if isinstance(root, pathlib.Path):
        assert os.listdir(root.parent) == []
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        ec.delete(root)


def test_a_step_that_is_pinned(root):
    manager = ec.CheckpointManager(root)
    manager.pin(4)
    path = manager.path(4)
    before = dict(StoredFiles(root))
    with pytest.raises(ValueError, match="a step that is pinned. Nothing was deleted"):
        ec.delete(path)
    with pytest.raises(FileExistsError, match=r"is pinned. Call `unpin\(4\)`"):
        manager.save(4, tree_at(9), force=True)
    assert dict(StoredFiles(root)) == before
    manager.unpin(4)
    with manager:
        manager.save(4, tree_at(9), force=True)
    ec.delete(path)
    assert manager.steps() == [2, 3]
    # A checkpoint elsewhere that is called so is no step.
    ec.tree_serialise_leaves(path, tree_at(9))
    ec.delete(path)


@pytest.mark.parametrize(
    "key",
    [
        *("notes.txt", "2/notes.txt", "2/default/notes.txt", "2/default/d/mine/x"),
        *("eqx_ckpt.history/notes", "eqx_ckpt.pins/notes", "5/data", "model/weights"),
        *("eqx_ckpt.pins/3", "eqx_ckpt.pins/9/notes", "eqx_ckpt.journal/notes"),
        *("eqx_ckpt.run/new-0123456789abcdef/notes", "7", "5/default"),
        *("5/default/d", "5/default/notes", "5/default/d/mine/x"),
        "5/default/d/0123456789abcdef/notes",
    ],
)
def test_nothing_that_is_not_ours(root, key):
    files = StoredFiles(root)
    if isinstance(root, pathlib.Path):
        (root / key).parent.mkdir(parents=True, exist_ok=True)
    files[key] = b"mine"
    before = dict(files)
    why = "pinned" if key == "eqx_ckpt.pins/3" else "Nothing was deleted. Move it"
    with pytest.raises(ValueError, match=why):
        ec.delete(root)
    assert dict(files) == before


def test_no_step_of_orbax_and_no_link(tmp_path):
    run = tmp_path / "run"
    with ec.CheckpointManager(run) as manager:
        fill_run(manager, [1])
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(ValueError, match="is a symbolic link"):
        ec.delete(tmp_path / "link")
    (run / "7").symlink_to(run / "1")
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="leads through a symbolic link"):
        ec.delete(run)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("kind", ["directory", "store"])
def test_a_damaged_checkpoint(tmp_path, layout, kind):
    path = tmp_path / "c" if kind == "directory" else f"memory:/{tmp_path}/c"
    ec.tree_serialise_leaves(path, tree_at(1), layout=layout)
    files = StoredFiles(path)
    files["eqx_ckpt.json"] = files["eqx_ckpt.json"][:-7]
    for key in ("notes", "x/notes"):
        if kind == "directory":
            (path / key).parent.mkdir(exist_ok=True)
        files[key] = b"mine"
        before = dict(files)
        with pytest.raises(ValueError, match="which is not part of the checkpoint"):
            ec.delete(path)
        assert dict(files) == before
        del files[key]
        if kind == "directory" and layout == "ocdbt" and key == "x/notes":
            (path / "x").rmdir()
    ec.delete(path)
    assert not [*files] and not ec.exists(path)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_what_others_put_there_as_it_is_deleted(tmp_path, monkeypatch, layout):
    path = tmp_path / "c"
    ec.tree_serialise_leaves(path, tree_at(1), layout=layout)
    put = lambda *_: (path / "notes").write_bytes(b"mine")
    with monkeypatch.context() as patch:
        inside.watch(patch, "name a directory beside", put)
        ec.delete(path)
    assert files_of(tmp_path) == {"c/notes": b"mine"}


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_a_zip_among_files_of_others(tmp_path, kind, monkeypatch):
    """Nothing of others goes with it, whatever comes to its place meanwhile."""
    at = tmp_path / "d" if kind == "directory" else f"memory:/{tmp_path}/d"
    path = f"{at}/a.zip"
    ec.tree_serialise_leaves(path, tree_at(1))
    files = StoredFiles(at)
    others = ["a", "a.zip.notes", "b/a.zip", "d/x"]
    if kind == "store":
        others += ["a.zip/notes"]
    for key in others:
        if kind == "directory":
            (at / key).parent.mkdir(exist_ok=True)
        files[key] = b"mine"
    ec.delete(path)
    assert {*files} == {*others}
    for key in {"a.zip/notes"} & {*files}:
        del files[key]
    ec.tree_serialise_leaves(path, tree_at(1))
    looks = []

    def put_another(*_):
        looks.append(1)
        if len(looks) == 2:
            files["a.zip"] = b"mine"

    inside.watch(monkeypatch, "is a zip", put_another)
    with pytest.raises((FileNotFoundError, ValueError)):
        ec.delete(path)
    assert files["a.zip"] == b"mine"


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, loss in (("a", 2.0), ("b", 1.0)):
        with ec.CheckpointManager(f"sweep/{name}") as manager:
            fill_run(manager, [1, 2], loss=[loss, loss + 1])
    ec.tree_serialise_leaves("model", tree_at(1))
    assert main(["runs", "sweep", "--sort", "loss"]) == 0
    head, titles, first, second = capsys.readouterr().out.splitlines()
    assert "2 runs" in head and titles.split()[:4] == ["run", "newest", "best", "steps"]
    assert first.split()[:4] == ["b", "2", "1", "2"] and second.split()[0] == "a"
    assert main(["delete", "sweep/a"]) != 0  # Nobody has said yes.
    assert main(["delete", "sweep/a", "--yes"]) == 0
    assert "with 2 steps" in capsys.readouterr().out
    assert main(["delete", "model", "--yes"]) == 0
    assert main(["delete", "model"]) == 2
    assert "There is no checkpoint" in capsys.readouterr().err
    assert [run.latest.number for run in ec.runs(".")] == [2]
    assert os.listdir() == ["sweep"] and os.listdir("sweep") == ["b"]
