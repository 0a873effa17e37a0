"""The loop of the README loses no state that `save` was given: see `support.loops`."""

import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from support import inside, scripts
from support.helpers import tree_at

import eqx_ckpt as ec


def _sweep(directory, *arguments):
    done = scripts.run_module("support.loops", directory, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    return found["count"]


@pytest.mark.long
def test_the_loop_ends_at_a_line(tmp_path):
    assert _sweep(tmp_path) > 15


@pytest.mark.long
def test_the_loop_ends_at_any_line(tmp_path):
    print(_sweep(tmp_path, "long"), "loops that were ended")


def test_what_is_kept_for_the_end_cannot_change(tmp_path):
    state = {"x": np.zeros(3), "n": [1], "y": jnp.ones(2)}
    metadata = {"at": {"row": 1}}
    with pytest.raises(KeyError):
        with ec.CheckpointManager(tmp_path, every=100) as manager:
            manager.save(7, state, metadata=metadata)
            state["x"] += 1
            state["n"][0] = state["y"] = 2
            metadata["at"]["row"] = 2
            raise KeyError
    assert manager.steps() == [7]
    out, _ = manager.restore({"x": np.ones(3), "n": [0], "y": jnp.ones(2)})
    assert out["x"].tolist() == [0, 0, 0] and out["n"] == [1]
    assert out["y"].tolist() == [1, 1]
    assert ec.open(manager.path(7)).metadata["at"] == {"row": 1}


def test_an_exception_deletes_nothing(tmp_path):
    """What comes before one may be what it is about: a model of NaN."""
    with pytest.raises(FloatingPointError):
        with ec.CheckpointManager(tmp_path, every=10, keep=1) as manager:
            for step in range(10, 15):
                manager.save(step, tree_at(step))
            raise FloatingPointError
    assert manager.steps() == [10, 14]
    with ec.CheckpointManager(tmp_path, every=10, keep=1) as manager:
        _, step = manager.restore(tree_at(0))
        assert step == 14
        for step in range(15, 23):
            manager.save(step, tree_at(step))
    assert manager.steps() == [22]


def test_a_state_that_is_gone_is_told(tmp_path):
    with ec.CheckpointManager(tmp_path, every=10) as manager:
        for step in range(10, 13):
            state = tree_at(step)
            manager.save(step, state)
        state["x"].delete()
        # Filters of warnings are of all threads, and others may put theirs back.
        manager.wait()
        with pytest.warns(UserWarning, match="state of step 12, .* is not saved"):
            manager.__exit__(None, None, None)
    with pytest.raises(KeyError) as caught:
        with manager:
            state = tree_at(13)
            manager.save(13, state)
            state["x"].delete()
            raise KeyError
    assert "state of step 13, the last" in caught.value.__notes__[0]
    assert manager.steps() == [10]


@pytest.mark.parametrize("given", [20, 25])
def test_a_save_that_failed_loses_no_later_state(tmp_path, monkeypatch, given):
    is_given = threading.Event()

    def no_space(*_):
        assert is_given.wait(60)  # Else the first call may be told already.
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as caught:
        with ec.CheckpointManager(tmp_path, every=10) as manager:
            with monkeypatch.context() as patch:
                inside.replace(patch, "publish", no_space)
                manager.save(10, tree_at(10))
                is_given.set()
                manager._saves._running[-1].over.wait()
            manager.save(given, tree_at(given))
    assert caught.value.errno == 28 and manager.steps() == [given]


def _run(path, every, last, **given):
    """Saves steps up to `last`; `given` makes what `save` gets with each."""
    with ec.CheckpointManager(path, every=every) as manager:
        for step in range(1, last + 1):
            more = {name: make(step) for name, make in given.items()}
            manager.save(step, {"step": np.full(3, step)}, **more)


def _newest(path):
    manager = ec.CheckpointManager(path)
    tree, step = manager.restore({"step": np.zeros(3, int)})
    assert (tree["step"] == step).all()
    return step


@pytest.mark.parametrize("bad", ["metadata", "metrics", "step"])
def test_what_save_refuses_costs_no_state_before_it(tmp_path, bad):
    wrong = {"metadata": {"lr": np.float32(1)}, "metrics": {"loss": np.ones(2)}}
    if bad == "step":
        _run(tmp_path, 20, 20)
        with pytest.raises(FileExistsError), pytest.warns(UserWarning, match="anew"):
            _run(tmp_path, 10, 20)
        ec.CheckpointManager(tmp_path).delete(20)
    else:
        with pytest.raises((TypeError, ValueError)):
            _run(tmp_path, 10, 20, **{bad: lambda s: wrong[bad] if s == 20 else None})
    assert _newest(tmp_path) == 19


def test_a_last_state_is_saved_without_metrics_that_are_none(tmp_path):
    with pytest.warns(UserWarning, match="Step 15 is saved without its metrics"):
        _run(tmp_path, 10, 15, metrics=lambda s: {"loss": None if s == 15 else s})
    assert _newest(tmp_path) == 15
    loss = np.zeros(())

    def metrics(step):
        loss[...] = step
        return {"loss": loss}

    _run(tmp_path / "b", 10, 12, metrics=metrics)
    loss[...] = -1
    assert ec.open(tmp_path / "b/12/default").metadata["metrics"]["loss"] == 12
