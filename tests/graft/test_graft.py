"""`graft`: what it loads, what it says, and each way of getting it wrong."""

import collections
import io
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from support import trees
from support.helpers import assert_alike, BytesRead, files_of

import eqx_ckpt as ec


class Encoder(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout

    def __init__(self, width, p=0.1, depth=4, *, key):
        first, *keys = jr.split(key, depth + 1)
        self.embed = eqx.nn.Embedding(10, width, key=first)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.dropout = eqx.nn.Dropout(p)


class Language(eqx.Module):
    """What was trained."""

    encoder: Encoder
    head: eqx.nn.Linear

    def __init__(self, width=8, *, key):
        self.encoder = Encoder(width, key=jr.fold_in(key, 0))
        self.head = eqx.nn.Linear(width, 10, key=jr.fold_in(key, 1))


class Classifier(eqx.Module):
    """What is to be trained."""

    backbone: Encoder
    classify: eqx.nn.Linear
    classes: int = eqx.field(static=True)

    def __init__(self, classes=3, width=8, p=0.0, *, key):
        self.backbone = Encoder(width, p, key=jr.fold_in(key, 0))
        self.classify = eqx.nn.Linear(width, classes, key=jr.fold_in(key, 1))
        self.classes = classes


ENCODER = (lambda m: m.backbone, lambda c: c.model.encoder)
REST = {
    "fresh": lambda m: m.classify,
    "drop": lambda c: [c.opt, c.step, c.model.head],
}


@pytest.fixture(scope="module")
def saved():
    return Language(key=jr.key(0))


@pytest.fixture(scope="module")
def path(saved, tmp_path_factory):
    """A training run: the model, its optimiser, and a count."""
    path = tmp_path_factory.mktemp("graft") / "run"
    opt = optax.adam(1e-3).init(eqx.filter(saved, eqx.is_array))
    ec.tree_serialise_leaves(path, {"model": saved, "opt": opt, "step": 3})
    return path


@pytest.fixture(scope="module")
def model():
    return Classifier(key=jr.key(1))


def refused(path, model, pairs, error=RuntimeError, **kwargs) -> str:
    """The message of a graft that is refused before anything is read."""
    before = files_of(path)
    with BytesRead() as read:
        with pytest.raises(error) as info:
            ec.graft(model, path, pairs, **kwargs)
    assert read.total == (path / "eqx_ckpt.json").stat().st_size
    assert files_of(path) == before
    return str(info.value)


# ---- What it does.


def test_an_encoder_under_a_new_head(path, saved, model):
    with BytesRead() as read:
        out, report = ec.graft(model, path, [ENCODER], **REST, scalars="keep")
    expected = eqx.tree_at(
        lambda m: (m.backbone.embed, m.backbone.layers),
        model,
        (saved.encoder.embed, saved.encoder.layers),
    )
    assert_alike(out, expected)
    assert report.bytes_read == read.total
    # The index of a small checkpoint is longer than its leaves.
    is_more = read.total > report.nbytes
    assert ("with the index; leaves have" in repr(report)) == is_more
    assert report.names("loaded") == [
        "backbone.embed.weight",
        *(f"backbone.layers.{i}.{x}" for i in range(4) for x in ("weight", "bias")),
    ]
    assert report.names("fresh") == ["classify.weight", "classify.bias"]
    assert len(report.names("dropped")) == 2 + 23 + 1
    # The model's own rate is kept, and said.
    assert out.backbone.dropout.p == 0.0
    assert report.differences == (("backbone.dropout.p", "0.1", "0.0"),)


def test_the_report_is_a_table(path, model):
    _, report = ec.graft(model, path, [ENCODER], **REST, scalars="keep")
    rows = [re.split("  +", line.strip()) for line in repr(report).splitlines()]
    assert rows[0] == [f"Graft of {path}"]
    assert rows[1] == ["leaves", "bytes"]
    assert ["loaded", "9", "1.4 KiB"] in rows
    assert ["fresh", "2", "108 B"] in rows
    assert rows[6] == ["dropped", "26", "3.9 KiB"]
    assert ["opt", "23 leaves"] in rows and ["classify", "2 leaves"] in rows
    assert ["backbone.dropout.p", "0.0, saved 0.1"] in rows
    assert report.nbytes == ec.open(path).nbytes
    with pytest.raises(ValueError, match="`status` is one of loaded, adapted, cast"):
        report.names("lost")
    row = report.rows[0]
    assert (row.status, row.name, row.sources, row.nbytes) == (
        "loaded",
        "backbone.embed.weight",
        ("model.encoder.embed.weight",),
        320,
    )


def test_only_what_is_grafted_is_read(tmp_path):
    tree = {"a": np.ones(500_000), "b": np.ones(5_000_000), "c": np.ones(500_000)}
    ec.tree_serialise_leaves(tmp_path / "x", tree)
    like = {"c": jax.ShapeDtypeStruct((10,), np.float64), "d": np.zeros(500_000)}
    like["c"] = np.zeros(10)
    pairs = [
        (lambda m: m["d"], lambda c: c.a),
        (lambda m: m["c"], lambda c: c.c[:10]),
    ]
    with BytesRead() as read:
        out, report = ec.graft(like, tmp_path / "x", pairs, drop="b", verify=False)
    assert np.array_equal(out["d"], tree["a"]) and out["c"].shape == (10,)
    assert 4_000_000 <= read.total < 4_000_000 + 5000
    assert report.bytes_read == read.total
    assert report.names("adapted") == ["c"] and report.nbytes == 48_000_000
    with BytesRead() as read:
        ec.graft(like, tmp_path / "x", pairs, drop="b")
    # Verified, a view costs the chunk that it lies in.
    assert 8_000_000 <= read.total < 8_000_000 + 5000
    with BytesRead() as read:
        ec.materialise(ec.open(tmp_path / "x").tree)
    assert read.total > 48_000_000


def test_into_a_skeleton(path, saved):
    skeleton = eqx.filter_eval_shape(Language, key=jr.key(0))
    out, report = ec.graft(
        skeleton,
        path,
        [(lambda m: m, lambda c: c.model)],
        drop=lambda c: [c.opt, c.step],
    )
    assert_alike(out, saved)
    assert ec.unloaded(out) == [] and not report.differences
    by_name, _ = ec.graft(
        skeleton,
        ec.open(path),
        [(lambda m: m, "model")],
        drop=lambda c: (c.opt, c.step),
    )
    assert_alike(by_name, saved)


def test_initialise_what_is_fresh_of_a_skeleton(path, saved, model):
    make = lambda: Classifier(key=jr.key(1))
    skeleton = eqx.filter_eval_shape(make)
    text = refused(path, skeleton, [ENCODER], **REST)
    assert "load_or_init" in text and "`init=`" in text
    assert "classify.weight  f32[3,8]" in text
    rest = REST | {"scalars": "keep"}
    out, report = ec.graft(skeleton, path, [ENCODER], **rest, init=make)
    expected, _ = ec.graft(model, path, [ENCODER], **rest)
    assert_alike(out, expected)
    assert report.names("fresh") == ["classify.weight", "classify.bias"]
    other = lambda: Language(key=jr.key(1))
    with pytest.raises(ValueError, match="The initialiser makes a tree of another"):
        ec.graft(skeleton, path, [ENCODER], **rest, init=other)
    other = lambda: Classifier(4, key=jr.key(1))
    with pytest.raises(ValueError, match="makes `classify.weight` of another shape"):
        ec.graft(skeleton, path, [ENCODER], **rest, init=other)


def test_lists_of_nodes_are_paired_one_by_one(path, saved, model):
    pairs = [
        (lambda m: m.backbone.embed, lambda c: c.model.encoder.embed),
        (lambda m: m.backbone.layers[:2], lambda c: c.model.encoder.layers[2:]),
        (
            lambda m: [m.backbone.layers[3], m.backbone.layers[2]],
            lambda c: [c.model.encoder.layers[0], c.model.encoder.layers[1]],
        ),
    ]
    drop = lambda c: [c.opt, c.step, c.model.head, c.model.encoder.dropout]
    out, _ = ec.graft(model, path, pairs, fresh=REST["fresh"], drop=drop)
    for i, j in ((0, 2), (1, 3), (3, 0), (2, 1)):
        assert eqx.tree_equal(out.backbone.layers[i], saved.encoder.layers[j])
    # All of a list, of one that is longer.
    short = {"layers": [eqx.nn.Linear(8, 8, key=jr.key(i)) for i in range(2)]}
    pairs = [(lambda m: m["layers"], lambda c: c.model.encoder.layers[1:3])]
    drop = lambda c: [
        c.opt,
        c.step,
        c.model.head,
        c.model.encoder.dropout,
        c.model.encoder.embed,
        c.model.encoder.layers[0],
        c.model.encoder.layers[3],
    ]
    out, _ = ec.graft(short, path, pairs, drop=drop)
    assert eqx.tree_equal(out["layers"], saved.encoder.layers[1:3])


def test_a_new_and_a_renamed_field(path, saved):
    """An old checkpoint, for a class that has changed since."""

    class New(eqx.Module):
        encoder: Encoder
        output: eqx.nn.Linear
        scale: jax.Array

    parts = Language(key=jr.key(5))
    new = New(parts.encoder, parts.head, jnp.full(8, 0.5))
    out, report = ec.graft(
        new,
        path,
        [
            (lambda m: m.encoder, lambda c: c.model.encoder),
            (lambda m: m.output, lambda c: c.model.head),
        ],
        fresh=lambda m: m.scale,
        drop=lambda c: [c.opt, c.step],
    )
    assert_alike(out, New(saved.encoder, saved.head, new.scale))
    # The node that holds both is one pair, as long as the names are the same.
    old = {"encoder": saved.encoder, "output": saved.head}
    ec.tree_serialise_leaves("memory://old", old)
    out, _ = ec.graft(
        new, "memory://old", [(lambda m: m, lambda c: c)], fresh=lambda m: m.scale
    )
    assert_alike(out, New(saved.encoder, saved.head, new.scale))
    assert report.bytes_read is not None


def test_where_fresh_and_drop_agree_a_pair_may_hold_both(path, saved):
    """A head that is in both trees, and is not to be loaded."""
    model = Language(16, key=jr.key(3))
    model = eqx.tree_at(lambda m: m.encoder, model, Encoder(8, key=jr.key(4)))
    whole = (lambda m: m, lambda c: c.model)
    both = {"fresh": lambda m: m.head, "drop": lambda c: [c.opt, c.step, c.model.head]}
    out, _ = ec.graft(model, path, [whole], **both)
    assert eqx.tree_equal(out, eqx.tree_at(lambda m: m.encoder, model, saved.encoder))
    drop = lambda c: [c.opt, c.step]
    text = refused(path, model, [whole], fresh=both["fresh"], drop=drop)
    assert "model.head.weight  f32[10,8]  (what it stands for is in `fresh`)" in text
    assert "    drop=lambda c: c.model.head," in text


def test_a_list_of_a_stack_says_unstack(tmp_path):
    """As `stack` is said of the other way; also of a node in a training state."""
    listed = {"blocks": [Encoder(4, depth=2, key=jr.key(i)) for i in range(3)]}
    stacked = {
        "blocks": eqx.filter_vmap(lambda k: Encoder(4, depth=2, key=k))(
            jr.split(jr.key(0), 3)
        )
    }
    for tree, node in (
        (stacked, "c"),
        ({"model": stacked, "opt": {"mu": stacked}}, "c.model"),
    ):
        ec.tree_serialise_leaves(tmp_path / "stacked", tree)
        text = refused(tmp_path / "stacked", listed, [(lambda m: m, lambda c: c)])
        pair = (
            f"(lambda m: m['blocks'], lambda c: {node}.blocks, ec.adapters.unstack()),"
        )
        assert pair in text
    fewer = {"blocks": listed["blocks"][:2]}
    text = refused(tmp_path / "stacked", fewer, [(lambda m: m, lambda c: c)])
    assert "unstack())," not in text


def test_lists_of_names(path, model, saved):
    sides = lambda m: [m.backbone.embed, m.backbone.layers, m.backbone.dropout]
    names = [f"model.encoder.{name}" for name in ("embed", "layers", "dropout")]
    named = {**REST, "drop": ["opt", "step", "model.head"]}
    out, _ = ec.graft(model, path, [(sides, names)], scalars="load", **named)
    assert eqx.tree_equal(out.backbone, saved.encoder)


def test_cast(tmp_path):
    tree = {"w": jnp.full(4, 1.5), "n": np.arange(4), "m": jnp.ones(2)}
    ec.tree_serialise_leaves(tmp_path / "x", tree)
    like = {
        "w": jnp.zeros(4, jnp.bfloat16),
        "n": np.zeros(4, np.int16),
        "m": jnp.zeros(2),
    }
    whole = (lambda m: m, lambda c: c)
    text = refused(tmp_path / "x", like, [whole])
    assert "    w  saved f32[4], the model has bf16[4]  (`cast=True` converts" in text
    out, report = ec.graft(like, tmp_path / "x", [whole], cast=True)
    assert out["w"].dtype == jnp.bfloat16 and out["n"].dtype == np.int16
    assert report.names("cast") == ["n", "w"] and report.names("loaded") == ["m"]
    assert report.rows[2].how == "float32 to bfloat16"
    assert "    w  float32 to bfloat16" in repr(report)
    ec.tree_serialise_leaves(tmp_path / "x", {"n": np.array([70_000])})
    with pytest.raises(RuntimeError, match="n: 70000 does not fit into int16"):
        ec.graft({"n": np.zeros(1, np.int16)}, tmp_path / "x", [whole], cast=True)


def test_python_scalars(tmp_path):
    """Those of a pair are compared, and loaded or kept as the call says."""
    saved = {"a": {"p": 0.5, "q": 1, "on": True, "x": jnp.ones(2), "z": jnp.ones(3)}}
    model = {"a": {"p": 0.25, "q": 1.0, "on": False, "x": jnp.zeros(2), "z": 7}, "r": 1}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    pair = (lambda m: m["a"], lambda c: c.a)
    with pytest.raises(RuntimeError) as info:
        ec.graft(model, tmp_path / "x", [pair])
    text = str(info.value)
    assert "    a.p  saved 0.5, the model has 0.25" in text and "a.q" not in text
    assert 'scalars="load",' in text and 'scalars="keep",' in text
    assert "a.z  saved f32[3], the model has 7" in text
    out, report = ec.graft(model, tmp_path / "x", [pair], scalars="keep")
    assert out["a"] | {"x": None} == model["a"] | {"x": None}
    assert out["a"]["x"].tolist() == [1, 1]
    assert set(report.differences) == {
        ("a.p", "0.5", "0.25"),
        ("a.on", "True", "False"),
        ("a.z", "f32[3]", "7"),
    }
    rest = lambda c: [c.a[k] for k in ("q", "on", "x", "z")]
    pairs = [(lambda m: m["a"]["p"], lambda c: c.a.p)]
    out, report = ec.graft(
        model, tmp_path / "x", pairs, fresh=lambda m: m["a"]["x"], drop=rest
    )
    assert out["a"]["p"] == 0.5 and report.names("loaded") == ["a.p"]
    text = refused(tmp_path / "x", model, [pair], scalars="load")
    assert "a.z  saved f32[3], the model has int" in text
    assert "a.q  saved int, the model has float" in text
    model["a"] |= {"q": 5, "z": jnp.zeros(3)}
    out, report = ec.graft(model, tmp_path / "x", [pair], scalars="load")
    assert (out["a"]["p"], out["a"]["q"], out["a"]["on"]) == (0.5, 1, True)
    assert report.names("loaded") == ["a.on", "a.p", "a.q", "a.x", "a.z"]
    assert not report.differences
    # One that the model does not have is a leaf that nobody has said anything of.
    del model["a"]["on"]
    text = refused(tmp_path / "x", model, [pair])
    assert "in no pair and not in `drop`:\n    a.on  bool" in text


_numbers = {
    bool: st.booleans(),
    int: st.integers(-(2**70), 2**70),
    float: st.floats(),
    complex: st.complex_numbers(),
}


@settings(max_examples=25)
@given(st.data())
def test_counters_of_a_training_state(data):
    """Wherever scalars stand in a pair: all are loaded, or kept, or an error."""
    shape = st.recursive(
        st.sampled_from(["array", *_numbers]),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("abc"), x),
        max_leaves=8,
    )
    structure = {"w": "array", "data": {"batch": int, "more": data.draw(shape)}}

    def make(kind):
        if kind == "array":
            return jnp.asarray(data.draw(st.integers(0, 99)))
        return data.draw(_numbers[kind])

    saved, model = (jtu.tree_map(make, structure) for _ in range(2))
    ckpt = ec.open(io.BytesIO(ec.to_bytes({"run": saved})))
    pair = (lambda m: m, lambda c: c.run)
    out, _ = ec.graft(model, ckpt, [pair], scalars="load")
    assert_alike(out, saved)
    is_array = lambda x: isinstance(x, jax.Array)
    kept = jtu.tree_map(lambda a, b: a if is_array(a) else b, saved, model)
    out, report = ec.graft(model, ckpt, [pair], scalars="keep")
    assert_alike(out, kept)
    numbers = lambda tree: [x for x in jtu.tree_leaves(tree) if not is_array(x)]
    pairs = list(zip(numbers(saved), numbers(model)))
    differ = sum(a != b and not (a != a and b != b) for a, b in pairs)
    assert len(report.differences) == differ
    if differ:
        with pytest.raises(RuntimeError, match=f"{differ} scalar"):
            ec.graft(model, ckpt, [pair])
    else:
        assert_alike(ec.graft(model, ckpt, [pair])[0], saved)


