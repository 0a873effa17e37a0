"""What the logger `eqx_ckpt` and `jax.monitoring` are told."""

import gc
import logging
import types

import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from support import inside
from support.helpers import run_program
from support.processes import good, run_team_program

import eqx_ckpt as ec


@pytest.fixture
def told(caplog):
    """The lines that were logged since it was last called: `(level, text)`."""
    gc.collect()  # What managers of other tests say at their end.
    caplog.set_level(logging.DEBUG, "eqx_ckpt")

    def take():
        records = [x for x in caplog.records if x.name == "eqx_ckpt"]
        caplog.clear()
        return [(x.levelname, x.getMessage()) for x in records]

    take.records = lambda: [x for x in caplog.records if x.name == "eqx_ckpt"]
    return take


@pytest.fixture
def durations():
    """The events that `jax.monitoring` has been told."""
    events = []
    _listeners.append(lambda event, seconds: events.append(event.split("/")[2]))
    yield lambda: events
    _listeners.clear()


_listeners = []


# Old versions of JAX do not forget a listener.
@jax.monitoring.register_event_duration_secs_listener
def _listen(event, seconds, **_):
    if event.startswith("/eqx_ckpt/"):
        assert event.endswith("/seconds") and seconds > 0
        for listener in _listeners:
            listener(event, seconds)


def test_saves_loads_and_deletions(tmp_path, told, durations):
    tree = {"w": jnp.ones(1000), "same": jnp.zeros(24)}
    ec.tree_serialise_leaves(tmp_path / "a", tree, metadata={"step": 7})
    (record,) = told.records()
    assert (record.step, record.nbytes) == (7, 4096) and record.seconds > 0
    assert record.path == str(tmp_path / "a")
    ((level, text),) = told()
    start = f"Saved step 7, `{tmp_path / 'a'}`: 4.0 KiB in "
    assert level == "INFO" and text.startswith(start) and text.endswith("/s")
    ec.tree_deserialise_leaves(tmp_path / "a", tree)
    ec.verify(tmp_path / "a")
    ec.delete(tmp_path / "a")
    assert [(level, text.split()[0]) for level, text in told()] == [
        ("DEBUG", "Loaded"),
        ("DEBUG", "Verified"),
        ("INFO", "Deleted"),
    ]
    assert durations() == ["save", "load", "verify", "delete"]


def test_a_run(tmp_path, told, durations):
    root = tmp_path / "run"
    with ec.CheckpointManager(root, every=2, keep=1) as manager:
        for step in (1, 2, 4):
            manager.save(step, {"w": jnp.full(2, step)})
            manager.wait()
    lines = told()
    assert lines[0] == ("DEBUG", f"Skipped step 1 of `{root}`: it is not due")
    shown = [(level, " ".join(text.split()[:3])) for level, text in lines[1:]]
    assert shown == [
        ("INFO", "Saved step 2,"),
        ("INFO", "Saved step 4,"),
        ("INFO", "Deleted step 2"),
    ]
    assert durations() == ["stage", "save", "stage", "save", "delete"]
    manager = ec.CheckpointManager(root)
    manager.save(6, {"w": jnp.full(2, 6)})
    manager.wait()
    (root / "6" / "default" / "eqx_ckpt.json").write_bytes(b"{}")
    told()
    with pytest.warns(UserWarning, match="Restored step 4"):
        assert manager.restore({"w": jnp.ones(2, int)})[1] == 4
    lines = [x for x in told() if x[0] != "DEBUG"]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert lines[0][1].startswith(f"Skipped step 6 of `{root}`: The checkpoint at")
    assert lines[1][1].startswith(f"Restored step 4 of `{root}`: 8 B in ")
    manager.save(6, {"w": jnp.full(2, 6)})
    manager.wait()
    assert any("Moved aside step 6" in text for _, text in told())


