"""A run of real processes, each with a near disk of its own, that is killed and goes
on: `run` is one attempt."""

import json
import pathlib
from typing import Any

import numpy as np

from support.processes import Done, run_team_program


NEAR_EVERY = 2


def run(
    path: pathlib.Path, size: int, until: int, timeout: float = 60, **how: Any
) -> list[Done]:
    """Runs to a step; `kill` ends all processes there at once, with an error."""
    how = {
        "order": list(range(size)),
        "until": until,
        "every": 100,
        "near_every": NEAR_EVERY,
        "copies": 1,
        "noise": 0,
        "all_own": False,
        "spec": "rows",
        "timeout": timeout,
        "logs": None,
        "dies_after": None,
        "kill": False,
    } | how
    return run_team_program(
        size, "team_of_a_near_run", path, json.dumps(how), devices=1
    )


def never_stopped(size: int, until: int) -> list[list[int]]:
    """What each process has at the end of a run that is never stopped."""
    return parts_of(trained(fresh(), range(1, until + 1), 0), size)


State = tuple[np.ndarray, np.ndarray]


def fresh() -> State:
    w = np.arange(24 * 8).reshape(24, 8)
    return w, w[:, :1]


def trained(state: State, steps: range, noise: int) -> State:
    w, m = state
    for step in steps:
        w = (3 * w + noise + step) % 1009
        m = (m + w[:, :1]) % 1009
    return w, m


def parts_of(state: State, size: int) -> list[list[int]]:
    """What each of the processes has of a state."""
    parts = zip(*(np.split(x, size) for x in state))
    return [[*a.ravel().tolist(), *b.ravel().tolist()] for a, b in parts]


def lines(team: list[Done]) -> list[list[str]]:
    """The lines that each process has printed, without those of its runtime."""
    texts = [done.out.splitlines() for done in team]
    return [[line for line in text if not line.startswith("[Gloo]")] for text in texts]