def test_leaves_of_all_kinds(tmp_path):
    tree = {
        "key": jr.key(3),
        "np": np.arange(3, dtype=np.int8),
        "scalar": np.float64(0.1),
        "weak": jnp.asarray(1.0),
        "half": jnp.ones(3, jnp.bfloat16),
        "f8": jnp.ones(3, jnp.float8_e4m3),
        "empty": jnp.zeros((0, 3)),
    }
    ec.tree_serialise_leaves(tmp_path / "x", {"saved": tree})
    blank = jtu.tree_map(lambda x: x if x.dtype == jr.key(0).dtype else x * 0, tree)
    blank["key"] = jr.key(0)
    out, _ = ec.graft(blank, tmp_path / "x", [(lambda m: m, "saved")])
    assert_alike(out, tree)
    text = refused(tmp_path / "x", {"key": jr.PRNGKey(0)}, [(lambda m: m, "saved")])
    assert "of another kind:\n    key  saved key<" in text


def test_lazy_leaves_are_grafted_over_or_kept(path, saved, model, tmp_path):
    """Two checkpoints in one model."""
    ec.tree_serialise_leaves(tmp_path / "head", {"head": model.classify})
    lazy = ec.open(tmp_path / "head").splice(
        {"head": model.classify, "encoder": saved.encoder.embed},
        where=lambda t: t["head"],
    )
    drop = lambda c: [
        c.opt,
        c.step,
        c.model.head,
        c.model.encoder.dropout,
        c.model.encoder.layers,
    ]
    out, _ = ec.graft(
        lazy,
        path,
        [(lambda m: m["encoder"], lambda c: c.model.encoder.embed)],
        fresh=lambda m: m["head"],
        drop=drop,
    )
    assert ec.unloaded(out) == ["head.weight", "head.bias"]
    out = ec.materialise(out)
    assert ec.unloaded(out) == []
    assert eqx.tree_equal(out, {"head": model.classify, "encoder": saved.encoder.embed})


