"""Numbers of merge methods that fit no tree, or that nobody would see."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec
from eqx_ckpt import merging


A, B = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, 6.0])}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: merging.average(x),
        lambda x: merging.task_arithmetic(x),
        lambda x: merging.ties(x, 0.5),
        lambda x: merging.ties([1, 1], density=x),
    ],
)
@pytest.mark.parametrize("around", [lambda x: x, lambda x: {"*": x}])
def test_there_is_one_for_each_tree(make, around, count):
    method = make(around((0.5,) * count))
    base = {"base": A} if method.base else {}
    with pytest.raises(ValueError, match=f"There are {count} .* for 2 trees"):
        ec.merge([A, B], method, **base)


@pytest.mark.parametrize("around", [lambda x: x, lambda x: {"*": x}])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: merging.ema(x),
        lambda x: merging.slerp(x),
        lambda x: merging.task_arithmetic(1, lambda_=x),
        lambda x: merging.ties(1, 0.5, lambda_=x),
    ],
)
def test_one_number_for_all_trees(make, around):
    with pytest.raises(ValueError, match="is one number for all trees"):
        make(around((0.5, 0.5)))


@pytest.mark.parametrize("weights", [1, {"*": 1}, {"w": [0.9, 0.1], "*": 1}])
def test_an_average_has_a_weight_for_each_tree(weights):
    said = "must be one for each tree|type hint"  # Where types are checked first.
    with pytest.raises((ValueError, TypeError), match=said):
        merging.average(weights)


@pytest.mark.parametrize("size", [1e-300, 1e-50, 1.0, 3.0, 1e39, 1e308])
def test_weights_of_any_size(size):
    merged = ec.merge([A, B], merging.average([size, size]))["w"]
    assert np.asarray(merged).tolist() == [2, 4]


def test_a_pattern_that_another_one_hides():
    weights = [{"w": 1, "*": 1}, {"*": 1, "w": 5}]
    with pytest.raises(ValueError, match="'w', which names no leaf"):
        ec.merge([A, B], merging.average(weights))


def test_one_array_has_one_number():
    tied = [{"a": x["w"], "h": x["w"]} for x in (A, B)]
    weights = [{"a": 1, "h": 0}, {"a": 0, "h": 1}]
    with pytest.raises(ValueError, match="`a` and `h` are one array"):
        ec.merge(tied, merging.average(weights))
    same = ec.merge(tied, merging.average([{"*": 1}, {"*": 3}]))
    assert same["a"] is same["h"]


def test_layers_whose_numbers_python_does_not_read():
    keys = ("1" * 5000, "0", "1")
    one, two = ({key: jnp.array(x["w"]) for key in keys} for x in (A, B))
    weights = [{"*": [0.0, 1.0]}, {"*": [1.0, 0.0]}]
    merged = ec.merge([one, two], merging.average(weights))
    assert [np.asarray(merged[key]).tolist() for key in "01"] == [[3, 6], [1, 2]]
