"""A run's checkpoints: which are saved, which are restored, and which stay."""

import contextlib
import gc
import itertools as it
import json
import os
import pathlib
import re
import shutil
import threading
import time
import tracemalloc
import weakref

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import inside, scripts
from support.helpers import files_of, fill_run, long, run_program, tree_at
from support.processes import good, run_team_program

import eqx_ckpt as ec


_numbers = it.count()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


def test_a_step_is_an_ordinary_checkpoint(root):
    with ec.CheckpointManager(root, layout="zarr") as manager:
        metrics = {"loss": jnp.float32(0.5), "n": np.int64(3), "bad": float("nan")}
        assert manager.save(7, tree_at(7), metrics, metadata={"width": 64})
    assert manager.path(7) == f"{root}/7/default"
    ckpt = ec.open(manager.path(7))
    assert ckpt.layout == "zarr"
    numbers = {"loss": 0.5, "n": 3.0, "bad": "nan"}
    assert ckpt.metadata == {"width": 64, "step": 7, "metrics": numbers}
    tree, step = manager.restore(tree_at(0))
    assert step == 7 and tree["step"] == 7 and tree["x"][0] == 7
    x, step = manager.restore(tree["x"], source="x", step=7)
    assert x[0] == 7 and manager.steps() == [7] and manager.latest() == 7


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(1, 3),
)
@settings(max_examples=20)
def test_of_each_multiple_the_nearest_step_stays(gaps, every, keep):
    steps = list(it.accumulate(gaps))
    root = f"memory://nearest/{next(_numbers)}"
    with ec.CheckpointManager(root, keep=keep, keep_nearest=every) as manager:
        fill_run(manager, steps)
    nearest = set()
    for n in range(every, steps[-1] + every, every):
        some = [step for step in steps if abs(step - n) < every]
        nearest |= {*sorted(some, key=lambda s, n=n: (abs(s - n), s))[:1]}
    assert manager.steps() == sorted(nearest | {*steps[-keep:]})


@pytest.mark.parametrize("root", ["memory://ages", "file"])
def test_steps_of_the_last_seconds_stay(root, tmp_path, monkeypatch):
    root = tmp_path if root == "file" else root
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for steps in ([1, 2], [3], [4]):
        with ec.CheckpointManager(root, keep=1, keep_seconds=1000) as manager:
            fill_run(manager, steps)
        now += 600
    assert manager.steps() == [3, 4]


@pytest.mark.parametrize("root", ["memory://manager", "file"])
def test_steps_of_any_store(root, tmp_path):
    root = tmp_path if root == "file" else root
    with ec.CheckpointManager(root, keep=1, best=("loss", "min")) as manager:
        assert manager.latest() is None and manager.best() is None
        fill_run(manager, [1, 2, 3, 10], loss=[2.0, 1.0, 1.5, float("inf")])
        manager.wait()
        assert manager.steps() == [2, 10] and manager.best() == 2
        manager.pin(10)
        fill_run(manager, [11])
        manager.wait()
        assert manager.steps() == [2, 10, 11]
        with pytest.raises(ValueError, match="Step 10 is pinned"):
            manager.delete(10)
        manager.unpin(10)
        manager.delete(10)
        assert manager.steps() == [2, 11]
        tree, step = manager.restore(tree_at(0))
        assert step == 11 and tree["x"][0] == 11
        with pytest.raises(FileNotFoundError, match="no step 5"):
            manager.pin(5)


def test_when_it_saves(root):
    with ec.CheckpointManager(root, every=10) as manager:
        saved = [s for s in range(25) if manager.save(s, tree_at(s))]
        assert saved == [0, 10, 20]
        assert manager.save(23, tree_at(23), force=True)
        with pytest.raises(FileExistsError, match="Step 20 exists already"):
            manager.save(20, tree_at(20))
        assert manager.save(20, tree_at(99), force=True)
        manager.wait()
        assert ec.open(manager.path(20))["step"].read() == 99
    assert manager.steps() == [0, 10, 20, 23]


def test_when_time_has_passed(root):
    with ec.CheckpointManager(root, every_seconds=1000) as manager:
        assert not manager.save(1, tree_at(1))
        manager._saves._last_begin_time -= 1000
        assert manager.save(2, tree_at(2)) and not manager.save(3, tree_at(3))
    with ec.CheckpointManager(root, every=2, every_seconds=0.01) as manager:
        assert manager.save(4, tree_at(4))
        time.sleep(0.02)
        assert manager.save(5, tree_at(5))