def test_a_sharding_is_respected(path, saved):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    layer = ec.skeleton(eqx.nn.Linear, 8, 8, key=jr.key(0), sharding=sharding)
    out, _ = ec.graft(
        {"a": layer, "b": layer},
        path,
        [
            (lambda m: m["a"], lambda c: c.model.encoder.layers[0]),
            (lambda m: m["b"], lambda c: c.model.encoder.layers[0]),
        ],
        drop=lambda c: [
            c.opt,
            c.step,
            c.model.head,
            c.model.encoder.embed,
            c.model.encoder.dropout,
            c.model.encoder.layers[1:],
        ],
    )
    assert out["a"].weight.sharding == sharding
    assert eqx.tree_equal(out["a"], saved.encoder.layers[0])
    assert eqx.tree_equal(out["b"], saved.encoder.layers[0])


# ---- eqx.nn.State.


class Normed(eqx.Module):
    first: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm

    def __init__(self):
        self.first = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.second = eqx.nn.BatchNorm(2, "batch", mode="ema")


class Reordered(eqx.Module):
    second: eqx.nn.BatchNorm
    first: eqx.nn.BatchNorm

    __init__ = Normed.__init__


class Holder(eqx.Module):
    extra: eqx.nn.BatchNorm
    body: Normed | Reordered

    def __init__(self, body):
        self.extra = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.body = body()


def _trained(model, state):
    """Statistics of which no two are the same."""
    leaves, structure = jtu.tree_flatten(state)
    leaves = [x if x.dtype == bool else x + 10 * (i + 1) for i, x in enumerate(leaves)]
    return model, jtu.tree_unflatten(structure, leaves)


def _statistics(model, state):
    return jtu.tree_leaves(
        [state.get(norm.ema_state_index) for norm in (model.first, model.second)]
    )


@pytest.mark.parametrize("body", [Normed, Reordered])
def test_statistics_are_not_swapped(tmp_path, body):
    """The entries of a State lie by position, and are matched by their layers."""
    model, state = _trained(*eqx.nn.make_with_state(Normed)())
    ec.tree_serialise_leaves(tmp_path / "x", {"model": model, "state": state})
    new, new_state = eqx.nn.make_with_state(Holder)(body)
    moved = {"net": new, "state": new_state}
    out, report = ec.graft(
        moved,
        tmp_path / "x",
        [
            (lambda t: t["net"].body, lambda c: c.model),
            (lambda t: t["state"], lambda c: c.state),
        ],
        fresh=lambda t: [
            t["net"].extra,
            t["state"].get(t["net"].extra.ema_state_index),
            t["state"].get(t["net"].extra.ema_first_time_index),
        ],
    )
    got = _statistics(out["net"].body, out["state"])
    assert eqx.tree_equal(got, _statistics(model, state))
    assert len(report.names("fresh")) == 2 + 3


def test_the_error_shows_the_entries_of_new_layers(tmp_path):
    model, state = eqx.nn.make_with_state(Normed)()
    ec.tree_serialise_leaves(tmp_path / "x", {"model": model, "state": state})
    new, new_state = eqx.nn.make_with_state(Holder)(Normed)
    moved = {"net": new, "state": new_state}
    pairs = [
        (lambda t: t["net"].body, lambda c: c.model),
        (lambda t: t["state"], lambda c: c.state),
    ]
    with pytest.raises(RuntimeError) as e:
        ec.graft(moved, tmp_path / "x", pairs)
    line = next(x for x in str(e.value).splitlines() if "fresh=" in x)
    fresh = eval(line.strip().removeprefix("fresh=").rstrip(","))
    report = ec.graft(moved, tmp_path / "x", pairs, fresh=fresh)[1]
    assert len(report.names("fresh")) == 2 + 3


class Norms(eqx.Module):
    norms: list[eqx.nn.BatchNorm]
    head: jax.Array

    def __init__(self, count):
        norm = lambda: eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.norms = [norm() for _ in range(count)]
        self.head = jnp.ones(3)


# Of saved layers and those of the model: how many, and which stand for each other.
_OTHER_LAYERS = [
    (3, 2, slice(1, None), slice(None)),
    (3, 5, slice(None), slice(2, None)),
]


def _some_layers(tmp_path, saved, count, there, here):
    """A model, what was saved, and the pairs of some of their layers."""
    old = _trained(*eqx.nn.make_with_state(Norms)(saved))
    ec.tree_serialise_leaves(tmp_path / "x", old)
    new = eqx.nn.make_with_state(Norms)(count)
    pairs = [
        (lambda m: m[0].head, lambda c: c[0].head),
        (lambda m: m[0].norms[here], lambda c: c[0].norms[there]),
    ]
    return new, old, pairs


def _all_statistics(model, state, some):
    return jtu.tree_leaves([state.get(x.ema_state_index) for x in model.norms[some]])


@pytest.mark.parametrize("saved, count, there, here", _OTHER_LAYERS)
def test_an_error_leads_to_the_entries_of_the_layers_in_pairs(
    tmp_path, saved, count, there, here
):
    new, old, pairs = _some_layers(tmp_path, saved, count, there, here)
    text = refused(tmp_path / "x", new, pairs).partition("Perhaps, to paste")[2]
    assert "    (lambda m: m[1], lambda c: c[1]),\n" in text
    assert "ec.rename" not in text
    more = {}
    for line in text.splitlines():
        if (name := line.strip().partition("=")[0]) in ("fresh", "drop"):
            more[name] = eval(line.strip().removeprefix(f"{name}=").rstrip(","))
    pairs.append((lambda m: m[1], lambda c: c[1]))
    out, _ = ec.graft(new, tmp_path / "x", pairs, **more)
    got = _all_statistics(*out, here)
    assert eqx.tree_equal(got, _all_statistics(*old, there))


def test_a_fresh_entry_is_none_of_a_saved_layer_of_its_name(tmp_path):
    new, old, pairs = _some_layers(tmp_path, *_OTHER_LAYERS[1])
    pairs.append((lambda m: m[1], lambda c: c[1]))
    parts = "ema_first_time_index", "ema_state_index"
    fresh = lambda m: [
        *m[0].norms[:2],
        *(m[1].get(getattr(x, part)) for x in m[0].norms[:2] for part in parts),
    ]
    out, _ = ec.graft(new, tmp_path / "x", pairs, fresh=fresh)
    got = _all_statistics(*out, slice(2, None))
    assert eqx.tree_equal(got, _all_statistics(*old, slice(None)))


