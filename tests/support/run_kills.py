"""Calls on a run, one after the other, in a process that is killed at one of the things
that it asks of the system, or of a store.

This runs as the program that forks a child for each kill. `JOBS` are played on a run
with the steps 10 to 150, of which 130 to 150 are there.
"""

import contextlib
import functools as ft
import json
import os
import pathlib
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _rows
from support import inside, killing, pauses, scripts


KEEP = 3
# The next save joins the files of its history.
STEPS = range(10, 160, 10)

JOBS: dict[str, list[tuple[str, int]]] = {
    "save": [("save", 160), ("save", 170)],
    "replace": [("replace", 150), ("replace", 140)],
    "delete": [("delete", 140), ("delete", 150)],
    "pin": [("pin", 130), ("save", 160), ("unpin", 130), ("save", 170)],
    "add": [("add", 130), ("save", 160)],
    "go back": [("restore", 140), ("save", 145), ("save", 146), ("save", 147)],
    "begin anew": [("save", 1), ("start", 0), ("save", 0), ("start", 0), ("save", 2)],
    "replace an older one": [("restore", 130), ("replace", 140), ("replace", 150)],
    "near": [("restore", 140), ("save", 145), ("start", 0), ("save", 3)],
}


def tree(step: int, noise: int) -> dict[str, Any]:
    return {"x": np.full(5, step), "step": step, "noise": noise}


def save(manager: ec.CheckpointManager, step: int, noise: int, **how: Any) -> None:
    manager.save(step, tree(step, noise), {"loss": 1000 * noise + step}, **how)
    manager.wait()


def make(root: pathlib.Path) -> None:
    with ec.CheckpointManager(root, keep=KEEP, reuse=False) as manager:
        for step in STEPS:
            save(manager, step, 0)


def is_torn(file: pathlib.Path) -> bool:
    return _rows.is_torn(file.read_bytes())


def play(job: str, directory: pathlib.Path, told: Callable[[int], Any]) -> None:
    """Makes the calls of a job on the run there, and tells of each when it is over."""
    near: Any = {"near": directory / "disk", "near_every": 1} if job == "near" else {}
    how = {"keep": KEEP, "reuse": False, **near}
    manager = ec.CheckpointManager(directory / "run", **how)
    for number, (call, step) in enumerate(JOBS[job], 1):
        if call == "start":
            manager = ec.CheckpointManager(directory / "run", **how)
        elif call == "restore":
            manager.restore(tree(0, 0), step=step)
        elif call == "add":
            manager.add_metrics(step, {"more": step})
        elif call in ("save", "replace"):
            save(manager, step, number, force=call == "replace")
        else:
            getattr(manager, call)(step)
        told(number)


class Seen(NamedTuple):
    """What somebody sees of a run: its history, its steps, those that are pinned, and
    the one that a restart goes on from, with the number of the call that saved it."""

    history: frozenset[tuple[int, int, str]]
    steps: frozenset[int]
    pinned: frozenset[int]
    latest: tuple[int, int]


def look(root: pathlib.Path) -> Seen:
    manager = ec.CheckpointManager(root)
    rows = manager.history()
    told = [(x.attempt, x.number, json.dumps(x.metrics)) for x in rows]
    assert len({row[:2] for row in told}) == len(told), told
    steps = manager.steps()
    assert sorted(x.number for x in rows if x.path is not None) == steps
    for step in steps:
        assert ec.verify(manager.path(step)) == []
        assert ec.open(manager.path(step)).metadata["step"] == step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, at = manager.restore(tree(0, 0))
    assert manager.latest() == at == got["step"]
    pinned = inside.pinned(manager)
    return Seen(
        frozenset(told), frozenset(steps), frozenset(pinned), (at, got["noise"])
    )


class Server:
    """The program, as the tests use it."""

    def __init__(self, as_store: bool):
        self.as_store = as_store

    def __enter__(self) -> "Server":
        self._process = scripts.server(
            "support.run_kills", int(self.as_store), JAX_PLATFORMS="cpu"
        )
        return self

    def __exit__(self, *_: Any) -> None:
        with self._process:
            self._process.communicate()

    def play(
        self,
        job: str,
        directory: pathlib.Path,
        at: int | None = None,
        copies: bool = False,
    ) -> tuple[int, int]:
        """Plays a job, and kills it at a point; or copies the run after each call, to
        `run<number>`. Returns how many points it came to, and how many calls it told
        of."""
        request = [job, str(directory), at, copies]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        points = json.loads(self._process.stdout.readline())
        return points, len((directory / "told").read_bytes())


def _in_store(job: Callable[[], Any], at: int | None) -> Iterable[Any]:
    """Kills a job before one of its calls to the store. Returns the points it came
    to."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        calls = pauses.CallsToStore(kill)
        calls.at = at or 0
        status = 1
        with contextlib.suppress(BaseException):
            job()
            os.write(write, str(calls.count).encode())
            status = 0
        os._exit(status)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with open(read) as said:
        count = said.read()
    assert status in (0, signal.SIGKILL), status
    return range(int(count) if count else at or 0)


def main() -> None:
    as_store = sys.argv[1] == "1"
    run = _in_store if as_store else killing.run_traced
    warnings.simplefilter("ignore")
    with pauses.stores(as_store):
        for line in sys.stdin:
            name, directory, at, copies = json.loads(line)
            here = pathlib.Path(directory)
            words = os.open(here / "told", os.O_CREAT | os.O_WRONLY)

            def told(
                number: int, here: Any = here, copies: Any = copies, words: Any = words
            ) -> None:
                os.write(words, b"+")
                if copies:
                    shutil.copytree(here / "run", here / f"run{number}")

            job = ft.partial(play, name, here, told)
            stops = run(job, at)
            os.close(words)
            print(json.dumps(len(list(stops))), flush=True)


if __name__ == "__main__":
    main()
