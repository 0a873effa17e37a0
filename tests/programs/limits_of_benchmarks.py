"""Limits of the benchmarks, of a good peer and of a wasteful one:
`BENCHMARKS SCRATCH`."""

import json
import pathlib
import sys


sys.path.insert(0, sys.argv[1])
import jax
import jax.numpy as jnp
import limits
import measure
import numpy as np
import peers
import workloads


PEER, UNVERIFIED = limits.PEERS
known = {peer.name: peer for peer in peers.PEERS}
ours, zarr, raw = known[PEER], known["eqx_ckpt, zarr"], known["raw, one thread"]


def wasteful_save(path, tree, durable):
    copy = jax.block_until_ready(jax.tree.map(jnp.copy, tree))
    ours.save(path, copy, durable)
    zarr.save(path.with_name("again"), tree, durable)


def wasteful_load(path, like):
    both = ours.load(path, like), ours.load(path, like)
    for _ in range(200):
        (path / "eqx_ckpt.json").read_bytes()
    return jax.block_until_ready(both)[0]


def hidden_load(path, like):
    return [np.array(np.memmap(path, np.uint8, "r"))]


wasteful = ours._replace(save=wasteful_save, load=wasteful_load)
hidden = raw._replace(name=UNVERIFIED, load=hidden_load)
make = workloads.sizes(short=True).whole["L"]
settings = measure.Settings(pathlib.Path(sys.argv[2]) / "w", 1)
for both in ([ours, known[UNVERIFIED]], [wasteful, hidden]):
    whole = {"L": measure.whole(make, both, settings)}
    print(json.dumps(limits.check({"whole": whole, "parts": {}})))
