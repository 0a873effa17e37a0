"""Trains a small transformer on many hosts: FSDP x tensor sharding, a checkpoint
manager with near disks and signals, and a data loader in each process.

`run.sh` starts it as some processes on one machine, kills some, and starts it again. On
a cluster it runs as it is: `slurm.sh`, `kubernetes.yaml` and `tpu.sh` start it. Where
JAX does not find out who takes part, say so with `--coordinator`, `--processes` and
`--process`, or with the variables that `kubernetes.yaml` sets.
"""

import argparse
import os
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt as ec


VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH = 64, 64, 4, 2, 32, 8

# A leaf gets the first that is found in its name; so do the optimiser's moments of it.
RULES = [
    (r"(query|key|value)_proj\.weight|up\.weight", P("tensor", "fsdp")),
    (r"output_proj\.weight|down\.weight", P("fsdp", "tensor")),
    (r"embed\.weight|head\.weight", P("fsdp", "tensor")),
    (".*", P()),
]


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask)
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, DEPTH + 2)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = [Block(k) for k in keys[2:]]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


optim = optax.adamw(1e-3)


def make(key):
    """All of the state that is sharded."""
    model = Transformer(key)
    return {"model": model, "opt": optim.init(eqx.filter(model, eqx.is_array))}


def constrained(state, like):
    """The state, with each leaf where `like` has it: a near step is restored onto the
    devices that it was saved from, and without this XLA may choose others."""
    arrays, rest = eqx.partition(state, eqx.is_array)
    abstract = eqx.filter(like, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    put = lambda x, leaf: jax.lax.with_sharding_constraint(x, leaf.sharding)
    return eqx.combine(jax.tree.map(put, arrays, abstract), rest)


@eqx.filter_jit(donate="all-except-first")
def train(fixed, state):
    tokens, like = fixed

    def loss_of(model):
        logits = jax.vmap(model)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    loss, grads = eqx.filter_value_and_grad(loss_of)(state["model"])
    model = eqx.filter(state["model"], eqx.is_array)
    updates, opt = optim.update(grads, state["opt"], model)
    state = {"model": eqx.apply_updates(state["model"], updates), "opt": opt}
    return constrained(state, like), loss


class Loader:
    """Sequences of this process alone. Where it is in them is its `state`."""

    def __init__(self, process):
        self.state = {"seed": process, "position": 0}

    def __next__(self):
        seed, position = self.state["seed"], self.state["position"]
        rng = np.random.default_rng([seed, position])
        self.state = {"seed": seed, "position": position + 1}
        start, step = rng.integers(0, VOCABULARY, (2, BATCH, 1))
        return ((start + step % 5 * np.arange(LENGTH)) % VOCABULARY).astype(np.int32)


def start(like, key):
    """A new state, each part of it made on its own device."""
    is_abstract = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    abstract, rest = eqx.partition(like, is_abstract)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    arrays = lambda key: eqx.filter(make(key), eqx.is_array)
    return eqx.combine(jax.jit(arrays, out_shardings=shardings)(key), rest)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="storage that all hosts share")
    parser.add_argument("--near", required=True, help="a disk of this host's own")
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--tensor", type=int, default=2, help="of the mesh")
    # Without these JAX asks SLURM, or the TPU.
    given = os.environ.get
    parser.add_argument("--coordinator", default=given("JAX_COORDINATOR_ADDRESS"))
    parser.add_argument("--processes", type=int, default=given("PROCESSES"))
    parser.add_argument("--process", type=int, default=given("JOB_COMPLETION_INDEX"))
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator, args.processes, args.process)

    devices = np.asarray(jax.devices()).reshape(-1, args.tensor)
    mesh = Mesh(devices, ("fsdp", "tensor"))
    rows = NamedSharding(mesh, P("fsdp"))
    key = jr.key(0)
    like = ec.skeleton(make, key, sharding=ec.partition_rules(mesh, RULES))
    loader, step = Loader(jax.process_index()), 0

    with ec.CheckpointManager(
        args.root,
        every=20,
        keep=2,
        near=args.near,
        near_every=5,
        copies=1,
        signals=[signal.SIGTERM],
    ) as manager:
        if manager.latest() is None:
            state = start(like, key)
        else:
            state, loader.state, step = manager.restore(like, own=loader.state)
        print(f"begins after step {step}", flush=True)
        while step < args.steps and not manager.should_stop():
            tokens = jax.make_array_from_process_local_data(rows, next(loader))
            state, loss = train((tokens, like), state)
            step += 1
            print(
                f"step {step}: loss {float(loss):.4f} {float(loss).hex()}", flush=True
            )
            manager.save(step, state, {"loss": loss}, own=loader.state)
    print(f"ends after step {step}", flush=True)


main()
