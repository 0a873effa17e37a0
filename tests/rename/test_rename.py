"""`rename=`: what was saved under other names loads as if it had those of `like`."""

import functools as ft
import itertools
import random
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from support import trees
from support.helpers import assert_alike, long
from support.renaming import below, modules_of, Mover, replaced

import eqx_ckpt as ec


# ---- Any tree, each of its nodes and leaves under another name.


def _shuffled(rng, keys):
    return tuple(rng.sample(keys, len(keys)))


def _suffixed(keys):
    longer = lambda kind, key: f"{key}_zz" if kind in "ak" and key else key
    return tuple(key._replace(key=longer(*key)) for key in keys)


@pytest.mark.parametrize("seed", [*range(8), *long(*range(8, 200))])
def test_any_tree(seed, tmp_path):
    rng = random.Random(seed)
    tree = {"top": trees.make(seed), "last": jnp.ones(2)}
    try:
        ec.tree_serialise_leaves(tmp_path / "old", tree, durable=False)
    except ValueError:
        return  # Two leaves or nodes of one name.
    like = trees.changed(tree)
    for how in ("shuffled", "suffixed"):
        choose = _suffixed if how == "suffixed" else ft.partial(_shuffled, rng)
        mover = Mover(tree, choose)
        moved = mover.relabel(mover.move(ec.open(tmp_path / "old").tree))
        ec.tree_serialise_leaves(tmp_path / how, moved, durable=False)
        rename = ft.partial(replaced, moves=mover.moves)
        if how == "suffixed":
            rename = ec.rename([(r"_zz(?=\.|$)", "")])
        ckpt = ec.open(tmp_path / how)
        assert_alike(ec.tree_deserialise_leaves(ckpt, like, rename=rename), tree)
        assert_alike(ec.materialise(ckpt.splice(like, rename=rename)), tree)
        assert_alike(ec.load_or_init(lambda: like, ckpt, rename=rename), tree)
        # A function that knows the names of leaves, and no others.
        leaves = {name: replaced(name, mover.moves) for name in ckpt}
        recorded, modules = modules_of(ckpt, leaves.__getitem__)
        for name in recorded:
            if any(below(leaf, name) for leaf in ckpt):
                assert modules(mover.moves[name]) == [name]


# ---- A class that has changed.


class _Old(eqx.Module):
    first: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm
    attention: eqx.nn.MultiheadAttention
    pool: eqx.nn.MaxPool2d

    def __init__(self, heads=4, size=2, *, key):
        self.first, self.second = _norm(), _norm()
        self.attention = eqx.nn.MultiheadAttention(heads, 8, key=key)
        self.pool = eqx.nn.MaxPool2d(size)


class _New(eqx.Module):
    second: eqx.nn.BatchNorm  # It was `first`.
    first: eqx.nn.BatchNorm  # It was `second`.
    mix: eqx.nn.MultiheadAttention
    reduce: eqx.nn.MaxPool2d

    def __init__(self, heads=4, size=2, *, key):
        self.first, self.second = _norm(), _norm()
        self.mix = eqx.nn.MultiheadAttention(heads, 8, key=key)
        self.reduce = eqx.nn.MaxPool2d(size)


_norm = lambda: eqx.nn.BatchNorm(3, "batch", mode="ema")
_NAMES = {"first": "second", "second": "first", "attention": "mix", "pool": "reduce"}
_RULES = [
    (r"\bfirst\b", "third"),
    (r"\bsecond\b", "first"),
    (r"\bthird\b", "second"),
    (r"\battention\b", "mix"),
    (r"^model\.pool", "model.reduce"),
]


def _by_function(name):
    model, dot, rest = name.partition(".")
    field, *below = rest.split(".")
    moved = model in ("model", "ema", "0")
    field = _NAMES.get(field, field) if moved else field
    return ".".join([model, field, *below]) if dot else name


def _raw(cls, **kwargs):
    model = cls(key=jr.key(0), **kwargs)
    return eqx.nn.delete_init_state(model), eqx.nn.State(model)