def test_metrics_are_computed_for_saved_steps_only(root):
    class Metric:
        def __float__(self):
            raise AssertionError

    warns = pytest.warns(UserWarning, match="Step 5 is saved without its metrics")
    with warns, ec.CheckpointManager(root, every=10) as manager:
        assert not manager.save(5, tree_at(5), {"loss": Metric()})
        with pytest.raises(TypeError, match="metric `loss` is not a number"):
            manager.save(10, tree_at(5), {"loss": "low"})
        with pytest.raises(ValueError, match="`step`"):
            manager.save(10, tree_at(5), metadata={"step": 3})


def test_metrics_are_numbers_or_arrays_of_one(root):
    metrics = {"a": jnp.ones(1), "b": np.full((1, 1), 2), "c": np.float32(3), "d": 4}
    with ec.CheckpointManager(root) as manager:
        manager.save(1, tree_at(1), metrics)
        for bad in (np.ones(2), 10**400):
            with pytest.raises(TypeError, match="metric `a` is not a number"):
                manager.save(2, tree_at(2), {"a": bad})
    assert ec.open(manager.path(1)).metadata["metrics"] == dict(a=1, b=2, c=3, d=4)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"keep": 0}, "`keep`"),
        ({"every": -1}, "`every`"),
        ({"best": ("loss", "least")}, "`best`"),
        ({"overwrite": True}, "has no argument `overwrite`"),
        ({"keep": 3, "durable": False}, "`durable`"),
    ],
)
def test_wrong_options(root, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        ec.CheckpointManager(root, **options)
    assert not root.exists()


def test_what_other_managers_have_is_said(root):
    with ec.CheckpointManager(root) as manager:
        with pytest.raises(AttributeError, match=r"here it is `latest\(\)`"):
            manager.latest_step()
        with pytest.raises(AttributeError, match="no attribute `lates`.$"):
            manager.lates()
        assert not hasattr(manager, "all_steps")


def test_metrics_without_that_of_best(root):
    """The manager warns once, and deletes nothing until a step has it."""
    with ec.CheckpointManager(root, keep=1, best=("accuracy", "max")) as manager:
        with pytest.warns(UserWarning, match="metric `accuracy`.* are `accurracy`"):
            manager.save(1, tree_at(1), {"loss": 1.0, "accurracy": 0.5})
        for step in (2, 3):  # Metrics may come later.
            manager.save(step, tree_at(step))
        manager.wait()
        assert manager.steps() == [1, 2, 3]
        with pytest.raises(ValueError, match="`accuracy`, which no step has"):
            manager.best()
        manager.save(4, tree_at(4), {"accuracy": 0.9})
        manager.save(5, tree_at(5), {"loss": 1.0})
    assert manager.steps() == [4, 5] and manager.best() == 4
    with ec.CheckpointManager(root, keep=1, best=("accuracy", "max")) as manager:
        manager.save(6, tree_at(6), {"loss": 1.0})
    assert manager.steps() == [4, 6]


def test_the_last_state_is_as_it_was_given(root):
    """Whatever the caller's arrays became, and whichever memory its copy has."""
    rng = np.random.default_rng(0)
    for number in range(20):
        path = root / str(number)
        own = rng.normal(size=(3, 4, 5))
        with ec.CheckpointManager(path, every=100) as manager:
            for step in range(1, rng.integers(2, 6)):
                # Ties, shapes, dtypes and orders come and go from state to state.
                some = [own[0], own[0].copy(), own[1].T, own[2].astype(np.float32)]
                tree = {"x": [some[i] for i in rng.integers(0, 4, 5)], "step": step}
                wanted = [x.copy() for x in tree["x"]]
                ties = [[x is y for x in tree["x"]] for y in tree["x"]]
                assert not manager.save(step, tree)
                own += 1
                tree["x"].clear()
        saved = ec.open(path).tree
        assert saved.step.read() == step
        for lazy, x in zip(saved.x, wanted, strict=True):
            assert lazy.dtype == x.dtype and np.array_equal(lazy.read(), x)
        aliases = ec.open(path)._source.index.leaves.aliases
        assert len(aliases) == 5 - len({tuple(row) for row in ties})


class Reader:
    """A value that goes on, as an iterator of data does."""

    def __init__(self, at):
        self.at = np.asarray(at)


@pytest.mark.parametrize("fails", [False, True])
def test_values_of_registered_types_are_saved_as_they_were_given(root, fails):
    reader, unread = Reader(7), object.__new__(Reader)
    tree = {"x": np.ones(3), "reader": reader, "unread": unread}
    is_read = lambda x: ec.is_storable(x) and x is not unread
    with ec.register_leaf(Reader, lambda x: x.at, Reader):
        with contextlib.suppress(KeyError):
            with ec.CheckpointManager(root, every=10, filter_spec=is_read) as manager:
                for _ in range(2):
                    reader.at += 1
                    manager.save(int(reader.at), tree, own={"reader": reader})
                reader.at += 90  # In place.
                if fails:
                    raise KeyError("the loop has failed")
        like = {"x": np.zeros(3), "reader": Reader(0), "unread": unread}
        own = {"reader": Reader(0)}
        tree, own, step = manager.restore(like, own=own, filter_spec=is_read)
    assert step == tree["reader"].at == own["reader"].at == 9


def _donated():
    x = jnp.ones(3)
    x.delete()
    return x


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"tree": {"x": np.ones(3), "y": _donated()}}, "deleted or donated"),
        ({"tree": {"x": np.array([None])}}, "dtype `object` cannot be stored"),
        ({"tree": {}}, "Nothing to save"),
        # Like the state before it, but for its structure.
        ({"tree": {"x" * 2**16: np.ones(3), "y": jnp.ones(3)}}, "has 65536 bytes"),
        ({"metadata": {"step": 1}}, "has the key `step`"),
        ({"metadata": {"lock": threading.Lock()}}, "is of type `lock`"),
        ({"own": {"x": np.array([None])}}, "dtype `object` cannot be stored"),
    ],
)
def test_a_state_that_is_refused_costs_none_before_it(root, wrong, why):
    """Whether it is due or not: the error is raised at once."""
    tree = {"x": np.ones(3), "y": jnp.ones(3)}
    with pytest.raises((TypeError, ValueError), match=why):
        with ec.CheckpointManager(root, every=100) as manager:
            for step in (1, 2):
                assert not manager.save(step, {**tree, "x": tree["x"] * step})
            manager.save(3, **{"tree": tree} | wrong)
    tree, step = manager.restore(tree)
    assert step == 2 and tree["x"].tolist() == [2, 2, 2] and manager.steps() == [2]


