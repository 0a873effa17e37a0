"""docs/resuming.md is a program that goes on exactly where it was stopped."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from helpers import facts

import eqx_ckpt as ec


page = (pathlib.Path(__file__).parents[1] / "docs" / "resuming.md").read_text()
(program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

# Sends the process itself a signal at a phase of the program: at the import of a
# module, at a printed step, as it restores, at the nth file that a save makes, and as
# it waits for the last save.
HEAD = """
import builtins, os, sys
phase, at, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
def now(what, where):
    if (what, str(where)) == (phase, at):
        os.kill(os.getpid(), number)
made = 0
def hook(event, args):
    global made
    if event == "import":
        now("import", args[0])
    if event == "open" and "/default/d/" in str(args[0]) and args[2] & os.O_CREAT:
        made += 1
        now("save", made)
sys.addaudithook(hook)
real = print
def print(*args, **kwargs):
    real(*args, **kwargs)
    now("step", args[0])
import eqx_ckpt as ec
def before(method, name):
    def call(self, *args, **kwargs):
        now(name, "")
        return method(self, *args, **kwargs)
    return call
Manager = ec.CheckpointManager
Manager.restore = before(Manager.restore, "restore")
Manager.__exit__ = before(Manager.__exit__, "exit")
"""

TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
# A phase, and how the process ends.
SHORT = [
    ("step", "3", TERM, 0),
    ("save", "4", KILL, -KILL),
    ("restore", "", USR1, 0),
    ("save", "2", TERM, 0),
]
LONG = [("step", str(n), number, 0) for n in (1, 9, 10, 11) for number in (TERM, USR1)]
LONG += [("exit", "", TERM, 0), ("import", "optax", TERM, -TERM)]
LONG += [("step", "25", KILL, -KILL), ("restore", "", KILL, -KILL)]
LONG += [("save", str(n), KILL, -KILL) for n in range(1, 8)]
LONG += [("save", str(n), TERM, 0) for n in range(1, 8)]


def _run(cwd, phase="", at="", number=0):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEAD + program, phase, at, str(number)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    return done, [tuple(line.split()) for line in done.stdout.splitlines()]


def _leaves(path):
    return {name: facts(x.read()) for name, x in ec.open(path).leaves.items()}


@pytest.mark.parametrize(
    "phases", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_run_that_is_stopped_again_and_again(tmp_path, phases):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    done, expected = _run(whole)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in expected] == [str(n) for n in range(1, 51)]
    said = set()
    for phase, at, number, status in phases:
        done, lines = _run(broken, phase, at, number)
        assert done.returncode == status, (phase, at, done.returncode, done.stderr)
        said.update(lines)
        if status == 0 and lines:
            # What it has done was saved before it ended.
            manager = ec.CheckpointManager(broken / "run")
            assert str(manager.latest()) == lines[-1][0], (phase, at)
    done, lines = _run(broken)
    assert done.returncode == 0, done.stderr
    assert sorted(said | set(lines)) == sorted(expected)
    path = pathlib.Path("run", "50", "default")
    assert _leaves(broken / path) == _leaves(whole / path)
    manager = ec.CheckpointManager(whole / "run")
    assert manager.steps() == [30, 40, 50]
