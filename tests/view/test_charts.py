"""The numbers of a leaf as data to draw."""

import base64
import functools as ft
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

import eqx_ckpt as ec
from eqx_ckpt._edit._sample import parse_index, read_sample, Sample
from eqx_ckpt._view import _charts


def _sample(x):
    return Sample(x, size=np.size(x))


def test_figures_and_norms_are_those_of_stats():
    x = np.array([[3.0, 0.0, -4.0], [np.nan, np.inf, 0.0]], np.float32)
    found = _charts.figures(_sample(x))
    assert found == {
        "min": "-4",
        "max": "3",
        "mean": "-0.25",
        "std": "2.487",
        "norm": "5",
        "zeros": "2 (33.33%)",
        "NaN": "1 (16.67%)",
        "infinite": "1 (16.67%)",
    }
    assert _charts.norm(_sample(x)) == 5.0


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int8", "uint16", "bool", "bfloat16", "float8_e4m3"]
)
def test_histograms_count_each_element(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = (np.random.default_rng(0).normal(size=9000) * 20).astype(dtype)
    found = _charts.histogram([_sample(x)])
    values = x.astype(np.float64)
    values = values[np.isfinite(values)]
    assert sum(found["counts"][0]) + found["outside"][0] == values.size
    expected, _ = np.histogram(
        values, len(found["counts"][0]), (found["lo"], found["hi"])
    )
    # The ends are shown in few digits, which moves an element to the next bin at most.
    assert np.abs(np.cumsum(expected - found["counts"][0])).max() <= 40
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("value", [2**52 - 1, 2**53, 2**60, -(2**63)])
def test_histograms_of_large_whole_numbers(value):
    found = _charts.histogram([_sample(np.full(4, value, np.int64))])
    assert sum(found["counts"][0]) == 4 and not any(found["outside"])


def test_a_picture_of_the_widest_range():
    wide = np.array([[-3e38, 3e38], [1e38, 0]])
    pictures = [_charts.picture([wide.astype(x)]) for x in ("float32", "float64")]
    pictures.append(_charts.picture([wide * (1e308 / 3e38)]))
    for found in pictures:
        grid = np.frombuffer(base64.b64decode(found["grid"]), np.uint8)
        assert grid.tolist() == [0, 254, 169, 127]


def test_two_histograms_have_the_same_bins():
    a, b = np.zeros(10), np.full(20, 8.0)
    found = _charts.histogram([_sample(a), _sample(b)])
    assert found["counts"][0][0] == 10 and found["counts"][1][-1] == 20


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3),
        "text",
        None,
        np.full(5, np.nan),
        np.zeros((0, 3)),
        np.array([-1e308, 1e308] * 9),
        10**400,
    ],
)
def test_what_has_no_histogram(value):
    assert _charts.histogram([_sample(value)]) is None


@pytest.mark.parametrize("value", [np.zeros(9), np.full(9, 3.0), np.arange(9) == 2])
def test_few_values(value):
    found = _charts.histogram([_sample(value)])
    assert sum(found["counts"][0]) == 9 and found["lo"] < value.min()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_widest_range(dtype):
    most = np.finfo(dtype).max / 2
    value = np.array([-0.9 * most, most] * 9, dtype)
    counts = _charts.histogram([_sample(value)])["counts"][0]
    assert [counts[0], counts[-1], sum(counts)] == [9, 9, 18]


def _dots(found):
    height, width = found["size"]
    levels = np.frombuffer(base64.b64decode(found["grid"]), np.uint8)
    return levels.reshape(height, width)


def test_a_picture_shows_the_extremes_of_blocks():
    x = np.zeros((600, 10), np.float32)
    x[301, 4], x[5, 5], x[9, 9] = -2.0, 2.0, np.nan
    found = _charts.picture([x])
    assert (found["size"], found["steps"]) == ([200, 10], [3, 1])
    dots = _dots(found)
    assert (dots[100, 4], dots[1, 5], dots[3, 9], dots[0, 0]) == (0, 254, 255, 127)
    assert (found["lo"], found["hi"], found["is_signed"]) == (-2.0, 2.0, True)


