"""What a save keeps from the one before it never shows: files are those of a first
save, whatever has changed between the two."""

import collections
import concurrent.futures as cf
import contextlib
import dataclasses
import enum
import functools as ft
import gc
import json
import math
import pathlib
import tempfile
import types
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from support import inside

import eqx_ckpt as ec


pytestmark = pytest.mark.filterwarnings("ignore:A JAX array is being set as static")


def files(root):
    """All files of a checkpoint, but for what differs between two saves of one tree."""
    index = json.loads((root / "eqx_ckpt.json").read_bytes())
    save = index.pop("save")
    index.pop("digest")
    index["saved"].pop("time")
    own = {
        str(path.relative_to(root)).replace(save, "SAVE"): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "eqx_ckpt.json"
    }
    own = {name: data.replace(save.encode(), b"S" * 16) for name, data in own.items()}
    # The manifests have the id of the save, and digests of themselves.
    own = {name: data for name, data in own.items() if "manifest" not in name}
    others = {name.replace(save, "SAVE"): x for name, x in index["others"].items()}
    index["others"] = {n: x for n, x in others.items() if "manifest" not in n}
    return index, own


class Pair(NamedTuple):
    n: Any
    m: Any


class Point(eqx.Module):
    n: Any


class Model(eqx.Module):
    w: Any
    n: Any = eqx.field(static=True)
    f: Any = jax.nn.relu


def closed(x):
    return lambda: x


# Of static fields, and of leaves that are functions. Some are equal, and not the same.
PARTIAL = ft.partial(jnp.add, 1)


class Own(NamedTuple):
    """Whose keys and children follow from its content."""

    n: Any
    m: Any


jax.tree_util.register_pytree_with_keys(
    Own,
    lambda x: (((jax.tree_util.DictKey(f"{x.n}"), x.m),), None),
    lambda _, children: Own("0", *children),
)


@dataclasses.dataclass
class Tagged:
    """Whose `tag` is in JAX's structure, and is none of its fields."""

    n: Any
    tag = ""

    def with_tag(self, tag):
        self.tag = tag
        return self


jax.tree_util.register_pytree_with_keys(
    Tagged,
    lambda x: (((jax.tree_util.GetAttrKey("n"), x.n),), x.tag),
    lambda tag, children: Tagged(*children).with_tag(tag),
)


class Key:
    """Whose objects differ, and are shown alike."""

    def __repr__(self):
        return "Key"


class Mode(enum.Enum):
    A = "a"
    B = "b"


STATICS = [
    *(1, True, 1.0, 0.0, -0.0, math.nan, None, "a", b"a", 2**70, 1j, ..., range(3)),
    *((1, 2), (1, True), (1, 2.0), [1, 2], {1: 2}, {True: 2}, {1, 2}, frozenset([1])),
    *(np.float32(1), np.dtype("f4"), jnp.float32, jnp.bfloat16),
    *(jax.nn.relu, jax.nn.gelu, jnp.sin, jax.jit(jnp.sin), np.sin, math.sin, len),
    *(PARTIAL, ft.partial(jnp.add, 2), closed(1), closed(2), lambda: 1, lambda: 2),
    *(int, Point, Pair(1, 2), Pair(1, 2.0), Point(1), Point(2), object(), "a".join),
    *(enum.Enum("E", "A B").A, jax.sharding.PartitionSpec("a"), pathlib.Path("a")),
]


