"""Adapters: each gives what NumPy gives, and reads only what it needs."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.helpers import BytesRead, damage

import eqx_ckpt as ec


adapt = ec.adapters


def _saved(shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def _graft(tmp_path, saved, like, *how, left=lambda m: m, right=lambda c: c, **kwargs):
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    return ec.graft(like, tmp_path / "x", [(left, right, *how)], **kwargs)[0]


@pytest.mark.parametrize(
    "adapter, expected",
    [
        (adapt.transpose(), lambda x: x.T),
        (adapt.transpose(2, 0, 1), lambda x: x.transpose(2, 0, 1)),
        (adapt.transpose(0, -1, 1), lambda x: x.transpose(0, 2, 1)),
        (adapt.take(2), lambda x: x[2]),
        (adapt.take(-1, axis=-1), lambda x: x[..., -1]),
        (adapt.take(slice(1, None, 2), axis=1), lambda x: x[:, 1::2]),
        (lambda saved, like: saved[1:, None].T, lambda x: x[1:, None].T),
        (lambda saved, like: np.asarray(saved) * 2, lambda x: x * 2),
        (lambda saved, like: jnp.asarray(saved).reshape(-1), lambda x: x.reshape(-1)),
        (lambda saved, like: like + 1, lambda x: x * 0 + 1),
    ],
)
def test_one_of_one(tmp_path, adapter, expected):
    saved = _saved((3, 4, 5))
    out = _graft(tmp_path, saved, np.zeros_like(expected(saved)), adapter)
    assert np.array_equal(out, expected(saved)) and out.dtype == saved.dtype


def test_views_in_the_lambda(tmp_path):
    saved = {"a": _saved((6, 4))}
    like = np.zeros((4, 2), np.float32)
    out = _graft(tmp_path, saved, like, right=lambda c: c.a[::3].T)
    assert np.array_equal(out, saved["a"][::3].T)


def test_members_of_an_ensemble(tmp_path):
    """One of those that `eqx.filter_vmap` made together."""
    make = lambda key: eqx.nn.MLP(2, 2, 4, 1, key=key)
    ensemble = eqx.filter_vmap(make)(jr.split(jr.key(0), 3))
    like = eqx.filter_eval_shape(make, jr.key(0))
    one = _graft(tmp_path, ensemble, like, adapt.take(1))
    expected = jtu.tree_map(lambda x: x[1] if eqx.is_array(x) else x, ensemble)
    assert eqx.tree_equal(one, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split_and_concatenate(tmp_path, axis, dtype):
    fused = np.arange(60, dtype=np.float32).reshape(6, 10).astype(jnp.dtype(dtype))
    cuts = [2, 3]
    parts = np.split(fused, cuts, axis)
    like = [np.zeros_like(x) for x in parts]
    split = adapt.split(axis)
    out = _graft(tmp_path, fused, like, split, left=lambda m: m[:])
    assert all(np.array_equal(a, b) for a, b in zip(out, parts))
    joined = _graft(tmp_path, parts, np.zeros_like(fused), adapt.concatenate(axis))
    assert np.array_equal(joined, fused) and joined.dtype == fused.dtype


class Fused(eqx.Module):
    qkv: eqx.nn.Linear


class Separate(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear


def _linear(rows, seed):
    like = eqx.filter_eval_shape(eqx.nn.Linear, 4, rows, key=jr.key(0))
    fill = np.random.default_rng(seed)
    return jtu.tree_map(
        lambda x: fill.normal(size=x.shape).astype(np.float32),
        like,
    )


def test_attention_fused_and_separate(tmp_path):
    """Whole layers: weights and biases, each by name."""
    separate = Separate(_linear(6, 0), _linear(2, 1), _linear(2, 2))
    fused = _linear(10, 3)
    nodes = lambda t: [t.q, t.k, t.v]
    # The number of rows is a static field of a Linear, and has changed.
    with pytest.raises(RuntimeError, match="saved 6 as `q.out_features`, the model"):
        _graft(
            tmp_path,
            separate,
            Fused(fused),
            adapt.concatenate(),
            left=lambda m: m.qkv,
            right=nodes,
        )
    out = _graft(
        tmp_path,
        separate,
        Fused(fused),
        adapt.concatenate(),
        left=lambda m: m.qkv,
        right=nodes,
        static="ignore",
    )
    for name in ("weight", "bias"):
        parts = [getattr(x, name) for x in nodes(separate)]
        assert np.array_equal(getattr(out.qkv, name), np.concatenate(parts))
    back = _graft(
        tmp_path,
        out,
        separate,
        adapt.split(),
        left=nodes,
        right=lambda c: c.qkv,
        static="ignore",
    )
    assert eqx.tree_equal(back, separate)


def _layers(count):
    return [{"w": _saved((2, 3)) + i, "b": _saved(2) - i} for i in range(count)]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stack_and_unstack(tmp_path, axis):
    layers = {"layers": _layers(4)}
    stacked = {
        name: np.stack([x[name] for x in layers["layers"]], axis) for name in "wb"
    }
    blank = {name: np.zeros_like(x) for name, x in stacked.items()}
    out = _graft(tmp_path, layers, blank, adapt.stack(axis), right=lambda c: c.layers)
    assert all(np.array_equal(out[k], stacked[k]) for k in "wb")
    back = _graft(
        tmp_path,
        stacked,
        {"layers": _layers(4)},
        adapt.unstack(axis=axis),
        left=lambda m: m["layers"],
    )
    assert eqx.tree_equal(back, layers)


def test_some_layers_only(tmp_path):
    layers = _layers(6)
    some = layers[1:6:2]
    blank = {name: np.zeros_like(np.stack([x[name] for x in some])) for name in "wb"}
    drop = lambda c: c[::2]
    out = _graft(
        tmp_path, layers, blank, adapt.stack(), right=lambda c: c[1::2], drop=drop
    )
    assert np.array_equal(out["w"], np.stack([x["w"] for x in some]))
    stacked = {name: np.stack([x[name] for x in layers]) for name in "wb"}
    three = {"layers": _layers(3)}
    out = _graft(
        tmp_path,
        stacked,
        three,
        adapt.unstack(only=[5, 0, 2]),
        left=lambda m: m["layers"],
    )
    assert eqx.tree_equal(out["layers"], [layers[i] for i in (5, 0, 2)])


def test_a_scanned_stack_of_modules(tmp_path):
    layers = [_linear(4, i) for i in range(3)]
    keys = jr.split(jr.key(0), 3)
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))
    blank = eqx.filter_eval_shape(make, keys)
    out = _graft(tmp_path, layers, blank, adapt.stack())
    assert np.array_equal(out.weight, np.stack([x.weight for x in layers]))
    assert isinstance(out.weight, jax.Array)
    back = _graft(tmp_path, out, layers, adapt.unstack(), left=lambda m: m[:])
    assert eqx.tree_equal(back, layers)


def test_a_leaf_that_an_adapter_does_not_take_has_a_pair_of_its_own(tmp_path):
    one = {"w": jnp.zeros(2), "count": jnp.zeros((), int)}
    ec.tree_serialise_leaves(tmp_path / "x", {"w": jnp.ones((3, 2)), "count": 7})
    pairs = [(lambda m: m, lambda c: c, adapt.take(1))]
    with pytest.raises(RuntimeError) as e:
        ec.graft(one, tmp_path / "x", pairs)
    title, row = str(e.value).splitlines()[1:]
    assert title.endswith(" (a leaf that needs none takes its own pair):")
    assert row.startswith("    count  pairs[0], `take(1, axis=0)`: axis 0 of an array")
    pairs.append((lambda m: m["count"], "count"))
    out, _ = ec.graft(one, tmp_path / "x", pairs)
    assert out["count"] == 7 and (out["w"] == 1).all()


class _Attention(eqx.Module):
    weight: jax.Array
    dropout: float
    heads: int = eqx.field(static=True)


def test_layers_of_a_stack_that_differ_are_named(tmp_path):
    rows = [(0.5, 4), (0.5, 2), (0.25, 4), (0.25, 4)]
    layers = [_Attention(jnp.ones(2), *row) for row in rows]
    like = _Attention(jnp.zeros((4, 2)), 0.5, 4)
    with pytest.raises(RuntimeError) as e:
        _graft(tmp_path, layers, like, adapt.stack())
    assert "    heads  saved 2 as `1.heads`, the model has 4" in str(e.value)
    for scalars, text in {
        "error": "dropout  saved 0.25 as `{2..3}.dropout`, the model has 0.5",
        "load": "dropout  saved 0.5, and 0.25 as `2.dropout`",
    }.items():
        with pytest.raises(RuntimeError, match=re.escape(text)):
            _graft(
                tmp_path, layers, like, adapt.stack(), static="ignore", scalars=scalars
            )


@settings(max_examples=25)
@given(st.data())
def test_unstack_undoes_stack(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    count = data.draw(st.integers(1, 3))
    layers = [_saved(shape, np.int16) + i for i in range(count)]
    stacked = np.stack(layers, axis)
    path = tmp_path_factory.mktemp("stack")
    assert np.array_equal(
        _graft(path, layers, np.zeros_like(stacked), adapt.stack(axis)), stacked
    )
    blank = [np.zeros_like(x) for x in layers]
    out = _graft(path, stacked, blank, adapt.unstack(axis=axis), left=lambda m: m)
    assert eqx.tree_equal(out, layers)


@pytest.mark.parametrize(
    "fill, new",
    [
        (0.0, [[0, 0], [0, 0]]),
        (2.5, [[2.5, 2.5], [2.5, 2.5]]),
        (np.array([1.0, 2.0]), [[1, 2], [1, 2]]),
        (lambda shape: np.full(shape, 7.0), [[7, 7], [7, 7]]),
    ],
)
def test_more_rows(tmp_path, fill, new):
    saved = _saved((3, 2))
    out = _graft(tmp_path, saved, jnp.zeros((5, 2)), adapt.rows(fill))
    assert np.array_equal(out, np.concatenate([saved, new]))


def test_fewer_rows(tmp_path):
    saved = {"w": _saved((3, 2)), "b": _saved(3)}
    like = {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}
    out = _graft(tmp_path, saved, like, adapt.rows())
    assert np.array_equal(out["w"], saved["w"][:2])
    assert np.array_equal(out["b"], saved["b"][:2])


def test_interpolate(tmp_path):
    saved = _saved((4, 2))
    out = _graft(tmp_path, saved, np.zeros((8, 2), np.float32), adapt.interpolate())
    expected = jax.image.resize(saved, (8, 2), "linear")
    assert np.array_equal(out, expected) and out[0, 0] == 0 and out[-1, 1] == 7
    same = _graft(tmp_path, saved, np.zeros_like(saved), adapt.interpolate("cubic"))
    assert np.array_equal(same, saved)


def test_interpolate_a_plane_behind_a_prefix(tmp_path):
    """A vision transformer: a class token, then positions in rows."""
    saved = _saved((1 + 2 * 3, 4)).astype(jnp.bfloat16)
    like = np.zeros((1 + 4 * 6, 4), jnp.bfloat16)
    adapter = adapt.interpolate("linear", grid=((2, 3), (4, 6)), prefix=1)
    out = _graft(tmp_path, saved, like, adapter)
    plane = saved[1:].astype(np.float32).reshape(2, 3, 4)
    resized = np.asarray(jax.image.resize(plane, (4, 6, 4), "linear"))
    expected = np.concatenate([saved[:1], resized.reshape(24, 4).astype(jnp.bfloat16)])
    assert np.array_equal(out, expected)


def test_cast_is_an_adapter_for_some(tmp_path):
    saved = {"a": _saved(3), "b": _saved(3)}
    like = {"a": np.zeros(3, jnp.bfloat16), "b": np.zeros(3, np.float32)}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    pairs = [(lambda m: m, lambda c: c, ec.rename([("^a$", adapt.cast())]))]
    out, report = ec.graft(like, tmp_path / "x", pairs)
    assert out["a"].dtype == jnp.bfloat16 and out["b"].dtype == np.float32
    assert report.names("cast") == ["a"]
    # A cast of one's own to less than the model has loses what it loses.
    fine = np.array([1.001], np.float32)
    half = lambda saved, like: saved.astype(jnp.bfloat16)
    out = _graft(tmp_path, fine, np.zeros(1, np.float32), half, cast=True)
    assert out[0] == 1.0
    with pytest.raises(RuntimeError, match="made bf16"):
        _graft(tmp_path, fine, np.zeros(1, np.float32), half)


def test_adapters_of_adapters(tmp_path):
    """What one has made, another takes."""
    layers = [_saved((2, 3)) + i for i in range(2)]
    rules = ec.rename([("^$", adapt.transpose()), ("^$", adapt.take(slice(2)))])
    like = np.zeros((2, 2, 2), np.float32)
    out = _graft(tmp_path, layers, like, rules, adapt.stack())
    assert np.array_equal(out, np.stack([x.T[:2] for x in layers]))


def test_several_for_one_function(tmp_path):
    """A function gets a list where its side is one."""
    saved = {"a": _saved((2, 3)), "b": _saved((2, 3)) + 9}
    both = lambda c: [c.a, c.b]
    mean = lambda saved, like: (np.asarray(saved[0]) + np.asarray(saved[1])) / 2
    out = _graft(tmp_path, saved, np.zeros((2, 3), np.float32), mean, right=both)
    assert np.array_equal(out, saved["a"] + 4.5)
    halves = lambda saved, likes: [saved[: len(x)] for x in likes]
    like = [np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float32)]
    out = _graft(
        tmp_path, saved["a"], like, halves, left=lambda m: m[::-1], right=lambda c: c
    )
    assert np.array_equal(out[0], saved["a"][:1])
    assert np.array_equal(out[1], saved["a"])


def test_views_read_only_their_bytes(tmp_path):
    """8 MB, in chunks of 400 kB; one read of the checkpoint for all of a graft."""
    saved = {"w": _saved((20, 50_000), np.float64), "e": _saved((20, 50_000), float)}
    ec.tree_serialise_leaves(tmp_path / "x", saved, chunks=400_000)
    ckpt = ec.open(tmp_path / "x")
    overhead = 5000

    def read(like, *pair, **kwargs):
        with BytesRead() as read:
            _, report = ec.graft(like, ckpt, [pair], **kwargs)
        assert report.bytes_read == read.total
        return read.total

    row = np.zeros(50_000)
    one = (lambda m: m, lambda c: c.w, adapt.take(7))
    for verify in (True, False):
        assert 400_000 <= read(row, *one, drop="e", verify=verify) < 400_000 + overhead
    few = (lambda m: m, lambda c: c.e, adapt.rows())
    total = read(np.zeros((3, 50_000)), *few, drop="w")
    assert 1_200_000 <= total < 1_200_000 + overhead
    some = (lambda m: m, lambda c: c.w, adapt.unstack(only=[2, 3, 11]))
    total = read([row, row.copy(), row.copy()], *some, drop="e")
    assert 1_200_000 <= total < 1_200_000 + overhead
    # A function of one's own that gives a view reads no more than the view.
    own = (lambda m: m, lambda c: c.w, lambda saved, like: saved[3])
    assert read(row, *own, drop="e") < 400_000 + overhead
    whole = (lambda m: m, lambda c: c.w)
    assert read(np.zeros((20, 50_000)), *whole, drop="e") >= 8_000_000


# ---- Wrong adapters: errors before anything is read.


def _misfit(tmp_path, saved, like, *how, left=lambda m: m) -> str:
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    with BytesRead() as read:
        with pytest.raises(RuntimeError) as info:
            ec.graft(like, tmp_path / "x", [(left, lambda c: c, *how)])
    assert read.total == (tmp_path / "x" / "eqx_ckpt.json").stat().st_size
    return str(info.value)


@pytest.mark.parametrize(
    "saved, like, adapter, said",
    [
        (
            (2, 3),
            (2, 3),
            adapt.transpose(),
            "of another shape: an adapter may make it fit; a new head is `fresh`, and "
            "the old one goes into `drop`:\n    %root (the whole tree)  saved "
            "f32[2,3](numpy), made f32[3,2](numpy) by transpose(), the model has "
            "f32[2,3](numpy)",
        ),
        ((2, 3), (3, 2), adapt.transpose(0), "(0,) is no order of 2 axes"),
        ((2, 3), (3,), adapt.take(5), "index 5 is out of bounds"),
        ((2, 3), (3,), adapt.take(0, axis=2), "axis 2 of an array with 2 axes"),
        ((2, 3), (3, 3), adapt.rows(), "the model has 1 rows more than were saved"),
        ((2, 3), (4, 3), adapt.rows(np.ones(2)), "`fill` has the shape [2], for new"),
        ((2, 3), (4, 5), adapt.rows(0.0), "saved f32[2,3](numpy), the model has"),
        ((2,), (), adapt.rows(0.0), "saved f32[2](numpy), the model has f32[](numpy)"),
        ((2, 3), (4,), adapt.interpolate(), "only arrays with as many axes"),
        ((2, 3), (4, 3), adapt.interpolate(prefix=2), "`prefix=2` leaves no positions"),
        (
            (5, 3),
            (11, 3),
            adapt.interpolate(grid=((2, 2), (3, 3)), prefix=1),
            "`grid` gives the model side 3x3 positions, and it has 10",
        ),
        ((2, 3), (2, 3), lambda saved: saved, "takes 1 positional argument but 2"),
        ((2, 3), (2, 3), lambda saved, like: saved.nope, "has no attribute `nope`"),
        ((2, 3), (2, 3), lambda saved, like: "text", "the model has f32[2,3]"),
        ((2, 3), (2, 3), lambda saved, like: None, "a `NoneType` cannot be stored"),
        (
            (2, 3),
            (2, 3),
            lambda saved, like: saved[0],
            "made f32[3](numpy) by <lambda>",
        ),
    ],
)
def test_one_leaf_that_does_not_fit(tmp_path, saved, like, adapter, said):
    like = np.zeros(like, np.float32)
    assert said in _misfit(tmp_path, _saved(saved), like, adapter)


def test_lists_that_do_not_fit(tmp_path):
    layers = _layers(3)
    text = _misfit(tmp_path, layers, {"w": np.zeros((4, 2, 3), "f4")}, adapt.stack())
    assert "made f32[3,2,3](numpy) by stack(axis=0), the model has f32[4,2,3]" in text
    ragged = [*layers, {"w": _saved((2, 2))}]
    text = _misfit(tmp_path, ragged, {"w": np.zeros((4, 2, 3), "f4")}, adapt.stack())
    assert "`stack(axis=0)`: f32[2,3], f32[2,2] are not of one shape" in text
    like = {"w": np.zeros((4, 2, 3), "f4"), "b": np.zeros((4, 2), "f4")}
    text = _misfit(tmp_path, ragged, like, adapt.stack())
    assert "not in all of the nodes" in text
    assert "    3.b  not in the checkpoint" in text
    stacked = _saved((3, 2))
    like = [np.zeros(2, "f4"), np.ones(2, "f4")]
    text = _misfit(tmp_path, stacked, like, adapt.unstack(), left=lambda m: m)
    assert "the model has 2 nodes for 3 that are stacked: say which with `only`" in text
    text = _misfit(tmp_path, stacked, like, adapt.split(1), left=lambda m: m)
    assert "the model's leaves have 0 + 0 along axis 1, and the saved one 2" in text
    mixed = [_saved(2), _saved(2, np.int32)]
    text = _misfit(tmp_path, mixed, np.zeros(4, "f4"), adapt.concatenate())
    assert "f32[2], i32[2] are not one array along axis 0" in text


@pytest.mark.parametrize(
    "adapter, left, right, said",
    [
        (adapt.stack(), lambda m: m[:2], lambda c: c, "takes one node of the model"),
        (adapt.split(), lambda m: m, lambda c: c[:2], "takes one node of the checkpo"),
    ],
)
def test_lists_on_the_wrong_side(tmp_path, adapter, left, right, said):
    saved = [_saved(2) for _ in range(3)]
    with pytest.raises(ValueError, match=re.escape(said)):
        _graft(tmp_path, saved, [x + 1 for x in saved], adapter, left=left, right=right)


def test_keys_are_not_adapted(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", jr.split(jr.key(0), 3))
    pair = (lambda m: m, lambda c: c, adapt.take(0))
    with pytest.raises(RuntimeError, match=r"`take\(0, axis=0\)`: does not take a key"):
        ec.graft(jr.key(1), tmp_path / "x", [pair])


def test_functions_of_ones_own_run_when_all_else_is_right(tmp_path):
    called = []

    def own(saved, like):
        called.append(saved.name)
        return saved

    ec.tree_serialise_leaves(tmp_path / "x", {"a": _saved(3), "b": _saved(2)})
    like = {"a": np.zeros(3, "f4"), "b": np.zeros(3, "f4")}
    pairs = [(lambda m: m["a"], "a", own), (lambda m: m["b"], "b")]
    with pytest.raises(RuntimeError, match="of another shape"):
        ec.graft(like, tmp_path / "x", pairs)
    assert called == []
    like["b"] = np.zeros(2, "f4")
    out, _ = ec.graft(like, tmp_path / "x", pairs)
    assert called == ["a"] and out["a"].tolist() == [0, 1, 2]


def test_leaves_of_another_checkpoint(tmp_path):
    """They have numbers of their own, and would be read from the wrong place."""
    ec.tree_serialise_leaves(tmp_path / "y", {"a": _saved(3) + 9, "b": _saved(3)})
    other = ec.open(tmp_path / "y")["b"]
    like = np.zeros(3, "f4")
    for own in (
        lambda saved, like: other,
        lambda saved, like: adapt.concatenate()([saved[:1], other[1:]], like),
    ):
        text = _misfit(tmp_path, _saved(3), like, own)
        assert f"`b` is of another checkpoint, `{tmp_path / 'y'}`" in text
    read = lambda saved, like: other.read()
    assert _graft(tmp_path, _saved(3), like, read).tolist() == [0, 1, 2]


def test_how_adapters_print():
    shown = [
        adapt.cast(),
        adapt.transpose(1, 0),
        adapt.rows(lambda shape: 0),
        adapt.rows(np.zeros(3)),
        adapt.unstack(only=range(2)),
        adapt.interpolate(grid=((2, 3), (4, 6)), prefix=1),
    ]
    assert list(map(repr, shown)) == [
        "cast()",
        "transpose(1, 0)",
        "rows(fill=<lambda>)",
        "rows(fill=...)",
        "unstack(only=[0, 1], axis=0)",
        "interpolate('linear', grid=((2, 3), (4, 6)), prefix=1)",
    ]


def test_one_array_of_two_leaves_is_one_if_it_is_made_in_one_way(tmp_path):
    """Adapters that are shown alike may differ, and so may the dtypes of views."""
    ec.tree_serialise_leaves(tmp_path / "c", {"e": jnp.full((2, 2), 1.0001)})
    zero = jnp.zeros((3, 2))
    model = {"a": zero, "b": zero}
    a, b = lambda m: m["a"], lambda m: m["b"]
    rows = ec.adapters.rows
    pairs = [(a, "e", rows(np.full(2, 5.0))), (b, "e", rows(np.full(2, 7.0)))]
    out, _ = ec.graft(model, tmp_path / "c", pairs)
    assert [out[name][2, 0] for name in "ab"] == [5, 7]
    same = rows(np.full(2, 5.0))
    out, _ = ec.graft(model, tmp_path / "c", [(a, "e", same), (b, "e", same)])
    assert out["a"] is out["b"] and out["a"][2].tolist() == [5, 5]
    zero = jnp.zeros((2, 2))
    pairs = [(a, lambda c: c.e.astype("bfloat16")), (b, lambda c: c.e)]
    out, _ = ec.graft({"a": zero, "b": zero}, tmp_path / "c", pairs, cast=True)
    assert (out["a"] == 1).all() and (out["b"] == jnp.float32(1.0001)).all()


def test_a_cast_after_another_adapter_holds_every_value(tmp_path):
    tree = {"e": jnp.array([[1.5, 300.0]]), "i": jnp.array([[300, 1]])}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    first = ec.rename([("", ec.adapters.rows(0))])
    cast = ec.adapters.cast()
    for name, dtype, match in (("e", "int32", "floats"), ("i", "int8", "300")):
        pair = (lambda m: m, name, first, cast)
        rest = "i" if name == "e" else "e"
        with pytest.raises(RuntimeError, match=match):
            ec.graft(jnp.zeros((2, 2), dtype), tmp_path / "c", [pair], drop=rest)
    pair = (lambda m: m, "i", first, cast)
    like = jnp.zeros((2, 2), "int16")
    out, _ = ec.graft(like, tmp_path / "c", [pair], drop="e")
    assert out.tolist() == [[300, 1], [0, 0]]


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("float16", -1e9), ("int32", 0.7), ("int32", 1j), ("float32", 1 + 2j)],
)
def test_rows_that_the_saved_dtype_does_not_hold(tmp_path, dtype, fill):
    ec.tree_serialise_leaves(tmp_path / "c", {"e": jnp.ones((1, 2), dtype)})
    pair = (lambda m: m, "e", ec.adapters.rows(fill))
    with pytest.raises(RuntimeError, match="does not hold"):
        ec.graft(jnp.zeros((2, 2), dtype), tmp_path / "c", [pair], cast=True)


def _squared(saved, like):
    return ec.lazy(jnp.square, elementwise=True)(saved)


def _twice_lazy(saved, like):
    part = ec.lazy(lambda x, y: x * y)(saved[1:], np.arange(4, dtype=np.float32))
    return ec.lazy(lambda x, y, z: (x + y).T * z)(part, saved[:-1], 2.0)[1:3]


@pytest.mark.parametrize(
    "how, expected",
    [
        ([_squared], np.square),
        ([_squared, adapt.transpose()], lambda x: np.square(x).T),
        ([_squared, adapt.cast()], lambda x: np.square(x).astype(np.float16)),
        ([adapt.transpose(), _squared], lambda x: np.square(x.T)),
        (
            [lambda saved, like: _squared(saved, like).astype(jnp.bfloat16)],
            lambda x: np.square(x).astype(jnp.bfloat16),
        ),
        ([_squared, _squared], lambda x: x**4),
        (
            [lambda saved, like: adapt.transpose()(_squared(saved, like), like)],
            lambda x: np.square(x).T,
        ),
        (
            [_twice_lazy],
            lambda x: ((x[1:] * np.float32([0, 1, 2, 3]) + x[:-1]).T * 2)[1:3],
        ),
    ],
)
def test_what_ec_lazy_makes(tmp_path, how, expected):
    x = _saved((3, 4))
    wanted = jnp.asarray(expected(x)).astype(expected(x).dtype)
    out = _graft(tmp_path, x, jnp.zeros_like(wanted), *how)
    assert out.dtype == wanted.dtype
    np.testing.assert_array_equal(out, wanted)


def test_what_ec_lazy_makes_of_several(tmp_path):
    x = _saved((2, 3))
    both = {"a": x, "b": x + 1}
    right = lambda c: [c.a, c.b]

    def joined(saved, like):
        return ec.lazy(lambda a, b: jnp.stack([a, b]))(*saved)

    out = _graft(tmp_path, both, jnp.zeros((2, 2, 3)), joined, right=right)
    np.testing.assert_array_equal(out, [x, x + 1])

    def parted(saved, like):
        return tuple(ec.lazy(lambda y, i=i: y[i] * 2)(saved) for i in range(2))

    model = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    left = lambda m: [m["a"], m["b"]]
    out = _graft(tmp_path, x, model, parted, left=left)
    np.testing.assert_array_equal([out["a"], out["b"]], x * 2)
    tied = dict.fromkeys("ab", model["a"])
    for how, factor in ((parted, 2), (adapt.unstack(), 1)):
        out = _graft(tmp_path, x, tied, how, left=left)
        np.testing.assert_array_equal([out["a"], out["b"]], x * factor)

    def joined_here(saved, like):
        return adapt.concatenate()([_squared(x, like) for x in saved], like)

    out = _graft(tmp_path, both, jnp.zeros((4, 3)), joined_here, right=right)
    np.testing.assert_array_equal(out, np.concatenate([x**2, (x + 1) ** 2]))
    with pytest.raises(RuntimeError, match="90000 does not fit into int8"):
        narrow = lambda saved, like: _squared(saved, like).astype(jnp.int8)
        _graft(tmp_path, np.array([300, -5], np.int32), jnp.zeros(2, jnp.int8), narrow)


def test_a_merge_in_an_adapter_is_that_merge(tmp_path):
    """Its thresholds are of blocks."""
    rng = np.random.default_rng(0)
    tree = {x: rng.normal(size=(2000, 1200)).astype(np.float32) for x in "abc"}
    ec.tree_serialise_leaves(tmp_path / "x", tree)
    ckpt = ec.open(tmp_path / "x")
    method = ec.merging.ties([0.7, 0.3], density=0.3)

    def merged(saved, like):
        return ec.merge([saved, ckpt.tree.b], method, base=ckpt.tree.c)

    pair = (lambda m: m, lambda c: c.a, merged)
    like = jnp.zeros((2000, 1200))
    out, _ = ec.graft(like, ckpt, [pair], drop=lambda c: [c.b, c.c])
    np.testing.assert_array_equal(out, merged(ckpt.tree.a, like).read())


def test_what_ec_lazy_makes_of_another_checkpoint(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "other", {"w": _saved(3)})
    other = ec.open(tmp_path / "other").tree.w
    mixed = lambda saved, like: ec.lazy(jnp.add)(saved, other)
    with pytest.raises(RuntimeError, match=r"`w` is of another checkpoint"):
        _graft(tmp_path, _saved(3), jnp.zeros(3), mixed)


def test_what_ec_lazy_makes_of_damage(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"w": _saved((300, 300))})
    damage(tmp_path / "x")
    with pytest.raises(ec.DamagedError, match="w: its bytes"):
        ec.graft(jnp.zeros((300, 300)), tmp_path / "x", [(lambda m: m, "w", _squared)])


@pytest.mark.parametrize("only", [[True, False], np.array([True]), [1.5], 2, "ab"])
def test_what_names_no_nodes_of_a_stack(only):
    """A mask is no list of numbers: 1 and 0 would be loaded."""
    with pytest.raises(TypeError, match="`only` must be None or a list of numbers of"):
        adapt.unstack(only=only)
