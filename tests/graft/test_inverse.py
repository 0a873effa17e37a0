"""Adapters one after the other, and back: to the bit."""

import re

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import safetensors.numpy
from support.helpers import assert_alike, examples

import eqx_ckpt as ec
from eqx_ckpt import adapters as adapt


# ---- A BERT whose projections are fused, and whose layers are stacked for a scan.


class Attention(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear


class Block(eqx.Module):
    attention: Attention
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    last: eqx.nn.LayerNorm

    def __init__(self, width, inner, key):
        linear = lambda i, *sizes: eqx.nn.Linear(*sizes, key=jr.fold_in(key, i))
        self.attention = Attention(linear(0, width, 3 * width), linear(1, width, width))
        self.norm, self.last = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.up, self.down = linear(2, width, inner), linear(3, inner, width)


class Embeddings(eqx.Module):
    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm


class Bert(eqx.Module):
    embed: Embeddings
    layers: Block
    pooler: eqx.nn.Linear

    def __init__(self, words=30522, places=512, width=384, inner=1536, *, key):
        table = lambda i, n: eqx.nn.Embedding(n, width, key=jr.fold_in(key, i))
        self.embed = Embeddings(
            table(0, words), table(1, places), table(2, 2), eqx.nn.LayerNorm(width)
        )
        self.layers = eqx.filter_vmap(lambda key: Block(width, inner, key))(
            jr.split(key, 6)
        )
        self.pooler = eqx.nn.Linear(width, width, key=jr.fold_in(key, 3))


def _hugging_face(words=30522, places=512, width=384, inner=1536):
    """Names and shapes of all-MiniLM-L6-v2, with random weights."""
    rng = np.random.default_rng(0)
    out = {
        "embeddings.word_embeddings.weight": (words, width),
        "embeddings.position_embeddings.weight": (places, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
        "pooler.dense.weight": (width, width),
        "pooler.dense.bias": (width,),
    }
    for i in range(6):
        for name, *shape in (
            ("attention.self.query", width, width),
            ("attention.self.key", width, width),
            ("attention.self.value", width, width),
            ("attention.output.dense", width, width),
            ("attention.output.LayerNorm", width),
            ("intermediate.dense", inner, width),
            ("output.dense", width, inner),
            ("output.LayerNorm", width),
        ):
            out[f"encoder.layer.{i}.{name}.weight"] = tuple(shape)
            out[f"encoder.layer.{i}.{name}.bias"] = (shape[0],)
    make = lambda shape: rng.standard_normal(shape, dtype=np.float32)
    out = {name: make(shape) for name, shape in out.items()}
    ids = np.arange(places, dtype=np.int64)[None]
    return {"embeddings.position_ids": ids, **out}


EMBEDDINGS = ec.rename(
    [
        (r"^word_embeddings", "words"),
        (r"^position_embeddings", "positions"),
        (r"^token_type_embeddings", "types"),
        (r"^LayerNorm", "norm"),
    ]
)
LAYERS = [
    ec.rename(
        [
            (r"^attention\.output\.dense", "attention.out"),
            (r"^attention\.output\.LayerNorm", "norm"),
            (r"^intermediate\.dense", "up"),
            (r"^output\.dense", "down"),
            (r"^output\.LayerNorm", "last"),
        ]
    ),
    adapt.stack(),
]
FUSED = [adapt.concatenate(), adapt.stack()]


def _projections(layers):
    parts = [x["attention"]["self"] for x in layers]
    return [[x["query"], x["key"], x["value"]] for x in parts]


def test_bert_there_and_back(tmp_path):
    theirs = _hugging_face()
    safetensors.numpy.save_file(theirs, tmp_path / "model.safetensors")
    ckpt = ec.open(tmp_path / "model.safetensors")
    bert, report = ec.graft(
        eqx.filter_eval_shape(Bert, key=jr.key(0)),
        ckpt,
        [
            (lambda m: m.embed, lambda c: c.embeddings, EMBEDDINGS),
            (lambda m: m.layers, lambda c: c.encoder.layer, LAYERS),
            (
                lambda m: m.layers.attention.qkv,
                lambda c: _projections(c.encoder.layer),
                FUSED,
            ),
            (lambda m: m.pooler, lambda c: c.pooler.dense),
        ],
        drop=lambda c: c.embeddings.position_ids,
    )
    assert ec.unloaded(bert) == []
    kinds = "query", "key", "value"
    name = "encoder.layer.3.attention.self.{}.weight"
    expected = np.concatenate([theirs[name.format(x)] for x in kinds])
    assert np.array_equal(bert.layers.attention.qkv.weight[3], expected)
    (row,) = [x for x in report.rows if x.name == "layers.attention.qkv.bias"]
    assert row.how.startswith("concatenate(axis=0), stack(axis=0), of 18 of f32[384]")

    ec.tree_serialise_leaves(tmp_path / "ours", bert)
    tree = ckpt.tree
    names = {k: np.zeros_like(x) for k, x in theirs.items() if x.dtype == np.float32}
    back, _ = ec.graft(
        ec.nest(names),
        tmp_path / "ours",
        [
            (
                lambda m: m["embeddings"],
                lambda c: c.embed,
                ec.inverse(EMBEDDINGS, tree.embeddings),
            ),
            (
                lambda m: m["encoder"]["layer"],
                lambda c: c.layers,
                ec.inverse(LAYERS, tree.encoder.layer),
            ),
            (
                lambda m: _projections(m["encoder"]["layer"]),
                lambda c: c.layers.attention.qkv,
                ec.inverse(FUSED),
            ),
            (lambda m: m["pooler"]["dense"], lambda c: c.pooler),
        ],
    )
    expected = {k: x for k, x in theirs.items() if k in names}
    assert_alike(back, ec.nest(expected))


# ---- Any adapters that can be undone.


def _bits(rng, shape, dtype):
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, size), np.uint8).view(dtype)[..., 0]


