"""`where` on a tree of ours and `source` on a checkpoint's own: every form of them."""

import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from support.helpers import run_program

import eqx_ckpt as ec


class Block(eqx.Module):
    linear: eqx.nn.Linear
    scale: jax.Array
    index: int = eqx.field(static=True)

    def __init__(self, index, *, key):
        self.linear = eqx.nn.Linear(2, 2, key=key)
        self.scale = jr.normal(key, (2,))
        self.index = index

    def apply(self, x):
        return self.linear(x)


class Net(eqx.Module):
    layers: list
    heads: dict
    pair: tuple
    bias: jax.Array | None
    rate: float
    activation: object
    name: str = eqx.field(static=True)
    sizes: tuple = eqx.field(static=True)
    absent: None = eqx.field(static=True)

    def __init__(self, depth=4, *, key):
        keys = jr.split(key, depth + 3)
        self.layers = [Block(i, key=keys[i]) for i in range(depth)]
        self.heads = {
            "a": eqx.nn.Linear(2, 1, key=keys[-1]),
            "b.c": eqx.nn.Linear(2, 1, use_bias=False, key=keys[-2]),
        }
        self.pair = (jr.normal(keys[-3], (3,)), jnp.arange(3))
        self.bias = None
        self.rate = 0.5
        self.activation = jax.nn.relu
        self.name = "net"
        self.sizes = (2, 2)
        self.absent = None

    @property
    def first(self):
        return self.layers[0]

    def head(self, name="a"):
        return self.heads[name]

    def weights(self):
        return [layer.linear.weight for layer in self.layers]


@ft.cache
def skeleton():
    return eqx.filter_eval_shape(Net, key=jr.key(2))


@ft.cache
def other():
    """A Net of other values."""
    return Net(key=jr.key(2))


def block(i):
    names = ("linear.bias", "linear.weight", "scale")
    return [f"layers.{i}.{name}" for name in names]


A = ["heads.a.bias", "heads.a.weight"]
B = ["heads.b%2Ec.weight"]
PAIR = ["pair.0", "pair.1"]
EVERYTHING = sorted([x for i in range(4) for x in block(i)] + A + B + PAIR + ["rate"])

