"""The history of a run has every step that was ever saved; and a directory has runs."""

import math
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.command import main
from support.helpers import fill_run, tree_at
from support.stores import StoredFiles

import eqx_ckpt as ec


PLACE = "eqx_ckpt.history"


@pytest.fixture(params=["directory", "store"])
def root(request, tmp_path):
    url = f"memory://{tmp_path}/run".replace("memory:///", "memory://")
    return tmp_path / "run" if request.param == "directory" else url


def told(steps):
    return [(x.attempt, x.number, x.metrics.get("loss")) for x in steps]


def forget(root):
    """Deletes the history, as if the process had been killed before it wrote it."""
    files = StoredFiles(root)
    for key in [key for key in files if key.startswith(PLACE)]:
        del files[key]


def test_deleted_steps_are_in_it(root):
    with ec.CheckpointManager(root, keep=1, best=("loss", "min")) as manager:
        for step in range(20):
            loss = math.nan if step == 3 else abs(step - 7)
            manager.save(step, tree_at(step), {"loss": loss, "rate": 0.5**step})
    found = manager.history()
    assert [x.number for x in found] == [*range(20)]
    assert [x.number for x in found if x.path is not None] == manager.steps() == [7, 19]
    assert math.isnan(found[3].metrics["loss"]) and found[4].metrics["loss"] == 3
    assert found[5].metrics["rate"] == 0.5**5 and manager.best() == 7
    assert ec.open(found[7].path).nbytes == found[7].nbytes == found[0].nbytes
    assert [x.time for x in found] == sorted(x.time for x in found)
    assert repr(ec.history(root)) == repr(found)  # Of which one is NaN.
    # Sixteen files have been joined.
    files = [key for key in StoredFiles(root) if key.startswith(PLACE)]
    assert len(files) == 5, files


def test_run_that_went_back_twice(root):
    like = tree_at(0)
    with ec.CheckpointManager(root, keep=2) as manager:
        fill_run(manager, [10, 20, 30], loss=[3, 2, 1])
    for attempt, back, saved in ((1, 20, [22, 24]), (2, 22, [23, 25])):
        with pytest.warns(UserWarning, match="begins an attempt"):
            with ec.CheckpointManager(root, keep=2) as manager:
                manager.restore(like, step=back)
                loss = [10 * attempt + 1, 10 * attempt + 2]
                fill_run(manager, saved, loss=loss)
    assert told(manager.history()) == [
        *((0, 10, 3), (0, 20, 2), (0, 30, 1)),
        *((1, 22, 11), (1, 24, 12), (2, 23, 21), (2, 25, 22)),
    ]


def test_replaced_steps_are_in_it(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2, 3], loss=[1, 2, 3])
    forget(root)
    with pytest.warns(UserWarning, match="begins an attempt"):
        with ec.CheckpointManager(root) as manager:
            manager.save(2, tree_at(2), {"loss": 5}, force=True)
            manager.save(2, tree_at(2), {"loss": 6}, force=True)
    found = manager.history()
    assert told(found) == [(0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 2, 6)]
    assert [x.path is None for x in found] == [False, True, False, False]


@pytest.mark.parametrize("deletes", ["keep", "delete"])
def test_no_step_goes_before_it_is_in_it(root, deletes):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2, 3], loss=[1, 2, 3])
    forget(root)
    assert told(ec.history(root)) == [(0, 1, 1), (0, 2, 2), (0, 3, 3)]
    if deletes == "keep":
        with ec.CheckpointManager(root, keep=1) as manager:
            fill_run(manager, [4], loss=[4])
    else:
        manager = ec.CheckpointManager(root)
        manager.delete(1)
        manager.delete(2)
    assert len(manager.steps()) == 1
    assert told(ec.history(root))[:3] == [(0, 1, 1), (0, 2, 2), (0, 3, 3)]


def test_what_is_torn_or_not_ours_is_left_alone(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, range(15), loss=range(15))
    files = StoredFiles(root)
    key = next(key for key in files if key.startswith(PLACE))
    torn = f"{PLACE}/saved-1-{'0' * 16}"
    files[torn], files[f"{PLACE}/notes"] = files[key][:-9], b"mine"
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, range(15, 40), loss=range(15, 40))
    assert told(ec.history(root)) == [(0, step, step) for step in range(40)]
    assert files[torn] and files[f"{PLACE}/notes"] == b"mine"