def _made(cls, **kwargs):
    return eqx.nn.make_with_state(cls)(key=jr.key(0), **kwargs)


def _filled(tree):
    arrays, rest = eqx.partition(tree, eqx.is_array)
    leaves, structure = jtu.tree_flatten(arrays)
    new = [jnp.full_like(x, i) for i, x in enumerate(leaves, 1)]
    return eqx.combine(jtu.tree_unflatten(structure, new), rest)


def _named(pair):
    return {"model": pair[0], "state": pair[1]}


@pytest.mark.parametrize("make", [_raw, _made])
@pytest.mark.parametrize("rename", [_RULES, ec.rename(_RULES), _by_function])
def test_fields_that_were_exchanged(make, rename, tmp_path):
    """Statistics go with their BatchNorm, by every call."""
    model, state = _filled(make(_Old))
    adam = {"mu": eqx.filter(model, eqx.is_array)}
    ec.tree_serialise_leaves(
        tmp_path / "1" / "default", {"model": model, "state": state, "opt": adam}
    )
    path, like = tmp_path / "1" / "default", _named(make(_New))
    kwargs = {"rename": rename, "unexpected": "ignore"}
    loads = [
        lambda: ec.tree_deserialise_leaves(path, like, **kwargs),
        lambda: ec.materialise(ec.open(path).splice(like, **kwargs)),
        lambda: ec.load_or_init(lambda: like, path, missing="init", **kwargs),
        lambda: ec.CheckpointManager(tmp_path).restore(like, **kwargs)[0],
        lambda: ec.from_bytes(
            ec.to_bytes({"model": model, "state": state}), like, rename=rename
        ),
    ]
    for load in loads:
        out = load()
        for new, old in (("first", "second"), ("second", "first")):
            here, there = getattr(out["model"], new), getattr(model, old)
            assert eqx.tree_equal(here.weight, there.weight)
            for field in ("ema_state_index", "ema_first_time_index"):
                got = out["state"].get(getattr(here, field))
                assert_alike(got, state.get(getattr(there, field)))
        assert eqx.tree_equal(out["model"].mix, model.attention)


@pytest.mark.parametrize("rename", [_RULES, _by_function])
def test_a_state_without_its_model(rename, tmp_path):
    model, state = _filled(_made(_Old))
    ec.tree_serialise_leaves(tmp_path / "c", _named((model, state)))
    like_model, like = _made(_New)
    out = ec.tree_deserialise_leaves(
        tmp_path / "c", like, source="state", rename=rename
    )
    index = like_model.first.ema_state_index
    assert_alike(out.get(index), state.get(model.second.ema_state_index))
    # Saved alone, its labels are paths from the model.
    ec.tree_serialise_leaves(tmp_path / "d", {"state": state})
    alone = [(r"^state\b", "statistics"), *_RULES[:3]]
    out = ec.tree_deserialise_leaves(tmp_path / "d", {"statistics": like}, rename=alone)
    got = out["statistics"].get(index)
    assert_alike(got, state.get(model.second.ema_state_index))


def _saved_again(path, tree):
    """What is saved of a checkpoint's own tree, whose labels are paths."""
    ec.tree_serialise_leaves(path / "a", tree)
    nodes = ec.open(path / "a").tree
    ec.tree_serialise_leaves(path / "b", {"model": nodes.model, "state": nodes.state})
    return ft.partial(ec.tree_deserialise_leaves, path / "b")


def _of_safetensors(path, tree):
    ec.export_safetensors(path / "a.safetensors", tree, eqx.is_array)
    load = ft.partial(ec.tree_deserialise_leaves, path / "a.safetensors")
    return ft.partial(load, filter_spec=eqx.is_array)


def _exported(path, tree):
    """Here it is the export that renames."""

    def load(like, rename):
        file = path / "a.safetensors"
        ec.export_safetensors(file, tree, eqx.is_array, rename=rename)
        return ec.tree_deserialise_leaves(file, like, eqx.is_array)

    return load


def _of_a_state_dict(path, tree):
    return ft.partial(ec.from_state_dict, ec.to_state_dict(tree))


