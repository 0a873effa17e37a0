"""One attempt of a run with near disks, as `HOW` says: JSON of `support.near.run`."""

import atexit
import json
import os
import sys
import warnings

import jax
import numpy as np
import pytest
from support import member, near_logs
from support.member import copies, meet, path, rank, rows, spread

import eqx_ckpt as ec


how = json.loads(sys.argv[5])
until, noise = how["until"], how["noise"]
# Which process has which disk is nobody's business.
disk = path / f"disk{how['order'].index(rank)}"
logs = None
if how["logs"] is None:
    warnings.simplefilter("ignore")
else:
    logs = near_logs.Logs(**how["logs"])


@jax.jit
def train(state, number):
    w = (3 * state["w"] + number) % 1009  # Exact, however it is computed.
    return {"w": w, "m": (state["m"] + w[:, :1]) % 1009, "n": state["n"] + 1}


def die_at_the_next_part():
    """Process 2 is killed as it is about to write its part of the next near step."""
    from eqx_ckpt._near import _near_steps

    if rank == 2:
        die = lambda *_: os._exit(9)
        pytest.MonkeyPatch().setattr(_near_steps.Near, "_write_part", die)
    else:
        atexit.register(os._exit, 9)  # JAX would wait for the one that is dead.


X = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
fresh = {
    "w": spread(X, getattr(member, how["spec"])),
    "m": spread(X[:, :1], rows),
    "n": spread(np.asarray(0, np.int32), copies),
}
like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
)
manager = ec.CheckpointManager(
    path / "run",
    every=how["every"],
    near=disk,
    near_every=how["near_every"],
    copies=how["copies"],
    processes=ec.Together(timeout=how["timeout"]),
)
state, at, own = fresh, 0, {"cursor": 0, "noise": 0}
if manager.latest() is not None:
    given = "all" if how["all_own"] else own
    state, own, at = manager.restore(like, own=given)
if logs is not None:
    logs.begin(at, own, state)
print("from", at, own["cursor"] if isinstance(own, dict) else len(own), flush=True)
for step in range(at + 1, until + 1):
    state = train(state, noise + step)
    own = {"cursor": 100 * step + rank, "noise": noise}
    manager.save(step, state, own=own)
    if logs is not None:
        logs.save(step)
    if step == how["dies_after"]:
        die_at_the_next_part()
manager.wait()
assert int(state["n"].addressable_data(0)) == until
both = [np.asarray(state[name].addressable_data(0)) for name in ("w", "m")]
print(json.dumps([int(x) for part in both for x in part.ravel()]))
if how["kill"]:
    # All have done what comes after a near step by then, such as deleting older ones.
    meet("killed")
    os._exit(9)
