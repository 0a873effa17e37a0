"""Any tree through every call that takes one.

JAX, NumPy and a plain walk of the tree decide what has to come back: bit for bit, with
its types, weak types and structure.
`python -m pytest -m long tests/tree/test_trees.py` takes 10,000 trees through
all of them.
"""

import collections
import contextlib
import functools as ft
import json
import pathlib
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
import pytest
from support import inside, trees
from support.helpers import assert_alike, facts, run_python

import eqx_ckpt as ec


_ARRAYS = (jax.Array, np.ndarray)
_NUMBERS = (*_ARRAYS, np.generic, bool, int, float, complex)


def _is_stored(x: Any) -> bool:
    return isinstance(x, _NUMBERS) and not isinstance(x, (np.str_, np.bytes_))


class Case(NamedTuple):
    """A tree, another of the same form, and what is known of its leaves."""

    tree: Any
    like: Any
    nodes: list[tuple[int, ...]]
    leaves: list[tuple[int, ...]]
    stored: list[bool]
    names: list[str]
    rng: random.Random
    path: str


def _case(seed: int, directory: str) -> Case:
    tree = trees.make(seed) if seed >= 0 else trees.twins(-seed)
    flat = jtu.tree_leaves(tree)
    names = jtu.tree_leaves(ec.leaf_names(tree))
    stored = list(map(_is_stored, flat))
    like, rng = trees.changed(tree), random.Random(-seed)
    return Case(tree, like, *trees.places(tree), stored, names, rng, directory)


def _refused(case: Case, chosen: Sequence[bool]) -> str | None:
    """Why leaves cannot be saved, or loaded."""
    flat = jtu.tree_flatten_with_path(case.tree)[0]
    named = [
        (name, path) for name, (path, _), good in zip(case.names, flat, chosen) if good
    ]
    if not named:
        return "Nothing to save|selects no leaf"
    if len({name for name, _ in named}) < len(named):
        return "Two leaves have the name|Two parts of the tree have the name"
    parts: dict[str, Any] = {name: None for name, _ in named}
    for name, path in named:
        components = name.split(".")
        for end in range(1, len(components)):
            kinds = list(map(_kind, path[:end]))
            if parts.setdefault(".".join(components[:end]), kinds) != kinds:
                return "Two parts of the tree have the name|Two leaves have the name"
    return None


def _kind(key: Any) -> Any:
    """Keys of one kind have one name only if they are equal."""
    if isinstance(key, (jtu.GetAttrKey, jtu.SequenceKey)):
        return type(key)
    if isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey)):
        return (type(key), type(key.key)) if type(key.key) in (int, str) else None
    return None


def _save(case: Case, path: str | None = None, **kwargs: Any) -> None:
    kwargs = {"layout": case.rng.choice(["ocdbt", "zarr"]), **kwargs}
    ec.tree_serialise_leaves(path or case.path, case.tree, durable=False, **kwargs)


def _merged(case: Case, chosen: Sequence[bool]) -> Any:
    """`like` with the chosen leaves of the tree."""
    both = zip(jtu.tree_leaves(case.tree), jtu.tree_leaves(case.like), chosen)
    leaves = [saved if good else own for saved, own, good in both]
    return jtu.tree_unflatten(jtu.tree_structure(case.like), leaves)


def _assert_shared(tree: Any, like: Any) -> None:
    """What is one array in `like` is one in `tree`, and nothing else is."""
    both = zip(jtu.tree_leaves(like), jtu.tree_leaves(tree), strict=True)
    pairs = {(id(a), id(b)) for a, b in both if isinstance(a, _ARRAYS)}
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)


# ---- The calls.


def load(case: Case) -> None:
    _save(case)
    assert ec.verify(case.path) == []
    out = ec.tree_deserialise_leaves(case.path, case.like)
    assert_alike(out, case.tree)
    _assert_shared(out, case.like)


def splice(case: Case) -> None:
    _save(case)
    lazy = ec.open(case.path).splice(case.like)
    assert jtu.tree_structure(lazy) == jtu.tree_structure(case.tree)
    is_lazy = [isinstance(x, ec.LazyArray) for x in jtu.tree_leaves(lazy)]
    assert is_lazy == case.stored
    out = ec.materialise(lazy)
    assert_alike(out, case.tree)
    _assert_shared(out, case.like)


