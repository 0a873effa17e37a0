"""What `.safetensors` files say besides the tensors, as positions do not."""

import json

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import safetensors.numpy
from support import trees

import eqx_ckpt as ec


_RELEASES = trees.without_keys("w", "b"), trees.without_keys("b", "w")


def _tree(cls, one, two, three, four):
    below = cls(w=jnp.full(3, two), b=jnp.full(3, three))
    return {"l": [cls(w=jnp.full(3, one), b=[below])], "r": cls(w=four, b=four + 1)}


def _numbers(tree):
    (top,), rest = tree["l"], tree["r"]
    (below,) = top.b
    some = top.w, below.w, below.b, rest.w, rest.b
    return [float(x.ravel()[0]) for x in some]


_RULES = [(r"^l[.]", "m.layer.")]


def _export(path, tree, way):
    one = path / "m.safetensors"
    if way == "sharded":
        ec.export_safetensors(path / "shards", tree, shard_bytes=16)
        return path / "shards"
    if way == "of a checkpoint":
        ec.tree_serialise_leaves(path / "first.zip", tree)
        ec.convert(path / "first.zip", one)
    elif way == "again":
        ec.export_safetensors(path / "first.safetensors", tree)
        ec.export_safetensors(one, ec.open(path / "first.safetensors").tree)
    else:
        ec.export_safetensors(one, tree, rename=_RULES if way == "renamed" else None)
    if way == "converted":
        ec.convert(one, path / "ours")
        return path / "ours"
    return one


_WAYS = "plain", "sharded", "of a checkpoint", "again", "converted", "renamed"


@pytest.mark.parametrize("way", _WAYS)
def test_children_without_keys_go_by_the_attributes_that_they_are(tmp_path, way):
    old, new = _RELEASES
    four = jnp.full(3, 4.0)
    path = _export(tmp_path, _tree(old, 1.0, 2.0, 3.0, four), way)
    back = [(r"^m[.]layer[.]", "l.")] if way == "renamed" else None
    for cls in (old, new):
        like = _tree(cls, 0.0, 0.0, 0.0, jnp.zeros(3))
        loaded = ec.tree_deserialise_leaves(path, like, rename=back)
        assert _numbers(loaded) == [1, 2, 3, 4, 5]
        if back is None:
            source = lambda c: c.l[0]
            part = ec.tree_deserialise_leaves(path, like["l"][0], source=source)
            assert _numbers(like | {"l": [part]})[:3] == [1, 2, 3]
        pairs = [(lambda m: m["l"], lambda c: c.m.layer if back else c.l)]
        got, _ = ec.graft(like, path, pairs, fresh=lambda m: m["r"], drop=lambda c: c.r)
        assert _numbers(got)[:3] == [1, 2, 3]


def test_a_file_without_such_nodes_is_as_it_was(tmp_path):
    path = tmp_path / "m.safetensors"
    ec.export_safetensors(path, eqx.nn.MLP(2, 2, 2, 1, key=jr.key(0)))
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() is None


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"l": []}', '{"l": {"0": 1}}', '{"l": {"0": "\\ud800"}}']
)
def test_attributes_that_nobody_writes(tmp_path, text):
    path = tmp_path / "m.safetensors"
    metadata = {"eqx_ckpt.attributes": text}
    safetensors.numpy.save_file({"l.0": np.ones(2, np.float32)}, path, metadata)
    with pytest.raises(ValueError, match="`eqx_ckpt.attributes` in its metadata"):
        ec.open(path)


def test_attributes_of_what_is_not_there(tmp_path):
    """As another program leaves them, which has renamed tensors."""
    path = tmp_path / "m.safetensors"
    given = {"k": {"0": "w"}, "l": {"0": None, "7": "b"}, "": {}}
    metadata = {"eqx_ckpt.attributes": json.dumps(given), "by": "me"}
    safetensors.numpy.save_file({"l.0": np.ones(2, np.float32)}, path, metadata)
    assert ec.open(path).metadata == {"by": "me"}
    got = ec.tree_deserialise_leaves(path, {"l": [jnp.zeros(2)]})
    assert got["l"][0].tolist() == [1, 1]
