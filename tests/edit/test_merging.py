"""The methods against plain NumPy, whole and by blocks."""

import math
import pickle

import jax.random as jr
import ml_dtypes
import numpy as np
import pytest

from eqx_ckpt import merging
from eqx_ckpt._edit import _methods
from eqx_ckpt._edit._methods import MergedLeaf


SHAPE = (37, 50)
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def _trees(count, dtype, shape=SHAPE, seed=0):
    """A base, and trees near it."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=shape)
    some = [base + 0.1 * rng.normal(size=shape) for _ in range(count)]
    return [x.astype(dtype) for x in (base, *some)]


def _merge(method, blocks, name="w", cut=None):
    """Whole, or in blocks of `cut` rows and columns."""
    leaf = MergedLeaf(method, name, blocks[0].shape, blocks[0].dtype)
    state = None
    if method.looks_first:
        rows = range(0, len(blocks[0]), 8)
        state = leaf.look([x[i : i + 8] for x in blocks] for i in rows)
    if cut is None:
        cut = blocks[0].shape
    out = np.empty_like(blocks[0])
    for i in range(0, SHAPE[0], cut[0]):
        for j in range(0, SHAPE[1], cut[1]):
            part = (slice(i, i + cut[0]), slice(j, j + cut[1]))
            some = [x[part] for x in blocks]
            out[part] = leaf.combine(some, state, (i, j))
    return out


def _slerp(t, x, y):
    a, b = x.ravel() / np.linalg.norm(x), y.ravel() / np.linalg.norm(y)
    angle = np.arccos(a @ b)
    return (np.sin((1 - t) * angle) * x + np.sin(t * angle) * y) / np.sin(angle)


def _ties(weights, density, base, *trees):
    """As in section 3 of the paper, with the weights as its scale."""
    tasks = [tree - base for tree in trees]
    for i, task in enumerate(tasks):
        kept = max(1, round(density * task.size))
        least = np.sort(np.abs(task).ravel())[-kept]
        exponent = 2.0 ** (math.frexp(least)[1] - 13)
        tasks[i] = np.where(np.abs(task) >= least // exponent * exponent, task, 0)
    tasks = [weight * task for weight, task in zip(weights, tasks)]
    sign = np.sign(sum(tasks))
    agree = [np.sign(task) == sign for task in tasks]
    count = sum(a & (task != 0) for a, task in zip(agree, tasks))
    total = sum(np.where(a, task, 0) for a, task in zip(agree, tasks))
    return base + np.divide(total, count, out=np.zeros_like(total), where=count > 0)


def _dare(weights, density, key, base, *trees):
    out = base
    for i, (weight, tree) in enumerate(zip(weights, trees)):
        at = np.arange(base.size, dtype=np.uint64).reshape(base.shape)
        mask = _methods.uniform(key, "w", i, at) < density
        out = out + weight * mask * (tree - base) / density
    return out


KEY = jr.key(3)
DATA = np.asarray(jr.key_data(KEY)).tobytes()
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
    "task": (
        merging.task_arithmetic(0.4),
        lambda o, a, b, c: o + 0.4 * (a - o) + 0.4 * (b - o) + 0.4 * (c - o),
    ),
    "tasks": (
        merging.task_arithmetic([1, -1]),
        lambda o, a, b: o + (a - o) - (b - o),
    ),
    "ties": (
        merging.ties(1.5, 0.2),
        lambda *x: _ties([1.5] * 3, 0.2, *x),
    ),
    "weighted ties": (
        merging.ties([1, 0.5, 2], 0.7),
        lambda *x: _ties([1, 0.5, 2], 0.7, *x),
    ),
    "dare": (
        merging.dare([1, 0.5], 0.3, KEY),
        lambda *x: _dare([1, 0.5], 0.3, DATA, *x),
    ),
}
COUNTS = {"slerp": 2, "tasks": 2, "dare": 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_as_numpy(name, dtype):
    method, reference = METHODS[name]
    count = COUNTS.get(name, 3)
    method.check(count)
    base, *trees = _trees(count, dtype)
    if name == "slerp":
        trees[1] = -trees[1] + trees[0]  # Otherwise they are on one line, nearly.
    blocks = [base, *trees] if method.has_base else trees
    found = _merge(method, blocks)
    assert found.dtype == dtype
    # What a merge does in float32 the reference does in float64: near to a threshold
    # a magnitude may be trimmed in one of the two.
    wide = [x.astype(np.float64) for x in (base, *trees)]
    if dtype != np.float64 and "ties" in name:
        wide = [x.astype(np.float32) for x in wide]
    expected = reference(*wide)
    eps = {np.float64: 1e-13, np.float32: 2e-6}.get(dtype, 2.0**-7)
    assert np.allclose(found.astype(np.float64), expected, rtol=eps, atol=eps)
    # To the bit, however it is cut.
    for cut in ((5, 50), (37, 7), (4, 11)):
        assert _merge(method, blocks, cut=cut).tobytes() == found.tobytes()
    assert (
        _merge(pickle.loads(pickle.dumps(method)), blocks).tobytes() == found.tobytes()
    )


def test_small_dtypes():
    dtype = ml_dtypes.float8_e4m3fn
    trees = [np.full(SHAPE, x, dtype) for x in (1.0, 2.0, 0.5)]
    out = _merge(merging.average([1, 1, 2]), trees)
    assert out.dtype == dtype and (out.astype(float) == 1).all()
    assert (_merge(merging.task_arithmetic(1), trees).astype(float) == 1.5).all()


def test_one_element():
    trees = [np.array(x, np.float32) for x in (1.0, 2.0, 4.0)]
    for name, (method, reference) in METHODS.items():
        blocks = trees[: COUNTS.get(name, 3) + method.has_base]
        if len(blocks) < 3 + method.has_base and name not in COUNTS:
            blocks = [*blocks, np.array(0.5, np.float32)]
        leaf = MergedLeaf(method, "w", (), np.dtype(np.float32))
        state = None
        if method.looks_first:
            state = leaf.look([blocks])
        out = leaf.combine(blocks, state, ())
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
    base, *trees = _trees(2, np.float32)
    trees[1][3, 4] = np.nan
    for name, (method, _) in METHODS.items():
        if COUNTS.get(name, 3) == 2 or name in ("ties", "average", "ema", "task"):
            some = [*trees, trees[0]][: COUNTS.get(name, 3)]
            blocks = [base, *some] if method.has_base else some
            out = _merge(method, blocks)
            if name != "dare":
                assert np.isnan(out[3, 4]), name
            if name != "slerp":
                assert np.isfinite(out).sum() >= out.size - 1


def test_dare_drops_as_it_should():
    base = np.zeros((100, 1000), np.float32)
    trees = [base + 1, base + 1]
    method = merging.dare(1.0, 0.3, KEY)

    def run(method, name="w"):
        leaf = MergedLeaf(method, name, base.shape, base.dtype)
        return leaf.combine([base, *trees], None, (0, 0))

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


def test_what_is_refused():
    for call in (
        lambda: merging.average([1, -1]),
        lambda: merging.average([]),
        lambda: merging.average([math.nan]),
        lambda: merging.ema(1.5),
        lambda: merging.slerp(-0.1),
        lambda: merging.ties(1, 0),
        lambda: merging.dare(1, 1.1, KEY),
        lambda: merging.slerp(0.5).check(3),
        lambda: merging.ties([1, 2], 0.5).check(3),
        lambda: merging.average([1, 2]).check(3),
    ):
        with pytest.raises(ValueError):
            call()
    for key in (3, jr.split(KEY)):
        with pytest.raises(TypeError, match="`key` must be"):
            merging.dare(1, 0.5, key)
    legacy = np.asarray(jr.key_data(KEY))
    assert merging.dare(1, 0.5, legacy) == merging.dare(1, 0.5, KEY)