def skeleton(case: Case) -> None:
    _save(case)
    likes = [ec.skeleton(lambda: case.tree)]
    if not any(isinstance(x, (np.ndarray, np.generic)) for x in jtu.tree_leaves(likes)):
        likes.append(eqx.filter_eval_shape(lambda: case.tree))
    for like in likes:
        assert jtu.tree_structure(like) == jtu.tree_structure(case.tree)
        assert_alike(ec.tree_deserialise_leaves(case.path, like), case.tree)
        lazy = ec.open(case.path).splice(like)
        assert_alike(ec.materialise(lazy), case.tree)
        assert_alike(ec.tree_deserialise_leaves(case.path, lazy), case.tree)


def _pick(case: Case) -> tuple[Callable[[Any], Any], list[bool]]:
    """A `where` of some nodes and leaves, and which of the stored leaves it picks."""
    rng = case.rng
    picks = rng.choices(case.nodes + case.leaves, k=rng.choice([1, 1, 2, 3]))
    form = rng.choice([list, tuple, lambda nodes: dict(enumerate(nodes))])

    def where(tree: Any) -> Any:
        nodes = [trees.at(tree, place) for place in picks]
        return nodes[0] if len(nodes) == 1 else form(nodes)

    chosen = [
        good and any(leaf[: len(place)] == place for place in picks)
        for leaf, good in zip(case.leaves, case.stored)
    ]
    return where, chosen


def _saves(case: Case, chosen: Sequence[bool], **kwargs: Any) -> bool:
    """Saves these leaves, unless that has to be refused, and is."""
    why = _refused(case, chosen)
    if why is None:
        _save(case, **kwargs)
        return True
    with pytest.raises(ValueError, match=why):
        _save(case, **kwargs)
    return False


def where_to_save(case: Case) -> None:
    where, chosen = _pick(case)
    if _saves(case, chosen, where=where):
        names = [name for name, good in zip(case.names, chosen) if good]
        assert list(ec.open(case.path).leaves) == names
        load = lambda **how: ec.tree_deserialise_leaves(case.path, case.like, **how)
        assert_alike(load(where=where), _merged(case, chosen))
        with _refusing_twins(case, chosen):
            assert_alike(load(missing="keep"), _merged(case, chosen))


def _refusing_twins(case: Case, saved: Sequence[bool]) -> Any:
    """Of a load of the whole tree: one saved leaf cannot be two."""
    stored = zip(case.names, case.stored)
    count = collections.Counter(name for name, good in stored if good)
    if any(good and count[name] > 1 for name, good in zip(case.names, saved)):
        return pytest.raises(ValueError, match="Two leaves have the name")
    return contextlib.nullcontext()


def where_to_load(case: Case) -> None:
    _save(case)
    where, chosen = _pick(case)
    load = ft.partial(ec.tree_deserialise_leaves, case.path)
    for call in (load, ec.open(case.path).splice):
        if any(chosen):
            out = ec.materialise(call(case.like, where=where))
            assert_alike(out, _merged(case, chosen))
        else:
            with pytest.raises(ValueError, match="selects no leaf"):
                call(case.like, where=where)


def filter_specs(case: Case) -> None:
    """Trees of bools, which may select texts too."""
    flat = jtu.tree_leaves(case.tree)
    can = [good or isinstance(x, (str, bytes)) for good, x in zip(case.stored, flat)]
    some = [good and case.rng.random() < 0.7 for good in can]
    spec = jtu.tree_unflatten(jtu.tree_structure(case.tree), some)
    if _saves(case, some, filter_spec=spec):
        out = ec.tree_deserialise_leaves(case.path, case.like, spec)
        assert_alike(out, _merged(case, some))


def source(case: Case) -> None:
    """The tree as a part of another."""
    whole = {"a.b": [(), case.tree], "b": 3}
    ec.tree_serialise_leaves(case.path, whole, durable=False)
    for how in ("a%2Eb.1", lambda c: c["a.b"][1]):
        out = ec.tree_deserialise_leaves(case.path, case.like, source=how)
        assert_alike(out, case.tree)


def graft(case: Case) -> None:
    """The tree as a part of another."""
    saved = {"old": [case.tree], "more": np.arange(3)}
    ec.tree_serialise_leaves(case.path, saved, durable=False)
    model = {"empty": (), "new": {"x": case.like}, "head": 1.5}
    out, _ = ec.graft(
        model,
        case.path,
        [(lambda m: m["new"]["x"], lambda c: c.old[0])],
        fresh=lambda m: m["head"],
        drop="more",
        scalars="load",
    )
    assert_alike(out, {**model, "new": {"x": case.tree}})


