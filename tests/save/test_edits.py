"""Edits of checkpoints with functions: as if all were loaded, or an error before a byte
is written. And nothing is published that a reader does not take."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import edits, inside
from support.helpers import files_of, long

import eqx_ckpt as ec


pytest.importorskip("flatbuffers")


@pytest.mark.parametrize(
    "seed, count", [(0, 30), *long(*((n, 2500) for n in range(1, 5)))]
)
def test_sequences(tmp_path, seed, count):
    campaign = edits.campaign(tmp_path, seed, count)
    print(json.dumps(campaign.counts))
    assert campaign.failures == []
    assert campaign.counts["functions kept"] > count / 4


SHIFT = ec.function(lambda t, x: t["w"] * x + t["v"], jnp.ones(3), platforms=["cpu"])
TREE = {"w": jnp.arange(3.0), "v": jnp.ones(3), "n": np.arange(5)}


def _to_file(path, tree, **options):
    with io.BytesIO() as file:
        ec.tree_serialise_leaves(file, tree, **options)


def _in_background(path, tree, **options):
    ec.async_tree_serialise_leaves(path, tree, **options).result()


SAVES = {
    "ocdbt": ec.tree_serialise_leaves,
    "zarr": lambda *args, **kw: ec.tree_serialise_leaves(*args, layout="zarr", **kw),
    "one.zip": ec.tree_serialise_leaves,
    "file": _to_file,
    "bytes": lambda path, *args, **kw: ec.to_bytes(*args, **kw),
    "background": _in_background,
}


@pytest.mark.parametrize("to", [*SAVES, "memory"])
def test_what_a_reader_does_not_take_is_not_published(tmp_path, monkeypatch, to):
    path = f"memory://untaken/{tmp_path.name}" if to == "memory" else tmp_path / to
    save = SAVES.get(to, ec.tree_serialise_leaves)
    ec.tree_serialise_leaves(path, TREE, functions={"f": SHIFT})
    before = files_of(tmp_path)

    def make(call):
        def twice(*args):
            rows = call(*args).items()
            altered = lambda f: f._replace(stored=f.stored._replace(leaves=[0, 0]))
            return {name: altered(function) for name, function in rows}

        return twice

    inside.wrap(monkeypatch, "plan the functions of a save", make)
    with pytest.raises(RuntimeError, match="cannot be read: .*Nothing was saved"):
        save(path, {**TREE, "w": jnp.zeros(3)}, functions={"f": SHIFT})
    assert files_of(tmp_path) == before
    f = ec.open(path).functions["f"]
    assert f(jnp.ones(3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", [k for k in edits.KINDS if k not in ("key", "number")])
@pytest.mark.parametrize("how", ["async", *long("run", "zip", "zarr")])
def test_memory_may_be_overwritten_once_staged(tmp_path, kind, how):
    """Also that of arrays that lazy ones are computed of."""
    rng = edits.random.Random(kind)
    makers = edits.Makers(rng)
    values = {name: makers.make(kind, (7, 5)) for name in "ab"}
    tree = {name: x.leaf for name, x in values.items()}
    path = tmp_path / (how if how != "zip" else "one.zip")
    if how == "run":
        with ec.CheckpointManager(path, every=1) as manager:
            manager.save(1, tree)
            makers.overwrite()
        path = path / "1" / "default"
    else:
        layout = "zarr" if how == "zarr" else "ocdbt"
        handle = ec.async_tree_serialise_leaves(path, tree, layout=layout)
        handle.staged()
        makers.overwrite()
        handle.result()
    for name, x in values.items():
        assert edits.facts(ec.open(path)[name].read()) == x.facts
