"""One manager, used from several threads, and from a handler of a signal."""

import signal
import threading
import time

import jax
import numpy as np
import pytest
from support import inside

import eqx_ckpt as ec


def _tree(step):
    return {"x": np.full(1000, step, np.float32)}


_LIKE = jax.eval_shape(lambda: jax.numpy.zeros(1000))


# They save in no order, and one restores meanwhile.
@pytest.mark.filterwarnings("ignore:.*begins an attempt", "ignore:Restored step")
@pytest.mark.parametrize("keep", [None, 2])
def test_threads_that_save_wait_and_restore(tmp_path, keep):
    errors, saved, is_over = [], [], threading.Event()
    # Which is never synced to a disk.
    manager = ec.CheckpointManager(f"memory://{tmp_path}", keep=keep)

    def save(first):
        for step in range(first, 60, 3):
            if manager.save(step, _tree(step), {"loss": 1 / step}):
                saved.append(step)

    def again(act):
        while not is_over.is_set():
            act()
            time.sleep(0.002)

    def restore():
        if manager.latest() is not None:
            try:
                tree, step = manager.restore({"x": _LIKE})
            except ec.DamagedError:
                return  # Each that it found has been deleted by now.
            assert {*np.unique(tree["x"])} == {step}

    def run(call, *args):
        try:
            call(*args)
        except BaseException as e:
            errors.append(e)

    with manager:
        savers = [threading.Thread(target=run, args=(save, i)) for i in (1, 2, 3)]
        others = [
            threading.Thread(target=run, args=(again, act))
            for act in (manager.wait, restore, manager.steps, manager.latest)
        ]
        for thread in (*savers, *others):
            thread.start()
        for thread in savers:
            thread.join()
        is_over.set()
        for thread in others:
            thread.join()
    assert not errors, errors
    assert sorted(saved) == [*range(1, 60)]
    if keep is None:
        assert manager.steps() == [*range(1, 60)]
    for step in manager.steps():
        ckpt = ec.open(manager.path(step))
        assert ckpt.metadata["step"] == step and ckpt["x"][0].read() == step


def test_a_handler_saves_while_a_save_begins(tmp_path):
    """Ctrl-C, or another signal, may come at any step of a save."""
    left = [2]

    def where(tree):
        if left:
            signal.raise_signal(signal.SIGUSR2)
        return tree

    def handle(number, frame):
        step = left.pop()
        manager.save(step, _tree(step))

    found = signal.signal(signal.SIGUSR2, handle)
    try:
        with ec.CheckpointManager(tmp_path / "run", where=where) as manager:
            manager.save(1, _tree(1))
    finally:
        signal.signal(signal.SIGUSR2, found)
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("where", ["as it is copied", "before its turn"])
@pytest.mark.parametrize("other", [2, 7])
def test_a_handler_saves_while_a_state_is_kept(tmp_path, monkeypatch, other, where):
    """The end of the run does not save the same step again."""
    real = np.copyto

    def copyto(*args):
        monkeypatch.setattr(np, "copyto", real)
        signal.raise_signal(signal.SIGUSR2)
        real(*args)

    def handle(number, frame):
        manager.save(other, _tree(other), force=True)

    found = signal.signal(signal.SIGUSR2, handle)
    try:
        with ec.CheckpointManager(tmp_path / "run", every=100) as manager:
            manager.save(6, _tree(6))
            if where == "as it is copied":
                monkeypatch.setattr(np, "copyto", copyto)
            else:
                near = iter([lambda: signal.raise_signal(signal.SIGUSR2)])
                send = lambda state: next(near, bool)()
                monkeypatch.setattr(manager._near, "save_if_due", send)
            manager.save(7, _tree(7))
    finally:
        signal.signal(signal.SIGUSR2, found)
    assert manager.steps() == sorted({other, 7})
    for step in manager.steps():
        assert ec.open(manager.path(step))["x"][0].read() == step


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_handler_saves_while_a_save_is_followed_up(
    tmp_path, monkeypatch, has_threads
):
    """Where no thread can be started, the call that it interrupts does that itself."""
    left = [2]

    def handle(number, frame):
        step = left.pop()
        manager.save(step, _tree(step))

    if not has_threads:
        inside.replace(monkeypatch, "start a thread", lambda _: False)
    send = lambda *_: signal.raise_signal(signal.SIGUSR2) if left else None
    inside.watch(monkeypatch, "add to the history", send)
    found = signal.signal(signal.SIGUSR2, handle)
    try:
        with ec.CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, _tree(1))
    finally:
        signal.signal(signal.SIGUSR2, found)
    assert manager.steps() == [1, 2]
    assert [step.number for step in manager.history()] == [1, 2]


def test_the_end_of_a_run_in_another_thread(tmp_path):
    manager = ec.CheckpointManager(tmp_path / "run", every=10)
    manager.save(1, _tree(1))
    thread = threading.Thread(target=manager.__exit__, args=[None] * 3)
    thread.start()
    thread.join()
    assert manager.steps() == [1]