selectors = {
    "leaf": (lambda m: m.layers[0].scale, ["layers.0.scale"]),
    "scalar": (lambda m: m.rate, ["rate"]),
    "module": (lambda m: m.layers[1], block(1)),
    "last": (lambda m: m.layers[-1], block(3)),
    "list": (lambda m: m.layers, sum(map(block, range(4)), [])),
    "slice": (lambda m: m.layers[1:3], block(1) + block(2)),
    "strided slice": (lambda m: m.layers[::-2], block(1) + block(3)),
    "tuple": (lambda m: m.pair, PAIR),
    "tuple slice": (lambda m: m.pair[1:], ["pair.1"]),
    "comprehension": (
        lambda m: [x.linear.weight for x in m.layers],
        [f"layers.{i}.linear.weight" for i in range(4)],
    ),
    "static fields choose": (
        lambda m: [x for x in m.layers if x.index % 2],
        block(1) + block(3),
    ),
    "types choose": (
        lambda m: [x for x in (*m.layers, m.rate) if isinstance(x, Block)],
        sum(map(block, range(4)), []),
    ),
    "dict": (lambda m: m.heads, A + B),
    "dict entry": (lambda m: m.heads["b.c"], B),
    "dict values": (lambda m: list(m.heads.values()), A + B),
    "dict of our own": (lambda m: {"x": m.heads["a"], "y": m.pair[0]}, A + PAIR[:1]),
    "nest": (
        lambda m: (m.pair, [{"x": (m.rate,)}, [[m.heads["a"]]]]),
        A + PAIR + ["rate"],
    ),
    "overlap": (
        lambda m: (m.layers[0], m.layers[0].scale, m.layers[:2]),
        block(0) + block(1),
    ),
    "twice": (lambda m: [m.rate, m.rate], ["rate"]),
    "property": (lambda m: m.first, block(0)),
    "below a property": (lambda m: m.first.linear, block(0)[:2]),
    "method": (lambda m: m.head("b.c"), B),
    "method of leaves": (lambda m: m.weights()[1:3], [block(1)[1], block(2)[1]]),
    "all": (lambda m: m, EVERYTHING),
    "with what is not stored": (lambda m: (m.pair, m.activation, m.bias), PAIR),
    "attrgetter": (operator.attrgetter("first.scale"), ["layers.0.scale"]),
    "partial": (ft.partial(lambda n, m: m.layers[n], 2), block(2)),
    "tree_leaves": (lambda m: jtu.tree_leaves(m.layers[0]), block(0)),
    "tree_map": (lambda m: jtu.tree_map(lambda x: x, m.layers[0]), block(0)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    net = Net(key=jr.key(1))
    path = tmp_path_factory.mktemp("select") / "a"
    ec.tree_serialise_leaves(path, net)
    return net, ec.open(path)


def named(tree, **kwargs):
    """The leaves of a tree by name."""
    names = jtu.tree_leaves(ec.leaf_names(tree))
    return dict(zip(names, jtu.tree_leaves(tree), strict=True))


@pytest.mark.parametrize("form", selectors)
def test_where_on_a_save(tmp_path, saved, form):
    where, names = selectors[form]
    net, _ = saved
    ec.tree_serialise_leaves(tmp_path / "a", net, where=where, durable=False)
    ckpt = ec.open(tmp_path / "a")
    assert sorted(ckpt.leaves) == sorted(names)
    for name in names:
        assert eqx.tree_equal(ckpt[name].read(), named(net)[name])


@pytest.mark.parametrize("form", selectors)
@pytest.mark.parametrize("make", [other, skeleton])
def test_where_on_a_load(saved, form, make):
    where, names = selectors[form]
    net, ckpt = saved
    like = make()
    loaded = ec.tree_deserialise_leaves(ckpt, like, where=where)
    assert jtu.tree_structure(loaded) == jtu.tree_structure(like)
    for name, leaf in named(loaded).items():
        if name in names:
            assert eqx.tree_equal(leaf, named(net)[name], typematch=True)
        else:
            assert leaf is named(like)[name]


@pytest.mark.parametrize("form", selectors)
def test_where_in_a_splice(saved, form):
    where, names = selectors[form]
    net, ckpt = saved
    like = skeleton()
    lazy = ckpt.splice(like, where=where)
    for name, leaf in named(lazy).items():
        assert isinstance(leaf, ec.LazyArray) == (name in names)
        if name in names:
            assert leaf.name == name
    loaded = ec.materialise(lazy)
    assert [x for x in named(loaded) if isinstance(named(loaded)[x], jax.Array)] == [
        name for name in named(loaded) if name in names and name != "rate"
    ]
    for name in names:
        assert eqx.tree_equal(named(loaded)[name], named(net)[name])


def test_where_on_a_save_then_on_a_load(tmp_path, saved):
    net, _ = saved
    ec.tree_serialise_leaves(tmp_path / "a", net, where=lambda m: m.layers)
    like = skeleton()
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", like, where=lambda m: m.first)
    assert eqx.tree_equal(loaded.first, net.first)
    with pytest.raises(RuntimeError, match="`heads.a.weight` is not in the checkpoint"):
        ec.tree_deserialise_leaves(tmp_path / "a", like, where=lambda m: m.heads)


def test_where_with_a_filter(tmp_path, saved):
    net, ckpt = saved
    floating = eqx.is_inexact_array
    ec.tree_serialise_leaves(tmp_path / "a", net, floating, where=lambda m: m.pair)
    assert list(ec.open(tmp_path / "a").leaves) == ["pair.0"]
    like = skeleton()
    loaded = ec.tree_deserialise_leaves(
        ckpt, like, floating, where=lambda m: (m.pair, m.rate)
    )
    assert eqx.tree_equal(loaded.pair[0], net.pair[0])
    assert loaded.pair[1] is like.pair[1]


def test_where_on_a_bare_leaf(tmp_path):
    x = jnp.arange(3)
    ec.tree_serialise_leaves(tmp_path / "a", x, where=lambda x: x)
    assert (
        ec.tree_deserialise_leaves(tmp_path / "a", x, where=lambda x: [x]) == x
    ).all()


def test_where_on_an_array_that_stands_at_two_places(tmp_path):
    x = jnp.arange(3.0)
    tree = {"a": x, "b": x}
    ec.tree_serialise_leaves(tmp_path / "a", tree, where=lambda t: t["b"])
    assert list(ec.open(tmp_path / "a").leaves) == ["b"]
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a", {"a": 1.0 + x, "b": x * 0}, where=lambda t: t["b"]
    )
    assert (loaded["b"] == x).all() and (loaded["a"] == x + 1).all()


def test_where_with_is_leaf(tmp_path):
    def is_leaf(x):
        return isinstance(x, list)

    tree = {"a": [1.0], "b": (2.0, [3.0])}
    ec.tree_serialise_leaves(
        tmp_path / "a", tree, is_leaf=is_leaf, where=lambda t: t["b"]
    )
    assert list(ec.open(tmp_path / "a").leaves) == ["b.0"]
    with pytest.raises(ValueError, match="selects no leaf that is stored"):
        ec.tree_serialise_leaves(
            tmp_path / "a", tree, is_leaf=is_leaf, where=lambda t: t["a"]
        )


# ---- What else is in the trees of Equinox and optax.


def test_parts_of_an_optax_state(tmp_path, getkey):
    net = eqx.filter(Net(key=getkey()), eqx.is_inexact_array)
    optimiser = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = optimiser.init(net)
    grads = jtu.tree_map(lambda x: x + 1, net)
    _, state = optimiser.update(grads, state, net)
    ec.tree_serialise_leaves(tmp_path / "a", {"model": net, "opt": state})
    like = {"model": net, "opt": optimiser.init(net)}

    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a", like, where=lambda t: t["opt"][1][0].mu
    )
    assert eqx.tree_equal(loaded["opt"][1][0].mu, state[1][0].mu)
    assert eqx.tree_equal(loaded["opt"][1][0].nu, like["opt"][1][0].nu)
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a",
        like,
        where=lambda t: (
            [s[0].nu.layers[2:] for s in t["opt"][1:]] + [t["opt"][1][0].count]
        ),
    )
    got, was = loaded["opt"][1][0], state[1][0]
    assert got.count == 1
    assert eqx.tree_equal(got.nu.layers[2:], was.nu.layers[2:])
    assert eqx.tree_equal(got.nu.layers[:2], like["opt"][1][0].nu.layers[:2])
    # As optax's own helper picks them.
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a", like, where=lambda t: optax.tree_utils.tree_get(t["opt"], "mu")
    )
    assert eqx.tree_equal(loaded["opt"][1][0].mu, was.mu)