@pytest.mark.parametrize(
    "names", ["running_mean running_var", "mean.value var.value", "state"]
)
def test_statistics_are_not_dropped_for_want_of_a_state(tmp_path, names):
    """What is pasted would load without them."""
    model, state = eqx.nn.make_with_state(Normed)()
    layer = lambda norm: {"weight": norm.weight, "bias": norm.bias}
    saved = {x: layer(getattr(model, x)) for x in ("first", "second")}
    if names == "state":
        saved["state"] = state
    else:
        for norm in saved.values():
            parts = [x.split(".") for x in names.split()]
            norm |= {x: {y[0]: jnp.ones(2)} if y else jnp.ones(2) for x, *y in parts}
    saved["head"] = jnp.ones(7)
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    pairs = [(lambda m: m.first, lambda c: c.first)]
    text = refused(tmp_path / "x", model, pairs)
    assert re.search(
        r"`\S+` and \d more are of the statistics of layers as `BatchNorm`: graft into "
        r"`\(model, state\)`, see docs/batchnorm.md[.]",
        text,
    )
    assert "    drop=lambda c: c.head," in text.splitlines()
    text = refused(tmp_path / "x", (model, state), [(lambda m: m[0].first, "first")])
    assert "graft into `(model, state)`" not in text


# ---- Ways of getting it wrong. Each is refused before anything is read.


def test_two_leaves_of_one_name(tmp_path):
    """One of them would have stayed as it was."""
    ec.tree_serialise_leaves(tmp_path / "x", {"1": 2.0})
    model = {"new": collections.OrderedDict({1: 0.5, "1": 1.5})}
    for options in ({"scalars": "load"}, {"fresh": lambda m: m["new"]}):
        with pytest.raises(ValueError, match="Two leaves have the name `new.1`"):
            ec.graft(model, tmp_path / "x", [(lambda m: m["new"], "")], **options)


def test_undeclared_leaves_are_listed_with_code_to_paste(path, saved, model):
    pairs = [(lambda m: m.backbone.embed, lambda c: c.model.encoder.embed)]
    text = refused(path, model, pairs)
    assert text.startswith(
        f"The graft of `{path}` does not fit the model (10 model, 36 checkpoint); "
        "nothing was loaded.\n"
    )
    mine, theirs = text.split("in the checkpoint, in no pair and not in `drop`:")
    assert "in the model, in no pair and not in `fresh`:" in mine
    assert "    backbone.layers.{0..3}.weight  f32[8,8]\n" in mine
    assert "    classify.bias  f32[3]\n" in mine
    assert "    opt.0.mu.encoder.layers.{0..3}.weight  f32[8,8]\n" in theirs
    assert "    step  int\n" in theirs
    # What it says to paste works.
    paste = theirs.split("Perhaps, to paste into `pairs`:")[1]
    (pair,) = re.findall(r"^    (\(.*\)),\n", paste, re.MULTILINE)
    assert "lambda m: m.backbone.layers, lambda c: c.model.encoder.layers" in pair
    keywords = re.findall(r"^    ((?:fresh|drop)=.*),$", paste, re.MULTILINE)
    assert len(keywords) == 2
    call = f"ec.graft(model, path, [*pairs, {pair}], {', '.join(keywords)})"
    scope = {"ec": ec, "model": model, "path": path, "pairs": pairs}
    out, _ = eval(call, scope)
    assert eqx.tree_equal(out.backbone.layers, saved.encoder.layers)


def test_the_likely_pair_of_a_renamed_field(tmp_path):
    saved = {
        "projection": eqx.nn.Linear(2, 3, key=jr.key(0)),
        "other": eqx.nn.Linear(2, 3, key=jr.key(1)),
        "class": jnp.ones(7),
        "a b": jnp.ones((2, 2)),
    }
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    model = {
        "proj": eqx.nn.Linear(2, 3, key=jr.key(2)),
        "classes": jnp.zeros(7),
        "a_b": jnp.zeros((2, 2)),
        "new": jnp.zeros(9),
    }
    pairs = [(lambda m: m["new"], lambda c: c.other)]
    text = refused(tmp_path / "x", model, pairs)
    for line in [
        "(lambda m: m['a_b'], lambda c: c['a b']),",
        "(lambda m: m['classes'], lambda c: c['class']),",
        "(lambda m: m['proj'], lambda c: c.projection),",
        "fresh=lambda m: m['new'],",
        "drop=lambda c: c.other,",
    ]:
        assert f"    {line}\n" in text + "\n"


def _pasted(text):
    """The pairs that an error says, and `fresh` and `drop`."""
    pairs = re.findall(r"^    (\(lambda.*\)),$", text, re.MULTILINE)
    keywords = re.findall(r"^    (fresh|drop)=(.*),$", text, re.MULTILINE)
    return [eval(x, {"ec": ec}) for x in pairs], {k: eval(x) for k, x in keywords}


def test_layers_that_are_stacked_in_the_model(tmp_path):
    layers = [eqx.nn.Linear(4, 4, key=jr.key(i)) for i in range(6)]
    deeper = [{"attention": {"self": {"query": x}}, "n": jnp.ones(3)} for x in layers]
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(
        jr.split(jr.key(0), 6)
    )
    expected = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    for saved, like in (
        ({"layers": layers, "a": 1.0}, {"blocks": stacked}),
        ({"encoder": {"layer": deeper}}, {"blocks": {"query": stacked}}),
        ({"encoder": {"layer": deeper}, "b": jnp.ones(2)}, {"query": stacked.weight}),
    ):
        ec.tree_serialise_leaves(tmp_path / "x", saved)
        pairs = [(lambda m: m["new"], lambda c: c.other)]
        ec.tree_serialise_leaves(tmp_path / "x", {**saved, "other": jnp.ones(7)})
        text = refused(tmp_path / "x", {**like, "new": jnp.zeros(7)}, pairs)
        assert "ec.adapters.stack())," in text
        more, rest = _pasted(text)
        out, _ = ec.graft(
            {**like, "new": jnp.zeros(7)},
            tmp_path / "x",
            pairs + more,
            static="ignore",
            **rest,
        )
        leaves = jtu.tree_leaves({**out, "new": ()})
        weights = [x for x in leaves if np.ndim(x) == 3]
        assert len(weights) == 1 and np.array_equal(weights[0], expected.weight)


@pytest.mark.parametrize("is_listed", [True, False])
def test_scalars_of_suggested_pairs_are_compared(tmp_path, is_listed):
    """What is to paste does not drop them: the pair has them, one for all layers."""
    make = lambda key, p: {
        "w": jr.normal(key, (2, 3)),
        "drops": [eqx.nn.Dropout(p)] * 12,
    }
    both = lambda p: (
        {"layers": [make(k, p) for k in jr.split(jr.key(0), 12)]},
        {"layers": eqx.filter_vmap(lambda k: make(k, p))(jr.split(jr.key(0), 12))},
    )
    (saved, other), (_, wrong) = both(0.1), both(0.2)
    if not is_listed:
        saved, other, wrong = other, saved, both(0.2)[0]
    saved, other, wrong = (x | {"used": jnp.ones(2)} for x in (saved, other, wrong))
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    pairs = [(lambda m: m["used"], lambda c: c.used)]
    more, rest = _pasted(refused(tmp_path / "x", wrong, pairs))
    assert len(more) == 1 and not rest
    made, _ = ec.graft(other, tmp_path / "x", pairs + more)
    assert eqx.tree_equal(made, other)
    with pytest.raises(RuntimeError, match="were saved with another value"):
        ec.graft(wrong, tmp_path / "x", pairs + more)


@pytest.mark.parametrize(
    "saved, wanted, adapter",
    [
        ((8,), (8, 1, 1), "unit_axes()"),
        ((4, 8), (8, 4), "transpose()"),
        # All axes turned round are of this shape too, with height and width exchanged.
        ((3, 3, 4, 8), (8, 4, 3, 3), "channels_first()"),
    ],
)
def test_the_adapter_that_makes_a_shape_fit(tmp_path, saved, wanted, adapter):
    """As a load says it."""
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(saved)})
    like = {"a": jnp.ones(wanted)}
    whole = (lambda m: m, lambda c: c)
    assert f"(`ec.adapters.{adapter}` loads it)" in refused(
        tmp_path / "x", like, [whole]
    )
    with pytest.raises(RuntimeError) as caught:
        ec.tree_deserialise_leaves(tmp_path / "x", like)
    assert f"(`ec.adapters.{adapter}` in a pair of `ec.graft` loads" in str(
        caught.value
    )
    ec.graft(like, tmp_path / "x", [(*whole, eval(f"ec.adapters.{adapter}"))])