# One that begins late finds newer steps of another.
@pytest.mark.filterwarnings("ignore:.*an attempt")
def test_several_managers_write_it(root):
    def save(start):
        with ec.CheckpointManager(root) as manager:
            fill_run(manager, range(start, start + 20), loss=range(20))

    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [0])
    threads = [threading.Thread(target=save, args=(i,)) for i in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = {x.number for x in ec.history(root)}
    assert numbers == {0} | {i + j for i in (100, 200, 300) for j in range(20)}


# ---- Runs.


def join(root, name):
    return root / name if isinstance(root, pathlib.Path) else f"{root}/{name}"


def test_runs_of_a_directory(root):
    for name, losses in (("a/x", [3, 1, 2]), ("a/y", [5, 0.5]), ("b", [None])):
        with ec.CheckpointManager(join(root, name)) as manager:
            for step, loss in enumerate(losses):
                metrics = None if loss is None else {"loss": loss}
                manager.save(step, tree_at(step), metrics)
    ec.tree_serialise_leaves(join(root, "model"), tree_at(0))
    found = ec.runs(root)
    assert [os.fspath(run.path)[len(str(root)) :] for run in found] == [
        "/a/x",
        "/a/y",
        "/b",
    ]
    assert [run.latest.number for run in found] == [2, 1, 0]
    assert [run.count for run in found] == [3, 2, 1]
    assert found[0].best is None and found[0].metrics == {"loss": 2}
    ranked = ec.runs(root, best=("loss", "min"))
    assert [os.fspath(run.path)[-1] for run in ranked] == ["y", "x", "b"]
    assert [run.best and run.best.number for run in ranked] == [1, 1, None]
    assert ec.open(ranked[0].best.path).metadata["metrics"] == {"loss": 0.5}
    (alone,) = ec.runs(join(root, "b"))
    assert alone == found[2] and alone.nbytes == alone.latest.nbytes


def test_a_folder_of_runs_is_no_run(root, capsys):
    for name in ("10", "11", "default", "12/default"):
        with ec.CheckpointManager(join(root, name)) as manager:
            fill_run(manager, [1, 2])
    assert len(ec.runs(root)) == 4
    for call in (ec.open, ec.history):
        with pytest.raises(FileNotFoundError):
            call(root)
    assert ec.CheckpointManager(root).steps() == []
    if isinstance(root, pathlib.Path):
        assert main(["steps", str(root)]) == 2
        assert "run" not in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="There is no run"):
        ec.history(join(root, "10/1/default"))


@pytest.mark.parametrize("key", ["7", "7/default", "7/default/d"])
def test_files_of_others_where_steps_have_directories(root, key):
    """Their names are numbers, as those of the chunks of Zarr, or ours."""
    if isinstance(root, pathlib.Path):
        (root / key).parent.mkdir(parents=True)
    StoredFiles(root)[key] = b"theirs"
    manager = ec.CheckpointManager(root)
    assert manager.steps() == [] and manager.latest() is None and ec.runs(root) == []
    for call in (lambda: manager.restore(tree_at(0)), lambda: ec.history(root)):
        with pytest.raises(FileNotFoundError):
            call()
    fill_run(manager, [1])
    manager.wait()
    assert [run.latest.number for run in ec.runs(root)] == manager.steps() == [1]
    with pytest.raises(FileNotFoundError, match="its only step is 1"):
        manager.restore(tree_at(0), 7)
    assert StoredFiles(root)[key] == b"theirs"


def test_what_is_no_directory_has_no_runs(tmp_path):
    for path in (tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(FileNotFoundError, match="There is no directory at"):
            ec.runs(path)
        (tmp_path / "file").touch()


def test_no_link_is_followed(tmp_path):
    with ec.CheckpointManager(tmp_path / "there/run") as manager:
        fill_run(manager, [1])
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/link").symlink_to(tmp_path / "there")
    assert ec.runs(tmp_path / "sweep") == []
    # Nor is one that is called as a step taken for that of a run beside it.
    shutil.copytree(tmp_path / "there/run", tmp_path / "sweep/1")
    (tmp_path / "sweep/2").symlink_to(tmp_path / "sweep/1")
    assert [run.path for run in ec.runs(tmp_path / "sweep")] == [f"{tmp_path}/sweep/1"]
    (file,) = (tmp_path / "there/run" / PLACE).iterdir()
    file.rename(tmp_path / "file")
    file.symlink_to(tmp_path / "file")
    where = f"in `{tmp_path}/there/run` is a symbolic link, .* Put the file in"
    with pytest.raises(ValueError, match=where):
        ec.history(tmp_path / "there/run")
    shutil.rmtree(tmp_path / "there/run" / PLACE)
    (tmp_path / "there/run" / PLACE).symlink_to(tmp_path)
    with pytest.raises(ValueError, match=f"`{PLACE}` .* is a symbolic link"):
        ec.history(tmp_path / "there/run")


def test_a_damaged_step_is_of_the_attempt_that_left_it(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2, 3, 5])
    StoredFiles(root)["2/default/eqx_ckpt.json"] = b"damaged"
    with pytest.warns(UserWarning, match="begins an attempt"):
        with ec.CheckpointManager(root) as manager:
            manager.restore(tree_at(0), step=1)
            manager.save(4, tree_at(4))
    manager = ec.CheckpointManager(root)
    assert manager.latest() == 4
    with pytest.warns(UserWarning, match="step 5 is of an earlier attempt"):
        assert manager.restore(tree_at(0))[1] == 4