def test_a_save_before_that_has_failed_costs_no_state_after_it(root):
    """Whatever its error: a damaged checkpoint is a `ValueError`."""
    source = root.parent / "source"
    ec.tree_serialise_leaves(source, {"x": np.arange(3e5)})
    lazy = ec.open(source).tree.x
    (file,) = source.glob("d/*/0")
    with pytest.raises(ec.DamagedError):
        with ec.CheckpointManager(root) as manager:
            file.write_bytes(bytes(file.stat().st_size))
            manager.save(1, {"x": lazy})
            manager.save(2, {"x": np.ones(3)})
    assert manager.steps() == [2]


def test_files_of_a_step_that_was_restored_as_by_default_are_linked(root):
    """Also if the defaults are given."""
    tree = {"x": np.arange(3e5)}
    with ec.CheckpointManager(root) as manager:
        manager.save(1, tree)
    for step, options in enumerate([{}, {"verify": True, "where": None}], 2):
        with ec.CheckpointManager(root) as manager:
            manager.restore(tree, unexpected="error", **options)
            manager.save(step, tree)
        (file,) = root.glob(f"{step}/default/d/*/0")
        assert file.stat().st_nlink == step
    with ec.CheckpointManager(root) as manager:
        manager.restore(tree, verify=False)
        manager.save(4, tree)
    (file,) = root.glob("4/default/d/*/0")
    assert file.stat().st_nlink == 1


def test_a_run_that_has_ended_holds_no_array_of_a_device(root):
    x = jnp.ones(3)
    with ec.CheckpointManager(root, every=10) as manager:
        manager.save(1, {"x": x})
        x = weakref.ref(x)
    gc.collect()
    assert manager.steps() == [1] and x() is None


def test_a_run_that_has_ended_holds_no_copy(root):
    tree = {"x": np.ones(10**6)}
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with ec.CheckpointManager(root, every=10) as manager:
            manager.save(1, tree)
        gc.collect()
        more = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert manager.steps() == [1] and more < tree["x"].nbytes


def test_a_state_that_is_not_due_takes_one_walk_and_no_new_memory(root, monkeypatch):
    tree = {f"w{i}": np.ones((50, 60)) for i in range(8)}
    with ec.CheckpointManager(root, every=100) as manager:
        manager.save(1, tree)
        flatten, walks = jtu.tree_flatten, []
        walk = lambda x, *args, **kwargs: walks.append(x) or flatten(x, *args, **kwargs)
        monkeypatch.setattr(jtu, "tree_flatten", walk)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            manager.save(2, tree)
            most = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert sum(x is tree for x in walks) == 1 and most < tree["w0"].nbytes
        monkeypatch.undo()