@pytest.mark.parametrize("make", [_raw, _made])
@pytest.mark.parametrize(
    "save", [_saved_again, _of_safetensors, _exported, _of_a_state_dict]
)
def test_statistics_go_with_layers_that_are_exchanged(save, make, tmp_path):
    model, state = _filled(make(_Old))
    load = save(tmp_path, _named((model, state)))
    like = _named(make(_Old))
    # `.first` and `.second` are paths from the model, and `model.first` is a name.
    rules = [
        (r"^model[.]first[.]", "model.third."),
        (r"^model[.]second[.]", "model.first."),
        (r"^model[.]third[.]", "model.second."),
    ]
    out = load(like, rename=rules)
    for new, old in (("first", "second"), ("second", "first")):
        here, there = getattr(out["model"], new), getattr(model, old)
        assert eqx.tree_equal(here.weight, there.weight)
        got = out["state"].get(here.ema_state_index)
        assert_alike(got, state.get(there.ema_state_index))


# A layout is None for a BatchNorm, or a dict of layouts.

_KEYS = ["a", "b-c", "d 1", "2", "é'", "e+f"]


def _layout(rng, depth=0):
    if depth == 3 or (depth and rng.random() < 0.4):
        return None
    names = rng.sample(rng.choice(["abc", _KEYS]), rng.randint(2, 3))
    return {name: _layout(rng, depth + 1) for name in names}


def _paths(layout, path="model.parts"):
    """The names of its BatchNorms."""
    if layout is None:
        return [path]
    parts = ec.leaf_names({key: 0 for key in layout})
    return [x for k, y in layout.items() for x in _paths(y, f"{path}.{parts[k]}")]


def _exchanged(rng, layout):
    """The same with other keys, in the order that they had."""
    if layout is None:
        return None
    keys = _shuffled(rng, [*layout])
    return {key: _exchanged(rng, x) for key, x in zip(keys, layout.values())}


class _Nested(eqx.Module):
    parts: dict

    def __init__(self, layout, *, key):
        build = lambda x: _norm() if x is None else {k: build(y) for k, y in x.items()}
        self.parts = build(layout)


def _norms(tree):
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    return [x for x in jtu.tree_leaves(tree, is_leaf=is_norm) if is_norm(x)]


def _own(path, tree):
    ec.tree_serialise_leaves(path / "a", tree)
    return ft.partial(ec.tree_deserialise_leaves, path / "a")


@pytest.mark.parametrize("seed", [*range(6), *long(*range(6, 100))])
def test_statistics_of_any_layers_that_were_exchanged(seed, tmp_path):
    """In memory first, where no marker says so, and then by a rename."""
    rng = random.Random(seed)
    make, layout = rng.choice([_raw, _made]), _layout(rng)
    model, state = make(_Nested, layout=layout)
    order = _shuffled(rng, _norms(model))
    model = eqx.tree_at(_norms, model, order)
    weights = [jnp.full(3, float(i)) for i in range(len(order))]
    model = eqx.tree_at(lambda m: [x.weight for x in _norms(m)], model, weights)
    for norm in _norms(model):
        mean = norm.weight.astype("float32")
        state = state.set(norm.ema_state_index, (mean, mean))
    new = _exchanged(rng, layout)
    moves = dict(zip(_paths(layout), _paths(new)))

    def rename(name):
        norm, dot, rest = name.rpartition(".")
        return moves.get(norm, norm) + dot + rest

    routes = _own, _saved_again, _of_safetensors, _exported, _of_a_state_dict
    for number, save in enumerate(routes):
        (tmp_path / f"{number}").mkdir()
        load = save(tmp_path / f"{number}", _named((model, state)))
        out = load(_named(make(_Nested, layout=new)), rename=rename)
        for norm in _norms(out["model"]):
            mean, _ = out["state"].get(norm.ema_state_index)
            assert jnp.array_equal(mean, norm.weight)