def test_the_picture_of_a_difference():
    a, b = np.ones((4, 4)), np.ones((4, 4))
    b[2, 3] = 5.0
    found = _charts.picture([a, b])
    assert (found["lo"], found["hi"]) == (0.0, 4.0) and _dots(found)[2, 3] == 254


def test_a_curve():
    assert _charts.picture([np.arange(3)])["curve"] == [[0, 1, 2]]
    least, most = _charts.picture([np.arange(1000.0)])["curve"]
    assert (least[0], most[0], len(most)) == (0.0, 3.0, 250)
    assert _charts.picture([np.zeros((2, 2, 2))]) is None


def test_singular_values():
    x = np.random.default_rng(0).normal(size=(30, 80)).astype(np.float32)
    found = _charts.spectrum(_sample(x))
    expected = np.linalg.svd(x, compute_uv=False)
    np.testing.assert_allclose(found["values"], expected, rtol=5e-3)
    assert found["count"] == 30 and 1 < found["effective"] <= 30
    assert _charts.spectrum(_sample(np.full((3, 3), np.inf))) is None
    assert (
        _charts.spectrum(_sample(np.broadcast_to(np.float32(0), (9999, 9999)))) is None
    )


def test_an_index():
    assert parse_index("0, :, -3:") == (0, slice(None), slice(-3, None))
    assert _charts.default_index((2, 3, 4, 5)) == "0, 0, :, :"
    with pytest.raises(ValueError):
        parse_index("__import__('os')")
    with pytest.raises(ValueError):
        parse_index("::::")


@pytest.mark.parametrize("layout", [{}, {"compression": "zstd", "chunks": 2**20}])
def test_large_leaves_are_read_by_a_sample(save, layout):
    """Of 96 MiB a third at most is read, from all over it."""
    x = np.zeros((24, 1024, 1024), np.float32)
    x += np.arange(24, dtype=np.float32)[:, None, None]
    lazy = ec.open(save("large", {"x": x}, **layout))["x"]
    with ec.counting() as bytes_read:
        found = read_sample(lazy)
    assert bytes_read() < 34 * 2**20
    assert found.value.nbytes <= 2**25 and found.said.startswith("A sample: ")
    values = set(np.unique(found.value))
    assert values >= {0, 23} and len(values) >= 8
    norm = float(np.linalg.norm(x.astype(np.float64)))
    assert math.isclose(_charts.norm(found), norm, rel_tol=0.1)
    assert _charts.figures(found)["norm"].startswith("about ")


def test_what_is_no_array(save):
    tree = {"key": jax.random.key(3), "n": 10**30, "text": "<b>", "x": jnp.ones(3)}
    ckpt = ec.open(save("odd", tree))
    values = {name: read_sample(ckpt[name]).value for name in ckpt}
    assert values["key"].tolist() == [0, 3] and values["n"] == 10**30
    assert _charts.words(values["x"]) == "[1.0, 1.0, 1.0]"
    assert _charts.words("y" * 5000) == "y" * 4000 + "..."


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), st.integers(1, 50)
)
def test_a_thinned_line_keeps_its_ends_and_extremes(values, most):
    points = list(zip(range(0, 10 * len(values), 10), values))
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    found = _charts.thinned(points, most)
    if len(finite) <= most:
        assert found == [[x, float(f"{y:.5g}")] for x, y in finite]
        return
    assert len(found) <= most and found[-1][0] == finite[-1][0]
    near = ft.partial(pytest.approx, rel=1e-4, abs=1e-300)
    assert min(x[2] for x in found) == near(min(y for _, y in finite))
    assert max(x[3] for x in found) == near(max(y for _, y in finite))
    # Each point says the same of the steps since the one before it.
    start = -1
    for x, mean, least, greatest in found:
        some = [y for place, y in finite if start < place <= x]
        start = x
        assert (least, greatest) == (near(min(some)), near(max(some)))
        assert mean == pytest.approx(sum(some) / len(some), rel=1e-4, abs=1e-3)