def test_what_is_to_paste_is_code(tmp_path):
    """Also where not all is listed."""
    saved = {f"x{i}y": {"a": jnp.ones(i + 2)} for i in range(30)}
    ec.tree_serialise_leaves(tmp_path / "x", saved | {"z": jnp.ones(50)})
    model = {"new": jnp.ones(50), "used": jnp.ones(2)}
    pairs = [(lambda m: m["used"], lambda c: c.x0y.a)]
    text = refused(tmp_path / "x", model, [*pairs, (lambda m: m["new"], "z")])
    (drop,) = re.findall("^    (drop=.*)$", text, re.MULTILINE)
    assert drop.endswith("],  # and 9 more")
    picked = eval(f"dict({drop}\n)")["drop"](ec.open(tmp_path / "x").tree)
    assert len(picked) == 20


def test_what_would_fit_is_not_thrown_away(tmp_path):
    """An error says of what it may be made, and no `fresh` and `drop` for it."""
    ones = lambda *shape: jnp.ones(shape)
    parts = [{x: ones(4, 4) for x in ("wq", "wk", "wv")} for _ in range(2)]
    saved = {
        "used": ones(3),
        "turned": ones(5, 2),
        "left": ones(7),
        "both": ones(6, 18),
        "parts": parts,
        "head": ones(11, 4),
        "opt": [{"mu": {"used": ones(3), "turned": ones(5, 2)}}],
    }
    model = {
        "a": ones(3),
        "kernel": ones(2, 5),
        "zz": ones(7),
        "squares": [ones(6, 6)] * 3,
        "qkv": ones(2, 12, 4),
        "classes": ones(3, 4),
        "bias": ones(3),
    }
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    text = refused(tmp_path / "x", model, [(lambda m: m["a"], "used")])
    _, rest = text.split("In no code to paste, as these would fit.")
    rows = [
        "    kernel  f32[2,5], of f32[5,2] by `transpose()`: `turned`, `opt.0.mu.tu",
        "    zz  f32[7], of f32[7]: `left`",
        "    squares.{0..2}  f32[6,6], of f32[6,18] by `split(1)`, transposed or not: "
        "`both`",
    ]
    assert all(row in rest for row in rows)
    (row,) = re.findall(r"    qkv  .* by `concatenate\(\), stack\(\)`: (.*)", rest)
    assert sorted(row.split(", ")) == [f"`parts.{{0..1}}.w{x}`" for x in "kqv"]
    _, keywords = _pasted(text)
    picked = keywords["fresh"](model)
    assert [x.shape for x in picked] == [(3,), (3, 4)]
    # The moments of what is used do not fit: they are of that. Of others nobody knows.
    dropped = keywords["drop"](ec.open(tmp_path / "x").tree)
    assert [x.name for x in dropped] == ["head", "opt.0.mu.used"]


def test_a_pair_that_matches_nothing(path, model):
    pairs = [ENCODER, (lambda m: m.classify, lambda c: c.model.encoder.embed)]
    pairs = [(lambda m: m.backbone.layers, lambda c: c.model.encoder.embed), ENCODER]
    text = refused(path, model, pairs, **REST)
    assert (
        "pairs that match nothing:\n    pairs[0]  in the model `backbone.layers` has "
        "{0..3}.weight, {0..3}.bias; in the checkpoint `model.encoder.embed` has weight"
    ) in text


LAYERS = {f"layer_{i}": {"w": jnp.full(2, float(i))} for i in range(12)}
LISTED = [LAYERS[f"layer_{i}"] for i in range(12)]
STACKED = jax.tree.map(lambda *x: jnp.stack(x), *LISTED)
VALUES = lambda tree: [tree.layers[k] for k in tree.layers]
TEXTS = (
    "`layers.layer_0`, `layers.layer_1`, `layers.layer_10`, `layers.layer_11`, ... of "
)


@pytest.mark.parametrize(
    "model, saved, where, source, steps, side",
    [
        (STACKED, LAYERS, lambda m: m, VALUES, [ec.adapters.stack()], 1),
        (LISTED, LAYERS, lambda m: m, VALUES, [], 1),
        (LISTED, LAYERS, lambda m: m, VALUES, [lambda saved, like: saved], 1),
        (
            {"layers": LAYERS},
            STACKED,
            lambda m: list(m["layers"].values()),
            "layers",
            [ec.adapters.unstack()],
            0,
        ),
        (
            {"layers": LAYERS},
            LISTED,
            lambda m: list(m["layers"].values()),
            "layers",
            [],
            0,
        ),
    ],
)
def test_layers_in_the_order_of_texts(
    tmp_path, model, saved, where, source, steps, side
):
    """0, 1, 10, 11, 2, as JAX sorts the keys of dicts."""
    ec.tree_serialise_leaves(tmp_path / "x", {"layers": saved})
    text = refused(tmp_path / "x", model, [(where, source, *steps)], ValueError)
    assert f"`pairs[0]` puts {TEXTS}the {('model', 'checkpoint')[side]} in " in text
    # What it says to write is right.
    code = re.findall(r"Sort them by number: `(.*)`[.]$", text)[0]
    by_number = eval(code) if side else eval(f"lambda m: {code}")
    pair = (where, by_number) if side else (by_number, source)
    made, _ = ec.graft(model, tmp_path / "x", [(*pair, *steps)])
    assert eqx.tree_equal(made, model)


@pytest.mark.parametrize("form", ["layer_{}_attn", "block{}.attn", "h{0}_{0}", "{}-x"])
def test_layers_in_the_order_of_other_texts(tmp_path, form):
    """With more after the number, or with more numbers."""
    saved = {form.format(i): jnp.full(2, float(i)) for i in range(12)}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    listed, zeros = jnp.zeros((12, 2)), [jnp.zeros(2)] * 12
    every = lambda c: [c[key] for key in c]
    for model, *steps in ((listed, ec.adapters.stack()), (zeros,)):
        pair = (lambda m: m, every, *steps)
        text = refused(tmp_path / "x", model, [pair], ValueError)
        assert "in this order, which is that of texts" in text
        keys = [form.format(i) for i in range(12)]
        by_number = lambda c: [c[key] for key in keys]
        made, _ = ec.graft(model, tmp_path / "x", [(lambda m: m, by_number, *steps)])
        assert [float(x[0]) for x in made] == [*range(12)]


def test_no_code_for_numbers_with_zeros_before_them(tmp_path):
    saved = {f"layer_{i:02}": jnp.full(2, float(i)) for i in range(101)}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    pair = (lambda m: m, lambda c: [c[key] for key in c], ec.adapters.stack())
    text = refused(tmp_path / "x", jnp.zeros((101, 2)), [pair], ValueError)
    assert text.endswith("Sort them by number.")


def test_layers_in_another_order_that_is_meant(tmp_path):
    """Or in one that both sides have."""
    ec.tree_serialise_leaves(tmp_path / "x", {"layers": LAYERS})
    model = jax.tree.map(jnp.zeros_like, {"layers": LAYERS})
    pair = (lambda m: list(m["layers"].values()), VALUES)
    assert eqx.tree_equal(ec.graft(model, tmp_path / "x", [pair])[0]["layers"], LAYERS)
    # Or one that counts from 1, and goes along.
    from_one = {f"block{i + 1}": LAYERS[f"layer_{i}"] for i in range(12)}
    keys = sorted(from_one)
    zeros = jax.tree.map(jnp.zeros_like, from_one)
    theirs = lambda c: [c.layers[f"layer_{int(key[5:]) - 1}"] for key in keys]
    pair = (lambda m: [m[key] for key in keys], theirs)
    assert eqx.tree_equal(ec.graft(zeros, tmp_path / "x", [pair])[0], from_one)
    pair = (lambda m: [m[key] for key in keys], VALUES)
    assert "`pairs[0]` puts `block1`, `block10`" in refused(
        tmp_path / "x", zeros, [pair], ValueError
    )
    some = lambda c: [c.layers[f"layer_{i}"] for i in (11, 0, 2)]
    rest = lambda c: [c.layers[f"layer_{i}"] for i in range(12) if i not in (11, 0, 2)]
    pair = (lambda m: m, some, ec.adapters.stack())
    made, _ = ec.graft({"w": jnp.zeros((3, 2))}, tmp_path / "x", [pair], drop=rest)
    assert made["w"][:, 0].tolist() == [11, 0, 2]


def test_swapped_sides(path, model):
    pair = ENCODER[::-1]
    text = refused(path, model, [pair], ValueError, **REST)
    assert text == (
        "`pairs[0][0]` fails on the model: 'Classifier' object has no attribute "
        "'model'. It has `backbone`, `classify`, `classes`. The sides of `pairs[0]` "
        "look swapped: the model's is the first, and the checkpoint's the second."
    )
    pair = ("model.encoder", lambda m: m.backbone)
    text = refused(path, model, [pair], ValueError, **REST)
    assert "The sides of `pairs[0]` look swapped" in text


