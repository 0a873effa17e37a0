"""The signals of a run, beside other runs, handlers of the program, and children."""

import multiprocessing
import signal
import subprocess
import sys

import pytest
from support.helpers import run_program

import eqx_ckpt as ec


_END = {
    "in the order of their begin": "a.__exit__(*3 * [None]); b.__exit__(*3 * [None])",
    "without `with`": "del a, b; gc.collect()",
    "in another thread": """
for manager in (a, b):
    thread = threading.Thread(target=manager.__exit__, args=3 * [None])
    thread.start(); thread.join()
""",
    "below a handler of the program": """
found = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *given: found(*given))
a.__exit__(*3 * [None]); b.__exit__(*3 * [None])
""",
}


@pytest.mark.parametrize("end", _END)
def test_a_signal_after_the_runs_does_what_it_did_before(tmp_path, end):
    code = f"""
import gc, os, signal, threading
import eqx_ckpt as ec
a, b = [ec.CheckpointManager(name, signals=[signal.SIGTERM]) for name in "ab"]
{_END[end]}
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(1000):
    pass
print("goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
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