# ---- What metrics keep.


def test_the_best_few_stay(root):
    options = dict(keep=2, best=("loss", "min"), keep_best=3)
    with ec.CheckpointManager(root, **options, keep_every=5) as manager:
        fill_run(manager, [1], loss=[6])
        manager.pin(1)
        fill_run(manager, range(2, 13), loss=[abs(step - 7) for step in range(2, 13)])
    assert manager.steps() == [1, 5, 6, 7, 8, 10, 11, 12]
    assert manager.best() == 7 and manager.best(n=3) == [7, 8, 6]
    assert manager.best(n=99)[-1] == 1
    # A run that keeps no best step lists them all the same.
    assert ec.CheckpointManager(root, best=("loss", "max")).best(n=2) == [1, 12]
    assert ec.CheckpointManager(join(root, "new"), **options).best(n=2) == []


def test_a_damaged_file_of_metrics_keeps_no_step(root):
    options = dict(keep=2, best=("loss", "min"))
    with ec.CheckpointManager(root, **options) as manager:
        fill_run(manager, [1], loss=[1])
        StoredFiles(root)[f"{PLACE}/added-1-{'0' * 16}"] = b"damaged"
        fill_run(manager, range(2, 6), loss=range(2, 6))
    assert manager.steps() == [1, 4, 5]


def test_a_rule_of_ones_own(root):
    given = []

    def rule(step):
        given.append(step)
        return step.metrics["loss"] < 1 or math.isnan(step.metrics["loss"])

    loss = [3, 0.5, 2, math.nan, 4, 5, 6]
    with ec.CheckpointManager(root, keep=1, keep_if=rule) as manager:
        fill_run(manager, range(7), loss=loss)
    assert manager.steps() == [1, 3, 6]
    assert all(isinstance(step, ec.Step) for step in given)
    there = {step.number: step for step in manager.history()}
    assert [x for x in given if x.number == 1][-1] == there[1]


def test_a_rule_that_fails_deletes_nothing(root):
    rule = lambda step: step.metrics["accuracy"] > 0.5
    with pytest.warns(
        UserWarning, match="step 1 was not deleted: `keep_if` raises KeyError: 'accu"
    ):
        with ec.CheckpointManager(root, keep=1, keep_if=rule) as manager:
            fill_run(manager, [1, 2], loss=[1, 2])
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("by", ["another process", "this process"])
def test_added_metrics_count(root, by):
    options = dict(keep=1, best=("accuracy", "max"))
    with ec.CheckpointManager(root, **options) as manager:
        fill_run(manager, [1, 2])
        manager.wait()
        assert manager.steps() == [1, 2] and manager.best() is None
        add = manager.add_metrics
        if by == "another process":
            add = lambda *given: ec.add_metrics(root, *given)
        add(1, {"accuracy": 0.9})
        add(2, {"accuracy": 0.8, "other": 1})
        assert manager.best() == 1
        manager.save(3, tree_at(3))
        manager.wait()
        assert manager.steps() == [1, 3]
        # Of one name the last counts.
        add(1, {"accuracy": -1.0})
        add(3, {"accuracy": 0.5})
        manager.save(4, tree_at(4))
        manager.wait()
        assert manager.steps() == [3, 4] and manager.best(n=2) == [3]
        with pytest.raises(FileNotFoundError, match="There is no step 1"):
            add(1, {"accuracy": 2})
        with pytest.raises(TypeError, match="The metric `accuracy` is not a number"):
            add(3, {"accuracy": "high"})
    found = {x.number: x.metrics for x in ec.history(root)}
    assert found[1] == {"accuracy": -1.0} and found[2] == {"accuracy": 0.8, "other": 1}
    assert ec.runs(root, best=("accuracy", "max"))[0].best.number == 3
    assert ec.open(manager.path(3)).metadata["metrics"] == {}


WAITS: dict[str, Callable[[Any, ec.Step], Any]] = {
    "wait": lambda manager, step: manager.wait(),
    "save": lambda manager, step: manager.save(9, tree_at(9)),
    "restore": lambda manager, step: manager.restore(tree_at(0), step.number),
    "pin": lambda manager, step: manager.pin(step.number),
    "delete": lambda manager, step: manager.delete(step.number),
}