class _Counter(eqx.Module):
    linear: eqx.nn.Linear | None
    count: eqx.nn.StateIndex

    def __init__(self, *, key):
        self.linear = eqx.nn.Linear(2, 2, key=key)
        self.count = eqx.nn.StateIndex(jnp.zeros(()))


class _Counters(eqx.Module):
    first: _Counter
    second: _Counter

    def __init__(self, *, key):
        self.first, self.second = _Counter(key=key), _Counter(key=key)


@pytest.mark.parametrize("make", [_raw, _made])
def test_a_module_whose_leaves_are_all_at_the_top_now(make, tmp_path):
    """It has gone nowhere, and entries of its StateIndex stay its own."""
    model, state = make(_Counters)
    state = state.set(model.first.count, jnp.ones(()))
    ec.tree_serialise_leaves(tmp_path / "c", _named((model, state)))
    like = _named(make(_Counters))
    like["model"] = eqx.tree_at(lambda m: m.first.linear, like["model"], None)
    like |= {"w": model.first.linear.weight, "b": model.first.linear.bias}
    rules = [(rf"^model[.]first[.]linear[.]{x}", x[0]) for x in ("weight", "bias")]
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, rename=rules)
    new = out["model"]
    counts = [out["state"].get(x.count) for x in (new.first, new.second)]
    assert counts == [1, 0]


def test_statistics_that_could_be_of_two(tmp_path):
    """The weights of two BatchNorms are exchanged, and the rest of them is not."""
    model, state = _filled(_made(_Old))
    ec.tree_serialise_leaves(tmp_path / "c", _named((model, state)))
    names = {"first": "second", "second": "first"}

    def rename(name):
        swap = lambda m: f"model.{names[m[1]]}.{m[2]}"
        return re.sub(r"^model\.(first|second)\.(weight|bias)$", swap, name)

    with pytest.raises(RuntimeError, match="no entry of the saved State is that of"):
        ec.tree_deserialise_leaves(tmp_path / "c", _named(_made(_Old)), rename=rename)


@pytest.mark.parametrize("rename", [_RULES, _by_function])
def test_static_fields_are_compared_under_the_new_names(rename, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", _named(_made(_Old)))
    load = lambda like, **kwargs: ec.tree_deserialise_leaves(
        tmp_path / "c", _named(like), rename=rename, **kwargs
    )
    for kwargs, name, stored in (
        ({"heads": 2}, "model.mix.num_heads", "model.attention.num_heads"),
        # It has no arrays.
        ({"size": 3}, "model.reduce.kernel_size", "model.pool.kernel_size"),
    ):
        like = _made(_New, **kwargs)
        with pytest.raises(RuntimeError) as caught:
            load(like)
        text = str(caught.value)
        assert (
            f"    {name}  saved " in text
            and f"  (stored as `{stored}`)\n" in f"{text}\n"
        )
        for pattern in (f"*.{stored.rpartition('.')[2]}", name, stored):
            sizes = ["*.qk_size", "*.vo_size"] if "heads" in kwargs else []
            load(like, static=[pattern, *sizes])


def test_leaves_of_a_node_that_all_have_other_names(tmp_path):
    """Nothing below the attention is called as it was."""
    attention = eqx.nn.MultiheadAttention(4, 8, key=jr.key(0))

    class Mix(eqx.Module):
        q: eqx.nn.Linear
        k: eqx.nn.Linear
        v: eqx.nn.Linear
        o: eqx.nn.Linear
        num_heads: int = eqx.field(static=True)

    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    parts = [getattr(attention, f"{name}_proj") for name in names]
    ec.tree_serialise_leaves(tmp_path / "c", {"a": attention}, eqx.is_array)
    saved = {f"a.{x}_proj.weight": f"m.{y}.weight" for x, y in names.items()}
    rules = [(f"^{x.replace('.', '[.]')}$", y) for x, y in saved.items()]
    for rename in (saved.__getitem__, rules):
        like = {"m": Mix(*parts, num_heads=4)}
        load = ft.partial(
            ec.tree_deserialise_leaves, tmp_path / "c", filter_spec=eqx.is_array
        )
        assert eqx.tree_equal(load(like, rename=rename), like)
        with pytest.raises(RuntimeError, match=r"m.num_heads  saved 4, `like` has 2"):
            like = {"m": Mix(*parts, num_heads=2)}
            load(like, rename=rename)


def test_functions_that_have_come_or_gone_are_told(tmp_path):
    """Also by nodes of which a layer has nothing but a function, or nothing at all."""
    path, w = tmp_path / "c", eqx.nn.Linear(1, 1, key=jr.key(0))
    alone, nothing = eqx.nn.Lambda(jax.nn.relu), eqx.nn.Identity()
    whats = jax.nn.relu, alone, nothing
    for trees_of in (lambda x: {"w": w, "act": x}, lambda x: {"layers": [w, [x]]}):
        for saved, here in itertools.permutations(whats, 2):
            ec.tree_serialise_leaves(path, trees_of(saved))
            load = ft.partial(ec.tree_deserialise_leaves, path, rename=[("^", "m.")])
            load({"m": trees_of(saved)})
            with pytest.raises(RuntimeError, match="m[.]\\S+  saved .*relu"):
                load({"m": trees_of(here)})


# ---- What is named how.


@pytest.fixture
def layers(tmp_path):
    layer = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}
    saved = {"bert": {"encoder": {"layer": [layer] * 3}}, "step": 7}
    ec.tree_serialise_leaves(tmp_path / "c", saved)
    return tmp_path / "c"