def graft_parts(case: Case) -> None:
    """Some children of the tree, each as a pair, and the others left as they are."""
    _save(case)
    keys: dict[tuple[int, ...], Any] = {}
    for number, (path, _) in enumerate(jtu.tree_flatten_with_path(case.tree)[0]):
        if case.stored[number] and path:
            keys[case.leaves[number][:1]] = path[0]
    tops = {name.partition(".")[0] for name in ec.open(case.path).leaves}
    some = [place for place in keys if case.rng.random() < 0.7]
    if not some or len(tops) < len(keys):
        return  # Two children may have one name, if their leaves have others.
    rest = [place for place in keys if place not in some]
    say = {
        "fresh": lambda m: [trees.at(m, place) for place in rest],
        "drop": lambda c: [_child(c, keys[place]) for place in rest],
    }
    call = lambda: ec.graft(
        case.like,
        case.path,
        [
            (ft.partial(trees.at, place=place), ft.partial(_child, key=keys[place]))
            for place in some
        ],
        **(say if rest else {}),
        scalars="load",
    )
    ids: dict[bool, set[int]] = {True: set(), False: set()}
    for leaf, place in zip(jtu.tree_leaves(case.like), case.leaves):
        if isinstance(leaf, _ARRAYS):
            ids[place[:1] in some].add(id(leaf))
    if ids[True] & ids[False]:
        with pytest.raises(RuntimeError, match="one array in the model"):
            call()
    else:
        chosen = [leaf[:1] in some for leaf in case.leaves]
        assert_alike(call()[0], _merged(case, chosen))


def _child(node: Any, key: Any) -> Any:
    """A child in a checkpoint's own tree, by its key in the tree that was saved."""
    if isinstance(key, jtu.GetAttrKey):
        return node[key.name]
    if isinstance(key, jtu.SequenceKey):
        return node[key.idx]
    has_key = isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey))
    return node[key.key if has_key else key]


def load_or_init(case: Case) -> None:
    _save(case)
    assert_alike(ec.load_or_init(lambda: case.like, case.path), case.tree)


def load_or_init_parts(case: Case) -> None:
    where, chosen = _pick(case)
    if _saves(case, chosen, where=where):
        load = lambda **how: ec.load_or_init(lambda: case.like, case.path, **how)
        assert_alike(load(where=where), _merged(case, chosen))
        with _refusing_twins(case, chosen):
            assert_alike(load(missing="init"), _merged(case, chosen))


def state_dict(case: Case) -> None:
    if _refused(case, case.stored):
        return  # Nodes of two kinds and one name are one dict.
    try:
        out = ec.from_state_dict(ec.to_state_dict(case.tree), case.like)
    except RuntimeError as e:
        assert "The State at" in str(e)  # Such dicts have its entries by position only.
    else:
        assert_alike(out, case.tree)


def in_bytes(case: Case) -> None:
    assert_alike(ec.from_bytes(ec.to_bytes(case.tree), case.like), case.tree)


def in_a_zip(case: Case) -> None:
    _save(case, case.path + ".zip", layout="ocdbt")
    assert_alike(ec.tree_deserialise_leaves(case.path + ".zip", case.like), case.tree)


def asynchronous(case: Case) -> None:
    layout = case.rng.choice(["ocdbt", "zarr"])
    handle = ec.async_tree_serialise_leaves(
        case.path, case.tree, layout=layout, durable=False
    )
    handle.staged()
    handle.result()
    assert_alike(ec.tree_deserialise_leaves(case.path, case.like), case.tree)


def convert(case: Case) -> None:
    _save(case)
    to, layout = case.rng.choice([(".zip", "ocdbt"), ("2", "ocdbt"), ("2", "zarr")])
    ec.convert(case.path, case.path + to, layout=layout, durable=False)
    assert_alike(ec.tree_deserialise_leaves(case.path + to, case.like), case.tree)
    _assert_told_alike(case.path + to, case.path)


def _assert_told_alike(path: str, other: str) -> None:
    """Names, kinds, dtypes, aliases, static fields, labels of States."""
    ours, theirs = map(_told, (path, other))
    assert ours == theirs