@pytest.mark.parametrize("call", WAITS)
def test_a_rule_that_would_wait_for_its_own_save_is_an_error(root, call):
    rule = lambda step: WAITS[call](manager, step)
    manager = ec.CheckpointManager(root, keep=1, keep_if=rule)

    def save():
        with manager:
            fill_run(manager, [1, 2])

    text = r"`keep_if` raises RuntimeError: .* Read the step by its `path`"
    # Of a thread, as a run that hangs would never end.
    with pytest.warns(UserWarning, match=text):
        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(120)
    assert not thread.is_alive()
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("by", ["its thread", "another thread"])
def test_metrics_that_are_added_as_steps_are_chosen_count(root, by):
    """The rule is asked between the look at all steps and the deletion of one."""

    def add(step):
        give = lambda: manager.add_metrics(step.number, {"accuracy": step.number})
        thread = threading.Thread(target=give)
        if by == "its thread":
            give()
        else:
            thread.start()
            thread.join()

    options = dict(keep=1, best=("accuracy", "max"), keep_if=add)
    with ec.CheckpointManager(root, **options) as manager:
        fill_run(manager, range(1, 4), accuracy=[0.5, 0, 0])
        manager.wait()
        assert manager.steps() == [2, 3] and manager.best() == 2
        fill_run(manager, [4], accuracy=[0])
        manager.wait()
        assert manager.steps() == [3, 4] and manager.best() == 3
    assert [x.number for x in manager.history() if x.metrics["accuracy"]] == [1, 2, 3]


def test_metrics_of_an_open_step_get_to_no_other_save_of_it(root, tmp_path):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [2, 3])
        manager.wait()
        old, other = ec.open(manager.path(3)), ec.open(manager.path(2))
        manager.add_metrics(old, {"val": 1})
        manager.save(3, tree_at(9), force=True)
        manager.wait()
        for add in (manager.add_metrics, lambda *given: ec.add_metrics(root, *given)):
            with pytest.raises(ec.ReplacedError, match="Step 3 of .* is another save"):
                add(old, {"val": 2})
        ec.add_metrics(root, other, {"val": 3})
        ec.add_metrics(root, ec.open(manager.path(3)), {"val": 4})
        manager.delete(2)
        with pytest.raises(FileNotFoundError, match="There is no step 2"):
            ec.add_metrics(root, other, {"val": 5})
    assert {x.number: x.metrics for x in ec.history(root)} == {
        2: {"val": 3},
        3: {"val": 4},
    }
    ec.tree_serialise_leaves(tmp_path / "apart", tree_at(3))
    with pytest.raises(ValueError, match="is no step of a run"):
        ec.add_metrics(root, ec.open(tmp_path / "apart"), {"val": 6})


@pytest.mark.parametrize("is_open", [False, True])
def test_a_step_that_is_replaced_as_it_gets_metrics(root, is_open, monkeypatch):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2])
    other = ec.CheckpointManager(root)
    find = other._steps.find_signature

    def replaced(step):
        found = find(step)
        monkeypatch.undo()
        manager.save(1, tree_at(9), force=True)
        manager.wait()
        return found

    step = ec.open(other.path(1)) if is_open else 1
    monkeypatch.setattr(other._steps, "find_signature", replaced)
    with pytest.raises(ec.ReplacedError, match="Step 1 of .* is another save than"):
        other.add_metrics(step, {"val": 1})
    assert [x.metrics for x in ec.history(root)] == [{}, {}]


@pytest.mark.parametrize("by", ["one manager", "many"])
def test_the_metric_that_was_added_last_counts_whatever_clocks_say(
    root, by, monkeypatch
):
    manager = ec.CheckpointManager(root)
    with manager:
        fill_run(manager, [1], loss=[0])
    clock = time.time
    for i, ahead in enumerate([0, -3600, 1e6, -3600, 0, 0, -1e9]):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: clock() + ahead)
        add = manager.add_metrics
        if by == "many":
            add = ec.CheckpointManager(root).add_metrics
        add(1, {"loss": i, str(i): 1})
        (step,) = ec.history(root)
        assert step.metrics == {"loss": i, **{str(j): 1 for j in range(i + 1)}}


def test_numbers_that_no_float_holds_are_ranked(root):
    """As in metadata that somebody else has written."""
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1], loss=[1])
    for step, loss in {2: 10**400, 3: -(10**400)}.items():
        metadata = {"metrics": {"loss": loss}}
        ec.tree_serialise_leaves(manager.path(step), tree_at(step), metadata=metadata)
    options = dict(best=("loss", "min"), keep=1)
    with ec.CheckpointManager(root, **options) as manager:
        assert manager.best(n=9) == [3, 1, 2]
        fill_run(manager, [4], loss=[0])
    assert manager.steps() == [3, 4]
    assert ec.runs(root, best=("loss", "max"))[0].best.number == 4
