"""A run as a path: its newest complete step, for every call that reads."""

import os

import jax.numpy as jnp
import pytest
from support import command
from support.helpers import fill_run, tree_at

import eqx_ckpt as ec


@pytest.fixture
def run(tmp_path):
    with ec.CheckpointManager(tmp_path / "run") as manager:
        fill_run(manager, [10, 20, 30])
    return str(tmp_path / "run")


def test_all_calls_take_it(run, tmp_path):
    like = tree_at(0)
    assert ec.open(run).path == f"{run}/30/default"
    assert ec.open(f"{run}/20").path == f"{run}/20/default"
    newest = ec.tree_deserialise_leaves(run, like)
    assert not ec.diff(newest, run) and ec.diff(f"{run}/20", run)
    whole = [(lambda m: m, lambda c: c)]
    assert not ec.diff(ec.graft(like, run, whole, scalars="load")[0], run)
    assert not ec.diff(ec.load_or_init(lambda: like, run), run)
    assert not ec.diff(ec.rebuild(run, []), run)
    assert not ec.diff(ec.merge([run, run], ec.merging.average()), run)
    assert ec.stats(run) and ec.rename([("x", "y")]).inverse(run)
    assert ec.verify(run) == []
    ec.convert(run, tmp_path / "copy")
    assert not ec.diff(tmp_path / "copy", run)
    ec.tree_serialise_leaves(tmp_path / "part", {"x": jnp.ones(2)}, base=run)
    assert ec.open(tmp_path / "part").base.path == f"{run}/30/default"


def test_what_was_opened_is_pinned(run):
    ckpt = ec.open(run)
    with ec.CheckpointManager(run) as manager:
        fill_run(manager, [40])
    assert ckpt.path == f"{run}/30/default" and ec.open(run).path != ckpt.path
    assert not ec.diff(ckpt, f"{run}/30")


def test_errors_have_the_steps_there_are(run, tmp_path, capsys):
    there = r"There is no step 7 in `.*run`: all steps are 10, 20, 30\."
    for path in (f"{run}/7", f"{run}/7/default"):
        with pytest.raises(FileNotFoundError, match=there):
            ec.open(path)
        with pytest.raises(FileNotFoundError, match=there):
            ec.graft(tree_at(0), path, [(lambda m: m, lambda c: c)])
    with pytest.raises(FileNotFoundError, match=there):
        ec.CheckpointManager(run).restore(tree_at(0), 7)
    with pytest.raises(FileNotFoundError, match=there):
        ec.add_metrics(run, 7, {"loss": 1})
    with pytest.raises(FileNotFoundError, match=there):
        ec.CheckpointManager(run).pin(7)
    assert command.main(["ls", f"{run}/7"]) == 2
    assert "all steps are 10, 20, 30." in capsys.readouterr().err
    for step in (10, 20):
        ec.delete(f"{run}/{step}/default")
    with pytest.raises(FileNotFoundError, match="`: its only step is 30"):
        ec.open(f"{run}/7")
    (tmp_path / "other" / "3").mkdir(parents=True)
    for path in ("other", "other/3", "other/4"):
        with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
            ec.open(tmp_path / path)


def test_errors_say_that_a_step_is_not_complete(run):
    os.remove(f"{run}/30/default/eqx_ckpt.json")
    there = (
        r"There is no step 30 in `.*run` that is complete \(its save was not "
        r"completed, .*\): all steps are 10, 20\."
    )
    for path in (f"{run}/30", f"{run}/30/default"):
        with pytest.raises(FileNotFoundError, match=there):
            ec.open(path)
    with pytest.raises(FileNotFoundError, match=there):
        ec.CheckpointManager(run).restore(tree_at(0), 30)
    with pytest.raises(FileNotFoundError, match=there):
        ec.add_metrics(run, 30, {"loss": 1})


def test_a_directory_of_runs(run, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    there = r"There is no checkpoint at .*: runs are in it, such as `run`\. Open one; "
    for call in (ec.open, lambda path: ec.tree_deserialise_leaves(path, tree_at(0))):
        with pytest.raises(FileNotFoundError, match=there + "`ec.runs` lists"):
            call(tmp_path)
        with pytest.raises(FileNotFoundError, match="What is in it is `b`"):
            call(tmp_path / "a")


def test_a_run_without_a_complete_step(tmp_path):
    (tmp_path / "run/3/default/d/0123456789abcdef").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="No step of the run .* is complete"):
        ec.open(tmp_path / "run")


def test_no_path_is_a_run_and_a_checkpoint(run, tmp_path):
    path = tmp_path / "ckpt"
    ec.tree_serialise_leaves(path, {"x": jnp.ones(2)})
    manager = ec.CheckpointManager(path)
    with pytest.raises(ValueError, match="is a checkpoint, and no directory of a run"):
        manager.save(1, {"x": jnp.ones(2)})
    assert manager.steps() == [] and ec.open(path)["x"].read().sum() == 2
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="is not empty, and not a checkpoint"):
            ec.tree_serialise_leaves(run, {"x": jnp.ones(2)}, overwrite=overwrite)


@pytest.mark.parametrize("root", ["run", "memory://no step of a run"])
def test_no_path_is_a_step_and_another_checkpoint(tmp_path, root):
    root = root if "://" in root else f"{tmp_path}/{root}"
    ec.tree_serialise_leaves(f"{root}/2", {"x": jnp.ones(2)})
    with ec.CheckpointManager(root, keep=1) as manager:
        manager.save(1, {"x": jnp.zeros(2)})
        for force in (False, True):
            with pytest.raises(
                FileExistsError, match="2` is a checkpoint, and no step"
            ):
                manager.save(2, {"x": jnp.zeros(2)}, force=force)
        manager.save(3, {"x": jnp.zeros(2)})
    assert manager.steps() == [3] and ec.open(f"{root}/2")["x"].read().sum() == 2


def test_the_steps_of_a_run_beside_one_that_is_damaged(run):
    """Damage of the newest step is told, and not passed over."""
    with open(f"{run}/30/default/eqx_ckpt.json", "w") as file:
        file.write("{")
    with pytest.raises(ec.DamagedError):
        ec.open(run)
