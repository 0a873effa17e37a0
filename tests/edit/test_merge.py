"""Trees merged by name into lazy leaves: read, sliced, saved."""

import math
import os
import pickle
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from support import inside
from support.helpers import BytesRead

import eqx_ckpt as ec


KEY = jr.key(3)


def _near(base, seed):
    """What a fine-tuning might make of a tree."""
    leaves, structure = jtu.tree_flatten(base)
    keys = jr.split(jr.key(seed), len(leaves))
    new = [
        x + 0.1 * jr.normal(key, x.shape, x.dtype) if eqx.is_inexact_array(x) else x
        for x, key in zip(leaves, keys)
    ]
    return jtu.tree_unflatten(structure, new)


@pytest.fixture(scope="module")
def trees():
    """A base and three trees near it."""
    model = eqx.nn.MLP(6, 3, 40, 2, key=jr.key(0))
    half = eqx.tree_at(
        lambda m: m.layers[1].weight, model, replace_fn=lambda x: x.astype(jnp.bfloat16)
    )
    base = {"model": half, "step": 7, "key": jr.key(1), "ids": jnp.arange(3)}
    return [base, *(_near(base, seed) for seed in (1, 2, 3))]


@pytest.fixture(scope="module")
def saved(trees, tmp_path_factory):
    root = tmp_path_factory.mktemp("merge")
    out = []
    for number, tree in enumerate(trees):
        cut = lambda name, shape, dtype, n=number: (n + 5, *shape[1:])[: len(shape)]
        ec.tree_serialise_leaves(root / str(number), tree, chunks=cut)
        out.append(ec.open(root / str(number)))
    return out


def _median(trees, base, leaf):
    assert leaf.count == 3 and leaf.name.startswith("model.")
    return base + np.median([tree - base for tree in trees], 0)


def _ranked(trees, base, leaf):
    """Of the whole leaf: as the first tree, in the order of the second."""
    assert base is None and trees[0].shape == leaf.shape
    order = trees[1].ravel().argsort().argsort()
    return np.sort(trees[0].ravel())[order].reshape(leaf.shape)


def _distances(blocks, leaf):
    every = [[np.sum(np.abs(x - base), dtype=float) for x in t] for t, base in blocks]
    return np.sum(every, 0)


def _nearest(trees, base, leaf):
    near, far = trees[leaf.state.argmin()], trees[leaf.state.argmax()]
    return near + np.float32(leaf.options["far"]) * (far - near)


METHODS = [
    (ec.merging.average([1, 2, 3]), 3),
    (ec.merging.ema(0.9), 3),
    (ec.merging.slerp(0.3), 2),
    (ec.merging.task_arithmetic([0.5, -0.5, 1]), 3),
    (ec.merging.ties(1.0, 0.2), 3),
    (ec.merging.dare(0.5, 0.4, KEY), 3),
    (ec.merging.dare_ties([1, [0, 0.5, 1], {"model": 2, "*": 1}], 0.4, KEY), 3),
    (ec.merging.della({"*.bias": 0, "*": [0.5, 1]}, 0.5, 0.2, KEY), 3),
    (ec.merging.breadcrumbs(1.0, (0.2, 0.3, 0.4), normalize="count"), 3),
    (ec.merging.model_stock(), 3),
    (ec.merging.Method("own", _median, base=True), 3),
    (ec.merging.Method("own", _ranked, whole=True, least=3), 3),
    (ec.merging.Method("own", _nearest, _distances, {"far": 0.5}, base=True), 3),
]


def test_methods_of_your_own_are_as_those_that_are_here(saved):
    own = ec.merging.Method("own", lambda trees, base, leaf: trees[0][:1], least=2)
    merged = ec.merge(saved, own)
    with pytest.raises(
        ValueError, match=r"`own` gave \[1, 6\] for a block of \[40, 6\]"
    ):
        merged.model.layers[0].weight.read()
    turned = ec.merging.Method("turned", lambda trees, base, leaf: trees[0] * 1j)
    with pytest.raises(ValueError, match="`turned` gave complex numbers for float32"):
        ec.merge(saved, turned).model.layers[0].weight.read()
    one, two = saved[1].tree, {"model": saved[2].tree.model}
    with pytest.raises(ValueError, match="not in all of the trees"):
        ec.merge([one, two], own)
    with pytest.raises(ValueError, match="`own` merges 2 or more trees, not 1"):
        ec.merge([one], own)
    with pytest.raises(ValueError, match="`lambda_` has 'x', which names no leaf"):
        ec.merge(
            [one], ec.merging.task_arithmetic(1, lambda_={"x": 1, "*": 2}), base=one
        )


