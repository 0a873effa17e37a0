"""`filter_spec` selects what `eqx.filter` would, on real trees and on skeletons."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support import inside

import eqx_ckpt as ec


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    steps: jax.Array
    half: jax.Array
    key: jax.Array
    rate: float
    depth: int
    on: bool
    activation: object
    text: str
    table: np.ndarray
    nothing: None
    width: int = eqx.field(static=True)

    def __init__(self, width=3, *, key):
        self.linear = eqx.nn.Linear(width, width, key=key)
        self.norm = eqx.nn.LayerNorm(width)
        self.steps = jnp.arange(3)
        self.half = jnp.zeros((), jnp.bfloat16)
        self.key = jr.key(0)
        self.rate = 0.5
        self.depth = 2
        self.on = True
        self.activation = jax.nn.relu
        self.text = "text"
        self.table = np.ones((2, 2))
        self.nothing = None
        self.width = width


def abstract(key):
    """A net as `ec.skeleton` has it: NumPy arrays stay what they are."""
    net = eqx.filter_eval_shape(Net, key=key)
    return eqx.tree_at(lambda net: net.table, net, np.ones((2, 2)))


def selected(spec, tree, is_leaf=None):
    leaves = jtu.tree_leaves(tree, is_leaf=is_leaf)
    return inside.selected(spec, tree, leaves, is_leaf)


def by_equinox(spec, tree):
    out = object()
    filtered = eqx.filter(tree, spec, replace=out)
    return [leaf is not out for leaf in jtu.tree_leaves(filtered)]


def names(ckpt):
    return sorted(ec.open(ckpt).leaves)


filters = {
    "is_array": eqx.is_array,
    "is_inexact_array": eqx.is_inexact_array,
    "is_array_like": eqx.is_array_like,
    "is_inexact_array_like": eqx.is_inexact_array_like,
    "is_storable": ec.is_storable,
    "ndim": lambda x: eqx.is_array(x) and x.ndim > 1,
    "shape": lambda x: getattr(x, "shape", None) == (3,),
    "dtype": lambda x: eqx.is_array(x) and x.dtype == jnp.bfloat16,
    "key": lambda x: eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key),
    "isinstance": lambda x: isinstance(x, jax.Array),
    "partial": ft.partial(lambda n, x: eqx.is_array(x) and x.size > n, 3),
    "float": lambda x: isinstance(x, float),
    "text": lambda x: isinstance(x, str),
    "number": lambda x: 1 if eqx.is_array(x) else 0,
    "True": True,
    "False": False,
}


@pytest.mark.parametrize("name", filters)
def test_as_in_equinox(getkey, name):
    spec, net = filters[name], Net(key=getkey())
    assert selected(spec, net) == by_equinox(spec, net)
    assert name == "False" or any(selected(spec, net))


@pytest.mark.parametrize("name", filters)
def test_a_skeleton_has_the_same_leaves_selected_as_the_model(getkey, name):
    spec, net = filters[name], Net(key=getkey())
    skeleton = abstract(getkey())
    assert isinstance(skeleton.linear.weight, jax.ShapeDtypeStruct)
    assert selected(spec, skeleton) == selected(spec, net)


def test_on_a_skeleton_equinox_itself_selects_nothing(getkey):
    # So this is what the tests above are about.
    skeleton = eqx.filter_eval_shape(eqx.nn.Linear, 2, 2, key=getkey())
    assert by_equinox(eqx.is_array, skeleton) == [False, False]
    assert selected(eqx.is_array, skeleton) == [True, True]


def test_lazy_leaves_are_seen_as_tracers_too(tmp_path, getkey):
    model = eqx.nn.Linear(3, 2, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", model)
    lazy = ec.open(tmp_path / "a").splice(model)
    assert selected(eqx.is_array, lazy) == [True, True]
    assert selected(lambda x: x.ndim > 1, lazy) == [True, False]


# ---- Prefixes.

tree = {
    "a": (1.0, jnp.ones(2), [np.ones(3), "s"]),
    "b": {"c": jnp.zeros((2, 2)), "d": (), "e": None},
    "f": print,
}
specs = st.sampled_from([True, False, eqx.is_array, eqx.is_array_like, callable])


@st.composite
def prefixes(draw, node=tree):
    if jtu.all_leaves([node]) or draw(st.integers(0, 2)) == 0:
        return draw(specs)
    children, structure = jtu.tree_flatten(node, is_leaf=lambda x: x is not node)
    return jtu.tree_unflatten(structure, [draw(prefixes(x)) for x in children])


@given(prefixes())
def test_prefixes_are_as_in_equinox(spec):
    assert selected(spec, tree) == by_equinox(spec, tree)


def test_a_tree_of_bools_made_by_tree_map(tmp_path, getkey):
    net = Net(key=getkey())
    spec = jtu.tree_map(lambda _: False, net)
    spec = eqx.tree_at(lambda n: n.linear, spec, True)
    ec.tree_serialise_leaves(tmp_path / "a", net, spec)
    assert names(tmp_path / "a") == ["linear.bias", "linear.weight"]
    like = abstract(getkey())
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", like, spec)
    assert eqx.tree_equal(loaded.linear, net.linear)
    assert loaded.norm.weight is like.norm.weight
    assert isinstance(loaded.steps, jax.ShapeDtypeStruct)


@pytest.mark.parametrize(
    "spec",
    [
        {"a": True},
        {"a": True, "b": True, "f": True, "g": True},
        {"a": [True, True, True], "b": True, "f": True},
        {"a": (True, True), "b": True, "f": True},
        {"a": ((True, True), True, True), "b": True, "f": True},
        {"a": True, "b": True, "f": None},
        [True],
        None,
        (),
    ],
)
def test_another_structure_is_refused(tmp_path, spec):
    with pytest.raises(ValueError, match="a pytree prefix of the tree made of those:"):
        ec.tree_serialise_leaves(tmp_path / "a", tree, spec)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("spec", [1, "a", 1.0, {"a": 1, "b": True, "f": True}])
def test_what_is_neither_a_bool_nor_a_function_is_refused(tmp_path, spec):
    with pytest.raises(TypeError, match="must be a bool, a function of a leaf"):
        ec.tree_serialise_leaves(tmp_path / "a", tree, spec)


def test_numpy_bools_are_bools():
    assert selected(np.True_, [1, 2]) == [True, True]
    assert selected([np.False_, True], [1, 2]) == [False, True]


def test_is_leaf():
    def is_none(x):
        return x is None

    pair = [None, 1.0]
    assert selected(True, pair, is_none) == [True, True]
    assert selected(ec.is_storable, pair, is_none) == [False, True]
    assert selected([is_none, True], pair, is_none) == [True, True]
    # Not in step with the leaves, below or above them.
    for spec, is_leaf in (
        ([None, True], is_none),
        ([(True, False)], lambda x: isinstance(x, tuple)),
    ):
        nodes = pair if is_leaf is is_none else [(1.0, 2.0)]
        with pytest.raises(ValueError, match="does not end at what `is_leaf` takes"):
            selected(spec, nodes, is_leaf)


def test_a_spec_is_not_asked_whether_it_is_a_leaf():
    # A function that knows the leaves of the tree alone.
    def is_leaf(x):
        assert not isinstance(x, bool)
        return isinstance(x, tuple)

    assert selected([True, False], [(1.0, 2.0), 3.0], is_leaf) == [True, False]


# ---- Results that are no bools.


@pytest.mark.parametrize("skeleton", [False, True])
def test_the_value_of_a_leaf_is_no_bool(tmp_path, getkey, skeleton):
    model = eqx.nn.Linear(2, 2, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", model)
    like = eqx.filter_eval_shape(lambda: model) if skeleton else model
    with pytest.raises(TypeError, match="`filter_spec` gave a .* must give a bool"):
        ec.tree_deserialise_leaves(tmp_path / "a", like, lambda x: x)


def test_a_filter_of_values_cannot_be_asked_of_a_skeleton(tmp_path, getkey):
    model = eqx.nn.Linear(2, 2, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", model, lambda x: (x != 0).any())
    assert names(tmp_path / "a") == ["bias", "weight"]
    like = eqx.filter_eval_shape(lambda: model)
    with pytest.raises(TypeError, match="must give a bool"):
        ec.tree_deserialise_leaves(tmp_path / "a", like, lambda x: (x != 0).any())


def test_errors_of_a_filter_come_through(tmp_path):
    def spec(x):
        raise KeyError("mine")

    for leaf in (1.0, jax.ShapeDtypeStruct((), jnp.float32)):
        with pytest.raises(KeyError, match="mine"):
            selected(spec, [leaf])


# ---- Equinox's own specs.


class TwoArguments:
    def __call__(self, f, x):
        return None


@pytest.mark.parametrize(
    "spec",
    [
        eqx.default_serialise_filter_spec,
        eqx.default_deserialise_filter_spec,
        lambda f, x: np.save(f, x),
        ft.partial(lambda a, f, x: None, 0),
        TwoArguments(),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_equinox_specs_are_refused_with_advice(tmp_path, spec, nested):
    spec = {"w": spec} if nested else spec
    with pytest.raises(TypeError, match="takes two arguments, like Equinox's") as e:
        ec.tree_serialise_leaves(tmp_path / "a", {"w": 1.0}, spec)
    assert "pass a function `leaf -> bool`" in str(e.value)
    assert "ec.is_storable(x) and not isinstance(x, jax.Array)" in str(e.value)
    assert not (tmp_path / "a").exists()
    ec.tree_serialise_leaves(tmp_path / "a", {"w": 1.0})
    for like in (1.0, jax.ShapeDtypeStruct((), jnp.float32)):
        with pytest.raises(TypeError, match="takes two arguments"):
            ec.tree_deserialise_leaves(tmp_path / "a", {"w": like}, spec)


def test_functions_with_more_arguments_that_need_one_are_taken():
    for spec in (lambda x, y=0: True, lambda *args: len(args) == 1, bool):
        assert selected(spec, [1.0]) == [True]


# ---- What a filter means for a save and for a load.


def test_saved_and_loaded_with_one_filter(tmp_path, getkey):
    net = Net(key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", net, eqx.is_inexact_array)
    assert names(tmp_path / "a") == [
        "half",
        "linear.bias",
        "linear.weight",
        "norm.bias",
        "norm.weight",
        "table",
    ]
    like = abstract(getkey())
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", like, eqx.is_inexact_array)
    assert eqx.tree_equal(loaded.linear, net.linear)
    # What the filter leaves out is neither missing nor changed.
    assert loaded.steps == like.steps and loaded.rate == 0.5
    with pytest.raises(RuntimeError, match="5 missing"):
        ec.tree_deserialise_leaves(tmp_path / "a", like)


def test_unexpected_leaves_are_those_that_the_filter_selects(tmp_path):
    saved = {
        "w": jnp.ones(2),
        "jax": jnp.ones(3),
        "key": jr.key(0),
        "numpy": np.ones(4),
        "generic": np.float64(1),
        "float": 1.0,
        "text": "text",
    }
    ec.tree_serialise_leaves(tmp_path / "a", saved, lambda x: True)
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}

    def unexpected(spec):
        try:
            ec.tree_deserialise_leaves(tmp_path / "a", like, spec)
        except RuntimeError as e:
            lines = str(e).splitlines()
            at = lines.index("  unexpected: in the checkpoint, not in `like`:")
            names = [x for x in lines[at + 1 :] if x.startswith("    ")]
            return sorted(x.split()[0] for x in names)
        return []

    assert unexpected(ec.is_storable) == ["float", "generic", "jax", "key", "numpy"]
    assert unexpected(eqx.is_array) == [
        name for name in sorted(saved) if name != "w" and eqx.is_array(saved[name])
    ]
    assert unexpected(lambda x: isinstance(x, jax.Array)) == ["jax", "key"]
    for cls, name in ((np.ndarray, "numpy"), (np.generic, "generic"), (float, "float")):
        # What was saved is seen as what it was.
        spec = lambda x: isinstance(x, cls) or np.shape(x) == (2,)  # noqa: B023
        expected = ["float", "generic"] if cls is float else [name]
        assert unexpected(spec) == expected  # np.float64 is a float.
    assert unexpected(lambda x: isinstance(x, jax.Array) and x.shape == (2,)) == []
    assert unexpected(True) == sorted(set(saved) - {"w"})
    assert unexpected(lambda x: isinstance(x, (str, jax.Array))) == [
        "jax",
        "key",
        "text",
    ]


def test_unexpected_leaves_below_a_prefix(tmp_path):
    saved = {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0, "y": 4.0}}
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    like = {"a": {"x": 0.0}, "b": {"x": 0.0}}
    with pytest.raises(RuntimeError) as e:
        ec.tree_deserialise_leaves(tmp_path / "a", like, {"a": True, "b": False})
    assert "    a.y  float" in str(e.value) and "b.y" not in str(e.value)
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a", like, {"a": {"x": True}, "b": False}, unexpected="ignore"
    )
    assert loaded == {"a": {"x": 1.0}, "b": {"x": 0.0}}


def test_a_filter_that_selects_nothing_is_an_error(tmp_path, getkey):
    model = eqx.nn.Linear(2, 2, key=getkey())
    with pytest.raises(ValueError, match="Nothing to save"):
        ec.tree_serialise_leaves(tmp_path / "a", model, False)
    assert not (tmp_path / "a").exists()
    ec.tree_serialise_leaves(tmp_path / "a", model)
    with pytest.raises(ValueError, match="Nothing to load"):
        ec.tree_deserialise_leaves(tmp_path / "a", model, lambda x: False)
    for make in (eqx.nn.Linear, lambda: model):
        with pytest.raises(ValueError, match="`like` is a function or a class"):
            ec.tree_deserialise_leaves(tmp_path / "a", make)
    skeleton = eqx.filter_eval_shape(lambda: model)
    with pytest.raises(ValueError, match="pass the whole skeleton"):
        ec.tree_deserialise_leaves(tmp_path / "a", eqx.filter(skeleton, eqx.is_array))
