"""Saves and loads of the trees that people have: Modules with the states of optimisers.

    python benchmarks/models.py [--short] [--scratch DIRECTORY] [--out DIRECTORY]

Each peer has the same arrays, and saves them to the page cache. Widths are small: the
table is about what a leaf costs, and large leaves are in `python benchmarks L M`. Later
calls are also measured of each model four times as wide. `flat` is a dict of the leaves
by name, which is made before the clock starts, and which safetensors is given. Figures
are medians of milliseconds of CPU of the process and, in brackets, by the clock: of a
first call in a new process with arrays of JAX, and of later calls in one process.
"""

import functools as ft
import gc
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import program
from peers import PEERS

import eqx_ckpt as ec


# ---- The models.


class Block(eqx.Module):
    """Attention and an MLP, before each of which is a norm, as in GPT-2."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, key: jax.Array):
        a, b = jr.split(key)
        biased = {f"use_{x}_bias": True for x in ("query", "key", "value", "output")}
        heads = max(4, width // 64)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=a, **biased)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=b)
        self.dropout = eqx.nn.Dropout(0.1, inference=True)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask)
        return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)))


class GPT2(eqx.Module):
    words: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, depth: int, width: int, key: jax.Array, vocabulary: int = 1000):
        a, b, *keys = jr.split(key, depth + 2)
        self.words = eqx.nn.Embedding(vocabulary, width, key=a)
        self.places = eqx.nn.Embedding(128, width, key=b)
        self.blocks = [Block(width, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        count = tokens.shape[0]
        x = jax.vmap(self.words)(tokens) + self.places.weight[:count]
        for block in self.blocks:
            x = block(x, jnp.tril(jnp.ones((count, count), bool)))
        return jax.vmap(self.norm)(x)


class Gated(eqx.Module):
    """The MLP of Llama."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, key: jax.Array):
        linear = ft.partial(eqx.nn.Linear, use_bias=False)
        a, b, c = jr.split(key, 3)
        self.gate = linear(width, hidden, key=a)
        self.up = linear(width, hidden, key=b)
        self.down = linear(hidden, width, key=c)


class LlamaBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.RMSNorm]
    mlp: Gated

    def __init__(self, width: int, key: jax.Array):
        a, b = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=a)
        self.norms = [eqx.nn.RMSNorm(width, use_bias=False) for _ in range(2)]
        self.mlp = Gated(width, 3 * width, b)


class Llama(eqx.Module):
    words: eqx.nn.Embedding
    blocks: list[LlamaBlock]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, key: jax.Array):
        a, b, *keys = jr.split(key, depth + 2)
        self.words = eqx.nn.Embedding(1000, width, key=a)
        self.blocks = [LlamaBlock(width, key) for key in keys]
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.head = eqx.nn.Linear(width, 1000, use_bias=False, key=b)


class ResNet(eqx.Module):
    """Convolutions with BatchNorm, whose means are in a State."""

    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, key: jax.Array):
        a, *keys = jr.split(key, depth + 1)
        conv = ft.partial(eqx.nn.Conv2d, width, width, 3, use_bias=False)
        self.convolutions = [conv(key=key) for key in keys]
        self.norms = [eqx.nn.BatchNorm(width, "batch", mode="ema") for _ in keys]
        self.head = eqx.nn.Linear(width, 1000, key=a)


def _train(model: Any, optimiser: Any) -> dict[str, Any]:
    params = eqx.filter(model, eqx.is_array)
    step = jnp.asarray(100)
    return {"model": model, "optimiser": optimiser.init(params), "step": step}


def _gpt2(short: bool, times: int) -> Any:
    model = GPT2(2 if short else 12, 32 * times, jr.key(0))
    return _train(model, optax.adam(1e-3))


def _llama(short: bool, times: int) -> Any:
    model = Llama(2 if short else 75, 16 * times, jr.key(0))
    average = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, model)
    return _train(model, optax.adamw(1e-3)) | {"average": average}


def _resnet(short: bool, times: int) -> Any:
    depth, width = 2 if short else 50, 16 * times
    model, state = eqx.nn.make_with_state(ResNet)(depth, width, jr.key(0))
    return _train(model, optax.sgd(1e-3, momentum=0.9)) | {"state": state}


MODELS: dict[str, Callable[[bool, int], Any]] = {
    "GPT-2-like with Adam": _gpt2,
    "Llama-like with AdamW and EMA": _llama,
    "ResNet with State and momentum": _resnet,
}