def test_a_last_state_that_nobody_saves(root, caplog):
    """Without a `with`, it is lost: a warning and the log say so."""
    manager = ec.CheckpointManager(root, every=10)
    for step in (10, 11):
        manager.save(step, tree_at(step))
    manager.wait()
    with pytest.warns(UserWarning, match="The state of step 11, .*without `with`"):
        with caplog.at_level("WARNING", "eqx_ckpt"):
            del manager
            gc.collect()
    assert "The state of step 11" in caplog.text
    done = scripts.run(scripts.program("run_that_ends_without_with"), root)
    assert "UserWarning: The state of step 21" in done.stderr
    with ec.CheckpointManager(root, every=10) as manager:
        manager.save(22, tree_at(22))
    del manager
    gc.collect()


def test_a_step_that_is_not_there(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 5, 9])
        manager.wait()
        text = f"There is no step 7 in `{root}`: all steps are 1, 5, 9."
        for own in (None, "all"):
            with pytest.raises(FileNotFoundError, match=re.escape(text)):
                manager.restore(tree_at(0), 7, own=own)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.array, jnp.array])
def test_a_step_is_any_integer(root, integer):
    step = integer(3)
    with ec.CheckpointManager(root) as manager:
        assert manager.save(step, tree_at(3), {"loss": 1})
        manager.pin(step)
        manager.unpin(step)
        manager.add_metrics(step, {"loss": 2})
        ec.add_metrics(root, step, {"other": 3})
        assert manager.path(step) == manager.path(3)
        assert manager.restore(tree_at(0), step)[1] == 3
        assert manager.history()[0].metrics == {"loss": 2, "other": 3}
        manager.delete(step)
    assert manager.steps() == []


@pytest.mark.parametrize(
    "step, shown",
    [(-1, "-1"), (10**18, "10{18}"), (10**5000, "one of many digits")],
    ids=["negative", "long", "very long"],
)
def test_a_step_has_few_digits(root, step, shown):
    with pytest.raises(ValueError, match=rf"more than 18 digits: {shown}\.$"):
        ec.CheckpointManager(root).save(step, tree_at(0))


def test_what_stays(root):
    options = dict(keep=2, keep_every=100, best=("accuracy", "max"))
    with ec.CheckpointManager(root, **options) as manager:
        accuracy = [0.1, 0.2, 0.9, 0.3, 0.9, 0.3, 0.3, 0.2]
        fill_run(manager, range(50, 450, 50), accuracy=accuracy)
    # Of two that are equal the newer is the best.
    assert manager.best() == 250
    assert manager.steps() == [100, 200, 250, 300, 350, 400]
    assert sorted(map(int, filter(str.isdigit, os.listdir(root)))) == manager.steps()


def test_going_back_loses_nothing_new(root):
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [10, 20])
        manager.wait()
        fill_run(manager, [11])
        manager.wait()
        assert manager.steps() == [11, 20]


def test_what_is_not_ours_stays(root, tmp_path):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2, 3, 4, 5])
    (root / "1" / "default" / "notes.txt").write_text("keep me")
    (root / "2" / "plots").mkdir()
    elsewhere = tmp_path / "elsewhere"
    shutil.move(root / "3", elsewhere)
    (root / "3").symlink_to(elsewhere)
    shutil.move(root / "4" / "default", tmp_path / "four")
    (root / "4" / "default").symlink_to(tmp_path / "four")
    (root / "0").mkdir()
    (root / "0" / "default").write_text("a file")
    (root / "007" / "default").mkdir(parents=True)
    before = files_of(elsewhere), files_of(tmp_path / "four")
    with ec.CheckpointManager(root, keep=1) as manager:
        assert manager.steps() == [1, 2, 5]
        fill_run(manager, [6])
        # Filters of warnings are of all threads, and others may put theirs back.
        assert manager._saves._running[-1].over.wait(60)
        with pytest.warns(UserWarning, match="step 1 was not deleted: .*`notes.txt`"):
            manager.wait()
        for step in (3, 4):
            with pytest.raises(ValueError, match="symbolic link"):
                manager.delete(step)
    assert manager.steps() == [1, 6]
    assert (files_of(elsewhere), files_of(tmp_path / "four")) == before
    assert (root / "2" / "plots").is_dir() and not (root / "2" / "default").exists()
    assert (root / "0" / "default").is_file() and (root / "007" / "default").is_dir()