class Normed(eqx.Module):
    one: eqx.nn.BatchNorm
    two: eqx.nn.BatchNorm

    def __init__(self):
        self.one = eqx.nn.BatchNorm(2, "batch", mode="batch")
        self.two = eqx.nn.BatchNorm(3, "batch", mode="batch")


def test_state_get(tmp_path):
    model, state = eqx.nn.make_with_state(Normed)()
    changed = jtu.tree_map(lambda x: x + 1, state)
    ec.tree_serialise_leaves(tmp_path / "a", (model, changed))
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a",
        (model, state),
        where=lambda t: t[1].get(t[0].two.batch_state_index),
    )
    for index, old, new in (
        (model.one.batch_state_index, True, False),
        (model.two.batch_state_index, False, True),
        (model.two.batch_counter, True, False),
    ):
        assert bool(eqx.tree_equal(loaded[1].get(index), state.get(index))) is old
        assert bool(eqx.tree_equal(loaded[1].get(index), changed.get(index))) is new
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a", (model, state), where=lambda t: t[1]
    )
    assert eqx.tree_equal(loaded[1], changed)
    # A part of the State, as for `eqx.filter_vmap`.
    sub = ec.tree_deserialise_leaves(
        tmp_path / "a", (model, state), where=lambda t: t[1].substate(t[0].one)
    )
    assert eqx.tree_equal(sub[1].substate(model.one), changed.substate(model.one))
    assert eqx.tree_equal(sub[1].substate(model.two), state.substate(model.two))


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, *, key):
        pair = (
            eqx.nn.Embedding(4, 2, key=key),
            eqx.nn.Linear(2, 4, key=key),
        )
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def test_shared(tmp_path):
    model, like = Tied(key=jr.key(1)), Tied(key=jr.key(2))
    ec.tree_serialise_leaves(tmp_path / "a", model)
    load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "a", like)
    # The tied weight is the embedding's.
    loaded = load(where=lambda m: m.shared()[1].weight)
    assert eqx.tree_equal(loaded.shared()[0], model.shared()[0])
    assert eqx.tree_equal(loaded.shared()[1].bias, like.shared()[1].bias)
    loaded = load(where=lambda m: m.shared()[1])
    assert eqx.tree_equal(loaded.shared(), model.shared())
    loaded = load(where=lambda m: m.shared.pytree[1])
    assert eqx.tree_equal(loaded.shared()[1].bias, model.shared()[1].bias)
    assert eqx.tree_equal(loaded.shared()[0], like.shared()[0])


