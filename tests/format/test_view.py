"""A view is NumPy's indexing: the same shape, the same elements."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import assume, example, given, strategies as st
from support.helpers import examples

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _view
from eqx_ckpt._kernel._storage import _arrays


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
step = st.one_of(st.none(), st.integers(-4, 4).filter(bool))
end = st.one_of(st.none(), st.integers(-7, 7))
slices = st.builds(slice, end, end, step)


def numbered(shape):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


@st.composite
def keys(draw, shape, new=True):
    """A key of NumPy's basic indexing for an array of this shape."""
    out = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        number = st.integers(-n, n - 1).map(draw(st.sampled_from([int, np.int32])))
        out.append(draw(st.one_of(slices, number) if n else slices))
    if draw(st.booleans()):
        # What follows `...` counts from the end.
        at = draw(st.integers(0, len(out)))
        tail = []
        for n in shape[len(shape) - (len(out) - at) :]:
            number = st.integers(-n, n - 1)
            tail.append(draw(st.one_of(slices, number) if n else slices))
        out = [*out[:at], Ellipsis, *tail]
    if new:
        for _ in range(draw(st.integers(0, 2))):
            out.insert(draw(st.integers(0, len(out))), None)
    if len(out) == 1 and draw(st.booleans()):
        return out[0]
    return tuple(out)


@st.composite
def index_arrays(draw, n):
    """An index array, a list or a mask for an axis of this length."""
    if draw(st.integers(0, 3)) == 0:
        mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        return np.array(mask, bool)
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) if n else [0, 2]
    kinds = [np.int64, np.int8, np.uint16, np.uint64]
    dtype = np.dtype(draw(st.sampled_from(kinds)))
    low = 0 if dtype.kind == "u" else -n
    count = math.prod(shape)
    numbers = st.lists(st.integers(low, n - 1), min_size=count, max_size=count)
    array = np.array(draw(numbers) if count else [], dtype).reshape(shape)
    form = draw(st.sampled_from([lambda x: x, jnp.asarray, np.ndarray.tolist]))
    # A list of lists of nothing has lost how many they are.
    return array if form is np.ndarray.tolist and array.size == 0 else form(array)


@st.composite
def advanced(draw, shape):
    """A key with an index array, and all else that NumPy's basic indexing takes."""
    key = draw(keys(shape))
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(parts) if k is Ellipsis]
    given = [i for i, k in enumerate(parts) if k is not None and k is not Ellipsis]
    if not given:
        return key
    at = draw(st.sampled_from(given))
    axis = given.index(at)
    if dots and dots[0] < at:
        axis += len(shape) - len(given)
    parts[at] = draw(index_arrays(shape[axis]))
    return tuple(parts)


@st.composite
def chains(draw):
    """An array, and the keys that index it one after the other ("T": transpose)."""
    array = part = numbered(draw(shapes))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from("Tkka"))
        key = (
            "T"
            if kind == "T"
            else draw((keys if kind == "k" else advanced)(part.shape))
        )
        if kind == "a" and takes_new_axis(follow(array, steps)[0], key):
            continue
        steps.append(key)
        part = part.T if isinstance(key, str) else part[key]
    return array, steps


def takes_new_axis(view, key):
    """Whether an index array is along an axis that is not stored, which is refused."""
    try:
        view.take(key)
    except TypeError as e:
        assert "not along new ones" in str(e)
        return True
    return False


def follow(array, steps):
    """The view that the steps lead to, and what NumPy makes of them."""
    view, expected = _view.whole(array.shape), array
    for key in steps:
        if isinstance(key, str):
            view, expected = view.transpose(), expected.T
        else:
            view, expected = view.take(key), expected[key]
    return view, expected


@examples(600)
@given(chains())
def test_views_are_as_in_numpy(chain):
    array, steps = chain
    view, expected = follow(array, steps)
    assert view.shape == expected.shape
    np.testing.assert_array_equal(view.apply(array), expected)
    assert hash(view) == hash(view._replace())