def test_nothing_is_deleted_for_a_save_that_fails(root):
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [1])
        manager.wait()
        (root / "2").write_text("in the way")
        with pytest.raises((OSError, RuntimeError)):
            manager.save(2, tree_at(2))
            manager.wait()
        assert manager.steps() == [1]
        fill_run(manager, [3])
    assert manager.steps() == [3]


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_directory_that_is_gone_while_a_run_goes_on(root, tmp_path, layout):
    """Or whose disk is. That a step is deleted is nothing to warn of."""
    with ec.CheckpointManager(root, layout=layout) as manager:
        for step in range(1, 8):
            if step == 3:
                shutil.rmtree(root / "2")
            elif step == 4:
                root.rename(tmp_path / "moved")
            elif step == 6:
                (tmp_path / "moved").rename(tmp_path / "back")
                root.rename(tmp_path / "moved")
                (tmp_path / "back").rename(root)
            elif step == 7:
                root.rename(tmp_path / "renamed")
                (tmp_path / "renamed").rename(root)
            is_told = step in (4, 6)
            says = rf"Step {step} is saved in another directory .* step {step - 1}, "
            with pytest.warns(match=says) if is_told else contextlib.nullcontext():
                manager.save(step, {"x": np.full(3, step)})
                manager.wait()
    assert manager.steps() == [1, 3, 6, 7]


def test_a_state_whose_save_fails_twice_is_told_of_once(root):
    root.mkdir()
    (root / "2").write_text("in the way")
    with pytest.raises(OSError) as e, ec.CheckpointManager(root) as manager:
        manager.save(2, tree_at(2))
    (note,) = e.value.__notes__
    assert note.startswith("The state of step 2") and note.endswith("again, as above.")


def test_a_pinned_step_stays_pinned_however_it_is_called(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2])
        manager.pin(1)
    # In a process that does not check types first.
    assert run_program("wrong_steps", root) == "[1, 2]\n"


def test_an_interrupted_wait_is_waited_for_again(root, monkeypatch):
    real, calls = ec.SaveHandle.result, []

    def result(handle, *args):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(handle, *args)

    with ec.CheckpointManager(root) as manager:
        manager.save(1, tree_at(1))
        monkeypatch.setattr(ec.SaveHandle, "result", result)
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
    assert len(calls) == 2 and manager.steps() == [1]


def _end_before_it_is_staged(patch):
    """Lets each save be over before the call that has begun it has staged it."""
    real = ec.SaveHandle.staged

    def staged(handle):
        handle._saved.exception()
        real(handle)

    patch.setattr(ec.SaveHandle, "staged", staged)


def test_an_error_is_told_once(root, monkeypatch):
    """Also where a save has failed before the call returns."""
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1])
        manager.wait()
        with monkeypatch.context() as patch:
            _end_before_it_is_staged(patch)
            inside.replace(patch, "publish", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                manager.save(2, tree_at(2))
        fill_run(manager, [3])
    assert manager.steps() == [1, 3]


def test_a_save_that_raises_is_followed_up(root, monkeypatch):
    """The step that it was to replace has its mark again."""
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1])
        manager.wait()
        _end_before_it_is_staged(monkeypatch)
        inside.replace(monkeypatch, "publish", lambda *_: 1 / 0)
        inside.watch(monkeypatch, "mark a step", lambda *_: time.sleep(0.3))
        with pytest.raises(ZeroDivisionError):
            manager.save(1, tree_at(2), force=True)
        assert (root / "1/commit_success.txt").exists()
        monkeypatch.undo()


def test_an_error_of_the_body_is_not_hidden(root):
    with pytest.raises(KeyError):
        with ec.CheckpointManager(root) as manager:
            fill_run(manager, [1])
            raise KeyError
    assert manager.steps() == [1]


# ---- Restoring.


def _break_data(path):
    (file,) = path.glob("d/*/0")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def _break_index(path):
    file = path / "eqx_ckpt.json"
    file.write_bytes(file.read_bytes()[:-60] + b" " * 60)


def _break_digests(path):
    (file,) = path.glob("d/*/digests")
    file.write_bytes(bytes(len(file.read_bytes())))


def _remove_index(path):
    (path / "eqx_ckpt.json").unlink()