@pytest.mark.parametrize(
    "pairs",
    [
        [ENCODER, ENCODER],
        [(lambda m: [m.backbone] * 2, lambda c: [c.model.encoder] * 2)],
    ],
)
def test_overlapping_pairs(path, model, pairs):
    text = refused(path, model, pairs, **REST)
    label = f"in pairs[0] and in pairs[{len(pairs) - 1}]"
    assert "in more than one pair: leave each leaf to one of them:" in text
    assert f"    backbone.embed.weight  {label}" in text


@pytest.mark.parametrize("order", [1, -1])
def test_a_pair_below_another_wins(path, saved, model, order):
    first = (
        lambda m: m.backbone.layers[0].weight,
        lambda c: c.model.encoder.layers[1].weight,
    )
    pairs = [ENCODER, first][::order]
    # What goes nowhere now has to be said.
    text = refused(path, model, pairs, **REST)
    assert "not in `drop`:\n    model.encoder.layers.0.weight  f32[8,8]\n" in text
    drop = lambda c: [REST["drop"](c), c.model.encoder.layers[0].weight]
    rest = {**REST, "drop": drop, "scalars": "keep"}
    out, report = ec.graft(model, path, pairs, **rest)
    ours, theirs = out.backbone.layers, saved.encoder.layers
    assert eqx.tree_equal(ours[0].weight, theirs[1].weight)
    assert eqx.tree_equal(ours[0].bias, theirs[0].bias)
    assert eqx.tree_equal(ours[1:], theirs[1:])
    ((row),) = [x for x in report.rows if x.name == "backbone.layers.0.weight"]
    assert row.sources == ("model.encoder.layers.1.weight",)


def test_a_pair_below_one_of_several(tmp_path):
    """Of nodes that are put together all have to be there."""
    saved = {"all": {"w": jnp.ones((2, 3))}, "b": jnp.ones(3)}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    pairs = [
        (lambda m: m["x"], "all", ec.adapters.unstack()),
        (lambda m: m["x"][0]["w"], "b"),
    ]
    model = {"x": [{"w": jnp.zeros(3)}, {"w": jnp.zeros(3)}]}
    text = refused(tmp_path / "x", model, pairs)
    assert "    x.0.w  in another pair, in `fresh` or in `drop`\n" in text + "\n"


def test_one_saved_leaf_may_be_used_twice(path, saved):
    layers = [eqx.nn.Linear(8, 8, key=jr.key(i)) for i in range(2)]
    first = lambda c: [c.model.encoder.layers[0], c.model.encoder.layers[0]]
    rest = lambda c: [
        c.opt,
        c.step,
        c.model.head,
        c.model.encoder.embed,
        c.model.encoder.dropout,
        c.model.encoder.layers[1:],
    ]
    out, _ = ec.graft(layers, path, [(lambda m: m, first)], drop=rest)
    assert eqx.tree_equal(out, [saved.encoder.layers[0]] * 2)
    assert out[0].weight is not out[1].weight


def test_fresh_and_paired(path, model):
    pairs = [ENCODER, (lambda m: m.classify, lambda c: c.model.head)]
    text = refused(path, model, pairs, **REST)
    assert "    pairs[1]  in the model `classify` has weight, bias; in the" in text
    assert "All of it is in `fresh` as well" in text
    pairs = [ENCODER, (lambda m: m.classify, lambda c: c.model.head)]
    drop = REST["drop"]
    text = refused(path, model, pairs, drop=drop)
    assert "All of it is in `drop` as well" in text
    assert "    classify.weight  f32[3,8]" in text


def test_shapes_and_static_fields(path, model):
    pairs = [ENCODER, (lambda m: m.classify, lambda c: c.model.head)]
    text = refused(path, model, pairs, drop=lambda c: [c.opt, c.step])
    assert "    classify.weight  saved f32[10,8], the model has f32[3,8]" in text
    assert "a new head is `fresh`, and the old one goes into `drop`" in text
    assert "    classify.out_features  saved 10, the model has 3" in text
    turned = {"w": jnp.zeros((8, 10))}
    pairs = [(lambda m: m["w"], "model.head.weight")]
    assert "(`ec.adapters.transpose()` loads it)" in refused(path, turned, pairs)


def test_other_heads_of_attention(tmp_path):
    """The same names and shapes, and another function."""
    attention = lambda heads: eqx.nn.MultiheadAttention(heads, 16, key=jr.key(heads))
    ec.tree_serialise_leaves(tmp_path / "x", {"old": [attention(8)]})
    whole = (lambda m: m[0], lambda c: c.old[0])
    text = refused(tmp_path / "x", [attention(4)], [whole])
    assert "    0.num_heads  saved 8, the model has 4" in text
    out, report = ec.graft([attention(4)], tmp_path / "x", [whole], static="ignore")
    assert ("0.num_heads", "8", "4") in report.differences
    weights = lambda m: [x for x in jtu.tree_leaves(m) if eqx.is_array(x)]
    ec.graft([attention(8)], tmp_path / "x", [whole])
    assert eqx.tree_equal(weights(out), weights([attention(8)]))
    # By another name as well.
    renamed = (lambda m: m, "old", ec.rename([(r"^0[.]", "attention.")]))
    text = refused(tmp_path / "x", {"attention": attention(4)}, [renamed])
    assert "    attention.num_heads  saved 8, the model has 4" in text


def test_static_fields_above_what_is_fresh_are_only_reported(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", Classifier(3, key=jr.key(0)))
    out, report = ec.graft(
        Classifier(5, key=jr.key(1)),
        tmp_path / "x",
        [(lambda m: m, lambda c: c)],
        fresh=lambda m: m.classify,
        drop=lambda c: c.classify,
    )
    assert report.differences == (
        ("classes", "3", "5"),
        ("classify.out_features", "3", "5"),
    )
    assert out.classes == 5


def test_tied_weights(tmp_path):
    """As in a load, two arrays that were saved stay two."""
    shared = jnp.arange(3)
    model = {"embed": shared, "head": shared, "b": jnp.zeros(3, int)}
    saved = {"embed": jnp.ones(3, int), "head": jnp.full(3, 2)}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    b = {"fresh": lambda m: m["b"]}
    out, _ = ec.graft(model, tmp_path / "x", [(lambda m: m, lambda c: c)], **b)
    assert out["embed"].tolist() == [1, 1, 1] and out["head"].tolist() == [2, 2, 2]
    both = (lambda m: [m["embed"], m["head"]], lambda c: [c.embed, c.embed])
    out, _ = ec.graft(model, tmp_path / "x", [both], **b, drop="head")
    assert out["embed"] is out["head"]
    out, _ = ec.graft(
        model,
        tmp_path / "x",
        [(lambda m: m["embed"], "embed")],
        fresh=lambda m: [m["b"], m["head"]],
        drop="head",
    )
    assert out["embed"].tolist() == [1, 1, 1] and out["head"] is shared
    # Tied in the checkpoint: the other name is the same array, and is said to be.
    ec.tree_serialise_leaves(tmp_path / "y", {"embed": shared, "head": shared})
    out, _ = ec.graft(model, tmp_path / "y", [(lambda m: m, lambda c: c)], **b)
    assert out["embed"] is out["head"]
    one = {"embed": jnp.zeros(3, int)}
    text = refused(tmp_path / "y", one, [(lambda m: m, lambda c: c)])
    assert "head  i32[3]  (the same array as `embed`, which is loaded)" in text
    separate = {"embed": jnp.zeros(3, int), "head": jnp.zeros(3, int)}
    out, _ = ec.graft(separate, tmp_path / "y", [(lambda m: m, lambda c: c)])
    assert out["embed"] is not out["head"] and out["head"].tolist() == [0, 1, 2]
    # Three are one in the model, and two of them in the checkpoint.
    like = dict.fromkeys(model, jax.ShapeDtypeStruct((3,), "i4"))
    ec.tree_serialise_leaves(tmp_path / "z", model)
    grafted, _ = ec.graft(like, tmp_path / "z", [(lambda m: m, lambda c: c)])
    for out in (grafted, ec.tree_deserialise_leaves(tmp_path / "z", like)):
        assert out["embed"] is out["head"] and out["b"].tolist() == [0, 0, 0]


def test_a_state_that_has_the_arrays_of_its_model(tmp_path):
    """As `eqx.nn.State` makes it: they are other arrays once it has been used."""
    model = eqx.nn.BatchNorm(3, "batch", mode="ema")
    used = eqx.nn.State(model).set(
        model.ema_state_index, (jnp.ones(3), 2 * jnp.ones(3))
    )
    ec.tree_serialise_leaves(tmp_path / "x", (model, used))
    pairs = [(lambda m: m, lambda c: c)]
    like = model, eqx.nn.State(model)
    (_, out), _ = ec.graft(like, tmp_path / "x", pairs, scalars="load")
    assert_alike(out.get(model.ema_state_index), used.get(model.ema_state_index))


def test_tied_by_equinox(tmp_path):
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, *, key):
            embed = eqx.nn.Embedding(4, 3, key=key)
            head = eqx.nn.Linear(3, 4, use_bias=False, key=key)
            where = lambda pair: pair[1].weight
            get = lambda pair: pair[0].weight
            self.shared = eqx.nn.Shared((embed, head), where, get)

    ec.tree_serialise_leaves(tmp_path / "x", {"wte": jnp.ones((4, 3))})
    pair = (lambda m: m.shared()[0].weight, lambda c: c.wte)
    out, _ = ec.graft(Tied(key=jr.key(0)), tmp_path / "x", [pair])
    assert out.shared()[1].weight.tolist() == np.ones((4, 3)).tolist()
    both = [pair, (lambda m: m.shared()[1].weight, lambda c: c.wte)]
    text = refused(tmp_path / "x", Tied(key=jr.key(0)), both)
    assert "in pairs[0] and in pairs[1]" in text