SHARED = jnp.arange(3.0)
LEAVES = [
    *(SHARED, SHARED + 1, np.asarray(SHARED), SHARED.astype(jnp.bfloat16)),
    *(jnp.asarray(1.0), jnp.ones(()), jnp.float32(1), np.float32(1), 1.0, 1, True),
    *(2**40, 2**70, 1j, "a", "ab", "\ud800", b"a", None, {}, [], ()),
    *(Mode.A, Mode.B, np.dtype([("a", "f4")]), np.dtype([("b", "f4")])),
    *(jr.key(0), jr.key(0, impl="rbg"), jr.split(jr.key(0)), np.zeros((0, 2))),
    *(jnp.zeros((2, 3)), jnp.zeros((3, 2)), np.zeros(2, ">i4"), np.ones(40_000)),
    *(2**62, 2**63, -(2**63), -(2**63) - 1, np.float64(1), np.bool_(True)),
    *(jax.device_put(SHARED, jax.devices()[-1]), np.zeros(2, "<i4"), jnp.zeros(0)),
]
KEYS = ["a", "b", "c.d", 1, True, 1.0, "1", 0, -0.0, "True"]
NODES = [
    *(lambda x: {"n": x}, lambda x: [x], lambda x: (x,), lambda x: [0.0, x]),
    *(lambda x: {1: x}, lambda x: {"n": x, "m": x}),
    *(lambda x: Pair(x, x), lambda x: Point(x), lambda x: [x] * 40),
    *(lambda x: Own("a", x), lambda x: Own("b", x)),
]
MODELS = st.builds(
    Model,
    st.sampled_from(LEAVES),
    st.sampled_from(STATICS),
    st.sampled_from([*STATICS, np.zeros(2)]),
)
TREES = st.dictionaries(
    st.sampled_from(KEYS),
    st.one_of(
        st.sampled_from(LEAVES),
        st.builds(lambda f, x: f(x), st.sampled_from(NODES), st.sampled_from(LEAVES)),
        MODELS,
    ),
    min_size=1,
    max_size=4,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "layout": st.sampled_from(["ocdbt", "zarr"]),
        "chunks": st.sampled_from([None, 8, 1000, lambda name, *_: None]),
        "compression": st.sampled_from([None, "zstd"]),
        "dtype": st.sampled_from([None, jnp.float16, jnp.float32]),
        "filter_spec": st.sampled_from(
            [ec.is_storable, lambda x: ec.is_storable(x) or isinstance(x, (str, bytes))]
        ),
    },
)


def _saved(path, tree, options, how):
    """The files of a save, or the error that there is instead."""
    try:
        if how == "async":
            ec.async_tree_serialise_leaves(
                path, tree, durable=False, **options
            ).result()
        else:
            ec.tree_serialise_leaves(path, tree, durable=False, **options)
    except (ValueError, TypeError) as e:
        return type(e), str(e)
    return files(path)


SAVES = st.lists(
    st.tuples(TREES, OPTIONS, st.sampled_from(["sync", "async"])),
    min_size=2,
    max_size=5,
)


@given(SAVES)
@settings(max_examples=10)
def test_a_save_is_what_a_first_one_is_whatever_was_saved_before(saves):
    _check(saves)


@pytest.mark.long
@given(SAVES)
@settings(max_examples=1000)
def test_saves_are_what_first_ones_are(saves):
    _check(saves)


def _check(saves):
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        inside.forget()
        # What a structure needs to be known at once is made when it comes again.
        after, _, again = (
            [_saved(root / turn / str(i), *x) for i, x in enumerate(saves)]
            for turn in "abc"
        )
        for i, save in enumerate(saves):
            inside.forget()
            alone = _saved(root / "d" / str(i), *save)
            # To `==` 1 and True are one.
            assert repr(after[i]) == repr(again[i]) == repr(alone)


def _loaded(path, like, root):
    return ec.tree_deserialise_leaves(path, like)


def _grafted(path, like, root):
    tree, report = ec.graft(like, path, [(lambda x: x, lambda x: x)])
    return tree, str(report)


def _saved_arrays(path, like, root):
    return _saved(root, like, {"filter_spec": eqx.is_array}, "sync")


def _registered(route):
    """A route with types that are registered only there."""

    def call(*args):
        encode = lambda x: x.value
        with (
            ec.register_leaf(Mode, encode, Mode),
            ec.register_leaf(np.float32, str, np.float32),
        ):
            return ROUTES[route](*args)

    return call


ROUTES = {
    "load": _loaded,
    "graft": _grafted,
    "diff": lambda path, like, root: ec.diff(path, like),
    "diff of trees": lambda path, like, root: ec.diff([like, 0], like),
    "merge": lambda path, like, root: ec.merge([path, like], ec.merging.average()),
    "save": lambda path, like, root: _saved(root, like, {}, "sync"),
    "save of arrays": _saved_arrays,
}
ROUTES |= {f"{name}, registered": _registered(name) for name in ROUTES}


def _given(route, path, like, root):
    """What a call gives, leaf by leaf, or its error."""
    try:
        found = ROUTES[route](path, like, root)
    except (ValueError, TypeError, RuntimeError) as e:
        assert not isinstance(e, RecursionError)
        return type(e), str(e)
    leaves, structure = jax.tree.flatten(found)
    if route.startswith("load"):
        assert structure == jax.tree.structure(like)
    return [(type(x), repr(x)) for x in leaves]