@examples(300)
@given(chains())
def test_views_are_as_in_tensorstore(chain):
    array, steps = chain
    # TensorStore refuses to read no rows by number from an axis that has none.
    assume(array.size)
    view, expected = follow(array, steps)
    store = _arrays.view(ts.array(array), view.slices(), view.arrays)
    picked = np.asarray(store.read().result())
    np.testing.assert_array_equal(view.arrange(picked), expected)
    store = _arrays.transposed(store, view.order)
    assert store.shape == expected.shape
    np.testing.assert_array_equal(store.read().result(), expected)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    array = numbered((40, 6, 5)).astype(np.int32)
    path = tmp_path_factory.mktemp("view") / "a"
    # In chunks of a few rows, and in one.
    tree = {"many": array, "one": array.copy(), "cut": array + 0}

    def chunks(name, shape, dtype):
        return {"many": (7, 6, 5), "one": None, "cut": (9, 4, 2)}[name]

    ec.tree_serialise_leaves(path, tree, chunks=chunks)
    return array, ec.open(path)


@examples(80)
@given(
    key=st.one_of(keys((40, 6, 5)), advanced((40, 6, 5))),
    verify=st.booleans(),
    name=st.sampled_from(["many", "one", "cut"]),
)
@example(key=(0, slice(2, None, -2)), verify=False, name="many")
@example(key=(39, 5, 4), verify=True, name="many")
@example(key=(39, 5, 4), verify=True, name="one")
def test_views_of_stored_leaves_are_as_in_numpy(stored, key, verify, name):
    array, ckpt = stored
    lazy = ckpt[name][key]
    assert lazy.shape == array[key].shape
    np.testing.assert_array_equal(lazy.read(verify=verify), array[key])
    np.testing.assert_array_equal(lazy.T.read(verify=verify), array[key].T)
    np.testing.assert_array_equal(lazy.store.read().result(), array[key])
    empty = lazy[None, ..., None][0:0]
    assert empty.read(verify=verify).shape == array[key][None, ..., None][0:0].shape
    assert empty[..., 0].T.store.read().result().shape == empty[..., 0].T.shape


def test_errors():
    view = _view.whole((3, 4))
    for key in (3, -4, (0, 4), (..., 4), (0, 0, 0), (..., ...), (0, 0, None, 0)):
        with pytest.raises(IndexError):
            numbered((3, 4))[key]
        with pytest.raises(IndexError):
            view.take(key)
    with pytest.raises(IndexError, match="index 3 is out of bounds .* length 3"):
        view.take(3)
    with pytest.raises(IndexError, match="too many indices for an array of 2 axes"):
        view.take((0, 0, 0))
    with pytest.raises(ValueError, match="step cannot be zero"):
        view.take(slice(None, None, 0))
    for key in (1.0, "a", True, np.True_, [0.5], np.zeros(0), ["a"]):
        with pytest.raises(TypeError, match="lazy arrays take integers, slices"):
            view.take(key)
    with pytest.raises(TypeError, match="take one index array at a time"):
        view.take(([0], [1]))
    with pytest.raises(TypeError, match="take masks of one axis, not of 2"):
        view.take(np.ones((3, 4), bool))
    with pytest.raises(IndexError, match="mask of length 4 is none .* length 3"):
        view.take([True] * 4)
    with pytest.raises(IndexError, match="index -4 is out of bounds .* length 3"):
        view.take([[0, 1], [-4, 2]])
    with pytest.raises(TypeError):
        view.take(slice(0.0, 1))
    with pytest.raises(IndexError, match="out of bounds"):
        view.take(None).take(1)


def test_a_view_of_a_huge_array_takes_no_memory():
    view = _view.whole((2**40, 2**15)).take((slice(None, None, -3), 5)).take(-1)
    assert view.shape == () and view.slices() == ((2**40 - 1) % 3, 5)


def test_transpose_to_an_order(tmp_path):
    array = np.arange(24).reshape(2, 3, 4)
    ec.tree_serialise_leaves(tmp_path / "x", array)
    lazy = ec.open(tmp_path / "x").tree
    for order in itertools.permutations(range(-1, 2)):
        np.testing.assert_array_equal(
            lazy[:, ::2].transpose(*order).read(), array[:, ::2].transpose(order)
        )
    np.testing.assert_array_equal(lazy.transpose().read(), array.T)
    for order in [(0, 1), (0, 1, 1), (0, 1, 3)]:
        with pytest.raises(ValueError, match="is no order of 3 axes"):
            lazy.transpose(*order)