DAMAGE = {
    "data": (_break_data, "is damaged"),
    "index": (_break_index, "the index is damaged"),
    "digests": (_break_digests, "file of digests is damaged"),
    "incomplete": (_remove_index, "was not completed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_steps_are_skipped_and_saved_anew(root, damage):
    breaks, says = DAMAGE[damage]
    manager = ec.CheckpointManager(root)
    fill_run(manager, [10, 20, 30])
    manager.wait()
    for step in (20, 30):
        breaks(pathlib.Path(manager.path(step)))
    manager = ec.CheckpointManager(root, keep=1)
    with pytest.warns(UserWarning, match="Restored step 10") as caught:
        tree, step = manager.restore(tree_at(0))
    assert len(caught) == 1 and step == 10 and tree["x"][0] == 10
    assert str(caught[0].message).count(says) == 2
    # The run comes by the same steps again.
    fill_run(manager, [20])
    manager.wait()
    assert 20 in manager.steps() and ec.verify(manager.path(20)) == []
    fill_run(manager, [30, 40])
    manager.wait()
    assert manager.steps() == [40]


def test_what_does_not_fit_is_an_error(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [10])
        assert manager.save(20, {"x": jnp.zeros(3)})
        with pytest.raises(RuntimeError, match="does not fit"):
            manager.restore(tree_at(0))
        with pytest.raises(ValueError, match="selects"):
            manager.restore(tree_at(0), filter_spec=False)


def test_a_newer_format_is_an_error(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [10, 20])
    index = pathlib.Path(manager.path(20), "eqx_ckpt.json")
    index.write_bytes(index.read_bytes().replace(b'"version":1', b'"version":9'))
    with pytest.raises(ValueError, match="pip install"):
        manager.restore(tree_at(0))


def test_nothing_to_restore(root):
    manager = ec.CheckpointManager(root)
    with pytest.raises(FileNotFoundError, match="no step to restore"):
        manager.restore(tree_at(0))
    fill_run(manager, [1])
    manager.wait()
    _break_data(pathlib.Path(manager.path(1)))
    with pytest.raises(ec.DamagedError, match="step 1: .*is damaged"):
        manager.restore(tree_at(0))
    with pytest.raises(ec.DamagedError, match="is damaged"):
        manager.restore(tree_at(0), step=1)
    with pytest.raises(FileNotFoundError):
        manager.restore(tree_at(0), step=2)


# ---- `exists` and `delete`.


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_delete(tmp_path, layout):
    path = tmp_path / "c"
    assert not ec.exists(path)
    ec.tree_serialise_leaves(path, tree_at(1), layout=layout)
    assert ec.exists(path)
    ec.delete(path)
    assert not ec.exists(path) and os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ec.delete(path)


def test_delete_refuses_what_is_not_ours(tmp_path):
    path, link, other = tmp_path / "c", tmp_path / "link", tmp_path / "other"
    ec.tree_serialise_leaves(path, tree_at(1))
    (path / "notes.txt").write_text("")
    link.symlink_to(path)
    other.mkdir()
    (other / "data").write_text("")
    file = tmp_path / "file"
    file.write_text("")
    before = files_of(tmp_path)
    for target, error in [
        (path, ValueError),
        (link, ValueError),
        (other, FileNotFoundError),
        (file, FileNotFoundError),
    ]:
        assert ec.exists(target) == (target in (path, link))
        with pytest.raises(error):
            ec.delete(target)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "layout, at", [("ocdbt", 0), ("ocdbt", 1), ("ocdbt", 3), ("zarr", 2)]
)
def test_a_deletion_that_is_killed_leaves_nothing_that_opens(root, layout, at):
    manager = ec.CheckpointManager(root, layout=layout)
    fill_run(manager, [1, 2])
    manager.wait()
    program = scripts.program("deletion_that_is_killed")
    assert scripts.run(program, root, at).returncode == 9
    if at < 2:
        assert manager.steps() == [1, 2] and ec.verify(manager.path(1)) == []
        return
    assert manager.steps() == [2] and not ec.exists(manager.path(1))
    (left,) = os.listdir(root / "1")
    with pytest.raises(FileNotFoundError):
        ec.open(root / "1" / left)
    # The next save deletes what is left.
    fill_run(manager, [3])
    manager.wait()
    assert not (root / "1").exists()


# ---- Orbax.


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])
def test_orbax_reads_the_steps(root, layout):
    with ec.CheckpointManager(root, layout=layout, orbax=True) as manager:
        fill_run(manager, [1, 20])
        manager.pin(1)
    out = run_program("restore_a_run_by_orbax", root)
    assert json.loads(out) == [[1, 20], 20.0, 20]


# ---- Several processes.


def test_several_processes(tmp_path):
    out = good(run_team_program(2, "team_of_a_manager", tmp_path, devices=1))
    assert [text.splitlines()[-1] for text in out] == ["[2, 3, 4, 5]"] * 2


def test_what_one_process_finds_wrong_keeps_none_waiting(tmp_path):
    out = good(run_team_program(2, "team_that_ends_apart", tmp_path, devices=1))
    for lines in (text.splitlines()[-3:] for text in out):
        assert all("has the key `step`" in line for line in lines[:2]), lines
        assert "step 0 was not deleted" in lines[2], lines