def _told(path: str) -> Any:
    """Whatever the order of leaves: that of integer keys in a node is by number."""
    leaves = ec.open(path)._source.index.leaves
    templates = {record.name: record.template for record in leaves.records()}
    alike: dict[int, set[str]] = {}
    for alias, origin in leaves.aliases.items():
        alike.setdefault(origin, {leaves.names[origin]}).add(leaves.names[alias])
    ties = set(map(frozenset, alike.values()))
    return templates, ties, inside.labels_of(path), inside.fields_of(path)


def lazily(case: Case) -> None:
    """The checkpoint's own tree is saved as any other, after JAX has rebuilt it."""
    _save(case)
    node = jtu.tree_map(lambda x: x, ec.open(case.path).tree)
    to = case.path + case.rng.choice(["2", ".zip"])
    is_async = case.rng.random() < 0.3
    save = ec.async_tree_serialise_leaves if is_async else ec.tree_serialise_leaves
    done = save(to, node, durable=False)
    if done is not None:
        done.result()
    assert_alike(ec.tree_deserialise_leaves(to, case.like), case.tree)
    _assert_told_alike(to, case.path)


def equinox_file(case: Case) -> None:
    """What Equinox has saved and can load, as it loads it: without weak types."""
    if not any(case.stored) or any(map(_not_of_equinox, jtu.tree_leaves(case.tree))):
        return
    file = case.path + ".eqx"
    try:
        eqx.tree_serialise_leaves(file, case.tree)
        expected = eqx.tree_deserialise_leaves(file, case.like)
    except Exception:
        return
    out = ec.tree_deserialise_leaves(file, case.like)
    assert jtu.tree_structure(out) == jtu.tree_structure(case.tree)
    for leaf, other in zip(jtu.tree_leaves(out), jtu.tree_leaves(expected)):
        if isinstance(leaf, jax.Array):
            leaf, other = np.asarray(leaf), np.asarray(other)
        assert facts(leaf) == facts(other)


def _not_of_equinox(x: Any) -> bool:
    """Scalars that it would make of bytes, in which NumPy crashes; and records that
    are refused here: of no numbers, in another order, or of ints that it widens."""
    if isinstance(x, np.ndarray):
        own = x.dtype != jax.dtypes.float0 and x.dtype.isnative
        return not (own and x.flags.c_contiguous)
    if isinstance(x, int):
        return not -(2**63) <= x < 2**63
    return isinstance(x, np.generic) and x.dtype.isbuiltin != 1


def own_tree(case: Case) -> None:
    """Every leaf is where it was; and comes back without the tree's classes."""
    _save(case)
    node = ec.open(case.path).tree
    flat = jtu.tree_flatten_with_path(case.tree)[0]
    expected = []
    for (path, leaf), name, good in zip(flat, case.names, case.stored):
        if good:
            assert ft.reduce(_child, path, node).name == name
            expected.append(_fact(_plain(leaf)))
    got = collections.Counter(map(_fact, _walk(ec.materialise(node))))
    assert got == collections.Counter(expected)


def _plain(x: Any) -> Any:
    """A leaf as it is where no `like` says of which type it is to be."""
    if isinstance(x, (np.generic, bool)):
        return x
    return next((cls(x) for cls in (int, float, complex) if isinstance(x, cls)), x)


def _fact(x: Any) -> str:
    if isinstance(x, np.ndarray):
        x = x.astype(x.dtype.newbyteorder("="))
    return repr(facts(x))


def _walk(plain: Any) -> list[Any]:
    """The leaves of dicts and lists, also of dicts whose keys JAX cannot sort."""
    if not isinstance(plain, (dict, list)):
        return [] if plain is None else [plain]
    children = plain.values() if isinstance(plain, dict) else plain
    return [leaf for child in children for leaf in _walk(child)]


