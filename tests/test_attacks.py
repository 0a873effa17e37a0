"""Checkpoints that mean harm end in one clear error, and nothing else happens.

Each attack of `tests/attacks` is done to a copy of a good checkpoint, and a process of
its own does to that all that a user does. It may take a second and 200 MB.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import attacks
import pytest
from attacks import ATTACKS


# Errors that the docstrings name.
_documented = ("ValueError", "RuntimeError", "FileNotFoundError")
_limit = 1.0
# A process that takes longer hangs.
_hang = 60.0

_traced = "openat|open|creat|mkdir|unlink|rename|socket|connect"


class Watched:
    """A process that is given paths, and says what came of each."""

    def __init__(self, good: list[pathlib.Path], trace: pathlib.Path | None):
        command = [sys.executable, "-m", "attacks"]
        if trace is not None:
            watch = "trace=" + _traced.replace("|", ",")
            command = ["strace", "-f", "-y", "-o", str(trace), "-e", watch, *command]
        here = pathlib.Path(__file__).parent
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        env["PYTHONPATH"] = os.pathsep.join(map(str, (here, here.parent)))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
        )
        for path in good:
            self.send(path)
        assert self.answer(10 * _hang) == "ready"

    def send(self, path):
        print(path, file=self.process.stdin, flush=True)

    def answer(self, seconds=_hang):
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        _, error = self.process.communicate()
        return {"died": self.process.returncode, "stderr": error[-2000:]}

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


def _snapshot(directory):
    """Everything below a directory that a write would change."""
    out = {}
    for file in sorted([directory, *directory.rglob("*")]):
        s = file.lstat()
        out[str(file)] = (s.st_mode, s.st_ino, s.st_nlink, s.st_size, s.st_mtime_ns)
    return out


def _canaries(directory):
    """A directory beside a checkpoint, which nobody has to do with."""
    directory.mkdir()
    for name in ("canary", "manifest.ocdbt", "tree", "0", "digests"):
        (directory / name).write_bytes(b"secret" * 10)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came of each attack, and what the process did meanwhile."""
    base = tmp_path_factory.mktemp("attacks")
    for layout in ("ocdbt", "zarr"):
        attacks.save(base / layout, layout)
    trace = base / "trace" if shutil.which("strace") else None
    good = [base / "ocdbt", base / "zarr"]
    watched = Watched(good, trace)
    out = {}
    for name, attack in ATTACKS.items():
        place = base / name
        place.mkdir()
        shutil.copytree(base / attack.layout, place / "a")
        _canaries(place / "outside")
        attack.make(place / "a", place / "outside")
        before = _snapshot(place)
        watched.send(place / "a")
        out[name] = watched.answer()
        out[name]["changed"] = _snapshot(place) != before
        if "died" in out[name]:
            # The trace is of the first process: what it saw then is not lost.
            watched = Watched(good, None)
    watched.close()
    return base, out, trace.read_text(errors="replace") if trace else None


_steps = "open touch show tree read unverified views store load".split()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(results, name):
    attack, out = ATTACKS[name], results[1][name]
    assert "died" not in out, out
    assert not out["changed"]
    assert out["seconds"] < _limit and out["wall"] < _hang
    assert out["ls"] is None
    errors = {step: out[step] for step in _steps if out.get(step)}
    for step, (kind, text) in errors.items():
        assert kind in _documented, (step, kind, text)
        assert len(text) < 5000
        assert all(line.isprintable() for line in text.split("\n")), text
    if attack.refused is None:
        assert not errors and out["right"]
        return
    assert attack.refused in errors, out
    assert re.search(attack.match, errors[attack.refused][1]), errors[attack.refused]
    assert set(errors) <= set(_steps[_steps.index(attack.refused) :])
    kinds = dict.fromkeys(("open", "touch", "tree"), "ValueError")
    assert errors[attack.refused][0] == kinds.get(attack.refused, "RuntimeError")
    # What is refused as a whole is refused by the load too.
    assert attack.refused == "open" or "load" in errors


_call = re.compile(rf"\b({_traced})\((.*)")
_own = (sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/usr/", "/lib", "/etc/ld.so")


def test_nothing_outside_is_opened(results):
    """Every path that the process opens is inside the checkpoint that it was given."""
    base, out, trace = results
    if trace is None:
        pytest.skip("there is no strace")
    here = str(pathlib.Path(__file__).parent.parent)
    current = None
    seen = set()
    for line in trace.splitlines():
        found = _call.search(line)
        if found is None:
            continue
        call, rest = found.groups()
        marker = re.search(r'"/attack/(.*)"', rest)
        if marker is not None:
            current = marker[1]
            seen.add(pathlib.Path(current).parent.name)
            continue
        if current is None:
            continue
        assert call not in ("creat", "mkdir", "unlink", "rename"), line
        assert call not in ("socket", "connect") or "AF_INET" not in rest, line
        if call in ("socket", "connect"):
            continue
        assert "O_CREAT" not in rest and "O_WRONLY" not in rest, line
        path = re.search(r'"([^"]*)"', rest)
        assert path is not None, line
        # What was opened, as the system has it, if it was.
        opened = re.search(r"= \d+<(.*)>$", line)
        for one in {path[1], opened[1] if opened else path[1]}:
            inside = one == current or one.startswith(current + "/")
            assert inside or one.startswith((*_own, here)), line
    alive = {name for name in ATTACKS if "died" not in out[name]}
    assert seen == alive