def test_vmapped_ensembles(tmp_path):
    make = eqx.filter_vmap(lambda key: Net(key=key))
    model, like = make(jr.split(jr.key(1), 5)), make(jr.split(jr.key(2), 5))
    ec.tree_serialise_leaves(tmp_path / "a", model)
    loaded = ec.tree_deserialise_leaves(
        tmp_path / "a", like, where=lambda m: m.layers[1:]
    )
    assert loaded.layers[1].scale.shape == (5, 2)
    assert eqx.tree_equal(loaded.layers[1:], model.layers[1:])
    assert eqx.tree_equal(loaded.first, like.first)
    like = eqx.filter_eval_shape(make, jr.split(jr.key(0), 5))
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", like)
    assert eqx.tree_equal(loaded, model)


# ---- Guards.


def each_call(tmp_path, saved, where, **kwargs):
    """A save, a load and a splice with this `where`."""
    net, ckpt = saved
    like = skeleton()
    yield lambda: ec.tree_serialise_leaves(tmp_path / "a", net, where=where, **kwargs)
    yield lambda: ec.tree_deserialise_leaves(ckpt, like, where=where, **kwargs)
    yield lambda: ckpt.splice(like, where=where, **kwargs)


nothing = {
    "empty slice": (lambda m: m.layers[9:], "pick nodes, and use `filter_spec`"),
    "empty": (lambda m: (), "pick nodes, and use `filter_spec`"),
    "None": (lambda m: m.bias, "It returned None"),
    "no result": (lambda m: print(end=""), "It returned None"),
    "static None": (lambda m: m.absent, "It returned None"),
    "not stored": (lambda m: m.activation, "selects no leaf that is stored"),
    "filter": (
        lambda m: eqx.filter(m, eqx.is_array),
        "Filtering inside `where` sees no",
    ),
    "partition": (
        lambda m: eqx.partition(m, eqx.is_inexact_array)[0],
        "Filtering inside `where` sees no arrays",
    ),
    "comprehension filter": (
        lambda m: [x for x in jtu.tree_leaves(m) if isinstance(x, jax.Array)],
        "Filtering inside `where` sees no arrays",
    ),
    "shape filter": (
        lambda m: [x for x in jtu.tree_leaves(m) if getattr(x, "ndim", 0) > 1],
        "Filtering inside `where` sees no arrays",
    ),
}


@pytest.mark.parametrize("form", nothing)
def test_selecting_nothing_is_an_error(tmp_path, saved, form):
    where, message = nothing[form]
    for call in each_call(tmp_path, saved, where):
        with pytest.raises(ValueError, match=message) as e:
            call()
        assert "`where` selects no leaf that is stored" in str(e.value)
    assert not (tmp_path / "a").exists()