def _like(shape=(2, 3), depth=3, **more):
    return {"layers": [{"weight": jnp.zeros(shape), "b": jnp.zeros(2), **more}] * depth}


_THERE = [(r"^bert\.encoder\.layer", "bert.layers"), (r"\.w$", ".weight")]


def test_errors_speak_of_both_names(layers):
    with pytest.raises(RuntimeError) as caught:
        ec.tree_deserialise_leaves(
            layers, _like((3, 3), 2, c=jnp.ones(1)), source="bert", rename=_THERE
        )
    text = str(caught.value)
    both = (
        "bert.layers.{{{0}}}.{1}  {2}  (stored as `bert.encoder.layer.{{{0}}}.{3}`)\n"
    )
    shapes = "saved f32[2,3], `like` has f32[3,3]"
    assert both.format("0..1", "weight", shapes, "w") in text + "\n"
    for own, stored, shown in (("weight", "w", "f32[2,3]"), ("b", "b", "f32[2]")):
        row = (
            f"bert.layers.2.{own}  {shown}  (stored as `bert.encoder.layer.2.{stored}`)"
        )
        assert row in text
    row = "bert.layers.{0..1}.c  f32[1]  (the nearest name there is `"
    assert row + "bert.layers.{0..1}.b`)\n" in text
    # A name that is nearly one: the stored one is beside it too.
    rules = [(r"^bert\.encoder\.layer", "layers"), (r"\.w$", ".weigth")]
    with pytest.raises(RuntimeError) as caught:
        ec.tree_deserialise_leaves(
            layers, _like(depth=1), rename=rules, missing="error"
        )
    near = "`layers.0.weigth`, stored as `bert.encoder.layer.0.w`)"
    assert near in str(caught.value)


def test_source(layers):
    load = ft.partial(ec.tree_deserialise_leaves, layers, _like(), rename=_THERE)
    for source in ("bert", lambda c: c.bert):
        assert load(source=source)["layers"][0]["weight"].shape == (2, 3)
    # One is a name after the rename, and the other a node as it is stored.
    like = _like()["layers"]
    load = ft.partial(ec.tree_deserialise_leaves, layers, like, rename=_THERE)
    for source in ("bert.layers", lambda c: c.bert.encoder.layer):
        assert load(source=source)[2]["b"].shape == (2,)
    with pytest.raises(KeyError, match="has no such node after the rename"):
        load(source="bert.encoder.layer")
    one = ec.tree_deserialise_leaves(
        layers, 0, rename=[("step", "count")], source=lambda c: c.step
    )
    assert one == 7
    parted = [(r"^bert.encoder.layer.0", "x.0"), (r"^bert.encoder.layer.1", "y.1")]
    with pytest.raises(ValueError, match="which the rename takes to"):
        ec.tree_deserialise_leaves(
            layers, like, rename=parted, source=lambda c: c.bert.encoder.layer
        )