def test_what_process_0_says_counts(tmp_path):
    """Its metrics, and which step is the latest: others may see less of a disk."""
    good(run_team_program(2, "team_of_other_metrics", tmp_path))
    for step in (2, 3):
        metadata = ec.open(tmp_path / f"run/{step}/default").metadata
        assert metadata == {"step": step, "metrics": {"speed": step / 4}}


def test_a_save_that_has_just_begun_is_no_failure(tmp_path):
    """Its directories are made before anything is in them, or locked."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, tree_at(1))
    (tmp_path / "2/default/d").mkdir(parents=True)
    manager = ec.CheckpointManager(tmp_path)
    assert manager.restore(tree_at(0))[1] == 1 and manager.steps() == [1]
    manager.save(2, tree_at(2))
    manager.wait()
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("pause", [0, 0.05])
def test_there_always_is_a_step(tmp_path, pause):
    """Beside a run that keeps one step, and saves the next as fast as it can, or that
    pauses between each directory and its lock."""
    root = tmp_path / "run"
    program = scripts.program("run_of_one_step_after_another")
    seen = set()
    with scripts.start(program, root, pause) as script:
        assert script.stdout.readline() == "begun\n"
        end = time.monotonic() + 1
        while time.monotonic() < end or len(seen) < 3:
            manager = ec.CheckpointManager(root)
            assert manager.latest() is not None and manager.steps()
            tree, step = manager.restore({"step": 0, "x": np.zeros(2, int)})
            assert (tree["x"] == step).all() and tree["step"] == step
            seen.add(ec.open(root).metadata["step"])


def test_a_save_that_begins_between_two_looks_is_not_one_that_was_killed(
    root, monkeypatch
):
    with ec.CheckpointManager(root) as manager:
        manager.save(1, tree_at(1))
    begun = root / "2/default/d/0123456789abcdef"
    begun.parent.mkdir(parents=True)

    def wrapper(names):
        def wrapped(directory):
            if not directory.url.endswith("2/default/d") or begun in seen:
                return names(directory)
            seen.append(begun)
            begun.mkdir()
            found = names(directory)
            begun.rmdir()  # As a save does that raises.
            return found

        return wrapped

    seen = []
    inside.wrap(monkeypatch, "names in a step", wrapper)
    # Without a warning.
    assert ec.CheckpointManager(root).restore(tree_at(0))[1] == 1 and seen


def test_a_fork_saves_nothing(root):
    run_program("fork_of_a_run", root)


def test_a_metric_that_no_step_has(root):
    with ec.CheckpointManager(root) as manager:
        assert ec.CheckpointManager(root, best=("vall", "min")).best() is None
        fill_run(manager, [1, 2], val=[2.0, 1.0], loss=[0.0, 0.0])
    with pytest.raises(ValueError, match="`vall`, which no step has. They have `val`."):
        ec.CheckpointManager(root, best=("vall", "min")).best()


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_step_that_another_writer_completes(root, monkeypatch, layout):
    """`restore` passes over a save that is under way, and takes it for no damage."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*_):
        begun.set()
        assert go_on.wait(60)

    with ec.CheckpointManager(root) as manager:
        manager.save(1, tree_at(1))
        manager.wait()
        inside.watch(monkeypatch, "publish", slowly)
        other = ec.async_tree_serialise_leaves(
            manager.path(2), tree_at(2), layout=layout
        )
        assert begun.wait(60)
        assert manager.restore(tree_at(0))[1] == 1  # Without a warning.
        assert not manager._saves.damaged
        go_on.set()
        other.result()
        with pytest.raises(FileExistsError, match="Step 2 exists already"):
            manager.save(2, tree_at(3))
        assert manager.restore(tree_at(0))[1] == 2


def test_a_save_that_is_interrupted_as_it_begins_goes_on(root, monkeypatch):
    def make(start):
        def interrupted(*args):
            start(*args)
            raise KeyboardInterrupt

        return interrupted

    with pytest.raises(KeyboardInterrupt) as e:
        with ec.CheckpointManager(root) as manager:
            inside.wrap(monkeypatch, "start in the background", make)
            manager.save(1, tree_at(1))
    assert not getattr(e.value, "__notes__", [])
    assert manager.restore(tree_at(0))[1] == 1
    # And so does what follows it.
    assert (root / "1/commit_success.txt").exists()
    assert [step.number for step in manager.history()] == [1]


