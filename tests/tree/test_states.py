"""`eqx.nn.State`, which flattens by position: by every route that takes a tree, entries
come back to what they belong to, or it is an error."""

import functools as ft
import itertools as it
import random
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from support.helpers import assert_alike

import eqx_ckpt as ec


class _Norms(eqx.Module):
    first: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm

    def __init__(self, _=None):
        self.first = eqx.nn.BatchNorm(3, "batch", mode="ema")
        self.second = eqx.nn.BatchNorm(3, "batch", mode="ema")


class _Reordered(eqx.Module):
    second: eqx.nn.BatchNorm
    first: eqx.nn.BatchNorm

    __init__ = _Norms.__init__


class _One(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")


def _made(cls):
    # The class has another name in a marker, as a class that was renamed.
    return eqx.nn.make_with_state(cls)()


def _raw(cls):
    """By Equinox's older way, whose markers are objects."""
    model = cls()
    return eqx.nn.delete_init_state(model), eqx.nn.State(model)


def _fill(state):
    """Every number of a State differs."""
    leaves, structure = jtu.tree_flatten(state)
    new = [jnp.full(x.shape, i).astype(x.dtype) for i, x in enumerate(leaves, 1)]
    return jtu.tree_unflatten(structure, new)


def _statistics(model, state):
    return [state.get(getattr(model, n).ema_state_index) for n in ("first", "second")]


# ---- The routes: each takes what to save, a path and what to load into.


def _load(path, like):
    return ec.tree_deserialise_leaves(path, like)


def _file(tree, tmp, like, name="c", **kwargs):
    ec.tree_serialise_leaves(tmp / name, tree, **kwargs)
    return _load(tmp / name, like)


def _async(tree, tmp, like):
    ec.async_tree_serialise_leaves(tmp / "c", tree).result()
    return _load(tmp / "c", like)


def _splice(tree, tmp, like):
    ec.tree_serialise_leaves(tmp / "c", tree)
    return ec.materialise(ec.open(tmp / "c").splice(like))


def _bytes(tree, tmp, like):
    return ec.from_bytes(ec.to_bytes(tree), like)


def _manager(tree, tmp, like):
    with ec.CheckpointManager(tmp / "run") as manager:
        manager.save(1, tree)
        return manager.restore(like)[0]


def _state_dict(tree, tmp, like):
    return ec.from_state_dict(ec.to_state_dict(tree), like)


def _joined_state_dict(tree, tmp, like):
    """As it would come from a file of joined names, in any order."""
    flat = jtu.tree_flatten_with_path(ec.to_state_dict(tree))[0]
    joined = {".".join(key.key for key in path): leaf for path, leaf in flat}
    return ec.from_state_dict(dict(reversed(joined.items())), like)


def _graft(tree, tmp, like):
    ec.tree_serialise_leaves(tmp / "c", tree)
    return ec.graft(like, tmp / "c", [(lambda m: m, lambda c: c)])[0]


def _export(tree, tmp, like, **kwargs):
    path = tmp / "c.safetensors"
    ec.export_safetensors(path, tree, eqx.is_array, **kwargs)
    return ec.tree_deserialise_leaves(path, like, eqx.is_array)


def _export_renamed(tree, tmp, like):
    return _export(tree, tmp, like, rename=lambda name: name)


def _convert(tree, tmp, like):
    """There and back again."""
    skip = [] if isinstance(tree, eqx.nn.State) else ["*.inference"]
    ec.tree_serialise_leaves(tmp / "c", tree)
    ec.convert(tmp / "c", tmp / "c.safetensors", skip=skip, metadata={"a": "b"})
    assert ec.open(tmp / "c.safetensors").metadata == {"a": "b"}
    ec.convert(tmp / "c.safetensors", tmp / "d.zip")
    return ec.tree_deserialise_leaves(tmp / "d.zip", like, eqx.is_array)


def _convert_eqx(tree, tmp, like):
    """Equinox's file has no names: the tree it is opened with says them."""
    eqx.tree_serialise_leaves(tmp / "c.eqx", tree)
    ec.convert(tmp / "c.eqx", tmp / "d", like=tree)
    return _load(tmp / "d", like)


def _nodes(tree, tmp, like):
    """What is saved of a checkpoint's own tree."""
    ec.tree_serialise_leaves(tmp / "c", tree)
    node = jax.tree.map(lambda x: x.read(), ec.open(tmp / "c").tree)
    ec.tree_serialise_leaves(tmp / "d.zip", node)
    return _load(tmp / "d.zip", like)


def _plain(tree, tmp, like):
    """Plain lists have no labels."""
    ec.tree_serialise_leaves(tmp / "c", tree)
    ec.tree_serialise_leaves(tmp / "d.zip", ec.materialise(ec.open(tmp / "c").tree))
    return _load(tmp / "d.zip", like)


def _load_or_init(tree, tmp, like):
    ec.tree_serialise_leaves(tmp / "c", tree)
    return ec.load_or_init(lambda: like, tmp / "c")


_ROUTES = [
    *(_file, ft.partial(_file, layout="zarr"), ft.partial(_file, name="c.zip")),
    *(_async, _splice, _bytes, _manager, _state_dict, _joined_state_dict, _graft),
    *(_export, _export_renamed, _convert, _convert_eqx, _nodes, _plain),
    _load_or_init,
]


def _name(route: Any) -> str:
    keywords = getattr(route, "keywords", {})
    return "_".join([getattr(route, "func", route).__name__, *keywords.values()])


@pytest.mark.parametrize("route", _ROUTES, ids=_name)
def test_reordered_states_by_every_route(route, tmp_path):
    for kind, make in (("made", _made), ("raw", _raw)):
        for what in ("both", "alone"):
            pick = (lambda pair: pair) if what == "both" else (lambda pair: pair[1])
            model, state = make(_Norms)
            state = _fill(state)
            for cls in (_Norms, _Reordered):
                case = tmp_path / kind / what / cls.__name__
                case.mkdir(parents=True)
                other = make(cls)
                # Of a State alone with such markers nothing can be known.
                unknown = kind == "raw" and what == "alone"
                if unknown or route is _plain:
                    with pytest.raises((RuntimeError, ValueError), match="look alike"):
                        route(pick((model, state)), case, pick(other))
                    continue
                loaded = route(pick((model, state)), case, pick(other))
                loaded = loaded[1] if what == "both" else loaded
                got = _statistics(other[0], loaded)
                assert_alike(got, _statistics(model, state))


@pytest.mark.parametrize("make", [_made, _raw])
@pytest.mark.parametrize("route", _ROUTES, ids=_name)
def test_layers_that_were_exchanged_by_every_route(route, make, tmp_path):
    """A marker is then that of another place in the model."""
    model, state = make(_Norms)
    both = lambda m: (m.first, m.second)
    model, state = eqx.tree_at(both, model, both(model)[::-1]), _fill(state)
    other = make(_Norms)
    if route is _plain:
        with pytest.raises(RuntimeError, match="look alike"):
            route((model, state), tmp_path, other)
        return
    loaded = route((model, state), tmp_path, other)
    assert_alike(_statistics(other[0], loaded[1]), _statistics(model, state))


@pytest.mark.parametrize("route", _ROUTES, ids=_name)
def test_one_batch_norm_by_every_route(route, tmp_path):
    """Its entries do not look alike, so that positions are enough."""
    for i, make in enumerate((_made, _raw)):
        model, state = make(_One)
        state = _fill(state)
        for what in ("both", "alone"):
            case = tmp_path / f"{what}{i}"
            case.mkdir()
            pick = (lambda pair: pair) if what == "both" else (lambda pair: pair[1])
            loaded = route(pick((model, state)), case, pick(make(_One)))
            loaded = loaded[1] if what == "both" else loaded
            assert eqx.tree_equal(jtu.tree_leaves(loaded), jtu.tree_leaves(state))


class _Deep(eqx.Module):
    """The path of one of its norms ends that of the other."""

    first: eqx.nn.BatchNorm
    block: _Norms
    second: eqx.nn.BatchNorm

    def __init__(self):
        self.first, self.second = (_Norms().first for _ in range(2))
        self.block = _Norms()


def _write(path, tree):
    ec.tree_serialise_leaves(path, tree, eqx.is_array)
    return path


def _write_safetensors(path, tree):
    path = path.with_suffix(".safetensors")
    ec.export_safetensors(path, tree, eqx.is_array)
    return path


@pytest.mark.parametrize("make", [_made, _raw])
@pytest.mark.parametrize("write", [_write, _write_safetensors])
def test_nodes_that_are_put_elsewhere(write, make, tmp_path):
    """Statistics go with the node, into whatever is made of it."""
    model, state = make(_Deep)
    state = _fill(state)
    c = ec.open(write(tmp_path / "a", {"model": model, "state": state})).tree
    turned = {"first": c.model.block.second, "second": c.model.first}
    turned["block"] = {"first": c.model.second, "second": c.model.block.first}
    both = lambda m: (m.first, m.second, m.block.first, m.block.second)
    first, second, third, fourth = both(model)
    wanted = [fourth, first, second, third]
    sides = (turned, wanted), (c.model, both(model))
    cases = it.product(("model", "net"), _AGAIN, sides)
    for number, (name, again, (tree, old)) in enumerate(cases):
        load = again(tmp_path / f"b{number}", {name: tree, "state": c.state})
        out = load(dict(zip((name, "state"), make(_Deep))), eqx.is_array)
        got = [out["state"].get(n.ema_state_index) for n in both(out[name])]
        assert_alike(got, [state.get(n.ema_state_index) for n in old])


def _again(path, tree):
    ec.tree_serialise_leaves(path, tree)
    return ft.partial(ec.tree_deserialise_leaves, path)


def _again_as_safetensors(path, tree):
    path = path.with_suffix(".safetensors")
    ec.export_safetensors(path, tree)
    return ft.partial(ec.tree_deserialise_leaves, path)


def _again_as_dicts(path, tree):
    read = jax.tree.map(lambda x: x.read(), tree)
    return ft.partial(ec.from_state_dict, ec.to_state_dict(read))


_AGAIN = [_again, _again_as_safetensors, _again_as_dicts]


class _Wrapped(eqx.Module):
    inner: dict

    def __init__(self):
        norms = _Norms()
        self.inner = {"one": norms.first, "two": norms.second}


@pytest.mark.parametrize("make", [_made, _raw])
@pytest.mark.parametrize("again", _AGAIN)
def test_nodes_that_get_other_names(again, make, tmp_path):
    """No marker has them, so that what is written of a label is the new name."""
    model, state = make(_Norms)
    state = _fill(state)
    path = _write(tmp_path / "a", {"model": model, "state": state})
    c = ec.open(path).tree
    tree = {"inner": {"one": c.model.first, "two": c.model.second}}
    ec.tree_serialise_leaves(tmp_path / "b", {"model": tree, "state": c.state})
    load = again(tmp_path / "c", ec.open(tmp_path / "b").tree)
    out = load(dict(zip(("model", "state"), make(_Wrapped))), eqx.is_array)
    norms = out["model"].inner
    got = [out["state"].get(norms[x].ema_state_index) for x in ("one", "two")]
    wanted = model.first, model.second
    assert_alike(got, [state.get(x.ema_state_index) for x in wanted])


def test_labels_on_one_side_only(tmp_path):
    """A State with its model, loaded without it, whose markers are objects."""
    model, state = _raw(_Norms)
    ec.tree_serialise_leaves(tmp_path / "c", {"model": model, "state": state})
    for like in (_raw(_Norms)[1], eqx.filter_eval_shape(lambda: _raw(_Norms)[1])):
        with pytest.raises(RuntimeError, match="`state.0` and `state.2` look alike"):
            ec.tree_deserialise_leaves(tmp_path / "c", like, source="state")
    # A part of it: another number of entries, of which nothing is known.
    ec.tree_serialise_leaves(tmp_path / "one", {"state": _raw(_One)[1]})
    part = _raw(_One)
    with pytest.raises(RuntimeError, match="2 were saved, and `like` has 1"):
        like = {"state": part[1].substate(part[0].norm.batch_counter)}
        ec.tree_deserialise_leaves(tmp_path / "one", like)


def test_names_of_a_state_dict(tmp_path):
    model, state = eqx.nn.make_with_state(_Norms)()
    names = list(ec.to_state_dict({"state": state})["state"])
    assert names[1] == "%=%3D%2Efirst%2Eema_state_index"
    # Positions are refused where they could mean something else, and taken elsewhere.
    leaves = jtu.tree_leaves(state)
    old = {"0": leaves[0], "1": {"0": leaves[1], "1": leaves[2]}}
    more = {"2": leaves[3], "3": {"0": leaves[4], "1": leaves[5]}}
    with pytest.raises(RuntimeError, match="look alike"):
        ec.from_state_dict({**old, **more}, state)
    one = eqx.nn.make_with_state(_One)()[1]
    counter, mean, var = jtu.tree_leaves(one)
    old = {"0": counter, "1": {"0": mean, "1": var}}
    assert eqx.tree_equal(ec.from_state_dict(old, one), one)


class _Pair(eqx.Module):
    norms: list

    def __init__(self):
        self.norms = [eqx.nn.BatchNorm(4, "b", mode="ema") for _ in range(2)]


def _with(values):
    """A model and its State, with one number in the weights and mean of each norm."""
    model, state = eqx.nn.make_with_state(_Pair)()
    for i, value in enumerate(values):
        weight = jnp.full(4, float(value))
        model = eqx.tree_at(lambda m: m.norms[i].weight, model, weight)
        index = model.norms[i].ema_state_index
        mean, variance = state.get(index)
        state = state.set(index, (jnp.full_like(mean, value), variance))
    return {"model": model, "state": state}


def _values(tree):
    norms = tree["model"].norms
    means = [tree["state"].get(norm.ema_state_index)[0][0] for norm in norms]
    return [(float(n.weight[0]), float(mean)) for n, mean in zip(norms, means)]


def test_statistics_follow_the_weights_through_a_graft(tmp_path):
    path = tmp_path / "c"
    ec.tree_serialise_leaves(path, _with([10, 11]))
    swap = lambda n: re.sub(r"norms\.(\d)", lambda k: f"norms.{1 - int(k[1])}", n)
    renamed = ec.rename(swap)
    state = (lambda m: m["state"], lambda c: c.state)
    leaves = [
        (
            lambda m, i=i, n=n: getattr(m["model"].norms[i], n),
            f"model.norms.{1 - i}.{n}",
        )
        for i in range(2)
        for n in ("weight", "bias", "inference")
    ]
    for pairs in (
        [(lambda m: m, lambda c: c, renamed)],
        [(lambda m: m["model"], lambda c: c.model, renamed), state],
        [(lambda m: m["model"].norms, lambda c: list(c.model.norms)[::-1]), state],
        [*leaves, state],
    ):
        out, _ = ec.graft(_with([0, 0]), path, pairs)
        assert _values(out) == [(11, 11), (10, 10)]
    out, _ = ec.graft(_with([0, 0]), path, [(lambda m: m, lambda c: c)])
    assert _values(out) == [(10, 10), (11, 11)]


_PLACES = ["norm", "a.norm", "a.b.norm", "b.norm", "b.a.norm", "other"]


def _grown(places, fill):
    """A model with a layer at each of these places, all of whose numbers are `fill`."""

    def make():
        out = {}
        for place in places:
            *above, last = place.split(".")
            node = out
            for part in above:
                node = node.setdefault(part, {})
            node[last] = eqx.nn.BatchNorm(2, "batch", mode="ema")
        return out

    model, state = eqx.nn.make_with_state(make)()
    full = lambda x: jnp.full_like(x, fill) if x.dtype == jnp.float32 else x
    return {"m": model, "s": jtu.tree_map(full, state)}


def _at(tree, place):
    return ft.reduce(lambda node, part: node[part], place.split("."), tree["m"])


def _means(tree, places):
    mean = lambda norm: tree["s"].get(norm.ema_state_index)[0][0]
    return {place: float(mean(_at(tree, place))) for place in places}


def _grow(seed, path):
    """Saves a model and makes another, with some of the same layers."""
    rng = random.Random(seed)
    saved, here = (rng.sample(_PLACES, rng.randrange(2, 6)) for _ in range(2))
    here = [*{*here, saved[0]}]
    ec.tree_serialise_leaves(path, _grown(saved, 7), durable=False)
    expected = {place: 7.0 if place in saved else 1.0 for place in here}
    return saved, here, _grown(here, 1), expected


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_come_and_go_have_their_own_statistics(tmp_path, seed):
    """However much their names resemble each other."""
    saved, here, like, expected = _grow(seed, tmp_path / "c")
    load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "c", like, missing="keep")
    assert _means(load(unexpected="ignore"), here) == expected
    if {*saved} <= {*here}:
        assert _means(load(), here) == expected
    given = ec.to_state_dict(_grown(saved, 7))
    out = ec.from_state_dict(given, like, missing="keep", unexpected="ignore")
    assert _means(out, here) == expected
    place = saved[0]
    parts = lambda t: [_at(t, place), *_entries(t, _at(t, place))]
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, where=parts)
    assert _means(out, here) == dict.fromkeys(here, 1.0) | {place: 7.0}
    for new in (x for x in here if x not in saved):
        both = lambda t: [*parts(t), *_entries(t, _at(t, new))]
        out = load(where=both)
        assert _means(out, here) == dict.fromkeys(here, 1.0) | {place: 7.0}