no_nodes = {
    "static str": (lambda m: m.name, "returned 'net', which is not a node"),
    "static tuple": (lambda m: m.sizes, "returned 2, which is not a node"),
    "static beside a node": (lambda m: (m.rate, m.layers[0].index), "returned 0"),
    "a value made there": (lambda m: [m.rate, 7], "returned 7"),
    "an array made there": (lambda m: jnp.ones(3), "returned Array"),
    "a large array": (lambda m: np.ones((50, 50)), "returned a `ndarray`"),
    "a generator": (lambda m: (x for x in m.layers), "generator.* Make a list of it"),
    "a map": (lambda m: map(id, m.layers), "<map .* Make a list of it"),
    "a view of a dict": (lambda m: m.heads.values(), "dict_values.* Make a list of it"),
    "a view in a list": (lambda m: [m.heads.items()], "dict_items.* Make a list of it"),
    "a set": (lambda m: {m.rate}, "returned {<leaf rate>}"),
    "a class": (lambda m: type(m), "which is not a node of the tree"),
    "a name": (lambda m: "layers.0", "returned 'layers.0', which is not a node"),
}


@pytest.mark.parametrize("form", no_nodes)
def test_what_is_no_node_is_an_error(tmp_path, saved, form):
    where, message = no_nodes[form]
    for call in each_call(tmp_path, saved, where):
        with pytest.raises(ValueError, match=message) as e:
            call()
        assert "a static field, or a value made in the lambda" in str(e.value)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("where", [lambda m: m.head, lambda m: [m.rate, m.weights]])
def test_a_method_that_is_not_called_is_an_error(tmp_path, saved, where):
    # A bound method of a Module is a tree with all of the Module's leaves.
    for call in each_call(tmp_path, saved, where):
        with pytest.raises(ValueError, match="the method `.*` without calling it"):
            call()


def test_a_method_that_is_stored_in_the_tree_is_a_node(tmp_path, getkey):
    block = Block(0, key=getkey())
    tree = {"f": block.apply, "b": block.scale}
    ec.tree_serialise_leaves(tmp_path / "a", tree, where=lambda t: t["f"])
    assert list(ec.open(tmp_path / "a").leaves) == [
        "f.__self__.linear.weight",
        "f.__self__.linear.bias",
        "f.__self__.scale",
    ]


values = {
    "==": lambda x: x == 0,
    "!=": lambda x: x != 0,
    "<": lambda x: x < 0,
    "in": lambda x: 0 in x,
    "in a list": lambda x: x in [0.0],
    "bool": lambda x: 1 if x else 0,
    "not": lambda x: not x,
    "and": lambda x: x and x,
    "+": lambda x: x + 1,
    "r+": lambda x: 1 + x,
    "-": lambda x: -x,
    "*": lambda x: 2 * x,
    "/": lambda x: x / 2,
    "@": lambda x: x @ x,
    "**": lambda x: 2**x,
    "&": lambda x: x & 1,
    "<<": lambda x: 1 << x,
    "abs": abs,
    "round": round,
    "divmod": lambda x: divmod(x, 2),
    "int": int,
    "float": float,
    "complex": complex,
    "index": lambda x: [1, 2][x],
    "len": len,
    "iter": list,
    "unpack": lambda x: [*x],
    "getitem": lambda x: x[0],
    "slice": lambda x: x[:1],
    "asarray": np.asarray,
    "numpy +": lambda x: np.ones(2) + x,
}
attributes = ["shape", "dtype", "ndim", "size", "T", "at", "sum", "weight", "name"]


@pytest.mark.parametrize("form", values)
def test_using_the_value_of_a_leaf_is_an_error(tmp_path, saved, form):
    for call in each_call(tmp_path, saved, lambda m: values[form](m.first.scale)):
        with pytest.raises(TypeError, match="uses the value of the leaf") as e:
            call()
        assert "`layers.0.scale`" in str(e.value)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", attributes)
def test_an_attribute_of_a_leaf_is_an_error(tmp_path, saved, name):
    for call in each_call(tmp_path, saved, lambda m: getattr(m.first.scale, name)):
        with pytest.raises(
            AttributeError, match=f"`where` takes `.{name}` of the leaf"
        ):
            call()


@pytest.mark.parametrize("f", [jnp.sum, jnp.asarray, jax.device_put, lambda x: x()])
def test_calling_jax_on_a_leaf_is_an_error(tmp_path, saved, f):
    for call in each_call(tmp_path, saved, lambda m: f(m.first.scale)):
        with pytest.raises(TypeError):
            call()