_SAFETENSORS = {
    **{"bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    **{"float8_e8m0fnu": "F8_E8M0", "bfloat16": "BF16", "complex64": "C64"},
    **{"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


def export(case: Case) -> None:
    """The arrays that `.safetensors` has: of the tree, and of a checkpoint of them."""
    leaves = jtu.tree_leaves(case.tree)
    chosen = [isinstance(x, _ARRAYS) and x.dtype.name in _SAFETENSORS for x in leaves]
    if not any(chosen):
        return
    short = {name: f"x{number}" for number, name in enumerate(case.names)}
    flat = {short[n]: x for n, x, good in zip(case.names, leaves, chosen) if good}
    expected = {}
    for name, x in flat.items():
        data = np.asarray(x).astype(x.dtype.newbyteorder("<")).tobytes()
        expected[name] = _SAFETENSORS[x.dtype.name], list(x.shape), data
    file = case.path + ".safetensors"
    spec = jtu.tree_unflatten(jtu.tree_structure(case.tree), chosen)
    if len(set(case.names)) == len(case.names):
        ec.export_safetensors(file, case.tree, spec, rename=short.get, durable=False)
        assert _tensors(file) == expected
    ec.tree_serialise_leaves(case.path, flat, durable=False)
    ec.export_safetensors(file, ec.open(case.path), durable=False)
    assert _tensors(file) == expected
    ec.convert(case.path, file, durable=False)
    assert _tensors(file) == expected
    out = ec.tree_deserialise_leaves(file, trees.changed(flat))
    assert_alike(out, flat)


def _tensors(file: str) -> dict[str, tuple]:
    data = pathlib.Path(file).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    out = {}
    for name, x in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = x["data_offsets"]
            out[name] = x["dtype"], x["shape"], data[start + first : start + last]
    return out


def manager(case: Case) -> None:
    with ec.CheckpointManager(case.path) as run:
        run.save(3, case.tree)
        run.wait()
        assert_alike(run.restore(case.like)[0], case.tree)


# ---- All of them.

# These say themselves what has to be refused, and the last of them compiles.
_JUDGES = [
    *(where_to_save, filter_specs, state_dict, export, equinox_file),
    load_or_init_parts,
]
_ROUTES = [
    *(splice, skeleton, where_to_load, source, graft, graft_parts, load_or_init),
    *(in_bytes, in_a_zip, asynchronous, convert, lazily, own_tree, manager),
    *_JUDGES,
]


def _take(seed: int, directory: str, routes: Sequence[Callable[[Case], None]]) -> list:
    """Takes a tree through some calls. Returns what went wrong: (seed, route, text)."""
    case = _case(seed, directory)
    is_refused = _refused(case, case.stored) is not None
    failures = []
    pathlib.Path(directory).mkdir()
    for route in routes:
        name = route.__name__
        own = case._replace(path=f"{directory}/{name}", rng=random.Random(seed))
        try:
            if is_refused and route not in _JUDGES:
                with pytest.raises((ValueError, KeyError)):
                    route(own)
            else:
                route(own)
        except Exception:
            failures.append((seed, name, traceback.format_exc()))
    shutil.rmtree(directory)
    return failures


def campaign(first: int, count: int, most: int, directory: str) -> None:
    """Takes trees of so many seeds through so many calls each, beginning with a load.
    Prints as JSON what went wrong."""
    calls, failures = 0, []
    for seed in range(first, first + count):
        others = [_ROUTES[(seed * (most - 1) + i) % len(_ROUTES)] for i in range(most)]
        routes = [load, *others[:-1]]
        calls += len(routes)
        failures += _take(seed, f"{directory}/{seed}", routes)
        if seed % 100 == 0:
            jax.clear_caches()
    print(json.dumps({"calls": calls, "failures": failures}))


def _run(first: int, count: int, most: int, directory: pathlib.Path) -> int:
    """A campaign in a process without checks of types, which would take longer."""
    here = str(pathlib.Path(__file__).parent)
    out = run_python(f"""
        import sys
        sys.path.insert(0, {here!r})
        import test_trees
        test_trees.campaign({first}, {count}, {most}, {str(directory)!r})
    """)
    report = json.loads(out.splitlines()[-1])
    failures = report["failures"]
    kinds = collections.Counter(name for _, name, _ in failures)
    told = [f"seed {seed}, {name}: {text}" for seed, name, text in failures[:5]]
    assert not failures, "\n".join([str(kinds), *told])
    return report["calls"]


def test_any_tree(tmp_path):
    _run(0, 8, 4, tmp_path)


def test_children_of_one_name(tmp_path):
    for seed in range(-10, 0):
        routes = [where_to_save, *([load_or_init_parts] if seed > -3 else [])]
        assert _take(seed, f"{tmp_path}/{seed}", routes) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_any_tree_long(part, tmp_path, capsys):
    first = random.SystemRandom().randrange(2**31)
    calls = _run(first, 1000, 1 + len(_ROUTES), tmp_path)
    with capsys.disabled():
        print(f"\n1,000 trees, from the seed {first}: {calls} calls")
