"""The work of a call grows with the tree, and not with its square.

Inputs are doubled twice. For each doubling, the processor's time for a call may grow
by 2.3 at most, which is 5.3 for the two. Other programs make a call slower and never
faster, so the shortest of several runs counts, and a ratio that is too large is
measured again.

`python -m support.work COUNT` prints the seconds of each call for `COUNT` inputs and
for four times as many, without the type checks of the tests, which are slow.
"""

import gc
import io
import json
import pathlib
import sys
import tempfile
import time

import equinox as eqx
import numpy as np
import pytest

import eqx_ckpt as ec
from eqx_ckpt import merging
from eqx_ckpt._kernel._save import _agree


MOST = 2.3**2


class Layer(eqx.Module):
    w: np.ndarray
    b: np.ndarray
    index: int = eqx.field(static=True)
    act: tuple = eqx.field(static=True)


def tree(n, shape=(1,), names=("w", "b"), key="layers"):
    """`2 * n` small leaves."""
    ones = np.ones(shape, np.float32)
    return {key: [{name: ones for name in names} for _ in range(n)]}


def modules(n, step=1):
    one = np.ones(1, np.float32)
    return {"layers": [Layer(one, one, i * step, (i, print)) for i in range(n)]}


def alike(n):
    """Nodes of 10 kinds: the index has no nodes of trees with 50,000 kinds."""
    return {"layers": modules(10)["layers"] * (n // 10)}


def flat(n, salt, value: object = np.ones(1, np.float32)):
    """Names that have little in common."""
    table = str.maketrans("0123456789", "ghijklmnop")
    names = [f"{(i * 2654435761 + salt) % 2**32:08x}" for i in range(2 * n)]
    return {x.translate(table): value for x in names}


def saved(of):
    return ec.open(io.BytesIO(ec.to_bytes(of)))


def refused(call, *args, **kwargs):
    with pytest.raises(RuntimeError):
        call(*args, **kwargs)


def written(write):
    """Calls what writes to a path."""
    with tempfile.TemporaryDirectory() as directory:
        write(pathlib.Path(directory))


def save(like, **options):
    written(lambda path: ec.tree_serialise_leaves(path / "c", like, **options))


def merged(like, ckpt):
    average = merging.average()
    ec.materialise(ec.merge([ckpt, ckpt], average))


load, graft = ec.tree_deserialise_leaves, ec.graft
WHOLE = [(lambda m: m, lambda c: c)]
FIRST = [(lambda m: m["layers"][0], lambda c: c.layers[0])]
OTHER = [(lambda m: m["x"], lambda c: c.x)]

# What is measured of two trees, the second of which is stored.
CALLS = {
    "load": (modules, modules, lambda like, ckpt: load(ckpt, like)),
    "splice": (tree, tree, lambda like, ckpt: ckpt.splice(like)),
    "init": (
        tree,
        tree,
        lambda like, ckpt: ec.load_or_init(lambda: like, ckpt, missing="init"),
    ),
    "where": (
        tree,
        tree,
        lambda like, ckpt: load(ckpt, like, where=lambda m: m["layers"][::2]),
    ),
    "filter_spec": (
        tree,
        tree,
        lambda like, ckpt: load(
            ckpt,
            {"layers": like["layers"][:-1]},
            {"layers": [{"w": True, "b": False}] * (len(like["layers"]) - 1)},
            unexpected="ignore",
        ),
    ),
    "static": (
        lambda n: modules(n, 2),
        modules,
        lambda like, ckpt: refused(load, ckpt, like),
    ),
    "static names": (
        lambda n: modules(n, 2),
        modules,
        lambda like, ckpt: load(ckpt, like, static=["*.index", "layers.0.act"]),
    ),
    "missing": (
        lambda n: tree(n, names=("weight", "bias")),
        tree,
        lambda like, ckpt: refused(load, ckpt, like),
    ),
    "missing of flat": (
        lambda n: flat(n, 1),
        lambda n: flat(n, 0),
        lambda like, ckpt: refused(load, ckpt, like),
    ),
    "unexpected": (
        lambda n: tree(n // 2),
        tree,
        lambda like, ckpt: refused(load, ckpt, like),
    ),
    "shapes": (
        lambda n: tree(n, (2,)),
        tree,
        lambda like, ckpt: refused(load, ckpt, like),
    ),
    "rename": (
        modules,
        lambda n: {"blocks": modules(n)["layers"]},
        lambda like, ckpt: load(ckpt, like, rename=[("^blocks", "layers")]),
    ),
    "rename to what does not fit": (
        lambda n: modules(n, 2),
        lambda n: {"blocks": modules(n)["layers"]},
        lambda like, ckpt: refused(load, ckpt, like, rename=[("^blocks", "layers")]),
    ),
    "graft": (modules, modules, lambda like, ckpt: graft(like, ckpt, WHOLE)),
    "graft of pairs": (
        modules,
        modules,
        lambda like, ckpt: graft(
            like,
            ckpt,
            [
                (lambda m, i=i: m["layers"][i], f"layers.{i}")
                for i in range(len(like["layers"]))
            ],
        ),
    ),
    "graft of other shapes": (
        lambda n: tree(n, (2,)),
        tree,
        lambda like, ckpt: refused(graft, like, ckpt, FIRST),
    ),
    "graft of other names": (
        lambda n: tree(n, names=("weight", "bias")),
        tree,
        lambda like, ckpt: refused(graft, like, ckpt, FIRST),
    ),
    "graft of twins": (
        tree,
        tree,
        lambda like, ckpt: refused(graft, like, ckpt, FIRST),
    ),
    "graft of stacks": (
        lambda n: tree(n, (2, 1), key="blocks") | {"x": np.ones(3)},
        lambda n: {
            "layers": [
                {x: [np.ones(1, np.float32)] * 2 for x in "wb"} for _ in range(n)
            ],
            "x": np.ones(3),
        },
        lambda like, ckpt: refused(graft, like, ckpt, [(lambda m: m["x"], "x")]),
    ),
    "graft of transposes": (
        lambda n: {"blocks": tree(n, (2, 3)), "x": np.ones(2)},
        lambda n: {"body": tree(n, (3, 2)), "x": np.ones(2)},
        lambda like, ckpt: refused(graft, like, ckpt, OTHER),
    ),
    "graft of sequences": (
        lambda n: flat(n // 2, 1, [np.ones(1, np.float32)] * 2) | {"x": np.ones(2)},
        lambda n: flat(n // 2, 0, [np.ones(1, np.float32)] * 2) | {"x": np.ones(2)},
        lambda like, ckpt: refused(graft, like, ckpt, OTHER),
    ),
    "graft of one more": (
        lambda n: tree(n, key="blocks") | {"layers": [{"w": np.ones(1, np.float32)}]},
        tree,
        lambda like, ckpt: refused(
            graft,
            like,
            ckpt,
            [(lambda m: m["layers"][0]["w"], lambda c: c.layers[0].w)],
        ),
    ),
    "graft of flat": (
        lambda n: flat(n, 1) | {"x": np.ones(2)},
        lambda n: flat(n, 0) | {"x": np.ones(2)},
        lambda like, ckpt: refused(graft, like, ckpt, OTHER),
    ),
    "save": (modules, tree, lambda like, ckpt: save(like, durable=False)),
    "processes that save other leaves": (
        lambda n: {"the leaves": [f"layers.{i}.w" for i in range(2 * n)]},
        tree,
        lambda like, ckpt: _agree._difference(
            1, like, {"the leaves": like["the leaves"][1:]}
        ),
    ),
    "save in the background": (
        modules,
        tree,
        lambda like, ckpt: written(
            lambda path: ec.async_tree_serialise_leaves(
                path / "c", like, durable=False
            ).result()
        ),
    ),
    "save of lazy leaves": (tree, tree, lambda like, ckpt: ec.to_bytes(ckpt.tree)),
    "open": (
        lambda n: ec.to_bytes(modules(n)),
        tree,
        lambda like, ckpt: ec.open(io.BytesIO(like)),
    ),
    "names": (tree, modules, lambda like, ckpt: (list(ckpt.leaves), repr(ckpt.tree))),
    "leaves by name": (
        tree,
        tree,
        lambda like, ckpt: [ckpt[name].shape for name in ckpt.leaves],
    ),
    "materialise": (tree, modules, lambda like, ckpt: ec.materialise(ckpt.tree)),
    "verify": (tree, tree, lambda like, ckpt: ec.verify(ckpt)),
    "rebuild": (tree, alike, lambda like, ckpt: ec.rebuild(ckpt, [Layer, print])),
    "diff": (modules, modules, lambda like, ckpt: ec.diff(like, ckpt)),
    "diff of names": (
        lambda n: flat(n, 1),
        lambda n: flat(n, 0),
        lambda like, ckpt: repr(ec.diff(like, ckpt)),
    ),
    "stats": (tree, tree, lambda like, ckpt: ec.stats(ckpt)),
    "merge": (tree, tree, merged),
    "convert": (
        tree,
        modules,
        lambda like, ckpt: written(
            lambda path: ec.convert(ckpt, path / "c.zip", durable=False)
        ),
    ),
    "export": (
        tree,
        tree,
        lambda like, ckpt: written(
            lambda path: ec.export_safetensors(
                path / "c.safetensors", ckpt, durable=False
            )
        ),
    ),
}


def _seconds(call, like, ckpt):
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        call(like, ckpt)
        return time.process_time() - start
    finally:
        gc.enable()


def growth(name, n):
    """The shortest of several runs with `n`, and with four times as many."""
    make, make_saved, call = CALLS[name]
    inputs = [(make(count), saved(make_saved(count))) for count in (n, 4 * n)]
    best = [float("inf")] * 2
    for _ in range(12):
        for i, one in enumerate(inputs):
            best[i] = min(best[i], _seconds(call, *one))
        if best[1] <= MOST * best[0]:
            break
    return best


if __name__ == "__main__":
    for name in CALLS:
        print(json.dumps([name, *growth(name, int(sys.argv[1]))]), flush=True)