def test_the_error_of_the_save_before_says_what_becomes_of_this_one(root, monkeypatch):
    errors, has_returned = [OSError("the disk is full")], threading.Event()

    def publish(*_):
        assert has_returned.wait(60)  # Else the first call may tell its error.
        if errors:
            raise errors.pop()

    inside.watch(monkeypatch, "publish", publish)
    with ec.CheckpointManager(root) as manager:
        manager.save(20, tree_at(20))
        has_returned.set()
        with pytest.raises(OSError, match="the disk is full") as e:
            manager.save(30, tree_at(30))
        (note,) = e.value.__notes__
        assert "Step 30, given to this call, is not saved either: it is kept" in note
    assert manager.steps() == [30]


@pytest.mark.parametrize("fails", [False, True])
def test_no_older_state_is_saved_after_a_newer_one(root, monkeypatch, fails):
    """A save that was interrupted goes on: the state that was kept before it is saved
    only if it fails."""
    real, errors = ec.SaveHandle.staged, [OSError("the disk is full")] if fails else []

    def staged(handle):
        monkeypatch.setattr(ec.SaveHandle, "staged", real)
        raise KeyboardInterrupt

    def publish(*_):
        if errors:
            raise errors.pop()

    x = jnp.ones(3)
    with pytest.raises(KeyboardInterrupt) as e:
        with ec.CheckpointManager(root, every=10) as manager:
            manager.save(9, {"x": x})
            monkeypatch.setattr(ec.SaveHandle, "staged", staged)
            inside.watch(monkeypatch, "publish", publish)
            try:
                manager.save(10, {"x": x})
            finally:
                if not fails:
                    x.delete()
    assert manager.steps() == [9 if fails else 10]
    notes = ["The save before has failed: OSError: the disk is full"] if fails else []
    assert getattr(e.value, "__notes__", []) == notes


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_state_whose_copy_fails_is_saved_as_it_was_given(root, monkeypatch, error):
    """The caller may write to its arrays once it has the error."""
    real = np.copyto

    def copyto(*args):
        monkeypatch.setattr(np, "copyto", real)
        raise error

    x = np.full(3, 1.0)
    with ec.CheckpointManager(root, every=10) as manager:
        manager.save(1, {"x": x})
        monkeypatch.setattr(np, "copyto", copyto)
        x += 1
        with pytest.raises(error):
            manager.save(2, {"x": x})
        x += 7
    assert manager.steps() == [2]
    assert ec.open(manager.path(2))["x"].read().tolist() == [2.0, 2.0, 2.0]


def test_an_interrupted_copy_of_a_state_leaves_no_mixture(root, monkeypatch):
    """It is made in the memory of the state before, which is no state any more then."""
    real = np.copyto

    def copyto(*args):
        real(*args)
        monkeypatch.setattr(np, "copyto", real)
        raise KeyboardInterrupt

    manager = ec.CheckpointManager(root, every=10)
    with pytest.raises(KeyboardInterrupt), manager:
        manager.save(1, {"a": np.full(3, 1.0), "b": np.full(3, 1.0)})
        monkeypatch.setattr(np, "copyto", copyto)
        manager.save(2, {"a": np.full(3, 2.0), "b": np.full(3, 2.0)})
    assert manager.steps() == [2]
    saved = ec.open(manager.path(2))
    assert {x for name in saved for x in saved[name].read().tolist()} == {2.0}


def test_a_save_does_not_look_at_all_steps_of_a_long_run(root, monkeypatch):
    looks = []
    for name in ("stat", "scandir"):
        ask = getattr(os, name)

        def count(*args, ask=ask, **keywords):
            looks.append(args)
            return ask(*args, **keywords)

        monkeypatch.setattr(os, name, count)
    with ec.CheckpointManager(root, durable=False) as manager:
        counts = []
        for first in (0, 1000):
            manager.save(first, tree_at(first))
            manager.wait()
            if first:
                for step in range(100, 900):
                    shutil.copytree(root / "0", root / str(step))
                # The next look at all finds them.
                for step in range(first + 1, first + 40):
                    manager.save(step, tree_at(step))
                    manager.wait()
                first += 40
            looks.clear()
            for step in range(first + 1, first + 40):
                manager.save(step, tree_at(step))
                manager.wait()
            counts.append(len(looks))
    assert counts[1] <= 1.5 * counts[0], counts


@pytest.mark.parametrize("handler", ["JAX", "Python"])
def test_preemption_stops_all_processes_at_one_step(tmp_path, handler):
    """By JAX's preemption service there is no message in each step."""
    out = good(
        run_team_program(3, "team_that_is_preempted", tmp_path, handler, devices=1)
    )
    lines = [text.splitlines()[-1] for text in out]
    step = int(lines[0].split()[0])
    asked = 0 if handler == "JAX" else step
    assert 7 <= step < 19_999 and lines == [f"{step} {asked} [{step}]"] * 3
    assert [("handled" in text) for text in out] == [False, handler == "Python", False]
