import fcntl
import os
import pathlib
import shutil
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from support import inside
from support.command import main
from support.helpers import files_of, locked, run_program
from support.stores import StoredFiles

import eqx_ckpt as ec


_id = "0123456789abcdef"


def _tree(value):
    return {f"x{i}": jnp.full(10, value + i) for i in range(3)}


def _value(path):
    return ec.open(path)["x0"].read()[0]


def _steps(tmp_path):
    """A directory with checkpoints, and one leftover of each kind."""
    steps = tmp_path / "steps"
    for step, layout in enumerate(["ocdbt", "zarr"]):
        ec.tree_serialise_leaves(steps / f"{step}", _tree(step), layout=layout)
    first = steps / "2" / "d" / _id
    overwrite = steps / "0" / "d" / _id
    swap = steps / f"1.eqx_ckpt-{_id}"
    for path in (first, overwrite):
        path.mkdir(parents=True)
        for name in ("0", "12", "tree", "manifest.ocdbt", "digests", "_METADATA.new"):
            (path / name).write_bytes(b"data")
    # A whole one: what was replaced, and not yet deleted.
    ec.tree_serialise_leaves(steps / "old", _tree(7), layout="zarr")
    (steps / "old").rename(swap)
    return steps, sorted(map(str, [first, overwrite, swap]))


def test_clean(tmp_path):
    steps, leftovers = _steps(tmp_path)
    before = files_of(steps)
    assert ec.clean(steps, remove=False) == leftovers
    assert files_of(steps) == before
    assert ec.clean(str(steps)) == leftovers
    assert ec.clean(steps) == []
    assert sorted(os.listdir(steps)) == ["0", "1"]
    assert _value(steps / "0") == 0 and _value(steps / "1") == 1
    kept = {name for name in before if _id not in name}
    assert files_of(steps).keys() == kept


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("place", ["directory", "step", "store"])
def test_a_signature_of_what_is_there_stays(tmp_path, place, layout):
    run = tmp_path / "run"
    path = f"memory://signed-step/{layout}" if place == "store" else run / "5/default"
    if place == "step":
        with ec.CheckpointManager(run, layout=layout) as manager:
            manager.save(5, _tree(1))
    else:
        ec.tree_serialise_leaves(path, _tree(1), layout=layout)
    files = StoredFiles(path)
    files["model.sig"] = b"{}"
    for at in {path, run if place == "step" else path}:
        assert ec.clean(at, idle=place == "store") == []
    assert files["model.sig"] == b"{}"


def test_clean_of_a_checkpoint(tmp_path):
    steps, leftovers = _steps(tmp_path)
    assert ec.clean(steps / "0") == [leftovers[0]]
    assert ec.clean(steps / "1") == [leftovers[1]]
    assert ec.clean(steps / "2") == [leftovers[2]]
    assert sorted(os.listdir(steps)) == ["0", "1", "2"]


def test_clean_leaves_what_somebody_writes(tmp_path):
    steps, leftovers = _steps(tmp_path)
    for path in leftovers:
        with locked(path):
            assert ec.clean(steps, remove=False) == [p for p in leftovers if p != path]
    done = threading.Event()
    going = threading.Event()

    def cleaner():
        while not done.is_set():
            ec.clean(steps)
            going.set()

    thread = threading.Thread(target=cleaner)
    thread.start()
    try:
        going.wait()
        for i in range(10):
            for layout in ("ocdbt", "zarr"):
                path = steps / f"{layout}{i % 3}"
                ec.tree_serialise_leaves(path, _tree(i), layout=layout, durable=False)
                assert _value(path) == i
    finally:
        done.set()
        thread.join()
    assert ec.clean(steps) == []


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_clean_before_a_writer_has_its_lock(tmp_path, layout, monkeypatch):
    """It takes the new directory for a leftover: the writer makes another."""
    flock = fcntl.flock
    cleaned = []

    def late(fd, flags):
        if flags & fcntl.LOCK_EX and not cleaned:
            cleaned.append([])
            cleaned[:] = ec.clean(tmp_path)
        flock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    ec.tree_serialise_leaves(tmp_path / "a", _tree(1), layout=layout)
    assert len(cleaned) == 1 and _value(tmp_path / "a") == 1


def test_clean_leaves_what_is_committed_meanwhile(tmp_path, monkeypatch):
    """The index is read once nobody can commit what is to be deleted."""
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    other = tmp_path / "b"
    ec.tree_serialise_leaves(other, _tree(2))
    save = ec.open(other).save_id

    def late(directory, *_, **__):
        if os.path.basename(directory) == save and (other / "eqx_ckpt.json").exists():
            (other / "eqx_ckpt.json").replace(path / "eqx_ckpt.json")

    # The data of a save that is about to commit.
    shutil.copytree(other / "d" / save, path / "d" / save)
    inside.watch(monkeypatch, "lock", late)
    ec.clean(path)
    assert _value(path) == 2