def test_failures_and_fallbacks(tmp_path, told, monkeypatch):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones(3)})
    (tmp_path / "a" / "eqx_ckpt.json").write_bytes(b"{}")
    told()
    ec.tree_serialise_leaves(tmp_path / "b", {"w": jnp.ones(3)}, reuse=tmp_path / "a")
    (fallback, saved) = told()
    assert fallback[0] == "INFO" and "all is written" in fallback[1]
    handle = ec.async_tree_serialise_leaves(
        tmp_path / "c", {"w": jnp.ones(3)}, overwrite=False
    )
    handle.result()
    told()
    # Somebody has saved there since the call.
    inside.replace(monkeypatch, "write a save", _fail)
    handle = ec.async_tree_serialise_leaves(tmp_path / "d", {"w": jnp.ones(3)})
    with pytest.raises(OSError, match="the disk is full"):
        handle.result()
    ((level, text),) = told()
    assert level == "ERROR" and text.endswith("has failed: OSError: the disk is full")
    assert handle.progress == (0, 12)


def _fail(*_):
    raise OSError("the disk is full")


def test_a_listener_that_fails_spoils_nothing(tmp_path, told):
    def listen(event, seconds):
        raise KeyError("mine")

    _listeners.append(listen)
    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones(3)})
    _listeners.clear()
    assert told()[0] == (
        "WARNING",
        "A listener of `jax.monitoring` has failed: KeyError('mine')",
    )
    assert ec.verify(tmp_path / "a") == []


def test_nothing_is_printed_unasked(tmp_path):
    out = run_program("save_unheard", tmp_path / "a")
    assert out == ""


def test_no_lock_is_taken_unless_somebody_listens(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a lock")

    logger = logging.getLogger("eqx_ckpt")
    monkeypatch.setattr(logger, "isEnabledFor", refuse)
    monkeypatch.setattr(logger, "level", logging.WARNING)
    ec.tree_serialise_leaves(tmp_path / "a", {"x": 1})  # An INFO.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    inside.replace(monkeypatch, "write a save", _fail)
    with pytest.raises(OSError, match="the disk is full"):
        ec.async_tree_serialise_leaves(tmp_path / "b", {"x": 1}).result()  # An ERROR.


def test_process_0_speaks(tmp_path):
    first, second = good(run_team_program(2, "team_that_logs", tmp_path))
    assert first.split() == ["Saved", "Saved", "Deleted", "Loaded", "Restored"]
    assert second == ""


def test_how_far_a_save_is(tmp_path):
    tree = {"a": jnp.ones(1000), "b": jnp.ones((3, 5)), "n": 1}
    handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree)
    done, total = handle.progress
    assert 0 <= done <= total == 4000 + 60 + 8
    handle.result()
    assert handle.progress == (total, total)
    again = ec.async_tree_serialise_leaves(tmp_path / "b", tree, reuse=handle)
    again.result()
    assert again.progress.nbytes == again.progress.total == total


class _Bar:
    """In the place of tqdm's."""

    moves: list[int]

    def __init__(self, total, **_):
        self.total, _Bar.moves, _Bar.texts = total, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert sum(self.moves) == self.total

    def set_postfix_str(self, text, refresh):
        self.texts.append(text)

    def update(self, nbytes):
        self.moves.append(nbytes)


def test_a_bar_and_a_handle_count_the_bytes_of_all_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("tqdm.auto.tqdm", _Bar)
    inside.limit(monkeypatch, min_file_bytes=2**18)
    tree = {f"{i}": np.full(2**16, i, np.float64) for i in range(8)}
    handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree, progress=True)
    handle.result()
    assert handle.progress == (2**22, 2**22) and len(_Bar.moves) > 8
    assert _Bar.texts[0] == "0/8 leaves" and _Bar.texts[-1] == "8/8 leaves"


def test_stragglers_are_named(told, monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    inside.pass_time_as(monkeypatch, clock)
    say = inside.say_stragglers("save, `run/c`")
    for now[0] in (101, 109.9, 110, 111, 119.9, 121, 139, 142):
        say([7, 2])
    ends = ("10 s", "21 s", "42 s")
    assert [text for _, text in told()] == [
        f"save, `run/c` has waited {end} for processes 2, 7" for end in ends
    ]