@pytest.mark.parametrize(
    "pairs, error, said",
    [
        ([(lambda m: None, lambda c: c)], ValueError, "`pairs[0][0]` selects no leaf"),
        ([(lambda m: [], lambda c: c)], ValueError, "`pairs[0][0]` selects no leaf"),
        (
            [(lambda m: m.classes, lambda c: c)],
            ValueError,
            "`pairs[0][0]` returned 3, which is not a node of the tree but a static",
        ),
        (
            [(lambda m: m.classify.weight + 1, lambda c: c)],
            TypeError,
            "`pairs[0][0]` uses the value of the leaf `classify.weight`",
        ),
        (
            [(lambda m: m.classify.weight.T, lambda c: c)],
            ValueError,
            "`pairs[0][0]` takes `.T` of the leaf `classify.weight`",
        ),
        (
            [(lambda m: m, lambda c: c.modle)],
            ValueError,
            "`pairs[0][1]` fails on the checkpoint: The checkpoint has no `modle`. It "
            "has `model`, `opt`, `step`.",
        ),
        (
            [(lambda m: m, lambda c: c.model.encoder.layers[9])],
            ValueError,
            "`pairs[0][1]` fails on the checkpoint: `model.encoder.layers` has no 9.",
        ),
        (
            [(lambda m: m, "model.encodr")],
            ValueError,
            "which the checkpoint at `{path}` does not have. The nearest there: "
            "`model.encoder`",
        ),
        ([(lambda m: m, lambda c: None)], TypeError, "and not a `NoneType`."),
        ([(lambda m: m, lambda c: [])], ValueError, "`pairs[0][1]` selects nothing of"),
        (
            [(lambda m: m, lambda c: (x for x in c.model))],
            TypeError,
            "and not a `generator`. Make a list of it.",
        ),
        ([(lambda m: m, 3)], TypeError, "`pairs[0][1]` must be a dotted name or a"),
        ([lambda m: m], TypeError, "`pairs[0]` must be `(where in the model, where in"),
        (
            [(lambda m: m, lambda c: c, "T")],
            TypeError,
            "`pairs[0]` has 'T' after its two sides",
        ),
        (
            [(lambda m: m, lambda c: c, ec.adapters.stack)],
            TypeError,
            "makes an adapter: call it, as `ec.adapters.stack()`.",
        ),
        (
            [(lambda m: m, ec.adapters.stack(), lambda c: c)],
            TypeError,
            "`pairs[0]` has a rename or an adapter in the place of a side",
        ),
        ([(lambda m: m, ["model", "optim"])], ValueError, "is 'optim', which the"),
        (
            [(lambda m: m, lambda c: c, [ec.rename([]), [ec.rename([])]])],
            TypeError,
            "takes one `ec.rename(...)`, and adapters",
        ),
        ([], TypeError, "`pairs` must be a list of pairs"),
        ("model", TypeError, "`pairs` must be a list of pairs"),
        (
            [(lambda m: m.backbone.layers[:2], lambda c: c.model.encoder.layers[:3])],
            ValueError,
            "`pairs[0]` pairs 2 nodes of the model (`backbone.layers.0`, "
            "`backbone.layers.1`) with 3 nodes of the checkpoint",
        ),
    ],
)
def test_pairs_that_are_none(path, model, pairs, error, said):
    with pytest.raises(error) as info:
        ec.graft(model, path, pairs, **REST)
    assert said.replace("{path}", str(path)) in str(info.value)


@pytest.mark.parametrize(
    "kwargs, error, said",
    [
        ({"fresh": lambda m: m.head}, ValueError, "`fresh` fails on the model: "),
        ({"fresh": lambda m: None}, ValueError, "`fresh` selects no leaf"),
        ({"drop": lambda c: c.optimiser}, ValueError, "`drop` fails on the checkpoint"),
        ({"drop": "optimiser"}, ValueError, "`drop` is 'optimiser', which the"),
        ({"drop": lambda c: ()}, ValueError, "`drop` selects nothing of the"),
        ({"static": "maybe"}, ValueError, "`static` must be"),
    ],
)
def test_fresh_and_drop_that_are_none(path, model, kwargs, error, said):
    with pytest.raises(error, match=re.escape(said)):
        ec.graft(model, path, [ENCODER], **{**REST, **kwargs})


@pytest.mark.parametrize("view", [lambda x: x[:2], lambda x: x.T, list])
def test_a_part_of_a_leaf_is_not_dropped(path, model, view):
    drop = lambda c: [*REST["drop"](c), view(c.model.head.weight)]
    with pytest.raises(ValueError, match="a view of the leaf `model.head.weight`"):
        ec.graft(model, path, [ENCODER], **{**REST, "drop": drop})


def test_nodes_of_another_checkpoint(path, model, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"w": jnp.ones(2)})
    other = ec.open(tmp_path / "x")
    text = refused(path, model, [(lambda m: m, lambda c: other.tree)], ValueError)
    assert f"a node of another checkpoint, that at `{tmp_path / 'x'}`" in text


def test_damage_is_an_error_that_names_the_leaf(tmp_path, getkey):
    ec.tree_serialise_leaves(tmp_path / "x", {"w": jnp.ones(30_000)}, layout="zarr")
    file = tmp_path / "x" / "w" / "c" / "0"
    data = bytearray(file.read_bytes())
    data[77] ^= 1
    file.write_bytes(data)
    for adapter in [(), (ec.adapters.rows(0.0),), (lambda saved, like: saved.read(),)]:
        with pytest.raises(RuntimeError, match="w: its bytes are not those that were"):
            ec.graft(
                {"w": jnp.zeros(30_000)},
                tmp_path / "x",
                [(lambda m: m["w"], lambda c: c.w, *adapter)],
            )


# ---- Renames.


class Attention(eqx.Module):
    query: eqx.nn.Linear
    out: eqx.nn.Linear


class Layer(eqx.Module):
    attention: Attention
    norm: eqx.nn.LayerNorm


class Bert(eqx.Module):
    words: eqx.nn.Embedding
    layers: list[Layer]

    def __init__(self, depth=3, *, key):
        linear = lambda i: eqx.nn.Linear(4, 4, key=jr.fold_in(key, i))
        self.words = eqx.nn.Embedding(6, 4, key=key)
        self.layers = [
            Layer(Attention(linear(i), linear(i + 99)), eqx.nn.LayerNorm(4))
            for i in range(depth)
        ]


HUGGING_FACE = [
    (r"^embeddings\.word_embeddings\.", "words."),
    (r"^encoder\.layer\.(\d+)\.", r"layers.\1."),
    (r"attention\.self\.query", "attention.query"),
    (r"attention\.output\.dense", "attention.out"),
    (r"output\.LayerNorm", "norm"),
]


def hugging_face(bert: Bert) -> dict:
    """The flat dict of dotted names that such a model's files hold."""
    out = {"embeddings.word_embeddings.weight": bert.words.weight}
    for i, layer in enumerate(bert.layers):
        for name, part in (
            ("attention.self.query", layer.attention.query),
            ("attention.output.dense", layer.attention.out),
            ("output.LayerNorm", layer.norm),
        ):
            out[f"encoder.layer.{i}.{name}.weight"] = part.weight
            out[f"encoder.layer.{i}.{name}.bias"] = part.bias
    return {name: np.asarray(x) for name, x in out.items()}


@pytest.fixture(scope="module")
def bert():
    bert = Bert(key=jr.key(7))
    scale = lambda x: x + 1.5 if eqx.is_array(x) else x
    return jtu.tree_map(scale, bert)