@pytest.mark.parametrize("method, count", METHODS)
def test_methods(method, count, trees, saved, tmp_path):
    base = saved[0] if method.base else None
    merged = ec.merge(saved[1 : 1 + count], method, base=base)
    ec.tree_serialise_leaves(tmp_path / "out", merged, max_bytes=2**20)
    out = ec.tree_deserialise_leaves(tmp_path / "out", trees[0])
    some = trees[0 if method.base else 1 : 1 + count]
    names = jtu.tree_leaves(ec.leaf_names(trees[0]))
    rows = list(zip(names, jtu.tree_leaves(out), *map(jtu.tree_leaves, some)))
    shapes = {name: x.shape for name, x, *_ in rows if eqx.is_inexact_array(x)}
    for name, found, *leaves in rows:
        if eqx.is_inexact_array(found):
            arrays = [np.asarray(x) for x in leaves]
            expected = inside.merged(method, name, arrays, shapes)
            assert found.dtype == expected.dtype
            assert np.asarray(found).tobytes() == expected.tobytes(), name
    assert not ec.diff(tmp_path / "out", merged)
    assert ec.diff(tmp_path / "out", saved[1])
    assert (out["step"], out["ids"].tolist()) == (7, [0, 1, 2])
    # Of values the same.
    whole = ec.merge(some[-count:], method, base=trees[0] if base else None)
    assert isinstance(whole["model"], eqx.nn.MLP)
    assert not ec.diff(whole, tmp_path / "out")
    w = merged.model.layers[0].weight
    array = np.asarray(out["model"].layers[0].weight)
    assert np.array_equal(w[3:30:4, ::-2].read(), array[3:30:4, ::-2])
    assert np.array_equal(pickle.loads(pickle.dumps(w)).read(), array)
    assert math.isclose(
        ec.stats(merged)["model.layers.0.weight"].norm,
        np.linalg.norm(array.astype(float)),
    )


def test_nodes_stay_nodes(saved):
    merged = ec.merge(saved, ec.merging.average())
    assert merged.model.layers[0].in_features == 6
    assert merged.model.layers[1].weight.dtype == jnp.bfloat16
    assert jtu.tree_structure(merged) == jtu.tree_structure(saved[0].tree)
    again = ec.merge([merged, saved[0]], ec.merging.slerp(0.5))
    assert again.model.layers[0].weight.shape == (40, 6)


def test_nothing_is_read_before(saved):
    with BytesRead() as read:
        merged = ec.merge(saved[1:], ec.merging.ties(1, 0.5), base=saved[0])
    # But for the digests, by which other leaves are compared.
    assert read.total < 10_000
    with BytesRead() as read:
        merged.model.layers[0].bias.read()
    assert read.total < 20_000


def test_kinds_of_leaves():
    one = {
        "numpy": np.ones(3),
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "weak": jnp.asarray(1.0),
        "empty": jnp.zeros((0, 2)),
        "scalar": 0.5,
        "generic": np.float32(2),
        "flag": True,
        "complex": np.ones(2, np.complex64),
        "text": "a",
        "function": jax.nn.relu,
        "none": None,
    }
    two = {**one, "numpy": np.full(3, 2.0), "weak": jnp.asarray(3.0)}
    merged = ec.merge([one, two], ec.merging.average())
    read = ec.materialise(merged)
    assert type(read["numpy"]) is np.ndarray and read["numpy"].tolist() == [1.5] * 3
    assert read["weak"].weak_type and read["weak"] == 2
    assert read["float8"].dtype == ml_dtypes.float8_e4m3fn
    for name in ("empty", "scalar", "generic", "flag", "complex", "text", "function"):
        assert merged[name] is one[name]


def test_what_is_one_array_stays_one(tmp_path):
    w, v = jnp.ones(3), jnp.zeros(3)
    two = [{"a": w, "b": w, "c": w}, {"a": v, "b": v, "c": w}]
    merged = ec.merge(two, ec.merging.average())
    assert merged["a"] is merged["b"] is not merged["c"]
    assert [float(merged[x].read()[0]) for x in "abc"] == [0.5, 0.5, 1]


class Net(eqx.Module):
    w: jax.Array
    width: int = eqx.field(static=True)