@pytest.mark.parametrize("seed", range(20))
def test_a_state_that_was_saved_again_without_some_leaves(tmp_path, seed):
    rng = random.Random(seed)
    places = rng.sample(_PLACES, rng.randrange(2, 6))
    tree, like = _grown(places, 7), _grown(places, 1)
    tree["s"] = _fill(tree["s"])
    ec.tree_serialise_leaves(tmp_path / "0", tree, durable=False)
    entries = [x for x in ec.open(tmp_path / "0") if x.startswith("s.")]
    left = {*rng.sample(entries, rng.randrange(1, len(entries)))}
    is_kept = lambda name: name not in left
    for number in range(2):
        own = ec.open(tmp_path / f"{number}").tree
        spec = jtu.tree_map(is_kept, ec.leaf_names(own))
        path = tmp_path / f"{number + 1}"
        ec.tree_serialise_leaves(path, own, spec, durable=False)
    names = ec.leaf_names(like)
    expected = jtu.tree_map(lambda n, x, y: x if is_kept(n) else y, names, tree, like)
    out = ec.tree_deserialise_leaves(path, like, missing="keep")
    assert_alike(out, expected)
    given, every = ec.to_state_dict(ec.open(path).tree), ec.to_state_dict(tree)
    assert sorted(x.name for x in jtu.tree_leaves(given)) == sorted(ec.open(path))
    assert given["s"].keys() <= every["s"].keys()
    found = ec.diff(tmp_path / "0", path)
    assert not found.added and not found.changed
    assert not any(map(is_kept, found.removed))


