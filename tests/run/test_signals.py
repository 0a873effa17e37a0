"""The signals of a run, beside other runs, handlers of the program, and children."""

import multiprocessing
import signal

import pytest
from support import scripts
from support.helpers import run_program

import eqx_ckpt as ec


@pytest.mark.parametrize(
    "end",
    [
        "in the order of their begin",
        "without `with`",
        "in another thread",
        "below a handler of the program",
    ],
)
def test_a_signal_after_the_runs_does_what_it_did_before(tmp_path, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    done = scripts.run(scripts.program("signal_after_runs"), end)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no processes fork"
)
def test_children_of_a_run_can_be_ended(tmp_path):
    assert run_program("children_of_a_run", tmp_path).split() == [
        str(-signal.SIGTERM),
        "False",
    ]


def test_each_run_is_told_and_the_handler_before_once(tmp_path):
    calls = []
    found = signal.signal(signal.SIGUSR2, lambda *_: calls.append(1))
    try:
        with ec.CheckpointManager(tmp_path / "a", signals=[signal.SIGUSR2]) as a:
            with ec.CheckpointManager(tmp_path / "b", signals=[signal.SIGUSR2]) as b:
                signal.raise_signal(signal.SIGUSR2)
            assert a.should_stop() and b.should_stop() and calls == [1]
        signal.raise_signal(signal.SIGUSR2)
        assert calls == [1, 1]
    finally:
        signal.signal(signal.SIGUSR2, found)
