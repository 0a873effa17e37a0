"""The nodes of a checkpoint's own tree: what they carry, and that they stay nodes."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from support import inside
from support.helpers import assert_alike

import eqx_ckpt as ec


class _Net(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    pools: eqx.nn.Sequential
    norm: eqx.nn.BatchNorm
    name: str = eqx.field(static=True, default="net")

    def __init__(self, key, heads=12):
        self.attention = eqx.nn.MultiheadAttention(heads, 24, key=key)
        layers = [_Leafless(3), eqx.nn.Linear(2, 2, key=key), _Leafless(4)]
        self.pools = eqx.nn.Sequential(layers)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="ema")


class _Leafless(eqx.Module):
    size: int = eqx.field(static=True)

    def __call__(self, x, *, key=None):
        return x


class _Keyless:
    def __init__(self, *children):
        self.children = children


jtu.register_pytree_node(
    _Keyless, lambda x: (x.children, None), lambda _, children: _Keyless(*children)
)


def _tree():
    model, state = eqx.nn.make_with_state(_Net)(jr.key(0))
    odd = {True: jnp.ones(1), False: [jnp.zeros(2), None, jnp.ones(3)]}
    keys = {3: jnp.ones(1), -7: {"": np.arange(2)}}
    keyless = _Keyless(1, [2.5], {"a.b": jr.key(3)})
    return {
        **{"model": model, "state": state, "odd": odd, "keys": keys, "%": keyless},
        **{"items": (jnp.zeros(()), ()), "_METADATA": {"_METADATA": 3}, "step": 5},
    }


@pytest.fixture(params=["ocdbt", "zarr"])
def ckpt(request, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", _tree(), layout=request.param)
    return ec.open(tmp_path / "c")


def _read(node: Any) -> Any:
    leaves, structure = jtu.tree_flatten(node)
    return jtu.tree_unflatten(structure, ec.materialise(leaves))


def _stored(path: Any) -> tuple:
    """All that loads check, of a checkpoint."""
    leaves = ec.open(path)._source.index.leaves
    labels = inside.labels_of(path)
    rows = {
        name: (leaves.templates[number], labels.get(name))
        for name, number in zip(leaves.names, leaves.template_of)
    }
    return rows, inside.fields_of(path)


def test_what_is_saved_of_nodes_is_what_they_are_of(ckpt, tmp_path):
    """Names, kinds of keys, static fields and labels of States; again and again."""
    want = _stored(ckpt)
    changes = [
        lambda tree: jax.tree.map(lambda x: x.read(), tree),
        lambda tree: _read(eqx.combine(*eqx.partition(tree, lambda x: x.ndim == 2))),
        lambda tree: _read(eqx.tree_at(lambda t: t.step, tree, 5)),
        lambda tree: pickle.loads(pickle.dumps(_read(tree))),
        lambda tree: _read(pickle.loads(pickle.dumps(tree))),
        lambda tree: copy.deepcopy(_read(copy.deepcopy(tree))),
        # Lazy leaves are not read before.
        lambda tree: tree,
        lambda tree: eqx.combine(*eqx.partition(tree, lambda x: x.ndim == 2)),
        lambda tree: jax.tree.map(lambda x: x, pickle.loads(pickle.dumps(tree))),
    ]
    tree = ckpt.tree
    for i, change in enumerate(changes):
        path = tmp_path / f"{i}.zip"
        ec.tree_serialise_leaves(path, change(tree))
        assert _stored(path) == want
        tree = ec.open(path).tree
    like = ec.skeleton(_tree)
    assert_alike(
        ec.tree_deserialise_leaves(tmp_path / f"{i}.zip", like),
        ec.tree_deserialise_leaves(ckpt, like),
    )


@pytest.mark.parametrize("read", [True, False], ids=["read", "lazy"])
def test_a_node_that_is_saved_alone(ckpt, tmp_path, read):
    """The prefix goes, and nothing else."""
    leaves, statics = _stored(ckpt)
    for name in ("model", "state", "odd", "keys", "%25", "_METADATA", "items"):
        node = ckpt.tree[name if name != "%25" else "%"]
        value = _read(node) if read else node
        ec.tree_serialise_leaves(tmp_path / f"{name}.zip", value)
        got = _stored(tmp_path / f"{name}.zip")
        prefix = "%5FMETADATA" if name == "_METADATA" else name
        cut = {
            x[len(prefix) + 1 :]: (t._replace(keys=t.keys[1:]), label)
            for x, (t, label) in leaves.items()
            if x.startswith(prefix + ".")
        }
        if name == "_METADATA":
            cut = {"%5FMETADATA": cut["_METADATA"]}
        assert got[0] == cut
        assert got[1] == {
            x[len(prefix) + 1 :]: fields
            for x, fields in statics.items()
            if x == prefix or x.startswith(prefix + ".")
        }


@pytest.mark.filterwarnings("ignore:The tree that is saved has layers")
def test_pruned_without_the_class_and_loaded_with_another(ckpt, tmp_path):
    """The static fields of the Module in `like` are compared with those saved."""
    ec.tree_serialise_leaves(tmp_path / "pruned", _read(ckpt.tree.model))
    make = lambda heads: eqx.nn.make_with_state(_Net)(jr.key(1), heads)[0]
    same = ec.tree_deserialise_leaves(tmp_path / "pruned", make(12))
    assert_alike(same.attention, _tree()["model"].attention)
    with pytest.raises(RuntimeError, match="attention.num_heads  saved 12, .*has 6"):
        ec.tree_deserialise_leaves(tmp_path / "pruned", make(6))
    # A node as `like` has static fields as well.
    ec.tree_serialise_leaves(tmp_path / "six", make(6))
    with pytest.raises(RuntimeError, match="attention.num_heads  saved 6, .*has 12"):
        ec.tree_deserialise_leaves(tmp_path / "six", ckpt.tree.model)
    # Plain containers have none: that is what `materialise` says of them.
    ec.tree_serialise_leaves(tmp_path / "plain", ec.materialise(ckpt.tree.model))
    ec.tree_deserialise_leaves(tmp_path / "plain", make(6))


def test_static_fields_are_attributes(ckpt):
    model = ckpt.tree.model
    assert model.attention.num_heads == 12 and model.name == "net"
    assert [x.size for x in model.pools.layers[::2]] == [3, 4]
    assert len(model.pools.layers) == 3 and model.pools.layers[-1].size == 4
    assert "num_heads" in dir(model.attention)
    with pytest.raises(KeyError, match="The static field is an attribute: `.num_heads"):
        model.attention["num_heads"]
    assert "num_heads" not in model.attention
    assert "num_heads = 12" in " ".join(repr(model.attention).split())
    assert "size = 3" in " ".join(repr(_read(model)).split())
    # Lazy leaves are printed as they are in the checkpoint.
    shown = lambda node: {" ".join(x.split()) for x in repr(node).splitlines()[1:]}
    assert shown(jax.tree.map(lambda x: x, model)) == shown(model)
    assert jtu.tree_leaves(model.pools.layers[0]) == []
    # Edited, they stay; and nodes that differ in them are of two structures.
    edited = eqx.tree_at(lambda t: t.attention.query_proj.weight, model, 0)
    assert edited.attention.num_heads == 12 and edited.attention.query_proj.weight == 0
    names = jtu.tree_structure(model.pools.layers[0])
    assert names != jtu.tree_structure(model.pools.layers[2])
    plain = ec.materialise(model.pools)
    assert [type(x) for x in plain["layers"]] == [type(None), dict, type(None)]


def test_nodes_stay_nodes_and_only_materialise_makes_plain_containers(ckpt):
    kind = type(ckpt.tree)
    for node in (
        jax.tree.map(lambda x: x, ckpt.tree),
        eqx.filter(ckpt.tree, lambda x: x.ndim == 1),
        eqx.tree_at(lambda t: t.odd, ckpt.tree, None),
    ):
        assert type(node) is kind and type(node.model.attention) is kind
    out = ec.materialise({"a": [ckpt.tree.odd], "b": _read(ckpt.tree.keys)})
    assert list(map(type, (out["a"][0], out["b"]))) == [dict, dict]
    assert [x if x is None else x.shape for x in out["a"][0]["%=False"]] == [
        (2,),
        None,
        (3,),
    ]
    assert_alike(out["b"], {3: jnp.ones(1), -7: {"": np.arange(2)}})
    odd = ckpt.tree.odd
    assert [odd[key] for key in odd] == [odd[False], odd[True]] and True in odd
    with pytest.raises(AttributeError, match="immutable"):
        ckpt.tree.step = 3


_NAMES = """keys _body _name _get _source _children _keys items values name shape dtype
__len__ __class__ __iter__ __dict__ _body__ __array__""".split()


_ENDS = [None, [], {}, jnp.tanh, "text", (None, jnp.tanh), eqx.nn.Identity()]


@pytest.mark.parametrize("end", [*_ENDS, [*_ENDS]], ids=lambda x: str(x)[:20])
def test_a_sequence_has_its_length_with_what_is_not_stored(tmp_path, end):
    """An index from its end leads to what it leads to in the tree that was saved."""
    x = jnp.ones(1)
    values = [x, None, 2 * x, end, end]
    tree = {"_METADATA": [*values], "b": {"c": (values, 3.0, end), "d": x}}
    ec.tree_serialise_leaves(tmp_path / "0", tree)
    for i in range(3):
        top = ec.open(tmp_path / f"{i}").tree
        for node, size in ((top["_METADATA"], 5), (top.b.c[0], 5), (top.b.c, 3)):
            assert len(node) == len([*node]) == len(ec.materialise(node)) == size
            assert len(node[:-1]) == size - 1 and node[-size] is node[0]
        assert top.b.c[-2].read() == 3 and top["_METADATA"][-3].read() == 2
        # What is saved of nodes has it as well.
        again = jax.tree.map(lambda y: y, pickle.loads(pickle.dumps(top)))
        ec.tree_serialise_leaves(tmp_path / f"{i + 1}", again)
        loaded = ec.tree_deserialise_leaves(tmp_path / f"{i + 1}", tree)
        assert loaded["b"]["c"][0][2] == 2


def test_fields_that_are_called_as_attributes_of_nodes(tmp_path):
    saved = {name: float(i) for i, name in enumerate(_NAMES)}
    ec.tree_serialise_leaves(tmp_path / "c", {"a": saved, **saved})
    tree = ec.open(tmp_path / "c").tree
    kind = type(tree)
    for node in (tree, tree.a, _read(tree), _read(tree.a)):
        value = lambda x: x if isinstance(x, float) else x.read()
        assert {name: value(node[name]) for name in _NAMES} == saved
        assert set(_NAMES) <= set(node)
        for name in _NAMES:
            if not name.startswith("__"):
                assert value(getattr(node, name)) == saved[name]
        assert isinstance(node, kind) and callable(node.__len__)
        with pytest.raises(AttributeError, match=r"is reached by `\['__array__'\]`"):
            node.__array__
        assert "_children" in repr(node) and "__len__" in dir(node)
    assert_alike(ec.materialise(tree.a), saved)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "c", tree).a._get, 3.0)


# ---- A Checkpoint is a mapping.


def test_a_checkpoint_is_a_mapping_of_names_to_lazies(ckpt):
    names = list(ckpt.leaves)
    assert list(ckpt) == list(ckpt.keys()) == names and len(ckpt) == len(names)
    assert all(isinstance(x, ec.LazyArray) for x in ckpt.values())
    assert [(k, v.name) for k, v in ckpt.items()] == [(x, x) for x in names]
    assert list(dict(ckpt)) == names and {**ckpt}["step"].read() == 5
    assert ckpt.get("step").read() == 5 and ckpt.get("stop", 3) == 3
    assert "step" in ckpt and "stop" not in ckpt and 3 not in ckpt
    # It is one thing, not what is in it.
    other = ec.open(ckpt.path)
    assert ckpt == ckpt and ckpt != other and len({ckpt, other}) == 2
    assert jtu.tree_leaves(ckpt) == [ckpt]


def test_one_leaf_of_many_is_found_without_the_others(tmp_path, monkeypatch):
    """`.tree` makes what is asked for: a lazy leaf, and no other one."""
    tree = {
        "a": {f"w{i}": i for i in range(3000)},
        "b": [{"w": i} for i in range(3000)],
    }
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    made = []
    inside.watch(monkeypatch, "make a lazy leaf", lambda *args: made.append(args))
    ckpt = ec.open(tmp_path / "c")
    assert ckpt.tree.a.w7.name == "a.w7" and ckpt.tree.b[2999].w.name == "b.2999.w"
    assert ckpt.tree.b[-1].w is ckpt.tree.b[2999].w
    assert len(made) < 5


def test_long_names_make_no_long_messages(tmp_path):
    long = "x" * 10_000
    ec.tree_serialise_leaves(tmp_path / "c", {f"{long}{i}": i for i in range(40)})
    ckpt = ec.open(tmp_path / "c")
    calls = [
        lambda: ec.tree_deserialise_leaves(ckpt, {f"{long}y{i}": i for i in range(40)}),
        lambda: ckpt.tree.nothing,
        lambda: ckpt["nothing"],
        lambda: ec.export_safetensors(tmp_path / "d.safetensors", ckpt),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, LookupError, AttributeError, TypeError)) as e:
            call()
        assert len(str(e.value)) < 150_000