def test_where_and_missing_speak_of_the_tree(layers):
    like = {"bert": _like(new=jnp.full(1, 5.0)), "step": 0}
    out = ec.tree_deserialise_leaves(
        layers,
        like,
        where=lambda t: t["bert"]["layers"][1],
        missing="keep",
        rename=_THERE,
    )
    new, old = out["bert"]["layers"][1], out["bert"]["layers"][0]
    assert new["weight"].sum() == 6 and new["new"] == 5 and old["weight"].sum() == 0
    like = {"bert": _like(), "step": 0}
    skeleton = jax.eval_shape(lambda: like)
    out = ec.load_or_init(
        lambda: {**like, "more": jnp.ones(3)}, layers, missing="init", rename=_THERE
    )
    assert out["more"].sum() == 3 and out["bert"]["layers"][2]["weight"].sum() == 6
    assert ec.open(layers).splice(skeleton, rename=_THERE)["step"].read() == 7


@pytest.mark.parametrize("layout", ["ocdbt", "zarr", "zip"])
def test_what_is_read_is_what_is_stored(layout, tmp_path):
    """Damage is told by the stored name, which the files have."""
    path = tmp_path / ("c.zip" if layout == "zip" else "c")
    kwargs = {} if layout == "zip" else {"layout": layout}
    shared = jnp.arange(3.0)
    ec.tree_serialise_leaves(
        path, {"a": shared, "b": shared, "c": jnp.ones(2)}, **kwargs
    )
    like = {"x": jnp.zeros(3), "b": jnp.zeros(3), "a": jnp.zeros(2)}
    rename = {"a": "x", "b": "b", "c": "a"}.__getitem__
    out = ec.tree_deserialise_leaves(path, like, rename=rename)
    assert_alike(out, {"x": shared, "b": shared, "a": jnp.ones(2)})
    assert ec.open(path).splice(like, rename=rename)["x"].name == "a"


@pytest.mark.parametrize(
    "rules, error, said",
    [
        (
            [("layer", "a"), ("zzz", "a")],
            ValueError,
            "change no name of the checkpoint: 'zzz'. ",
        ),
        ([("bert", "bert")], ValueError, "rules that change no name"),
        (
            [(r"\.\d\.", ".0.")],
            ValueError,
            "layer.0.w`: `bert.encoder.layer.0.w`, `bert.encoder.layer.1.w`, ",
        ),
        (lambda name: "x", ValueError, "gives one name to several leaves"),
        ([("w$", ec.adapters.transpose())], ValueError, "has a rule with an adapter"),
        (
            [("w$", r"\2")],
            ValueError,
            "does not go with the pattern 'w$': invalid group",
        ),
        (lambda name: None, TypeError, "gave a `NoneType` for the name `bert.enc"),
        ([("layer",)], TypeError, "is none of them"),
    ],
)
def test_renames_that_cannot_be(layers, rules, error, said):
    for load in (
        lambda: ec.tree_deserialise_leaves(layers, _like(), rename=rules),
        lambda: ec.open(layers).splice(_like(), rename=rules),
        lambda: ec.load_or_init(_like, layers, missing="init", rename=rules),
    ):
        with pytest.raises(error, match=re.escape(said)):
            load()


def test_there_and_back(layers):
    """An inverse knows the names of leaves, and no others."""
    there = ec.rename(_THERE)
    like = {"bert": _like(), "step": 0}
    out = ec.tree_deserialise_leaves(layers, like, rename=there)
    ec.tree_serialise_leaves(layers.parent / "new", out)
    old = {
        "bert": {
            "encoder": {"layer": [{"w": jnp.zeros((2, 3)), "b": jnp.zeros(2)}] * 3}
        },
        "step": 0,
    }
    back = ec.tree_deserialise_leaves(
        layers.parent / "new", old, rename=there.inverse(layers)
    )
    assert back["bert"]["encoder"]["layer"][1]["w"].sum() == 6
    turning = ec.rename([*_THERE, ("w$", ec.adapters.transpose())])
    with pytest.raises(ValueError, match="arrays would stay as the adapters have made"):
        turning.inverse(layers)


