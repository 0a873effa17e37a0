"""docs/resuming.md is a program that goes on exactly where it was stopped."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from support import scripts
from support.helpers import facts

import eqx_ckpt as ec


docs = pathlib.Path(__file__).parents[2] / "docs"
page = (docs / "resuming.md").read_text()
(program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

HEAD = """
import os, sys, warnings
from support import phases
warnings.simplefilter("ignore")
phase, at, number, *where = sys.argv[1:]
for directory in where:
    os.chdir(directory)
phases.begin(phase, at, int(number))
"""

TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
# A phase, and how the process ends.
SHORT = [("save", "4", KILL, -KILL)]
# Each in a run of its own.
LONG = [
    [
        ("step", "3", TERM, 0),
        ("save", "4", KILL, -KILL),
        ("restore", "", USR1, 0),
        ("save", "2", TERM, 0),
    ]
]
LONG += [
    [("step", str(n), number, 0)] for n in (1, 9, 10, 11, 49) for number in (TERM, USR1)
]
LONG += [
    [("step", "3", USR1, 0), *SHORT],
    [("exit", "", TERM, 0)],
    [("import", "optax", TERM, -TERM)],
]
LONG += [[("step", "25", KILL, -KILL)]]
LONG += [[("step", "3", TERM, 0), ("restore", "", KILL, -KILL)]]
LONG += [[("save", str(n), KILL, -KILL)] for n in range(1, 8)]
LONG += [[("save", str(n), TERM, 0)] for n in range(1, 8)]


def _run(cwd, phase="", at="", number=0):
    done = scripts.run(HEAD + program, phase, at, number, cwd, XLA_FLAGS="")
    # Whoever is killed may have been in the middle of a line.
    whole = done.stdout[: done.stdout.rfind("\n") + 1]
    return done, [tuple(line.split()) for line in whole.splitlines()]


def _leaves(path):
    return {name: facts(x.read()) for name, x in ec.open(path).leaves.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stops, and what it says."""
    path = tmp_path_factory.mktemp("whole")
    done, expected = _run(path)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in expected] == [str(n) for n in range(1, 51)]
    return path, expected


def _id(phases):
    return "-".join(f"{phase}{at}-{number}" for phase, at, number, _ in phases)


@pytest.mark.parametrize(
    "phases",
    [SHORT, *(pytest.param(phases, marks=pytest.mark.long) for phases in LONG)],
    ids=_id,
)
def test_a_run_that_is_stopped_again_and_again(tmp_path, whole, phases):
    broken = tmp_path
    whole, expected = whole
    said = set()
    for phase, at, number, status in phases:
        done, lines = _run(broken, phase, at, number)
        assert done.returncode == status, (phase, at, done.returncode, done.stderr)
        # The signal has come, and the run ended at it.
        is_over = any(step == "50" for step, _ in lines)
        assert is_over == (phase == "exit"), (phase, at)
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


# Its job step is signalled at its third step, when it is started for the first time.
SRUN = """#!/bin/bash
shift
first=$([ -e started ] || echo step)
touch started
exec "$PYTHON" -c "import sys; sys.argv[1:] = ['$first', '3', '$NUMBER']
$(cat head.py "$@")"
"""


@pytest.mark.long
def test_the_job_of_slurm_is_started_again(tmp_path, whole):
    text = (docs / "with" / "slurm.md").read_text()
    (job,) = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    end = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "train.py").write_text(program + end)
    (tmp_path / "head.py").write_text(HEAD)
    (tmp_path / "job.sh").write_text(job)
    for name, code in ("srun", SRUN), ("scontrol", '#!/bin/bash\necho "$@" >>asked\n'):
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)

    def start():
        given = {"PYTHON": sys.executable, "SLURM_JOB_ID": "42", "XLA_FLAGS": ""}
        given["NUMBER"] = str(int(signal.SIGUSR1))
        given["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=os.environ | given,
            capture_output=True,
            text=True,
        )
        return done, [tuple(line.split()) for line in done.stdout.splitlines()]

    done, first = start()
    assert done.returncode == 3 and [step for step, _ in first] == ["1", "2", "3"]
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    done, second = start()
    assert done.returncode == 0, done.stderr
    assert first + second == whole[1]
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