def test_clean_leaves_what_is_not_ours(tmp_path):
    steps = tmp_path / "steps"
    ec.tree_serialise_leaves(steps / "good", _tree(1))
    elsewhere = tmp_path / "elsewhere"
    ec.tree_serialise_leaves(elsewhere, _tree(2))
    (elsewhere / "d" / _id).mkdir()
    # Links to leftovers, and to their parents.
    (steps / "link").symlink_to(elsewhere)
    (steps / f"good.eqx_ckpt-{_id}").symlink_to(elsewhere)
    (steps / "good" / "d" / _id).symlink_to(elsewhere / "d" / _id)
    (steps / "linked").mkdir()
    (steps / "linked" / "d").symlink_to(elsewhere / "d")
    # A file of this name; names that are almost right.
    (steps / f"file.eqx_ckpt-{_id}").write_bytes(b"")
    for name in (f"x.eqx_ckpt-{_id}0", f".eqx_ckpt-{_id}", "x.eqx_ckpt-0123", _id):
        (steps / name).mkdir()
    # Not only data of ours, not only saves, more than the saves.
    (steps / "a" / "d" / _id).mkdir(parents=True)
    (steps / "a" / "d" / _id / "notes.txt").write_text("mine")
    (steps / "b" / "d" / _id).mkdir(parents=True)
    (steps / "b" / "notes.txt").write_text("mine")
    (steps / "c" / "d" / _id[1:]).mkdir(parents=True)
    # An index that cannot be read does not say which save is the checkpoint.
    ec.tree_serialise_leaves(steps / "damaged", _tree(3))
    (steps / "damaged" / "d" / _id).mkdir()
    index = steps / "damaged" / "eqx_ckpt.json"
    index.write_bytes(index.read_bytes()[:-1])
    walked = lambda: sorted(tmp_path.rglob("*"))
    before = files_of(tmp_path), walked()
    assert ec.clean(steps, remove=False) == ec.clean(steps) == []
    assert (files_of(tmp_path), walked()) == before


def test_clean_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="no directory"):
        ec.clean(tmp_path / "none")
    with pytest.raises(ValueError, match="not in a local file system"):
        ec.clean("memory://clean")


def test_names_of_leftovers_are_reserved(tmp_path):
    steps, leftovers = _steps(tmp_path)
    for path in leftovers:
        with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
            ec.open(path)
    with pytest.raises(ValueError, match="is a name for saves"):
        ec.tree_serialise_leaves(steps / f"new.eqx_ckpt-{_id}", _tree(1))


def test_the_next_save_cleans_whatever_the_layouts(tmp_path):
    steps, leftovers = _steps(tmp_path)
    (steps / f"0.eqx_ckpt-{_id}").mkdir()
    (steps / "1" / "d" / _id).mkdir(parents=True)
    for step in ("0", "1", "2"):
        ec.tree_serialise_leaves(steps / step, _tree(5))
        assert _value(steps / step) == 5 and len(os.listdir(steps / step / "d")) == 1
    assert sorted(os.listdir(steps)) == ["0", "1", "2"]


def test_command_line(tmp_path, capsys):
    steps, leftovers = _steps(tmp_path)
    assert main(["clean", "--list", str(steps)]) == 0
    assert capsys.readouterr().out.splitlines() == leftovers
    out = run_program("command", "clean", steps)
    assert out.splitlines() == leftovers
    assert main(["clean", str(steps)]) == 0 and not capsys.readouterr().out
    assert main(["clean", str(steps / "none")]) == 2
    assert "no directory" in capsys.readouterr().err


def test_near_steps_that_their_run_needs_no_more(tmp_path, capsys, caplog):
    disk = tmp_path / "disk"
    roots = [tmp_path / name for name in ("over", "behind", "gone")]
    for root, every in zip(roots, (4, 100, 100)):
        manager = ec.CheckpointManager(root, every=every, near=disk, near_every=2)
        for step in range(1, 5):
            manager.save(step, _tree(step))
        manager.wait()
    shutil.rmtree(roots[2])
    before = files_of(disk)
    (over,) = ec.clean(disk, remove=False)
    assert main(["clean", "--list", str(disk)]) == 0
    told = capsys.readouterr().out
    for root, why in zip(
        roots, ("it is not needed", "its run has no newer step", "its run is not there")
    ):
        assert f"near step 4, attempt 1 at `{root}`: {why}" in told
    # A run may go on, and nobody has said that it does not.
    assert ec.clean(disk) == [] and files_of(disk) == before
    with caplog.at_level("INFO", "eqx_ckpt"):
        assert ec.clean(disk, idle=True) == [over]
    text = f"Deleted a near step that its run needs no more: `{over}`"
    assert text in [record.getMessage() for record in caplog.records]
    left = {name for name in before if not str(disk / name).startswith(over)}
    assert files_of(disk).keys() == left and len(left) == 2
    assert not pathlib.Path(over).parent.exists()
    tree, step = ec.CheckpointManager(roots[1], near=disk, near_every=2).restore(
        _tree(0)
    )
    assert step == 4


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("by", ["clean", "clean the run", "save"])
@pytest.mark.parametrize("orbax", [False, True])
def test_what_a_commit_leaves_behind_is_deleted(tmp_path, monkeypatch, orbax, by):
    """A save was killed right after its commit: the old one is of no use any more."""
    root = tmp_path / "run"
    path = root / "7" / "default"
    for step in (3, 9):
        ec.tree_serialise_leaves(root / f"{step}" / "default", _tree(step))
    ec.tree_serialise_leaves(path, {**_tree(1), "name": "text"}, orbax=orbax)

    def kill(*args):
        raise _Killed

    with monkeypatch.context() as patch:
        inside.replace(patch, "delete files at the root of another save", kill)
        with pytest.raises(_Killed):
            ec.tree_serialise_leaves(path, {"b": np.ones(4), **_tree(2)})
    assert _value(path) == 2 and bool(ec.verify(path)) is orbax
    assert (path / "_METADATA").exists() is orbax
    assert len(os.listdir(path / "d")) == 2
    if by == "save":
        ec.tree_serialise_leaves(path, _tree(2))
    else:
        ec.clean(path if by == "clean" else root)
    assert ec.verify(path) == [] and _value(path) == 2
    assert {x.name for x in path.iterdir()} == {"eqx_ckpt.json", "d"}
    assert len(os.listdir(path / "d")) == 1


