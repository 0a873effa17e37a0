"""Attempts at a run: what goes back to an older step, or begins anew, and what a
restart then goes on from."""

import itertools
import random
import warnings

import numpy as np
import pytest
from support import inside
from support.command import main
from support.helpers import fill_run, long
from support.stores import StoredFiles

import eqx_ckpt as ec


_numbers = itertools.count()


def _tree(step, attempt):
    return {"at": np.asarray([step, attempt])}


def _save(manager, steps, attempt, **how):
    for step in steps:
        manager.save(step, _tree(step, attempt), **how)
    manager.wait()


def _at(root, **how):
    """The step that a restart goes on from, and its attempt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree, step = ec.CheckpointManager(root, **how).restore(_tree(0, 0))
    assert tree["at"][0] == step
    return step, int(tree["at"][1])


@pytest.fixture(params=["directory", "memory"])
def root(request, tmp_path):
    if request.param == "memory":
        return f"memory://attempts/{next(_numbers)}"
    return tmp_path / "run"


def _attempt_of(root, step):
    return int(ec.open(f"{root}/{step}/default")["at"].read()[1])


def test_a_run_that_begins_anew(root, capsys):
    with ec.CheckpointManager(root, keep=3) as manager:
        _save(manager, range(100, 151, 10), 1)
    manager = ec.CheckpointManager(root, keep=3)
    began = "Step 10 begins an attempt .* anew. Newer steps, 3 from 130 to 150, are of"
    with pytest.warns(UserWarning, match=began):
        _save(manager, [10], 2)
    # Those of before stay until there are as many.
    assert manager.steps() == [10, 130, 140, 150] and manager.latest() == 10
    told = "Restored step 10 .*\n  steps, 3 from 130 to 150, are of an earlier attempt"
    with pytest.warns(UserWarning, match=told):
        ec.CheckpointManager(root).restore(_tree(0, 0))
    assert ec.open(root).metadata["step"] == 10
    _save(manager, [20], 2)
    assert manager.steps() == [10, 20, 130, 140, 150]
    assert main(["steps", str(root)]) == 0
    assert capsys.readouterr().out.count("of an earlier attempt") == 3
    assert main(["average", "--last", "3", str(root), "--to", f"{root}-mean"]) == 2
    assert "has only 2 complete steps" in capsys.readouterr().err
    _save(manager, [30], 2)
    assert manager.steps() == [10, 20, 30]
    _save(manager, [40], 2)
    assert manager.steps() == [20, 30, 40] and _at(root) == (40, 2)


def test_a_run_that_began_without_a_restore_says_how_it_goes_on(root):
    with ec.CheckpointManager(root, every=5) as manager:
        _save(manager, range(1, 11), 1)
    manager = ec.CheckpointManager(root, every=5)
    hint = r"The run has steps up to 10: to go on from there, call `restore\(like{}\)`"
    for _ in range(2):
        with pytest.raises(FileExistsError, match=hint.format("")):
            _save(manager, [5], 2)
    with pytest.warns(UserWarning, match="Step 4 begins an attempt"):
        _save(manager, [4], 2, force=True)
    with pytest.raises(FileExistsError, match=r"`force=True`\.$"):
        _save(manager, [5], 2)
    # Now a restart takes step 4, and comes by step 5 again.
    with pytest.warns(UserWarning, match="Restored step 4"):
        manager.restore(_tree(0, 0))
    with pytest.raises(FileExistsError, match=hint.format(", step=10")):
        _save(manager, [5], 2)
    manager.restore(_tree(0, 0), step=10)
    with pytest.raises(FileExistsError, match=r"`force=True`\.$"):
        _save(manager, [10], 2)


def test_a_run_that_goes_back(root):
    with ec.CheckpointManager(root) as manager:
        _save(manager, range(10, 101, 10), 1)
    manager = ec.CheckpointManager(root, keep=3)
    manager.restore(_tree(0, 0), step=50)
    # Nothing is replaced that nobody asks to replace.
    with pytest.raises(FileExistsError, match="Step 60 exists"):
        _save(manager, [60], 2)
    assert _at(root) == (100, 1)
    with pytest.warns(UserWarning, match="Step 60 begins .* restored of step 50"):
        _save(manager, [60], 2, force=True)
    assert _at(root) == (60, 2)
    assert manager.steps() == [40, 50, 60, 70, 80, 90, 100]
    # Back in the attempt of before, which the second has not followed.
    other = ec.CheckpointManager(root)
    other.restore(_tree(0, 0), step=80)
    with pytest.warns(UserWarning, match="Newer steps, 2 from 90 to 100, are"):
        _save(other, [85], 3)
    assert _at(root) == (85, 3)


@pytest.mark.parametrize("is_near", [False, True])
def test_what_goes_while_an_attempt_has_fewer_steps(root, is_near, tmp_path):
    """Also where the near disk begins the attempt, before the save at the root does."""
    near = {"near": tmp_path / "disk", "near_every": 1} if is_near else {}
    with ec.CheckpointManager(root, keep=3, **near) as manager:
        _save(manager, [10, 20, 30], 1)
        manager.restore(_tree(0, 0), step=10)
        with pytest.warns(UserWarning, match="Step 11 begins .* restored of step 10"):
            _save(manager, [11], 2)
        assert manager.steps() == [10, 11, 20, 30]
        _save(manager, [12], 2)
        assert manager.steps() == [10, 11, 12, 20, 30]
        _save(manager, [13], 2)
        assert manager.steps() == [11, 12, 13]


def test_the_best_step_of_an_attempt(root):
    how = {"keep": 1, "best": ("loss", "min")}
    with ec.CheckpointManager(root, **how) as manager:
        fill_run(manager, [10, 20, 30], loss=[1.0, 0.1, 0.5])
    manager = ec.CheckpointManager(root, **how)
    with pytest.warns(UserWarning, match="Step 1 begins"):
        fill_run(manager, [1], loss=[9.0])
    manager.wait()
    assert manager.best() == 1 and manager.steps() == [1]


@pytest.mark.filterwarnings("ignore:Step .* begins an attempt", "ignore:Restored step")
def test_another_run_that_comes_in_the_place_of_one(root):
    """Whoever has a manager from before reads nothing of the run that is gone."""

    def run(first, back, new):
        with ec.CheckpointManager(root) as manager:
            _save(manager, first, 1)
        manager = ec.CheckpointManager(root)
        manager.restore(_tree(0, 0), step=back)
        _save(manager, new, 2)

    run([10, 20, 30], 10, [15])
    before = ec.CheckpointManager(root)
    assert before.latest() == 15 and len(before.history()) == 4
    ec.delete(root)
    run([11, 12, 30, 40], 12, [25])
    assert before.latest() == 25 and before.restore(_tree(0, 0))[1] == 25
    assert before.history() == ec.CheckpointManager(root).history()
    assert [x.number for x in before.history()] == [11, 12, 30, 40, 25]


def test_what_is_restored_for_a_look_begins_nothing(root):
    with ec.CheckpointManager(root, keep=2) as manager:
        _save(manager, [10, 20, 30], 1)
        manager.restore(_tree(0, 0), step=20)
        _save(manager, [40], 1)
        manager.restore(_tree(0, 0))
        _save(manager, [50], 1)
    assert manager.steps() == [40, 50] and _at(root) == (50, 1)
    assert not [key for key in StoredFiles(root) if "eqx_ckpt.run" in key]


def test_damaged_steps_of_the_last_attempt(root):
    """Then a step of an earlier one is better than none."""
    with ec.CheckpointManager(root) as manager:
        _save(manager, [20, 30], 1)
    manager = ec.CheckpointManager(root)
    with pytest.warns(UserWarning, match="Step 10 begins"):
        _save(manager, [10], 2)
    index = "10/default/eqx_ckpt.json"
    StoredFiles(root)[index] = b"{" + StoredFiles(root)[index][1:][::-1]
    assert _at(root) == (30, 1)


def _bad(step):
    return {**_tree(step, 2), "bad": np.array([None])}


@pytest.mark.parametrize("back", [None, 20])
@pytest.mark.parametrize("refused", ["tree", "own"])
@pytest.mark.parametrize("is_near", [False, True])
def test_what_is_refused_begins_none(root, is_near, refused, back, tmp_path):
    """Neither at the root, nor on a near disk, of which older steps would not count."""
    near = {"near": tmp_path / "disk", "near_every": 1} if is_near else {}
    with ec.CheckpointManager(root, keep=2, **near) as manager:
        _save(manager, [10, 20, 30], 1)
    manager = ec.CheckpointManager(root, keep=2, **near)
    if back is not None:
        manager.restore(_tree(0, 0), step=back)
    before = dict(StoredFiles(root)), dict(StoredFiles(tmp_path))
    given = {"own": {"x": np.array([None])}} if refused == "own" else {}
    with pytest.raises((TypeError, ValueError), match="cannot be saved"):
        manager.save(5, _bad(5) if refused == "tree" else _tree(5, 2), **given)
    manager.wait()
    assert (dict(StoredFiles(root)), dict(StoredFiles(tmp_path))) == before
    assert _at(root, **near) == (30, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _save(manager, [5], 2)
    assert _at(root, **near) == (5, 2)


# ---- Any history, against a model.


class _World:
    """A run that is started and killed, and what it has to have."""

    def __init__(self, root, seed):
        self.root, self.rng = root, random.Random(seed)
        self.keep = self.rng.choice([None, 1, 2, 3])
        # Of each step that was saved its attempt; and those of the last attempt, and
        # those that it began with, in order.
        self.saved: dict[int, int] = {}
        self.own: list[int] = []
        self.lineage: list[int] = []
        self.attempt = 0

    def play(self):
        for _ in range(self.rng.randrange(2, 6)):
            self._session()
            assert _at(self.root) == (self.own[-1], self.saved[self.own[-1]])

    def _session(self):
        rng = self.rng
        manager = ec.CheckpointManager(self.root, keep=self.keep)
        there = manager.steps()
        from_ = 0
        how = rng.choice(["go on", "go on", "back", "anew"])
        if how != "anew" and there:
            from_ = self.own[-1]
            if how == "back":
                from_ = rng.choice([s for s in self.lineage + self.own if s in there])
                manager.restore(_tree(0, 0), step=from_)
            else:
                manager.restore(_tree(0, 0))
        step = from_ + rng.randrange(1, 9)
        if self.own and step < self.own[-1]:
            # An attempt, if it saves anything.
            if rng.random() < 0.3:
                self._killed(manager, step)
                return
            self.lineage = [s for s in self.lineage + self.own if s <= from_]
            self.own = []
            self.attempt += 1
        for _ in range(rng.randrange(1, 6)):
            manager.save(step, _tree(step, self.attempt), force=True)
            manager.wait()
            self.saved[step] = self.attempt
            self.own.append(step)
            self._check(manager)
            if rng.random() < 0.3:
                manager.restore(_tree(0, 0), step=rng.choice(manager.steps()))
            step += rng.randrange(1, 9)

    def _killed(self, manager, step):
        """The attempt has begun, and its first save comes to nothing."""
        with pytest.MonkeyPatch.context() as patch:
            inside.replace(patch, "publish", _no_space)
            with pytest.raises(OSError, match="No space"):
                manager.save(step, _tree(step, -1), force=True)
                manager.wait()

    def _check(self, manager):
        there = manager.steps()
        line = [s for s in self.lineage if s in there] + self.own
        assert manager.latest() == self.own[-1]
        # None goes that counts.
        assert set(line[-(self.keep or len(line)) :]) <= set(there)
        for step in there:
            assert _attempt_of(self.root, step) == self.saved[step]
        if self.keep is None:
            assert set(there) == set(self.saved)


def _no_space(*_):
    raise OSError(28, "No space left on device")


# In a store, the last replaces steps that an earlier attempt has left.
_seeds = [0, 1, 116, *long(*range(2, 116), *range(117, 300))]


@pytest.mark.parametrize("seed", _seeds)
@pytest.mark.filterwarnings("ignore")
def test_any_attempts(root, seed):
    _World(root, seed).play()