@pytest.fixture(scope="module")
def torch_path(bert, tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "bert"
    ec.tree_serialise_leaves(path, ec.nest(hugging_face(bert)))
    return path


def test_rename_by_rules_and_by_a_function(bert, torch_path):
    skeleton = eqx.filter_eval_shape(Bert, key=jr.key(0))

    def function(name):
        for pattern, replacement in HUGGING_FACE:
            name = re.sub(pattern, replacement, name)
        return name

    for rules in (HUGGING_FACE, function):
        pair = (lambda m: m, lambda c: c, ec.rename(rules))
        out, report = ec.graft(skeleton, torch_path, [pair])
        assert eqx.tree_equal(out, bert)
    assert report.rows[1].sources == ("encoder.layer.0.attention.self.query.weight",)


def test_rename_below_a_node(bert, torch_path):
    layer = eqx.filter_eval_shape(Bert, key=jr.key(0)).layers[0]
    rules = [
        (r"^attention\.self\.", "attention."),
        (r"^attention\.output\.dense", "attention.out"),
        (r"^output\.LayerNorm", "norm"),
    ]
    out, _ = ec.graft(
        layer,
        torch_path,
        [(lambda m: m, lambda c: c.encoder.layer[2], ec.rename(rules))],
        drop=lambda c: [c.embeddings, c.encoder.layer[:2]],
    )
    assert eqx.tree_equal(out, bert.layers[2])
    # Together with an adapter that puts the layers together.
    stacked = eqx.filter_vmap(lambda k: Bert(1, key=k).layers[0])(
        jr.split(jr.key(0), 3)
    )
    out, _ = ec.graft(
        stacked,
        torch_path,
        [
            (
                lambda m: m,
                lambda c: c.encoder.layer,
                ec.rename(rules),
                ec.adapters.stack(),
            )
        ],
        drop="embeddings",
    )
    assert np.array_equal(out.norm.bias, jnp.stack([x.norm.bias for x in bert.layers]))


def test_rename_with_adapters(tmp_path, bert):
    """Kernels that lie the other way round."""
    flat = hugging_face(bert)
    turned = {k: x.T if "attention" in k else x for k, x in flat.items()}
    ec.tree_serialise_leaves(tmp_path / "x", ec.nest(turned))
    rules = [
        (r"attention.*weight$", ec.adapters.transpose()),
        *HUGGING_FACE[:2],
        (r"attention\.self\.query", "attention.query", lambda saved, like: saved),
        *HUGGING_FACE[3:],
    ]
    pair = (lambda m: m, lambda c: c, ec.rename(rules))
    out, report = ec.graft(Bert(key=jr.key(0)), tmp_path / "x", [pair])
    assert eqx.tree_equal(out, bert)
    assert "layers.2.attention.out.weight" in report.names("adapted")
    assert "layers.2.attention.out.bias" in report.names("loaded")


def test_rules_that_find_nothing(bert, torch_path):
    rules = [*HUGGING_FACE, (r"gamma$", "weight"), (r"words", r"words")]
    text = refused(torch_path, bert, [(lambda m: m, lambda c: c, ec.rename(rules))])
    assert "rules of a rename that find nothing:" in text
    assert "    pairs[0]: 'gamma$'\n" in text
    # One that gives what was there anyway does nothing either.
    assert "    pairs[0]: 'words'" in text and text.count("pairs[0]: ") == 2


def test_a_rename_that_leaves_something_out(bert, torch_path):
    pair = (lambda m: m, lambda c: c, ec.rename(HUGGING_FACE[:-1]))
    text = refused(torch_path, bert, [pair])
    assert (
        "in no pair and not in `fresh`:\n    layers.{0..2}.norm.weight  f32[4]" in text
    )
    assert "    encoder.layer.{0..2}.output.LayerNorm.weight  f32[4](numpy)" in text


@pytest.mark.parametrize(
    "rules, error, said",
    [
        (
            [(r"\.\d+\.", ".0.")],
            ValueError,
            "gives the name `encoder.layer.0.attention",
        ),
        (lambda name: None, TypeError, "gave a `NoneType` for the name `embeddings.wo"),
    ],
)
def test_renames_that_cannot_be(bert, torch_path, rules, error, said):
    pair = (lambda m: m, lambda c: c, ec.rename(rules))
    assert said in refused(torch_path, bert, [pair], error)


@pytest.mark.parametrize(
    "rules, error, said",
    [
        ([("a",)], TypeError, "and ('a',) is none of them"),
        ([("a", 3)], TypeError, "and ('a', 3) is none of them"),
        ([("a", "b", "c")], TypeError, "is none of them"),
        ([("(", "b")], ValueError, "The pattern '(' is no regex: "),
    ],
)
def test_rules_that_are_none(rules, error, said):
    with pytest.raises(error, match=re.escape(said)):
        ec.rename(rules)


def test_no_function_is_called_for_a_leaf_that_nothing_can_become(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(3)})
    called = []

    @jax.jit
    def traced(x):
        pairs = [(lambda m: m["a"], lambda c: c["a"], lambda x, _: called.append(x))]
        ec.graft({"a": x}, tmp_path / "x", pairs)

    with pytest.raises(TypeError, match="`like` has a tracer"):
        traced(jnp.ones(3))
    assert not called


def test_a_flat_dict_is_said_to_be_one(tmp_path, bert):
    ec.tree_serialise_leaves(tmp_path / "x", hugging_face(bert))
    text = refused(tmp_path / "x", bert, [(lambda m: m, lambda c: c)])
    assert "`ec.nest(...)` of the dict" in text


def test_nest():
    flat = {"a.0.w": 1, "a.1.w": 2, "b.0": 3, "b.2": 4, "c": 5}
    assert ec.nest(flat) == {
        "a": [{"w": 1}, {"w": 2}],
        "b": {"0": 3, "2": 4},
        "c": 5,
    }
    assert ec.nest({"a/b": 1}, separator="/") == {"a": {"b": 1}}
    for bad in ({"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}):
        with pytest.raises(ValueError, match="`a` is a leaf, and a node as well"):
            ec.nest(bad)


def test_a_rename_that_fails(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", {"a": jnp.ones(2)})
    pair = (lambda m: m, lambda c: c, ec.rename({"b": "a"}.__getitem__))
    with pytest.raises(ValueError, match="rename of .* at the name `a` with KeyError"):
        ec.graft({"b": jnp.zeros(2)}, tmp_path / "c", [pair])


class _Holder(eqx.Module):
    held: Any
    size: int = eqx.field(static=True)


def _keyless(cls, value, sizes=(2, 3, 2, 3), size=1):
    linears = [eqx.nn.Linear(2, n, False, key=jr.key(0)) for n in sizes]
    of = [eqx.tree_at(lambda m: m.weight, x, value(i)) for i, x in enumerate(linears)]
    top = cls(w=cls(w=of[0], b=of[1]), b=cls(w=of[2], b=[of[3]]))
    return {"l": [_Holder(top, size)]}


@pytest.mark.parametrize(
    "name, rules",
    [
        ("x", None),
        ("y", None),
        ("y", [("^x[.]", "y.")]),
        ("z", [("^x[.]l[.]", "l.")]),
    ],
)
def test_children_without_keys_in_another_order(tmp_path, name, rules):
    """Each goes by the attribute that it is, under its own name or another one, and so
    do its static fields."""
    old, new = trees.without_keys("w", "b"), trees.without_keys("b", "w")
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, {"x": _keyless(old, lambda i: jnp.full(6, i))})
    zero = lambda _: jnp.zeros(6, int)
    pair = (lambda m: m[name], lambda c: c.x)
    if rules:
        here = (lambda m: m) if name == "y" else lambda m: m[name]
        pair = (here, lambda c: c, ec.rename(rules))
    for cls in (old, new):
        got, _ = ec.graft({name: _keyless(cls, zero)}, path, [pair])
        top = got[name]["l"][0].held
        found = top.w.w, top.w.b, top.b.w, *top.b.b
        assert [int(x.weight[0]) for x in found] == [0, 1, 2, 3]
        for other in (_keyless(cls, zero, (2, 3, 2, 5)), _keyless(cls, zero, size=2)):
            with pytest.raises(RuntimeError, match=r"\(1 static\)"):
                ec.graft({name: other}, path, [pair])


def test_more_digits_than_python_reads_are_a_text(tmp_path):
    low, high = "1" * 5000, "2" * 5000
    x, path = np.ones(3, np.float32), tmp_path / "x"
    ec.tree_serialise_leaves(path, {"z": {low: {"w": x}, high: {"w": 2 * x}}, "b": x})
    like = {"q": np.zeros((2, 3), np.float32)}
    pair = (lambda m: m["q"], lambda c: [c.z[low].w, c.z[high].w], ec.adapters.stack())
    made, _ = ec.graft(like, path, [pair], drop="b")
    assert made["q"].tolist() == [[1, 1, 1], [2, 2, 2]]
    # Nor are they the items of a sequence.
    pair = (lambda m: m["q"], lambda c: c.z, ec.adapters.stack())
    assert "pairs[0]" in refused(path, like, [pair], drop="b")
    model = {"y": {low: {"w": x}, high: {"kernel": x}}, "q": x}
    assert "y." in refused(path, model, [(lambda m: m["q"], lambda c: c.b)])