def make(model: str, short: bool, times: int = 1) -> Any:
    """A tree for which nothing is compiled: its leaves are parts of a random pool."""
    skeleton = eqx.filter_eval_shape(MODELS[model], short, times)
    pool = np.random.default_rng(0).standard_normal(2**20, np.float32)
    starts = itertools.count(0, 4099)

    def fill(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        start = next(starts) % 2**19
        return jnp.asarray(pool[start : start + x.size].reshape(x.shape), x.dtype)

    return jax.block_until_ready(jax.tree.map(fill, skeleton))


# ---- The peers.

Path = pathlib.Path


class Peer(NamedTuple):
    """`of` makes, of a tree, what is saved, and `like` what is told to a load."""

    save: Callable[[Path, Any], Any]
    load: Callable[[Path, Any], Any]
    of: Callable[[Any], Any]
    like: Callable[[Any], Any]


def _flat(tree: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# The package imports a function when it is first asked for: before the clock starts.
_ours = ft.partial(ec.tree_serialise_leaves, durable=False)
_safetensors = next(peer for peer in PEERS if peer.name == "safetensors.flax")
_load, _same = ec.tree_deserialise_leaves, lambda tree: tree
_skeleton = lambda tree: eqx.filter_eval_shape(lambda: tree)
ALL: dict[str, Peer] = {
    "eqx_ckpt": Peer(_ours, _load, _same, _skeleton),
    "eqx_ckpt, flat": Peer(_ours, _load, _flat, lambda tree: _skeleton(_flat(tree))),
    "Equinox": Peer(
        eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves, _same, _skeleton
    ),
    "safetensors.flax, flat": Peer(
        lambda path, tree: _safetensors.save(path, tree, False),
        _safetensors.load,
        _flat,
        lambda tree: _safetensors.like(_flat(tree)),
    ),
}


# ---- The clock.


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of CPU, and by the clock, until all arrays of the result are there.

    To wait for them is a walk of the tree, which is no part of a call. It is made
    twice, and the second one, in which there is nothing to wait for, is taken off.
    """
    gc.collect()  # Else luck says in which call all older objects are looked at: 70 ms.
    times = [_now()]
    out = call()
    for _ in range(2):
        jax.block_until_ready(out)
        times.append(_now())
    start, there, end = times
    cpu, clock = 1e3 * ((there - start) - (end - there))
    return cpu, clock


def _now() -> np.ndarray:
    """Seconds of CPU, and of the clock."""
    return np.array([time.process_time(), time.perf_counter()])


def _clear(path: Path) -> None:
    """Nothing is at the path. A save over another one deletes that as well."""
    ec.delete(path) if path.is_dir() else path.unlink(missing_ok=True)


def later(tree: Any, rounds: int, scratch: Path) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {x: {"save": [], "load": []} for x in ALL}
    given = {name: (peer.of(tree), peer.like(tree)) for name, peer in ALL.items()}
    for turn in range(rounds + 1):
        for name, peer in [*ALL.items()][:: -1 if turn % 2 else 1]:
            saved, like = given[name]
            path = scratch / f"{name}.eqx"
            _clear(path)
            save = _timed(lambda: peer.save(path, saved))
            load = _timed(lambda: peer.load(path, like))
            if turn:  # The first one is measured in a process of its own.
                out[name]["save"].append(save)
                out[name]["load"].append(load)
    return out


def first(model: str, scratch: Path) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {name: {} for name in ALL}
    for _, name, call in itertools.product(range(5), ALL, ("save", "load")):
        got = program.call(__file__, "--once", model, name, call, str(scratch))
        out[name].setdefault(f"first {call}", []).append(got)
    return out


def once(model: str, name: str, call: str, scratch: Path) -> tuple[float, float]:
    tree = make(model, False)
    peer, path = ALL[name], scratch / f"first {name}.eqx"
    if call == "save":
        _clear(path)
        saved = peer.of(tree)
        return _timed(lambda: peer.save(path, saved))
    like = peer.like(tree)
    return _timed(lambda: peer.load(path, like))


def measure(short: bool, scratch: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for number, (model, times) in enumerate(itertools.product(MODELS, (1, 4))):
        own = scratch / str(number)
        own.mkdir()
        tree = make(model, short, times)
        peers = later(tree, 1 if short else 7, own)
        if times == 1 and not short:  # Each takes a new process.
            for name, row in first(model, own).items():
                peers[name] |= row
        leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        size = sum(x.nbytes for x in leaves)
        title = model if times == 1 else f"{model}, {times} times as wide"
        results[title] = {"leaves": len(leaves), "bytes": size, "peers": peers}
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        *given, scratch = sys.argv[2:]
        print(json.dumps(once(*given, Path(scratch))))
    else:
        program.run("models", measure, ["modules"])
