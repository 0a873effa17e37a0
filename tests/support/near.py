"""A run of real processes, each with a near disk of its own, that is killed and goes
on: `run` is one attempt."""

import pathlib
from typing import Any

import numpy as np

from support.processes import Done, run_team


_PROGRAM = """
import json, warnings
order = {order}
index = order.index(rank)  # Who has which disk is nobody's business.
disk = path / f"disk{{index}}"
{setup}

@jax.jit
def train(state, noise):
    w = (3 * state["w"] + noise) % 1009  # Exact, however it is computed.
    return {{"w": w, "m": (state["m"] + w[:, :1]) % 1009, "n": state["n"] + 1}}

X = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
fresh = {{"w": spread(X, {spec}), "m": spread(X[:, :1], rows)}}
fresh["n"] = spread(np.int32(0), copies)
like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
manager = ec.CheckpointManager(path / "run", every={every}, near=disk,
    near_every=NEAR_EVERY, copies={copies}, processes=ec.Together(timeout={timeout}))
state, at, own = fresh, 0, {{"cursor": 0, "noise": 0}}
if manager.latest() is not None:
    state, own, at = manager.restore(like, own={own})
{begun}
print("from", at, own["cursor"] if isinstance(own, dict) else len(own), flush=True)
for step in range(at + 1, {until} + 1):
    state = train(state, {noise} + step)
    own = {{"cursor": 100 * step + rank, "noise": {noise}}}
    manager.save(step, state, own=own)
    {body}
manager.wait()
assert int(state["n"].addressable_data(0)) == {until}
both = [np.asarray(state[name].addressable_data(0)) for name in ("w", "m")]
print(json.dumps([int(x) for part in both for x in part.ravel()]))
{end}
"""

NEAR_EVERY = 2
_QUIET = 'warnings.simplefilter("ignore")'

# All have done what comes after a near step by then, such as deleting older ones.
_KILL = """
meet("killed")
os._exit(9)
"""


def run(path: pathlib.Path, size: int, until: int, **how: Any) -> list[Done]:
    """Runs to a step; `kill` ends all processes there at once, with an error."""
    how = {"every": 100, "copies": 1, "noise": 0, "body": "pass", "own": "own"} | how
    how = {"spec": "rows", "setup": _QUIET, "begun": "", "end": ""} | how
    timeout = how.pop("timeout", 60)
    order = how.pop("order", list(range(size)))
    if how.pop("kill", False):
        how["end"] = _KILL
    program = _PROGRAM.format(order=order, until=until, timeout=timeout, **how)
    return run_team(size, program.replace("NEAR_EVERY", str(NEAR_EVERY)), path, 1)


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