def _turned(draw, rank):
    axes = draw(st.permutations(range(rank)))
    some = draw(st.sampled_from([(), tuple(axes), tuple(x - rank for x in axes)]))
    return adapt.transpose(*some), lambda x: x.transpose(*some) if some else x.T


@st.composite
def _chains(draw):
    """Nested arrays, the adapters that make one of them, and that one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rank = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    dtype = draw(st.sampled_from(["float32", "float16", "int8", "uint16"]))
    fused, stacked = draw(st.booleans()), draw(st.booleans())
    axis = draw(st.integers(-rank, rank - 1))
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    many = lambda make: [make() for _ in range(count)] if stacked else make()
    count = draw(st.integers(1, 3))

    def one(width):
        own = list(shape)
        own[axis] = width
        return _bits(rng, own, dtype)

    chain, fns = [], []
    saved = many(lambda: [one(x) for x in widths] if fused else one(shape[axis]))

    def turn(rank):
        if draw(st.booleans()):
            adapter, fn = _turned(draw, rank)
            chain.append(adapter)
            fns.append((0, fn))

    if fused:
        chain.append(adapt.concatenate(axis))
        fns.append((1, lambda x: np.concatenate(x, axis)))
    turn(rank)
    if stacked:
        new = draw(st.integers(-rank - 1, rank))
        chain.append(adapt.stack(new))
        fns.append((1, lambda x: np.stack(x, new)))
        turn(rank + 1)

    def run(x, fn, lists):
        depth = 0
        part = x
        while isinstance(part, list):
            depth, part = depth + 1, part[0]
        return [run(y, fn, lists) for y in x] if depth > lists else fn(x)

    made = saved
    for lists, fn in fns:
        made = run(made, fn, lists)
    return saved, chain, made


def _zeros(x):
    return jax.tree.map(np.zeros_like, x)


def _graft(path, like, *how):
    return ec.graft(like, path, [(lambda m: m["x"], lambda c: c.x, *how)])[0]


@examples(20)
@hypothesis.given(_chains(), st.booleans())
def test_there_and_back(tmp_path_factory, case, is_renamed):
    saved, chain, made = case
    tmp = tmp_path_factory.mktemp("c")
    theirs, ours = {"x": saved}, {"x": made}
    if is_renamed:
        turned = adapt.transpose()
        leaves = jax.tree.map(lambda x: {"w": x.T, "b": x}, saved)
        theirs = {"x": leaves}
        ours = {"x": {"weight": made, "b": made}}
        chain = [ec.rename([("^w$", "weight"), ("weight", turned)]), *chain]
    ec.tree_serialise_leaves(tmp / "theirs", theirs, durable=False)
    source = ec.open(tmp / "theirs").tree.x
    assert_alike(_graft(tmp / "theirs", _zeros(ours), chain), ours)
    ec.tree_serialise_leaves(tmp / "ours", ours, durable=False)
    back = ec.inverse(chain, source)
    assert_alike(_graft(tmp / "ours", _zeros(theirs), back), theirs)
    # And there once more.
    again = ec.inverse(back, ec.open(tmp / "ours").tree.x)
    assert_alike(_graft(tmp / "theirs", _zeros(ours), again), ours)


def test_rows_that_were_added(tmp_path):
    saved = np.arange(6.0, dtype="f4").reshape(3, 2)
    ec.tree_serialise_leaves(tmp_path / "a", {"x": saved})
    more = _graft(tmp_path / "a", {"x": np.zeros((5, 2), "f4")}, adapt.rows(0.5))
    ec.tree_serialise_leaves(tmp_path / "b", more)
    (back,) = ec.inverse(adapt.rows(0.5))
    assert_alike(_graft(tmp_path / "b", {"x": _zeros(saved)}, back), {"x": saved})


@pytest.mark.parametrize(
    "given, said",
    [
        (adapt.cast(), "`cast()` cannot be undone"),
        ([adapt.stack(), adapt.cast()], "`cast()` cannot be undone"),
        (adapt.take(0), "`take(0, axis=0)` cannot be undone"),
        (adapt.unstack(only=[0]), "`unstack(only=[0], axis=0)` cannot be undone"),
        (adapt.interpolate(), "cannot be undone"),
        (lambda saved, like: saved, "`<lambda>` cannot be undone"),
        (ec.rename([("a", adapt.cast())]), "`cast()` cannot be undone"),
        (ec.rename(lambda name: "c"), "gives the name `c` to both `a` and `b`"),
    ],
)
def test_what_cannot_be_undone(tmp_path, given, said):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=re.escape(said)):
        ec.inverse(given, tmp_path / "x")


def test_the_inverse_of_an_adapter_in_a_rule(tmp_path):
    """It is a list, as several adapters of a rule are."""
    ours = {"weight": jnp.arange(24.0).reshape(3, 2, 4), "bias": jnp.ones((3, 1))}
    ec.tree_serialise_leaves(tmp_path / "ours", ours)
    kernel = [ec.adapters.channels_first(), ec.adapters.conv_transpose()]
    bias = ec.adapters.unit_axes()
    back = [("weight$", "kernel", ec.inverse(kernel)), ("bias$", ec.inverse(bias))]
    whole = (lambda m: m, lambda c: c)
    like = {"kernel": jnp.zeros((4, 3, 2)), "bias": jnp.zeros(3)}
    theirs, _ = ec.graft(like, tmp_path / "ours", [(*whole, ec.rename(back))])
    turned = ours["weight"].transpose(2, 0, 1)[::-1]
    assert (theirs["kernel"] == turned).all()
    ec.tree_serialise_leaves(tmp_path / "theirs", theirs)
    there = [("kernel$", "weight", kernel), ("bias$", bias)]
    made, _ = ec.graft(ours, tmp_path / "theirs", [(*whole, ec.rename(there))])
    assert eqx.tree_equal(made, ours)


def test_inverses_that_are_none(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    there = ec.rename([("a", "b")])
    for source in (None, []):
        with pytest.raises(TypeError, match="needs the `source` of its names"):
            ec.inverse(there, source)
    with pytest.raises(TypeError, match="`inverse` has 3 after"):
        ec.inverse([there, 3], tmp_path / "x")
    ckpt = ec.open(tmp_path / "x")
    for source in (tmp_path / "x", ckpt, ckpt.tree):
        (back,) = ec.inverse([there], source)
        assert back.rules("b") == "a" and back.rules("other") == "other"


# ---- Lists of lists.


def test_nested_lists_keep_their_nesting(tmp_path):
    rng = np.random.default_rng(0)
    layers = [{x: rng.standard_normal((2, 2)) for x in "qkv"} for _ in range(3)]
    ec.tree_serialise_leaves(tmp_path / "x", {"x": layers})
    seen = []

    def own(saved, like):
        seen.append([len(x) for x in saved])
        return np.stack([np.concatenate(list(map(np.asarray, x))) for x in saved])

    pair = (
        lambda m: m["x"],
        lambda c: [[x[key] for key in "qkv"] for x in c.x],
    )
    expected = np.stack([np.concatenate(list(x.values())) for x in layers])
    like = {"x": np.zeros((3, 6, 2))}
    for how in (own, [own], [adapt.concatenate(), adapt.stack()]):
        out, _ = ec.graft(like, tmp_path / "x", [(*pair, how)])
        assert_alike(out["x"], expected)
    assert seen == [[3, 3, 3]] * 2
    # A cast before or after; and several of them at once.
    half = {"x": np.zeros((3, 6, 2), "f2")}
    for how in ([adapt.cast(), *FUSED], [*FUSED, adapt.cast()]):
        out, _ = ec.graft(half, tmp_path / "x", [(*pair, how)])
        assert_alike(out["x"], expected.astype("f2"))
    two = {"x": np.zeros((3, 2, 2)), "y": np.zeros((3, 2, 2))}
    out, _ = ec.graft(
        two,
        tmp_path / "x",
        [
            (
                lambda m: [m["x"], m["y"]],
                lambda c: [[x.q for x in c.x], [x.v for x in c.x]],
                adapt.stack(),
            )
        ],
        drop=lambda c: [x.k for x in c.x],
    )
    assert_alike(out["y"], np.stack([x["v"] for x in layers]))


def test_lists_that_do_not_go_with_the_adapters(tmp_path):
    ec.tree_serialise_leaves(
        tmp_path / "x", {"x": [np.ones((4, 2))] * 2, "y": np.ones((2, 4, 2))}
    )
    graft = lambda like, *pair: ec.graft(like, tmp_path / "x", [pair], drop="y")
    ragged = lambda c: [c.x[0], [c.x[1]]]
    with pytest.raises(ValueError, match="takes one node of the model"):
        graft({"x": np.ones((2, 4, 2))}, lambda m: m["x"], ragged, adapt.stack())
    with pytest.raises(RuntimeError, match="it gives 2 arrays, and the model has 1"):
        graft({"x": np.ones((4, 2))}, lambda m: m["x"], lambda c: [*c.x], adapt.cast())


def test_several_of_one_in_any_order(tmp_path):
    """The shapes say what `split` gives each, whatever comes after it."""
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((3, n, 2)) for n in (1, 4)]
    ec.tree_serialise_leaves(tmp_path / "x", np.concatenate(parts, 1))
    layers = [[part[i] for i in range(3)] for part in parts]
    like = jax.tree.map(np.zeros_like, layers)
    for chain in (
        [adapt.split(1), adapt.unstack()],
        [adapt.split(1), adapt.transpose(1, 0, 2), adapt.unstack(axis=1)],
        [adapt.transpose(), adapt.split(1), adapt.transpose(), adapt.unstack()],
    ):
        pair = (lambda m: m, lambda c: c, chain)
        assert_alike(ec.graft(like, tmp_path / "x", [pair])[0], layers)
    # By layer first.
    by_layer = [list(x) for x in zip(*layers)]
    like = jax.tree.map(np.zeros_like, by_layer)
    pair = (lambda m: m, lambda c: c, [adapt.unstack(), adapt.split()])
    assert_alike(ec.graft(like, tmp_path / "x", [pair])[0], by_layer)


def test_several_lists_and_back(tmp_path):
    """One pair stacks two lists, and its inverse takes both apart."""
    lists = lambda: [{"w": jnp.ones(2) * i} for i in range(3)]
    listed = {"m": lists(), "mu": lists()}
    ec.tree_serialise_leaves(tmp_path / "listed", listed)
    sides = lambda m: [m["m"], m["mu"]], lambda c: [c.m, c.mu]
    stacked = {name: {"w": jnp.zeros((3, 2))} for name in ("m", "mu")}
    out, _ = ec.graft(stacked, tmp_path / "listed", [(*sides, ec.adapters.stack())])
    ec.tree_serialise_leaves(tmp_path / "stacked", out)
    pair = (*sides, ec.inverse(ec.adapters.stack()))
    like = jax.tree.map(jnp.zeros_like, listed)
    back, _ = ec.graft(like, tmp_path / "stacked", [pair])
    assert eqx.tree_equal(back, listed)


def test_an_adapter_is_told_the_leaf_before_later_adapters(tmp_path):
    theirs = [
        {"kernel": np.random.randn(3, 3, 4, 8), "bias": np.random.randn(8)}
        for _ in range(2)
    ]
    ec.tree_serialise_leaves(tmp_path / "theirs", theirs)
    moved, spread = adapt.channels_first(), adapt.unit_axes()
    ours = {"weight": np.zeros((2, 8, 4, 3, 3)), "bias": np.zeros((2, 8, 1, 1))}
    rules = [("kernel", "weight", moved), ("bias", spread)]
    renamed = ec.rename([("kernel", "weight")])
    for how in (
        [ec.rename(rules), adapt.stack()],
        [renamed, moved, spread, adapt.stack()],
        [renamed, spread, moved, adapt.stack()],
    ):
        pair = (lambda m: m, lambda c: c, how)
        made, _ = ec.graft(ours, tmp_path / "theirs", [pair])
        for i, layer in enumerate(theirs):
            expected = layer["kernel"].transpose(3, 2, 0, 1)
            assert np.array_equal(made["weight"][i], expected)
            assert np.array_equal(made["bias"][i].ravel(), layer["bias"])
        ec.tree_serialise_leaves(tmp_path / "ours", made, overwrite=True)
        back = ec.inverse(how, ec.open(tmp_path / "theirs").tree)
        pair = (lambda m: m, lambda c: c, back)
        again, _ = ec.graft(theirs, tmp_path / "ours", [pair])
        assert_alike(again, theirs)


@pytest.mark.parametrize("more", [[], [adapt.stack()]])
def test_rows_before_a_transpose(tmp_path, more):
    saved = np.arange(12.0).reshape(4, 3)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": saved})
    like = np.zeros((*[1] * len(more), 3, 6))
    how = [adapt.rows(7.0), adapt.transpose(), *more]
    pair = (lambda m: m, lambda c: [c.w], how)
    made, _ = ec.graft(like, tmp_path / "c", [pair])
    assert np.array_equal(made.reshape(3, 6).T, [*saved, [7.0] * 3, [7.0] * 3])


def test_a_rename_after_what_puts_leaves_together(tmp_path):
    saved = {"a": {"kernel": np.ones((2, 2))}, "b": {"weight": np.ones((2, 2))}}
    ec.tree_serialise_leaves(tmp_path / "c", saved)
    rules = ec.rename([("kernel", "weight", adapt.transpose())])
    like = {"weight": np.zeros((2, 2, 2))}
    nodes = lambda c: [c.a, c.b]
    with pytest.raises(RuntimeError, match="one array by then: put it first"):
        pair = (lambda m: m, nodes, adapt.stack(), rules)
        ec.graft(like, tmp_path / "c", [pair])
    ec.graft(like, tmp_path / "c", [(lambda m: m, nodes, rules, adapt.stack())])


def test_sizes_of_a_split_before_an_axis_is_taken(tmp_path):
    saved = np.arange(24.0).reshape(4, 3, 2)
    ec.tree_serialise_leaves(tmp_path / "c", saved)

    def graft(shape, *how):
        like = [np.zeros(shape), np.zeros(shape)]
        pair = (lambda m: m, lambda c: c, how)
        return ec.graft(like, tmp_path / "c", [pair])[0]

    first, second = graft((2, 2), adapt.split(), adapt.take(-1, axis=1))
    assert np.array_equal([*first, *second], saved[:, -1])
    # Where each part of an axis ended, nothing says once an item of it is taken.
    with pytest.raises(RuntimeError, match="have 1 [+] 1 along axis 0, and the .* 4"):
        graft((2, 3), adapt.transpose(0, 2, 1), adapt.split(), adapt.take(0))