# What stands at one place of trees that are alike else.
ALIKE = [
    ["a", "ab", "\ud800", b"a"],
    [Mode.A, Mode.B, np.float32(1), np.float32(2), 1.0, True, 1],
    [np.dtype([("a", "f4")]), np.dtype([("b", "f4")]), np.dtype("f4")],
    [Own("a", 1.0), Own("b", 1.0), Own("b", "a"), Pair(1.0, "a"), Pair(1.0, "b")],
    [jax.nn.relu, jax.nn.gelu, PARTIAL, len, None],
    [SHARED, np.asarray(SHARED), SHARED.astype(jnp.bfloat16), SHARED[:2]],
    [{Key(): 1.0}, {Key(): 2.0}, Tagged(1.0), Tagged(1.0).with_tag("a")],
]
AROUND = [*NODES, lambda x: Model(x, 1), lambda x: Model(jnp.zeros(2), 1, x)]
CALLS = st.builds(
    lambda alike, around, calls: [
        (route, around(alike[number % len(alike)])) for route, number in calls
    ],
    st.sampled_from(ALIKE),
    st.sampled_from(AROUND),
    st.lists(
        st.tuples(st.sampled_from(list(ROUTES)), st.integers(0, 6)),
        min_size=3,
        max_size=6,
    ),
)


@given(CALLS)
@settings(max_examples=25)
def test_a_call_gives_what_it_gives_at_first_whatever_was_called_before(calls):
    _check_calls(calls)


@pytest.mark.long
@given(CALLS)
@settings(max_examples=2000)
def test_calls_give_what_first_ones_give(calls):
    _check_calls(calls)


def _check_calls(calls):
    with tempfile.TemporaryDirectory() as directory:
        path, root = pathlib.Path(directory) / "c", pathlib.Path(directory) / "d"
        inside.forget()
        _saved(path, [calls[0][1], SHARED], {}, "sync")
        _, after = (
            [_given(route, path, [like, SHARED], root) for route, like in calls]
            for _ in range(2)
        )
        for (route, like), found in zip(calls, after):
            inside.forget()
            assert _given(route, path, [like, SHARED], root) == found


def _recorded(path, tree, **options):
    """The templates of a save, and the record of its tree."""
    index, _ = _saved(path, tree, options, "sync")
    return index["templates"], index["tree"]


@pytest.mark.parametrize(
    "change", ["list", "dict", "object", "partial", "name", "dtype"]
)
def test_what_is_changed_in_place_is_recorded_anew(tmp_path, monkeypatch, change):
    value: Any = {
        "list": lambda: [1],
        "dict": lambda: {"a": 1},
        "object": lambda: types.SimpleNamespace(a=1),
        "partial": lambda: ft.partial(closed, x=1),
        "name": lambda: closed,
        "dtype": lambda: np.dtype([("a", "f4")]),
    }[change]()
    tree = {"m": Model(jnp.zeros(2), (value,), value), "b": jnp.zeros(2)}
    spare = Model(jnp.zeros(2), 1), jnp.zeros(2)
    before = [_recorded(tmp_path / "c", tree) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    _recorded(tmp_path / "c", spare)
    if change == "list":
        value.append(2)
    elif change == "dict":
        value["a"] = 2
    elif change == "object":
        value.a = 2
    elif change == "dtype":
        value.names = ("b",)
    elif change == "partial":
        value.keywords["x"] = 2
    else:
        monkeypatch.setitem(globals(), "closed", lambda x: x)
    after = _recorded(tmp_path / "c", tree)
    inside.forget()
    assert _recorded(tmp_path / "c", tree) == after != before[0]


# Trees that are alike, and whose structures differ.
STRUCTURES: dict[str, Any] = {
    "classes of one name": lambda x, i: {enum.Enum("E", "A").A: x},
    "keys that are shown alike": lambda x, i: {Key(): x},
    "more than its fields": lambda x, i: Tagged(x).with_tag(f"{i}"),
    "NaN as a key": lambda x, i: {float("nan"): x},
    "NaN in a static field": lambda x, i: Model(x, (1, float("nan"))),
    "a scalar that is NaN": lambda x, i: Model(x, np.float32("nan")),
    "a list": lambda x, i: Model(x, [1]),
    "an order of keys": lambda x, i: collections.OrderedDict([(i, x), (1 - i, x)]),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_tree_that_is_loaded_has_the_structure_of_its_own_like(tmp_path, kind):
    for number in range(2):
        like = [STRUCTURES[kind](jnp.full(2, number), number)]
        ec.tree_serialise_leaves(tmp_path / f"{number}", like)
        found = ec.tree_deserialise_leaves(tmp_path / f"{number}", like)
        assert jax.tree.structure(found) == jax.tree.structure(like)
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(like)))


