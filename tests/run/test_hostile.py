"""Runs and near disks that somebody has altered: no text in them becomes a path, and no
link is followed. `attacks/runs.py` makes many more.
"""

import json
import os
import zipfile

import attacks
import attacks.runs
import numpy as np
import pytest
from support import inside
from support.helpers import call_main, files_of

import eqx_ckpt as ec


TREE = {"w": np.ones(3)}


def manager(path):
    return ec.CheckpointManager(path / "run", near=path / "disk", near_every=1, every=9)


def calls(path):
    """Errors of calls that would read, write and delete."""
    own = manager(path)
    for call in (lambda: own.restore(TREE), lambda: own.save(2, TREE), own.latest):
        with pytest.raises(ValueError) as e:
            call()
        yield e.value


@pytest.mark.parametrize("run", ["../../home/thesis", "/", "*", "0" * 15, 1])
def test_an_attempt_names_no_directory(tmp_path, run):
    (tmp_path / "home/thesis/chapter").mkdir(parents=True)
    (tmp_path / "home/thesis/chapter/1").touch()
    saved = manager(tmp_path)
    saved.save(1, TREE)
    saved.wait()
    before = files_of(tmp_path)
    attempt = tmp_path / "run/eqx_ckpt.run/1"
    attempt.write_text(json.dumps([run, 1, "", None, []]))
    for error in calls(tmp_path):
        assert isinstance(error, ec.DamagedError)
        assert "Which steps" in str(error) and "`eqx_ckpt.run/1`" in str(error)
    before["run/eqx_ckpt.run/1"] = attempt.read_bytes()
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("place", ["run/eqx_ckpt.run", "disk/eqx_ckpt.near"])
def test_directories_of_a_manager_are_no_links(tmp_path, place):
    with ec.CheckpointManager(tmp_path / "other") as other:
        for step in (1, 2, 3):
            other.save(step, TREE)
    saved = manager(tmp_path)
    saved.save(1, TREE)
    saved.wait()
    (tmp_path / place).rename(tmp_path / "away")
    os.symlink(tmp_path / "other", tmp_path / place)
    before = files_of(tmp_path / "other")
    for error in calls(tmp_path):
        assert "is a symbolic link, and a manager follows none" in str(error)
    assert files_of(tmp_path / "other") == before
    # The root itself, and the near disk, may be links.
    (tmp_path / place).unlink()
    (tmp_path / "away").rename(tmp_path / place)
    for name in ("run", "disk"):
        (tmp_path / name).rename(tmp_path / f"real-{name}")
        os.symlink(tmp_path / f"real-{name}", tmp_path / name)
    assert manager(tmp_path).restore(TREE)[1] == 1


@pytest.mark.parametrize(
    "what, alter",
    [
        ("two leaves", lambda index: index.update(names=["w", "w"])),
        ("the tree has no", lambda index: index.update(tree={"rows": 1})),
    ],
)
def test_a_part_whose_leaves_cannot_be_is_damaged(tmp_path, what, alter):
    """Others, and copies of it, may be good."""
    tree = {"w": np.ones(3), "v": np.ones(3)}
    with manager(tmp_path) as saved:
        saved.save(9, tree)
        saved.save(10, tree)
        saved._saves._last.kept = None
    (part,) = tmp_path.glob("disk/*/*/*/0.zip")
    with zipfile.ZipFile(part) as archive:
        archive.extractall(tmp_path / "part")
    attacks.forge(tmp_path / "part", alter)
    part.write_bytes(attacks.runs.zipped(tmp_path / "part"))
    match = f"near step 10: part 0 on the disk of process 0: .*{what}"
    with pytest.warns(UserWarning, match=match):
        assert manager(tmp_path).restore(tree)[1] == 9


def test_what_process_0_says_of_a_save_is_checked(tmp_path):
    for said in (
        ["../x", False],
        ["0" * 16, 0],
        ["0" * 16],
        "0" * 16,
        ["*" * 16, True],
    ):
        with pytest.raises(ec.DamagedError, match="process 0"):
            inside.read_told(tmp_path, json.dumps(said).encode())


def test_altered_runs():
    _campaign(60)


@pytest.mark.long
def test_many_altered_runs():
    print(_campaign(10_000))


def _campaign(count):
    done = json.loads(call_main("attacks.runs", count, 1)[-1])
    assert done["tried"] == count and done["wrong"] == []
    return done["outcomes"]
