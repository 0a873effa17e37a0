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
warnings.simplefilter("ignore")

@jax.jit
def train(state, noise):
    w = (3 * state["w"] + noise) % 1009  # Exact, however it is computed.
    return {{"w": w, "m": (state["m"] + w[:, :1]) % 1009, "n": state["n"] + 1}}

X = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
fresh = {{"w": spread(X, {spec}), "m": spread(X[:, :1], rows)}}
fresh["n"] = spread(np.int32(0), copies)
like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
manager = ec.CheckpointManager(path / "run", every={every}, near=disk, near_every=2,
    copies={copies}, timeout={timeout})
state, at, own = fresh, 0, {{"cursor": 0}}
if manager.latest() is not None:
    state, own, at = manager.restore(like, own={own})
print("from", at, own["cursor"] if isinstance(own, dict) else len(own), flush=True)
for step in range(at + 1, {until} + 1):
    state = train(state, {noise} + step)
    own = {{"cursor": 100 * step + rank}}
    manager.save(step, state, own=own)
    {body}
manager.wait()
assert int(state["n"].addressable_data(0)) == {until}
both = [np.asarray(state[name].addressable_data(0)) for name in ("w", "m")]
print(json.dumps([int(x) for part in both for x in part.ravel()]))
{end}
"""

# All have done what comes after a near step by then, such as deleting older ones.
_KILL = """
from jax._src import distributed
distributed.global_state.client.wait_at_barrier("killed", 60_000)
os._exit(9)
"""


def run(path: pathlib.Path, size: int, until: int, **how: Any) -> list[Done]:
    """Runs to a step; `kill` ends all processes there at once, with an error."""
    how = {"every": 100, "copies": 1, "noise": 0, "body": "pass", "own": "own"} | how
    how.setdefault("spec", "rows")
    timeout = how.pop("timeout", 20)
    order = how.pop("order", list(range(size)))
    how["end"] = _KILL if how.pop("kill", False) else ""
    return run_team(
        size, _PROGRAM.format(order=order, until=until, timeout=timeout, **how), path, 1
    )


def never_stopped(size: int, until: int) -> list[list[int]]:
    """What each process has at the end of a run that is never stopped."""
    w = np.arange(16 * 8).reshape(16, 8)
    m = w[:, :1]
    for step in range(1, until + 1):
        w = (3 * w + step) % 1009
        m = (m + w[:, :1]) % 1009
    parts = zip(np.split(w, size), np.split(m, size))
    return [[*a.ravel().tolist(), *b.ravel().tolist()] for a, b in parts]


def lines(team: list[Done]) -> list[list[str]]:
    """The lines that each process has printed, without those of its runtime."""
    texts = [done.out.splitlines() for done in team]
    return [[line for line in text if not line.startswith("[Gloo]")] for text in texts]