@pytest.mark.parametrize("seed", range(20))
def test_statistics_of_other_layers_are_not_compared_or_merged(tmp_path, seed):
    saved, here, like, _ = _grow(seed, tmp_path / "c")
    both = {*saved} & {*here}
    found = ec.diff(tmp_path / "c", like)
    for names, count in (
        (found.changed, 2 * len(both)),
        (found.added, 3 * len({*here} - both)),
        (found.removed, 3 * len({*saved} - both)),
    ):
        assert sum(name.startswith("s.") for name in names) == count
    merge = ft.partial(ec.merge, [tmp_path / "c", like], ec.merging.average())
    if both == {*saved} == {*here}:
        merge(where=lambda tree: tree["s"])
    else:
        with pytest.raises(ValueError, match="not in all of the trees"):
            merge(where=lambda tree: tree["s"])


def _entries(tree, norm):
    indices = norm.ema_first_time_index, norm.ema_state_index
    return [*map(tree["s"].get, indices)]


@pytest.mark.parametrize("seed", range(20))
def test_new_layers_in_a_graft_take_no_statistics(tmp_path, seed):
    saved, here, like, expected = _grow(seed, tmp_path / "c")
    both, new = [x for x in here if x in saved], [x for x in here if x not in saved]
    pairs = [(lambda m, x=x: _at(m, x), lambda c, x=x: _at(c, x)) for x in both]
    fresh = lambda m: [y for x in new for y in (_at(m, x), *_entries(m, _at(m, x)))]
    # Entries lie in the order of the layers, two of each.
    order = sorted(saved, key=lambda place: place.split("."))
    drop = lambda c: [
        y
        for i, x in enumerate(order)
        if x not in here
        for y in (_at(c, x), c["s"][2 * i], c["s"][2 * i + 1])
    ]
    options = {"fresh": fresh} if new else {}
    options |= {} if {*saved} <= {*here} else {"drop": drop}
    pairs.append((lambda m: m["s"], lambda c: c["s"]))
    out, _ = ec.graft(like, tmp_path / "c", pairs, **options)
    assert _means(out, here) == expected


def test_a_model_without_its_state_is_told(tmp_path):
    model, state = _made(_Norms)
    with pytest.warns(UserWarning, match="no State: they are not saved") as told:
        for name in ("a", "b"):
            ec.tree_serialise_leaves(tmp_path / name, {"model": model})
    # Of trees of one structure it is said once.
    assert len(told) == 1
    # These have what they need: a State, the first values of one, or no layers of such.
    for tree in ((model, state), _Norms(), state, {"x": 1.0}):
        ec.tree_serialise_leaves(tmp_path / "c", tree)
