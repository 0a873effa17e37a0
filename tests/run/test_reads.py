"""Whatever a manager is asked, each step that was due is there at the end, and so is
the last state."""

import contextlib
import itertools
import random
import warnings

import numpy as np
import pytest
from support.helpers import long
from support.processes import good, run_team_program

import eqx_ckpt as ec


_numbers = itertools.count()


def _tree(step):
    return {"x": np.full(3, step)}


def _not_there(manager):
    with pytest.raises(FileNotFoundError):
        manager.restore(_tree(0), step=10**6)


def _of_another_form(manager):
    # `ValueError` where there is a step; `RuntimeError` tells what does not fit.
    with contextlib.suppress(FileNotFoundError):
        with pytest.raises((ValueError, RuntimeError)):
            manager.restore({"y": np.zeros(7)})


def _some(manager, call):
    if steps := manager.steps():
        call(steps[len(steps) // 2])


ASKED = {
    "restore": lambda m: _some(m, lambda _: m.restore(_tree(0))),
    "restore one": lambda m: _some(m, lambda s: m.restore(_tree(0), step=s)),
    "restore the best": lambda m: (
        (best := m.best()) is not None and m.restore(_tree(0), step=best)
    ),
    "restore none": _not_there,
    "restore another form": _of_another_form,
    "latest": lambda m: m.latest(),
    "steps": lambda m: m.steps(),
    "best": lambda m: m.best(),
    "path": lambda m: _some(m, m.path),
    "pin": lambda m: _some(m, lambda s: (m.pin(s), m.unpin(s))),
    "wait": lambda m: m.wait(),
    "show": lambda m: (repr(m), m._repr_html_()),
    "stop": lambda m: m.should_stop(),
    "open": lambda m: _some(m, lambda s: ec.open(m.path(s))["x"].read()),
}


def _play(root, seed):
    rng = random.Random(seed)
    every = rng.choice([None, 3, 5])
    due = set()
    step = 0
    for _ in range(rng.choice([1, 1, 2])):
        asked = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with ec.CheckpointManager(root, every=every, best=("n", "min")) as manager:
                for step in range(step + 1, step + rng.randrange(2, 14)):
                    is_due = every is None or step % every == 0
                    metrics = {"n": abs(step - 6)}
                    force = rng.random() < 0.1
                    assert manager.save(step, _tree(step), metrics, force=force) is (
                        is_due or force
                    )
                    if is_due or force:
                        due.add(step)
                    while rng.random() < 0.3:
                        asked.append(rng.choice([*ASKED]))
                        ASKED[asked[-1]](manager)
                for name in rng.sample([*ASKED], rng.randrange(4)):
                    asked.append(name)
                    ASKED[name](manager)
        due.add(step)
        manager = ec.CheckpointManager(root)
        assert manager.steps() == sorted(due), (seed, asked)
        assert manager.latest() == step
    for at in due:
        assert (ec.open(f"{root}/{at}")["x"].read() == at).all()


@pytest.mark.parametrize("seed", [*range(8), *long(*range(8, 400))])
def test_what_is_asked_changes_nothing_that_is_saved(seed, tmp_path):
    root = tmp_path / "run" if seed % 2 else f"memory://reads/{next(_numbers)}"
    _play(root, seed)


@pytest.mark.parametrize("asked", ASKED)
def test_the_last_state_is_saved_whatever_was_asked(asked, tmp_path):
    with ec.CheckpointManager(tmp_path, every=10, best=("n", "min")) as manager:
        for step in range(10, 26):
            manager.save(step, _tree(step), {"n": step})
        ASKED[asked](manager)
    assert manager.steps() == [10, 20, 25]


def test_processes_restore_a_step_that_changes_as_they_open_it(tmp_path):
    good(run_team_program(2, "team_that_restores_beside_others", tmp_path, devices=1))