def test_errors_of_a_where_come_through(tmp_path, saved):
    for where, error in (
        (lambda m: m.leyers, AttributeError),
        (lambda m: m.layers[9], IndexError),
        (lambda m: m.heads["x"], KeyError),
    ):
        for call in each_call(tmp_path, saved, where):
            with pytest.raises(error) as e:
                call()
            (note,) = e.value.__notes__
            assert note.startswith("`where` fails on the tree.")
            is_field = error is AttributeError
            assert is_field == (" It has `layers`, " in note)


def test_what_is_no_function():
    # In a process without the type checks of the tests.
    out = run_program("wrong_selectors")
    lines = out.splitlines()
    assert len(lines) == 6
    for line in lines[:4]:
        assert line.startswith(
            "`where` must be None or a function of the tree, such as `lambda "
            "tree: tree.model` (a tree of bools is a `filter_spec`), not "
        )
    for line in lines[4:]:
        assert line.startswith("`source` must be a dotted name or a function")


# ---- source.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    net = Net(key=jr.key(1))
    opt = optax.adam(1e-3).init(eqx.filter(net, eqx.is_inexact_array))
    tree = {"model": net, "opt": opt, "step": 7, "runs": [net.first, net.layers[1]]}
    path = tmp_path_factory.mktemp("source") / "a"
    ec.tree_serialise_leaves(path, tree)
    return tree, path


def test_a_model_loads_with_only_its_own_skeleton(trained):
    tree, path = trained
    like = skeleton()
    for source in ("model", lambda c: c.model, lambda c: c["model"]):
        loaded = ec.tree_deserialise_leaves(path, like, source=source)
        assert eqx.tree_equal(loaded, tree["model"], typematch=True)
        lazy = ec.open(path).splice(like, source=source)
        assert lazy.first.scale.name == "model.layers.0.scale"
        assert eqx.tree_equal(ec.materialise(lazy), tree["model"], typematch=True)


sources = [
    ("model.layers.2", lambda c: c.model.layers[2], lambda t: t["model"].layers[2]),
    ("model.layers.3", lambda c: c.model.layers[-1], lambda t: t["model"].layers[3]),
    ("runs.1", lambda c: c.runs[1], lambda t: t["runs"][1]),
    ("runs.1.linear", lambda c: c["runs"][1].linear, lambda t: t["runs"][1].linear),
    ("opt.0", lambda c: c.opt[0], lambda t: t["opt"][0]),
    ("opt.0.mu", lambda c: c.opt[0].mu, lambda t: t["opt"][0].mu),
    ("step", lambda c: c.step, lambda t: t["step"]),
    ("opt.0.count", lambda c: c.opt[0].count, lambda t: t["opt"][0].count),
    ("model.pair.1", lambda c: c.model.pair[1], lambda t: t["model"].pair[1]),
    (
        "model.heads.b%2Ec",
        lambda c: c.model.heads["b.c"],
        lambda t: t["model"].heads["b.c"],
    ),
    ("", lambda c: c, lambda t: t),
    (None, lambda c: c, lambda t: t),
]


@pytest.mark.parametrize("dotted, function, pick", sources)
def test_source(trained, dotted, function, pick):
    tree, path = trained
    part = pick(tree)
    like = jtu.tree_map(lambda x: x * 0 if ec.is_storable(x) else x, part)
    for source in (dotted, function):
        loaded = ec.tree_deserialise_leaves(path, like, source=source)
        assert eqx.tree_equal(loaded, part, typematch=True)


def test_source_of_a_list_at_the_top(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", [{"x": 1.0}, 2.0])
    load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "a")
    assert load({"x": 0.0}, source=lambda c: c[0]) == {"x": 1.0}
    assert load(0.0, source=lambda c: c[1]) == 2.0
    assert load(0.0, source=lambda c: c[-1]) == 2.0
    assert load(0.0, source="0.x") == 1.0