def test_one_report_of_what_does_not_fit(saved):
    one = {"w": jnp.ones(3), "n": Net(jnp.ones(2), 1), "i": 1, "k": KEY, "gone": 0.0}
    two = {"w": jnp.ones(4), "n": Net(jnp.ones(2), 2), "i": 2, "k": jr.key(4), "new": 0}
    with pytest.raises(ValueError) as error:
        ec.merge([one, one, two], ec.merging.average())
    assert str(error.value).splitlines() == [
        "The trees do not fit each other; nothing was merged:",
        "  not in all of the trees:",
        "    gone  not in tree 2",
        "    new  int only in tree 2",
        "  of another shape or dtype:",
        "    w  f32[3], in tree 2 f32[4]",
        "  not floating arrays, and not equal (`where` leaves them out):",
        "    i  int, in tree 2 another value",
        "    k  key<threefry2x32>[], in tree 2 another value",
        '  static fields that differ (`static="ignore"` lets them pass, '
        '`static=["*.width"]` those of that name):',
        "    n.width  1, in tree 2 2",
    ]
    where = lambda t: t["n"]
    with pytest.raises(ValueError, match="static fields"):
        ec.merge([one, two], ec.merging.average(), where=where)
    for static in ("ignore", ["*.width"]):
        merged = ec.merge([one, two], ec.merging.average(), where=where, static=static)
        assert merged["n"].width == 1 and merged["w"] is one["w"]
        assert isinstance(merged["n"].w, ec.LazyArray)
    base = eqx.tree_at(lambda t: t["w"], one, jnp.ones((), jnp.int32))
    with pytest.raises(ValueError, match=r"w  f32\[3\], in the base i32\[\]"):
        ec.merge([one, one], ec.merging.ties(1, 0.5), base=base)


def test_what_is_refused(saved):
    average, ties = ec.merging.average(), ec.merging.ties(1, 0.5)
    for match, call in {
        "no trees": lambda: ec.merge([], average),
        "takes a `base`": lambda: ec.merge(saved, ties),
        "takes no `base`": lambda: ec.merge(saved, average, base=saved[0]),
        "`slerp` merges 2 trees, not 4": lambda: ec.merge(saved, ec.merging.slerp(0.5)),
        "2 weights for 4": lambda: ec.merge(saved, ec.merging.average([1, 2])),
        "`static` must be": lambda: ec.merge(saved, average, static="no"),
        "it is abstract": lambda: ec.merge(
            [jax.eval_shape(lambda: {"w": jnp.ones(3)})] * 2, average
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_damage_fails_the_save_and_names_the_leaf(tmp_path):
    for name in "ab":
        tree = {"w": jnp.ones(2**15)}
        ec.tree_serialise_leaves(tmp_path / name, tree, layout="zarr")
    merged = ec.merge([tmp_path / "a", tmp_path / "b"], ec.merging.average())
    (tmp_path / "b" / "w" / "c" / "0").write_bytes(bytes(2**17))
    with pytest.raises(ec.DamagedError, match="w: its bytes are not those"):
        ec.tree_serialise_leaves(tmp_path / "out", merged)
    assert not ec.exists(tmp_path / "out")


def test_small_leaves_are_read_together(tmp_path, monkeypatch):
    opened = []
    open_it = os.open
    monkeypatch.setattr(
        os, "open", lambda *a, **k: opened.append(a) or open_it(*a, **k)
    )
    counts = {}
    for count in (10, 300):
        tree = {f"w{i}": jnp.full(256, i, jnp.float32) for i in range(count)}
        for name in "ab":
            ec.tree_serialise_leaves(tmp_path / f"{name}{count}", tree)
        paths = [tmp_path / f"{name}{count}" for name in "ab"]
        for method in (ec.merging.average(), ec.merging.slerp(0.5)):
            opened.clear()
            merged = ec.materialise(ec.merge(paths, method))
            counts.setdefault(str(method), []).append(len(opened))
            assert eqx.tree_equal(merged, tree)
    assert all(many <= few + 10 for few, many in counts.values()), counts


def _calls_of_a_merge(path, count):
    """How many functions are called to merge so many leaves, and to save that."""
    tree = {f"w{i}": np.full(4, i, np.float32) for i in range(count)}
    ec.tree_serialise_leaves(path, tree, durable=False)
    calls = []

    def merge():
        merged = ec.merge([path] * 2, ec.merging.average())
        ec.tree_serialise_leaves(path.with_name("out"), merged, durable=False)

    merge()
    sys.setprofile(lambda _, event, arg: calls.append(event.endswith("call")))
    try:
        merge()
    finally:
        sys.setprofile(None)
    return sum(calls)


@pytest.mark.skipif("support.checked" in sys.modules, reason="checks are calls too")
def test_a_merge_of_small_leaves_takes_few_calls(tmp_path):
    few, many = (_calls_of_a_merge(tmp_path / str(n), n) for n in (50, 150))
    assert many - few <= 100 * 800
