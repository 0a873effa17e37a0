"""The methods against plain NumPy, whole and by blocks."""

import math
import pickle

import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import inside

from eqx_ckpt import merging
from eqx_ckpt.merging import _methods


SHAPE = (37, 50)
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def _trees(count, dtype, shape=SHAPE, seed=0):
    """A base, and trees near it."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=shape)
    some = [base + 0.1 * rng.normal(size=shape) for _ in range(count)]
    return [x.astype(dtype) for x in (base, *some)]


def _merge(method, blocks, name="w", cut=None, looks=None):
    """Whole, or in blocks of `cut` rows and columns; `looks` are rows seen at once."""
    leaf = inside.merging(method, name, blocks)
    state = None
    if method.look:
        step = looks or len(blocks[0])
        rows = range(0, len(blocks[0]), step)
        state = leaf.look([x[i : i + step] for x in blocks] for i in rows)
    if cut is None:
        cut = blocks[0].shape
    out = np.empty_like(blocks[0])
    for i in range(0, SHAPE[0], cut[0]):
        for j in range(0, SHAPE[1], cut[1]):
            part = (slice(i, i + cut[0]), slice(j, j + cut[1]))
            some = [x[part] for x in blocks]
            out[part] = leaf.combine(some, state, (i, j))
    return out


# ---- The formulas, of arrays that are in memory whole.


def _slerp(t, x, y):
    a, b = x.ravel() / np.linalg.norm(x), y.ravel() / np.linalg.norm(y)
    angle = np.arccos(a @ b)
    return (np.sin((1 - t) * angle) * x + np.sin(t * angle) * y) / np.sin(angle)


def _stock(base, *trees):
    """Equations 5 and 6 of the paper, of each pair."""
    n, tasks = len(trees), [(x - base).ravel() for x in trees]
    units = [x / np.linalg.norm(x) for x in tasks]
    cos = np.mean([units[i] @ units[j] for i in range(n) for j in range(i)])
    t = n * cos / (1 + (n - 1) * cos)
    return t * sum(trees) / n + (1 - t) * base


def _kept(task, density, gamma=0.0):
    """The task vector without the smallest and the largest magnitudes."""
    sizes = np.sort(np.abs(task).ravel())[::-1]
    top = int(gamma * task.size)
    least = sizes[min(task.size, top + max(1, round(density * task.size))) - 1]
    above = sizes[top - 1] if top else np.inf
    return np.where((np.abs(task) >= least) & (np.abs(task) < above), task, 0)


def _fused(weights, tasks, base, normalize, lambda_=1.0, elect=False):
    """The base, and the sum of the weighted task vectors over what `normalize` says."""
    tasks = np.stack([w * x for w, x in zip(weights, tasks)])
    agree = np.ones(tasks.shape, bool)
    if elect:
        agree = (np.sign(tasks) == np.sign(tasks.sum(0))) & (tasks != 0)
    weights = np.reshape(weights, (-1, *[1] * base.ndim))
    by = {None: np.ones(base.shape), "count": agree.sum(0)}
    by["weights"] = (agree * weights).sum(0)
    divisor = np.where(by[normalize] == 0, 1, by[normalize])
    return base + lambda_ * (agree * tasks).sum(0) / divisor


def _dropped(task, number, density, epsilon=0.0, rescale=True):
    at = np.arange(task.size, dtype=np.uint64).reshape(task.shape)
    ranks = np.abs(task).argsort(1, kind="stable").argsort(1) / (task.shape[1] - 1)
    chance = density + epsilon * (ranks - 0.5)
    mask = _methods.uniform(DATA, "w", number, at) < chance
    return mask * task / np.asarray(chance if rescale else 1, task.dtype)


KEY = jr.key(3)
DATA = np.asarray(jr.key_data(KEY)).tobytes()


def _tasks(change, *sides):
    base, *trees = sides
    return [change(tree - base, i) for i, tree in enumerate(trees)]


def _of_tasks(weights, normalize, change=lambda x, i: x, **more):
    return lambda base, *trees: _fused(
        weights, _tasks(change, base, *trees), base, normalize, **more
    )


def _ties(weights, density, normalize="count", lambda_=1.0):
    keep = lambda x, i: _kept(x, density)
    return _of_tasks(weights, normalize, keep, lambda_=lambda_, elect=True)


METHODS = {
    "average": (merging.average(), lambda _, a, b, c: (a + b + c) / 3),
    "weighted": (
        merging.average([1, 2, -0.5]),
        lambda _, a, b, c: (a + 2 * b - 0.5 * c) / 2.5,
    ),
    "ema": (
        merging.ema(0.9),
        lambda _, a, b, c: 0.9 * (0.9 * a + 0.1 * b) + 0.1 * c,
    ),
    "slerp": (merging.slerp(0.3), lambda _, a, b: _slerp(0.3, a, b)),
    "stock": (merging.model_stock(), _stock),
    "stock of 2": (merging.model_stock(), _stock),
    "task": (merging.task_arithmetic(0.4), _of_tasks([0.4] * 3, None)),
    "tasks": (merging.task_arithmetic([1, -1]), _of_tasks([1, -1], None)),
    "task by count": (
        merging.task_arithmetic([1, 2, 4], normalize="count", lambda_=0.5),
        _of_tasks([1, 2, 4], "count", lambda_=0.5),
    ),
    "task by weights": (
        merging.task_arithmetic([1, 2, 4], normalize="weights", lambda_=0.5),
        _of_tasks([1, 2, 4], "weights", lambda_=0.5),
    ),
    "ties": (merging.ties(1.5, 0.2), _ties([1.5] * 3, 0.2)),
    "weighted ties": (merging.ties([1, 0.5, 2], 0.7), _ties([1, 0.5, 2], 0.7)),
    "ties by weights": (
        merging.ties([1, 0.5, 2], 0.4, normalize="weights", lambda_=0.7),
        _ties([1, 0.5, 2], 0.4, "weights", 0.7),
    ),
    "ties by none": (
        merging.ties([1, 0.5, 2], 0.4, normalize=None),
        _ties([1, 0.5, 2], 0.4, None),
    ),
    "breadcrumbs": (
        merging.breadcrumbs([1, 0.5, 2], 0.6, 0.1, lambda_=0.5),
        _of_tasks([1, 0.5, 2], None, lambda x, i: _kept(x, 0.6, 0.1), lambda_=0.5),
    ),
    "dare": (
        merging.dare([1, 0.5], 0.3, KEY),
        _of_tasks([1, 0.5], None, lambda x, i: _dropped(x, i, 0.3)),
    ),
    "dare, no rescale": (
        merging.dare([1, 0.5], 0.3, KEY, rescale=False, normalize="weights"),
        _of_tasks([1, 0.5], "weights", lambda x, i: _dropped(x, i, 0.3, rescale=False)),
    ),
    "dare ties": (
        merging.dare_ties([1, 0.5, 1], 0.6, KEY),
        _of_tasks([1, 0.5, 1], "count", lambda x, i: _dropped(x, i, 0.6), elect=True),
    ),
    "della": (
        merging.della([1, 0.5, 1], 0.5, 0.6, KEY, lambda_=1.1),
        _of_tasks(
            [1, 0.5, 1],
            "count",
            lambda x, i: _dropped(x, i, 0.5, 0.6),
            lambda_=1.1,
            elect=True,
        ),
    ),
}
COUNTS = {"slerp": 2, "stock of 2": 2, "tasks": 2, "dare": 2, "dare, no rescale": 2}
# Of them each part of a leaf is as of the whole, with any columns.
BY_ROWS = {"della"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_as_numpy(name, dtype):
    method, reference = METHODS[name]
    base, *trees = _trees(COUNTS.get(name, 3), dtype)
    if name == "slerp":
        trees[1] = -trees[1] + trees[0]  # Otherwise they are on one line, nearly.
    blocks = [base, *trees] if method.base else trees
    found = _merge(method, blocks)
    assert found.dtype == dtype
    # Near a threshold, or of opposite signs, all depends on what it is computed in.
    wide = np.float64 if dtype == np.float64 else np.float32
    expected = reference(*(x.astype(wide) for x in (base, *trees)))
    eps = {np.float64: 1e-6, np.float32: 2e-6}.get(dtype, 2.0**-7)
    assert np.allclose(found.astype(np.float64), expected, rtol=eps, atol=eps)
    # To the bit, however it is cut.
    for cut in ((5, 50), (37, 7), (4, 11)):
        if name not in BY_ROWS or cut[1] == 50:
            assert _merge(method, blocks, cut=cut).tobytes() == found.tobytes()
    again = pickle.loads(pickle.dumps(method))
    assert again == method and _merge(again, blocks).tobytes() == found.tobytes()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_arrays(data):
    """Of few different numbers, so that many magnitudes are equal, and signs cancel."""
    name = data.draw(st.sampled_from(sorted(METHODS)))
    method, reference = METHODS[name]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = COUNTS.get(name, 3) + 1
    base, *trees = rng.integers(-3, 4, (count, *SHAPE)).astype(np.float32) / 4
    found = _merge(method, [base, *trees] if method.base else trees)
    assert np.allclose(found, reference(base, *trees), rtol=1e-5, atol=1e-5)


def test_magnitudes_of_many_blocks_are_told_apart_by_12_bits():
    for name in ("ties", "weighted ties", "breadcrumbs"):
        method, _ = METHODS[name]
        blocks = _trees(3, np.float32)
        leaf = inside.merging(method, "w", blocks)
        (exact, rough) = (
            leaf.look([x[i : i + step] for x in blocks] for i in range(0, 37, step))
            for step in (37, 8)
        )
        for limits in zip(exact, rough):
            for one, other in zip(*limits):
                assert np.isnan(one) == np.isnan(other)
                assert np.isnan(one) or one * (1 - 2**-12) <= other <= one
        found = _merge(method, blocks, looks=8)
        whole = _merge(method, blocks)
        assert np.mean(found != whole) < 0.005


def test_small_dtypes():
    dtype = ml_dtypes.float8_e4m3fn
    trees = [np.full(SHAPE, x, dtype) for x in (1.0, 2.0, 0.5)]
    out = _merge(merging.average([1, 1, 2]), trees)
    assert out.dtype == dtype and (out.astype(float) == 1).all()
    assert (_merge(merging.task_arithmetic(1), trees).astype(float) == 1.5).all()


def test_one_element():
    trees = [np.array(x, np.float32) for x in (1.0, 2.0, 4.0, 0.5)]
    for name, (method, _) in METHODS.items():
        blocks = trees[: COUNTS.get(name, 3) + method.base]
        out = inside.merged(method, "w", blocks)
        assert out.shape == () and out.dtype == np.float32 and np.isfinite(out)


def test_ends_of_slerp():
    a, b = _trees(1, np.float32)
    b = b[::-1]
    assert np.allclose(_merge(merging.slerp(0), [a, b]), a)
    assert np.allclose(_merge(merging.slerp(1), [a, b]), b)
    half = _merge(merging.slerp(0.5), [a, b]).astype(float)
    assert np.isclose(np.linalg.norm(half), np.linalg.norm(a.astype(float)), rtol=1e-2)
    # On one line, or zero: linear.
    for x in (2 * a, -a, 0 * a):
        expected = 0.75 * a.astype(float) + 0.25 * x
        assert np.allclose(_merge(merging.slerp(0.25), [a, x]), expected, atol=1e-6)
    # Squares that float32 does not hold.
    for scale in (1e-25, 1e25):
        large = _merge(merging.slerp(0.5), [a * scale, b * scale]).astype(float)
        assert np.allclose(large, half * scale, rtol=1e-5, atol=1e-6 * scale)


def test_stock_without_an_angle():
    base, one, two = _trees(2, np.float32)
    stock = merging.model_stock()
    assert np.allclose(_merge(stock, [base, one, one]), one)
    assert np.allclose(_merge(stock, [base, one, base]), base)
    assert np.allclose(_merge(stock, [base, one, 2 * base - one]), base)


def test_ties_of_the_paper():
    """Figure 1 in numbers: trim, elect, merge."""
    base = np.zeros(SHAPE, np.float32)
    one, two, three = (base.copy() for _ in range(3))
    one[0, :3] = 3, -1, 0.1
    two[0, :3] = 1, 2, 0.1
    three[0, :3] = -2, 2, -0.1
    out = _merge(merging.ties(1.0, 2 / base.size), [base, one, two, three])
    # Of each the two largest are kept, and those that agree with the sum averaged.
    assert out[0, :4].tolist() == [2, 2, 0, 0] and not out[1:].any()


def test_a_nan_stays():
    base, *trees = _trees(3, np.float32)
    trees[1][3, 4] = np.nan
    for name, (method, _) in METHODS.items():
        some = trees[: COUNTS.get(name, 3)]
        out = _merge(method, [base, *some] if method.base else some)
        if "stock" in name:
            continue  # It has no angle.
        if method.name not in ("dare", "dare_ties", "della", "breadcrumbs"):
            assert np.isnan(out[3, 4]), name
        if name != "slerp":
            assert np.isfinite(out).sum() >= out.size - 1, name


def test_dare_drops_as_it_should():
    base = np.zeros((100, 1000), np.float32)
    trees = [base + 1, base + 1]
    method = merging.dare(1.0, 0.3, KEY)

    def run(method, name="w"):
        return inside.merged(method, name, [base, *trees])

    out = run(method)
    # Two independent masks: 0, 1 or 2 of them are kept.
    shares = [np.mean(np.isclose(out, n / 0.3)) for n in range(3)]
    assert np.allclose(shares, [0.49, 0.42, 0.09], atol=0.01)
    assert (run(method) == out).all()
    for other in (
        run(merging.dare(1.0, 0.3, jr.key(4))),
        run(method, "v"),
    ):
        assert abs(np.corrcoef(other.ravel(), out.ravel())[0, 1]) < 0.02
    rows = np.corrcoef(out[:20])
    assert np.abs(rows - np.eye(20)).max() < 0.2
    assert (run(merging.dare(1.0, 1.0, KEY)) == 2).all()
    # A change here would change what every merge gives.
    at = np.arange(4, dtype=np.uint64)
    assert _methods.uniform(b"key", "w", 1, at).tolist() == PINNED


PINNED = [
    0.6589964584020805,
    0.7579836420962388,
    0.6294679176529123,
    0.9973152168764565,
]


def test_della_keeps_what_is_larger():
    rng = np.random.default_rng(0)
    task = rng.normal(size=(200, 1000)).astype(np.float32)
    method = merging.della(1.0, 0.4, 0.6, KEY, rescale=False)
    kept = inside.merged(method, "w", [np.zeros_like(task), task]) != 0
    by_rank = np.take_along_axis(kept, np.abs(task).argsort(1), 1).mean(0)
    expected = 0.4 + 0.6 * (np.arange(1000) / 999 - 0.5)
    assert np.allclose(
        by_rank.reshape(10, -1).mean(1), expected.reshape(10, -1).mean(1), atol=0.02
    )
    # With them divided by their chance, the mean is as before.
    scaled = merging.della(1.0, 0.4, 0.6, KEY)
    ones = np.ones((200, 1000), np.float32)
    assert np.isclose(inside.merged(scaled, "w", [0 * ones, ones]).mean(), 1, atol=0.02)


def test_what_is_refused():
    for call in (
        lambda: merging.average([1, -1]),
        lambda: merging.average([]),
        lambda: merging.average([math.nan]),
        lambda: merging.ema(1.5),
        lambda: merging.slerp(-0.1),
        lambda: merging.slerp({"w": 2}),
        lambda: merging.slerp([]),
        lambda: merging.slerp("a"),
        lambda: merging.ties(1, 0),
        lambda: merging.ties([[0, math.inf]], 0.5),
        lambda: merging.ties(1, 0.5, normalize="mean"),
        lambda: merging.dare(1, 1.1, KEY),
        lambda: merging.breadcrumbs(1, 0.5, 1.5),
        lambda: merging.della(1, 0.5, {"a": 0.2, "*": [0.2, 1]}, KEY),
        lambda: merging.slerp(0.5).leaves({}, 3),
        lambda: merging.model_stock().leaves({}, 1),
        lambda: merging.ties([1, 2], 0.5).leaves({}, 3),
        lambda: merging.average([1, 2]).leaves({}, 3),
    ):
        # A TypeError where types are checked first.
        with pytest.raises((ValueError, TypeError)):
            call()
    for key in (3, jr.split(KEY)):
        with pytest.raises(TypeError, match="`key` must be"):
            merging.dare(1, 0.5, key)
    with pytest.raises(TypeError, match="`combine` and `look` must be|type hint"):
        merging.Method("mine", None)  # type: ignore
    legacy = np.asarray(jr.key_data(KEY))
    assert merging.dare(1, 0.5, legacy) == merging.dare(1, 0.5, KEY)


# ---- A number for each leaf.

NAMES = [
    "embed.weight",
    *(f"blocks.{i}.{x}" for i in (0, 1, 2, 10) for x in ("attn.0", "mlp")),
    "tied.0.w",
    "head",
]


def _numbers(value, names=NAMES, count=2, option="lambda_"):
    method = merging.task_arithmetic(**{"weights": 1, option: value})
    leaves = method.leaves(dict.fromkeys(names, (3,)), count)
    return [leaves[name].options[option] for name in names]


def test_a_number_for_each_leaf():
    assert _numbers(2) == [2] * 11
    # Over the layers, of which `blocks` has four.
    expected = [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert np.allclose(_numbers([0, 3]), expected)
    assert np.allclose(_numbers([0, 3, 3]), np.minimum(np.array(expected) * 2, 3))
    assert _numbers([4]) == [4] * 11
    patterns = {"*.attn.*": 5, "blocks.1": 6, "blocks": [0, 3], "*": 7}
    assert np.allclose(_numbers(patterns), [7, 5, 0, 5, 6, 5, 2, 5, 3, 7, 7])
    # One for each tree.
    assert _numbers((1, {"head": 5, "*": 2}), option="weights")[-2:] == [(1, 2), (1, 5)]
    # Two stacks, each by its own layers; nothing is a layer of `opt.0.mu`.
    names = [f"opt.0.mu.{x}.{i}" for x, n in (("enc", 3), ("dec", 2)) for i in range(n)]
    assert np.allclose(_numbers([0, 1], names), [0, 0.5, 1, 0, 1])
    for match, value in {
        "`lambda_` has no pattern of the leaf `embed.weight`": {"head": 1},
        "`lambda_` has 'heads', which names no leaf": {"heads": 1, "*": 2},
    }.items():
        with pytest.raises(ValueError, match=match):
            _numbers(value)
    with pytest.raises(ValueError, match="3 weights for 2 trees"):
        _numbers((1, 2, 3), option="weights")