def test_source_of_a_bare_leaf(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", 2.0)
    for source in (None, "", "%root", lambda c: c):
        assert ec.tree_deserialise_leaves(tmp_path / "a", 0.0, source=source) == 2.0


def test_source_of_awkward_keys(tmp_path):
    tree = {"manifest": {"x": 1.0}, "a.b": {"keys": 2.0}, "": 3.0, "%": {"": 4.0}}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "a", 0.0)
    assert load(source=lambda c: c.manifest.x) == 1.0
    assert load(source="%6Danifest.x") == 1.0
    assert load(source=lambda c: c["a.b"]["keys"]) == 2.0
    assert load(source="a%2Eb.keys") == 2.0
    assert load(source=lambda c: c[""]) == 3.0
    assert load(source=lambda c: c["%"][""]) == 4.0


def test_where_is_of_like_and_source_of_the_checkpoint(trained):
    tree, path = trained
    like = skeleton()
    loaded = ec.tree_deserialise_leaves(
        path, like, source="model", where=lambda m: m.layers[3]
    )
    assert eqx.tree_equal(loaded.layers[3], tree["model"].layers[3])
    assert loaded.first.scale is like.first.scale
    block = eqx.filter_eval_shape(Block, 1, key=jr.key(0))
    loaded = ec.tree_deserialise_leaves(
        path, block, source=lambda c: c.runs[1], where=lambda b: b.linear.weight
    )
    assert eqx.tree_equal(loaded.linear.weight, tree["runs"][1].linear.weight)
    assert isinstance(loaded.scale, jax.ShapeDtypeStruct)


_TOPS = r"no such node\. At its top it has `model`, `opt`, `runs`, `step`\."


@pytest.mark.parametrize(
    "source, has",
    [
        *((x, _TOPS) for x in ("modle", "mod", ".model", "%root", "modle.layers.0")),
        ("model.", r"\. `model` has `layers`, "),
        ("model.layer", r"\. `model` has `layers`, "),
        ("model.layers.9", r"\. `model\.layers` has `0`, `1`, `2`, `3`\."),
        ("model.layers.9.weight", r"\. `model\.layers` has `0`, `1`, `2`, `3`\."),
        ("step.number", r"\. `step` is a leaf\."),
    ],
)
def test_a_wrong_name_lists_what_is_there(trained, source, has):
    with pytest.raises(KeyError, match=has):
        ec.tree_deserialise_leaves(trained[1], 0.0, source=source)


@pytest.mark.parametrize(
    "source, error, has",
    [
        (lambda c: c.modle, AttributeError, ["model", "opt", "runs", "step"]),
        (lambda c: c["modle"], KeyError, ["model", "opt", "runs", "step"]),
        (lambda c: c.model.layer, AttributeError, ["layers", "heads", "pair", "rate"]),
        (lambda c: c.model.layers[9], KeyError, ["0", "1", "2", "3"]),
        (lambda c: c.model.layers[-9], KeyError, ["0", "1", "2", "3"]),
        (lambda c: c[0], KeyError, ["model", "opt"]),
        (lambda c: c.model.heads["b"], KeyError, ["a", "b%2Ec"]),
    ],
)
def test_a_wrong_lambda_lists_what_exists(trained, source, error, has):
    with pytest.raises(error) as e:
        ec.tree_deserialise_leaves(trained[1], 0.0, source=source)
    for name in has:
        assert f"`{name}`" in str(e.value)
    assert e.value.__notes__ == ["`source` fails on the checkpoint."]


def test_a_source_that_edits(trained):
    with pytest.raises(TypeError, match="does, not a node that was edited"):
        ec.tree_deserialise_leaves(
            trained[1], 0.0, source=lambda c: jax.tree.map(lambda x: x[0], c.model.pair)
        )


@pytest.mark.parametrize(
    "source",
    [
        lambda c: c.model.layers[1:],
        lambda c: (c.model, c.opt),
        lambda c: None,
        lambda c: "model",
        lambda c: c.keys,
        lambda c: c.model.pair[0][1:],
        lambda c: c.model.pair[0].T,
        lambda c: c.model.pair[0].astype(np.float16),
        lambda c: ec.lazy(lambda x: 2 * x)(c.model.pair[0]),
        lambda c: c.step.read(),
    ],
)
def test_a_source_is_one_node(trained, source):
    with pytest.raises(TypeError, match="`source` must return one node"):
        ec.tree_deserialise_leaves(trained[1], 0.0, source=source)