@pytest.mark.parametrize(
    "rules, above",
    [([("^x[.]", "y.")], ["y"]), ([("^x[.]", "")], []), ([("^x", "y.z")], ["y", "z"])],
)
def test_children_without_keys_go_by_their_attributes_below_each_other(
    tmp_path, rules, above
):
    """Their classes flatten them in another order now."""

    def tree(cls, value, sizes, above):
        linears = [eqx.nn.Linear(2, n, False, key=jr.key(0)) for n in sizes]
        of = lambda i: eqx.tree_at(lambda m: m.weight, linears[i], value(i))
        out = {"l": cls(w=cls(w=of(0), b=of(1)), b=cls(w=of(2), b=[of(3)]))}
        return ft.reduce(lambda tree, key: {key: tree}, reversed(above), out)

    old, new = trees.without_keys("w", "b"), trees.without_keys("b", "w")
    path, sizes = tmp_path / "a", (2, 3, 2, 3)
    value = lambda i: jnp.full(6, i)
    ec.tree_serialise_leaves(path, tree(old, value, sizes, ["x"]))
    for cls in (old, new):
        like = tree(cls, lambda _: jnp.zeros(6, int), sizes, above)
        got = ec.tree_deserialise_leaves(path, like, rename=rules)
        top = ft.reduce(lambda tree, key: tree[key], above, got)["l"]
        found = top.w.w, top.w.b, top.b.w, *top.b.b
        assert [int(x.weight[0]) for x in found] == [0, 1, 2, 3]
        like = tree(cls, lambda _: jnp.zeros(6, int), (2, 3, 2, 5), above)
        with pytest.raises(RuntimeError, match=r"\(1 static.*"):
            ec.tree_deserialise_leaves(path, like, rename=rules)


# ---- Kernels of other libraries.


def test_a_warning_of_square_kernels(tmp_path):
    """They fit as they are, and a load cannot turn them."""
    mlp = eqx.nn.MLP(4, 4, 4, 0, use_final_bias=False, key=jr.key(0))
    kernels = [{"kernel": {"value": x.weight.T}} for x in mlp.layers]
    ckpt = tmp_path / "x"
    ec.tree_serialise_leaves(ckpt, {"layers": kernels})
    given = {"rename": [("kernel.value$", "weight")]}
    for call in (
        lambda: ec.tree_deserialise_leaves(ckpt, mlp, **given),
        lambda: ec.open(ckpt).splice(mlp, **given),
        lambda: ec.load_or_init(lambda: mlp, ckpt, **given),
        lambda: ec.from_state_dict({"layers": {"0": kernels[0]}}, mlp, **given),
    ):
        with pytest.warns(UserWarning, match="do not say how they are stored") as some:
            call()
        (warning,) = some
        assert warning.filename == __file__
        assert str(warning.message).splitlines()[1:] == [
            "  layers.0.weight  of `layers.0.kernel.value`: kernels of flax, "
            "Keras and Haiku need `ec.adapters.channels_first()`",
            "  A load takes them as they are. `ec.graft` takes this rename in a pair, "
            'where a rule may have the adapter: `("weight$", '
            "ec.adapters.channels_first())`. See docs/layouts.md.",
        ]


def test_a_state_whose_entries_have_numbers_that_python_does_not_read(tmp_path):
    pair = _made(_Old)
    ec.tree_serialise_leaves(tmp_path / "c", pair)
    rename = [(r"^1\.(\d+)", rf"1.{'1' * 5000}\1")]
    with pytest.raises(RuntimeError, match="is not in the checkpoint"):
        ec.tree_deserialise_leaves(tmp_path / "c", pair, rename=rename)