def test_what_is_kept_of_a_structure_holds_no_arrays(tmp_path):
    array = jnp.ones(100)
    alive = weakref.ref(array)

    def default(x=array):
        return x

    def attribute():
        pass

    setattr(attribute, "array", array)
    functions = [closed(array), jax.jit(closed(array)), default, attribute]
    functions += [jax.jit(default), (default,)]
    pairs = [*zip(functions, functions), (None, ft.partial(closed, array))]
    for leaf, static in pairs:
        for _ in range(3):
            ec.tree_serialise_leaves(tmp_path / "c", Model(jnp.zeros(2), static, leaf))
    del array, leaf, static, pairs, functions, default, attribute
    gc.collect()
    assert alive() is None


def test_what_is_kept_of_a_structure_knows_registered_types(tmp_path):
    tree = Model({"a": np.float32(1), "b": jnp.ones(2)}, 1)
    before = [_recorded(tmp_path / "c", tree) for _ in range(3)]
    with ec.register_leaf(np.float32, str, np.float32):
        registered = _recorded(tmp_path / "c", tree)
        inside.forget()
        assert registered == _recorded(tmp_path / "c", tree) != before[0]
    assert _recorded(tmp_path / "c", tree) == before[0] == before[1]


class Holder:
    """An object that is recorded by its class alone."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("kind", ["registered", "with an array"])
def test_what_is_kept_of_a_structure_knows_what_is_left_out_on_purpose(tmp_path, kind):
    def record(value):
        tree = {"a": jnp.ones(2), "b": Holder(value)}
        return _recorded(tmp_path / "c", tree, filter_spec=eqx.is_array)

    before = [record(1) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        if kind == "registered":
            get = lambda x: x.value
            stack.enter_context(ec.register_leaf(Holder, get, Holder))
        value = 1 if kind == "registered" else jnp.ones(2)
        after = record(value)
        inside.forget()
        assert after == record(value) != before[0]


def test_named_tuples_that_are_registered_meanwhile_have_their_new_order(tmp_path):
    class Two(NamedTuple):
        n: Any
        m: Any

    tree = [Two(jnp.zeros(2), jnp.ones(2))]
    for _ in range(3):
        ec.tree_serialise_leaves(tmp_path / "c", tree)
    keys = jax.tree_util.GetAttrKey("m"), jax.tree_util.GetAttrKey("n")
    jax.tree_util.register_pytree_with_keys(
        Two,
        lambda x: ((*zip(keys, (x.m, x.n)),), Two),
        lambda _, children: Two(*children[::-1]),
    )
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    ckpt = ec.open(tmp_path / "c")
    assert [ckpt[f"0.{name}"].read().tolist() for name in "nm"] == [[0, 0], [1, 1]]
    tree = {"a": tree}  # Nothing is kept of its structure.
    ec.tree_serialise_leaves(tmp_path / "d", tree)
    assert eqx.tree_equal(ec.tree_deserialise_leaves(tmp_path / "d", tree), tree)


def test_arrays_that_lie_otherwise_than_those_before_are_stored_alike(tmp_path):
    layouts = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layouts, "Format"):
        pytest.skip("This JAX calls it otherwise.")
    x = jnp.arange(12.0).reshape(3, 4)
    turned = layouts.Format(layouts.Layout((1, 0)), x.sharding)
    odd = jnp.asarray(np.full(64, 2, np.uint8).view(np.bool_))
    for y in (x, x, jax.device_put(x, turned)):
        ec.tree_serialise_leaves(tmp_path / "c", {"x": x, "y": y, "odd": odd})
    ckpt = ec.open(tmp_path / "c")
    assert np.array_equal(ckpt["y"].read(), x) and np.array_equal(ckpt["x"].read(), x)
    assert np.asarray(ckpt["odd"].read()).view(np.uint8).tolist() == [1] * 64
    ec.verify(tmp_path / "c")


def test_models_in_training_are_remembered():
    params, static = eqx.partition(Model(jnp.ones(2), (1, "a")), eqx.is_array)
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    states = optax.adamw(1e-3).init(params), optax.sgd(1e-3, momentum=0.9).init(params)
    for tree in (params, static, model, state, *states, [1, (None, {"a": Pair(1, 2)})]):
        assert inside.is_remembered([tree, 1.0])
    assert inside.is_remembered(Own("a", 1))


def test_a_skeleton_is_remembered_as_its_model():
    model = {"a": Model(jnp.ones(2), (1, "a")), "b": [jnp.ones(3), 1.0, None]}
    assert inside.is_remembered(model, eqx.filter_eval_shape(lambda: model))
    for b in ([None, 1.0, jnp.ones(3)], [jnp.ones(3), [], None], [jnp.ones(3), 1.0, 2]):
        assert not inside.is_remembered(model, model | {"b": b})


def test_threads_save_and_load_many_structures_at_once(tmp_path):
    trees = [Model(jnp.full(2, n), n, [jnp.zeros(n)] * n) for n in range(1, 9)]

    def work(number):
        for _ in range(10):
            path, tree = tmp_path / str(number), trees[number]
            ec.tree_serialise_leaves(path, tree, durable=False)
            assert eqx.tree_equal(ec.tree_deserialise_leaves(path, tree), tree)

    with cf.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(len(trees))))


def test_a_second_save_of_a_structure_makes_its_files_once(tmp_path):
    inside.forget()
    tree = {"a": jnp.zeros(3), "b": [jnp.zeros(3), 1.0]}
    for value in range(3):
        now = jax.tree.map(lambda x, v=value: x + v, tree)
        ec.tree_serialise_leaves(tmp_path / str(value), now, orbax=True)
    counts = inside.made()
    assert len(counts) == 3 and set(counts.values()) == {1}
    assert ec.open(tmp_path / "2")["b.1"].read() == 3.0


def test_what_is_kept_of_a_save_knows_registered_types_and_deleted_arrays(tmp_path):
    tree = {"a": np.float32(1), "b": jnp.ones(2)}
    for number in range(2):
        ec.tree_serialise_leaves(tmp_path / str(number), tree)
    with ec.register_leaf(np.float32, str, np.float32):
        ec.tree_serialise_leaves(tmp_path / "text", tree)
    assert ec.open(tmp_path / "text")["a"].read() == "1.0"
    assert ec.open(tmp_path / "1")["a"].read() == np.float32(1)
    tree["b"].delete()
    with pytest.raises(ValueError, match="`b` cannot be saved: it has been deleted"):
        ec.tree_serialise_leaves(tmp_path / "deleted", tree)


def test_what_is_kept_of_a_save_holds_no_arrays(tmp_path):
    class Key(str):
        pass

    array, key = jnp.ones(100), Key("a")
    alive = weakref.ref(array), weakref.ref(key)
    for number in range(2):
        ec.tree_serialise_leaves(tmp_path / str(number), {key: array})
    del array, key
    gc.collect()
    assert alive[0]() is None and alive[1]() is None


def test_small_arrays_that_are_copied_together_are_what_they_were(tmp_path):
    names = "bool int4 uint8 int8 bfloat16 float16 float8_e4m3fn float32 complex64"
    tree = {
        f"{name}{number}": jnp.asarray(np.arange(6).reshape(shape) + number).astype(
            name
        )
        for name in names.split()
        for number, shape in enumerate([(6,), (2, 3), (6,)])
    }
    tree |= {f"0{i}": jnp.asarray(i) for i in range(3)}
    tree |= {f"empty{i}": jnp.zeros((0, 2)) for i in range(3)}
    tree |= {f"nan{i}": jnp.asarray([jnp.nan, -0.0]) for i in range(3)}
    tree |= {"same": tree["nan0"], "key": jr.key(0), "key2": jr.key(1)}
    blocking = _saved(tmp_path / "a", tree, {}, "sync")
    assert _saved(tmp_path / "b", tree, {}, "async") == blocking
    # On CPU the caller may write to memory that an array shares, once this returns.
    memory = np.zeros((100, 8), np.float32)
    handle = ec.async_tree_serialise_leaves(tmp_path / "c", [jnp.asarray(memory)] * 2)
    memory[:] = 1
    handle.result()
    assert not ec.open(tmp_path / "c")["0"].read().any()


def test_nodes_that_are_alike_but_for_a_static_field(tmp_path):
    """What is kept of one checkpoint's nodes is not taken for that of another's."""
    values = [1, True, "1", (1, True)]
    for number, n in enumerate(values):
        tree = {"a": Model(jnp.ones(2), n), "b": [Model(jnp.ones(2), 1)] * 2}
        ec.tree_serialise_leaves(tmp_path / f"{number}", tree)
    for _ in range(2):
        for number, n in enumerate(values):
            nodes = ec.open(tmp_path / f"{number}").tree
            ec.tree_serialise_leaves(tmp_path / "again", nodes)
            like = {"a": Model(jnp.ones(2), n), "b": [Model(jnp.ones(2), 1)] * 2}
            ec.tree_deserialise_leaves(tmp_path / "again", like)
            for other, m in enumerate(values):
                differs = ec.diff(nodes, ec.open(tmp_path / f"{other}").tree).static
                assert bool(differs) is (other != number), (n, m)