def test_without_a_source_the_report_says_which_one(trained):
    like = skeleton()
    with pytest.raises(RuntimeError, match='pass `source="model"`'):
        ec.tree_deserialise_leaves(trained[1], like)


# ---- Unexpected leaves.


def unexpected(path, like, **kwargs):
    """The names that a load reports as unexpected."""
    try:
        ec.tree_deserialise_leaves(path, like, **kwargs)
    except RuntimeError as e:
        title, _, rest = str(e).partition("  unexpected: in the checkpoint")
        assert rest and "missing:" not in title, e
        return [x.split()[0] for x in rest.splitlines()[1:] if x.startswith("    ")]
    return []


def test_unexpected_only_inside_what_where_takes_whole(tmp_path):
    saved = {
        "a": {"x": 1.0, "y": 2.0, "z": 3.0},
        "b": {"x": 1.0, "y": {"p": 1.0, "q": 2.0}},
        "l": [1.0, 2.0, 3.0],
        "extra": 5.0,
    }
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    like = {
        "a": {"x": 0.0, "y": 0.0},
        "b": {"x": 0.0, "y": {"p": 0.0}},
        "l": [0.0, 0.0],
    }
    look = ft.partial(unexpected, tmp_path / "a", like)
    assert look() == ["a.z", "b.y.q", "extra", "l.2"]
    assert look(unexpected="ignore") == []
    assert look(where=lambda t: t) == ["a.z", "b.y.q", "extra", "l.2"]
    assert look(where=lambda t: t["a"]) == ["a.z"]
    assert look(where=lambda t: t["b"]) == ["b.y.q"]
    assert look(where=lambda t: t["b"]["y"]) == ["b.y.q"]
    assert look(where=lambda t: (t["a"]["x"], t["b"])) == ["b.y.q"]
    assert look(where=lambda t: {"mine": t["l"]}) == ["l.2"]
    # Leaves, slices and parts of nodes are taken for themselves.
    assert look(where=lambda t: t["a"]["x"]) == []
    assert look(where=lambda t: [t["a"]["x"], t["a"]["y"]]) == []
    assert look(where=lambda t: t["b"]["x"]) == []
    assert look(where=lambda t: t["l"][:1]) == []
    assert look(where=lambda t: [t["a"]["x"], t["b"]["x"], t["l"][1:]]) == []


def test_unexpected_below_a_source(tmp_path):
    saved = {"model": {"x": 1.0, "y": 2.0}, "modelling": 1.0, "opt": {"x": 1.0}}
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    assert unexpected(tmp_path / "a", {"x": 0.0}, source="model") == ["model.y"]
    assert unexpected(tmp_path / "a", {"x": 0.0}, source="opt") == []
    assert (
        unexpected(tmp_path / "a", {"x": 0.0}, source="model", where=lambda t: t["x"])
        == []
    )


def test_static_fields_only_of_what_where_takes_whole(tmp_path, getkey):
    class Heads(eqx.Module):
        first: eqx.nn.MultiheadAttention
        second: eqx.nn.MultiheadAttention
        name: str = eqx.field(static=True)

    def make(n, m, name="a"):
        attention = ft.partial(eqx.nn.MultiheadAttention, query_size=8, key=getkey())
        return Heads(attention(n), attention(m), name)

    ec.tree_serialise_leaves(tmp_path / "a", make(4, 4))
    load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "a")
    like = make(4, 8, "b")
    load(like, where=lambda m: m.first)
    load(like, where=lambda m: m.second.query_proj)
    load(like, where=lambda m: [m.second.query_proj, m.first])
    with pytest.raises(RuntimeError, match="`second.num_heads` was 4"):
        load(like, where=lambda m: m.second)
    with pytest.raises(RuntimeError, match="`name` was 'a'"):
        load(make(4, 4, "b"))
    load(like, static="ignore")