def test_files_for_orbax_of_a_save_before_in_a_store():
    """A process was killed as it added them, and another had saved meanwhile."""
    path = "memory://killed-for-orbax"
    ec.tree_serialise_leaves(path, _tree(1))
    ec.write_orbax(path)
    files = StoredFiles(path)
    left = {key: files[key] for key in files if key[:2] != "d/" and key[0] != "e"}
    ec.clean(path, idle=True)
    assert left.keys() <= {*files}
    ec.tree_serialise_leaves(path, _tree(2))
    for key, data in left.items():
        files[key] = data
    assert len(ec.verify(path)) == len(left) == 3
    ec.clean(path, idle=True)
    assert ec.verify(path) == [] and not left.keys() & {*files}


def test_what_killed_managers_leave_at_the_root(tmp_path):
    """Small files that were being written, and steps without anything in them."""
    root = tmp_path / "run"
    with ec.CheckpointManager(root) as manager:
        manager.save(3, _tree(1))
    left, written = [], []
    for place in ("eqx_ckpt.pins", "eqx_ckpt.run"):
        for number, paths in enumerate((left, written)):
            paths.append(root / f"{place}/new-{_id[:-1]}{number}")
            paths[-1].mkdir(parents=True)
            (paths[-1] / "file").write_bytes(b"")
    for empty in ("160", "170/default", "180/default/d"):
        (root / empty).mkdir(parents=True)
        (tmp_path / empty).mkdir(parents=True)
    with locked(written[0]), locked(written[1]):
        paths = sorted(map(str, left))
        assert ec.clean(root, remove=False) == paths == ec.clean(root)
        assert all(path.exists() for path in written)
    manager.pin(3)
    assert not written[0].exists()
    ec.clean(root)
    assert {x.name for x in root.iterdir() if x.name.isdecimal()} == {"3"}
    assert [x.name for x in root.glob("eqx_ckpt.[pr]*/*")] == ["3"]
    # Whose these are nobody can tell.
    ec.clean(tmp_path)
    assert (tmp_path / "180/default/d").exists() and (tmp_path / "160").exists()


def test_files_of_the_history_that_are_torn(tmp_path):
    root = tmp_path / "run"
    with ec.CheckpointManager(root) as manager:
        manager.save(3, _tree(1))
    place = root / "eqx_ckpt.history"
    (whole,) = place.iterdir()
    data = whole.read_bytes()
    files = {name: data[:end] for name, end in (("0", 0), ("1", 1), ("2", -1))}
    files["3"] = bytes(len(data))  # It is damaged, and not torn.
    paths = [place / f"saved-1-{_id[:-1]}{name}" for name in files]
    for path, torn in zip(paths, files.values()):
        path.write_bytes(torn)
    with locked(place):
        assert ec.clean(root) == []
    left = list(map(str, paths[:3]))
    assert ec.clean(root, remove=False) == left == ec.clean(root)
    assert {*place.iterdir()} == {whole, paths[3]}


def test_a_disk_where_only_root_may_look_at_all():
    run_program("look_at_a_disk")


def test_the_mark_of_a_step_that_is_gone(tmp_path):
    """It tells Orbax that a step is whole."""
    for step, said in ((1, b"by eqx_ckpt"), (2, b"by eqx_ckpt"), (3, b"")):
        (tmp_path / f"{step}").mkdir()
        (tmp_path / f"{step}/commit_success.txt").write_bytes(said)
    ec.tree_serialise_leaves(tmp_path / "2/default", {"x": np.ones(2)})
    mark = str(tmp_path / "1/commit_success.txt")
    assert ec.clean(tmp_path, remove=False) == [mark] == ec.clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]
    assert (tmp_path / "2/commit_success.txt").exists()
