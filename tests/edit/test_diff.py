import math
import pickle
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from support import trees
from support.helpers import BytesRead, facts

import eqx_ckpt as ec


SEEDS = [*range(8), *(pytest.param(i, marks=pytest.mark.long) for i in range(8, 200))]


def _save(path, tree, **kwargs):
    ec.tree_serialise_leaves(path, tree, **kwargs)
    return ec.open(path)


def _whats(diff):
    return {name: change.what for name, change in diff.changed.items()}


def test_kinds_of_changes(tmp_path):
    a = {
        "gone": jnp.ones(3),
        "shape": jnp.ones(3),
        "dtype": jnp.ones(3, jnp.bfloat16),
        "kind": jnp.ones(3),
        "value": jnp.ones(3),
        "weak": jnp.ones(()),
        "key": jr.key(0),
        "impl": jr.key(0),
        "text": "a",
        "scalar": 1,
        "same": jnp.ones(3),
        "big": 1,
        "type": 1,
    }
    b = {
        "new": np.int8(3),
        "shape": jnp.ones(4),
        "dtype": jnp.ones(3, jnp.float32),
        "kind": np.ones(3, np.float32),
        "value": jnp.zeros(3),
        "weak": jnp.asarray(1.0),
        "key": jr.key(1),
        "impl": jr.key(0, impl="rbg"),
        "text": "b",
        "scalar": 2,
        "same": jnp.ones(3),
        "big": 2**70,
        "type": 1.0,
    }
    expected = {
        "big": ("value",),
        "dtype": ("dtype",),
        "impl": ("kind",),
        "key": ("value",),
        "kind": ("kind",),
        "scalar": ("value",),
        "shape": ("shape",),
        "text": ("value",),
        "type": ("kind", "dtype"),
        "value": ("value",),
        "weak": ("dtype",),
    }
    every = lambda x: True
    saved = [
        _save(tmp_path / name, tree, filter_spec=every)
        for name, tree in (("a", a), ("b", b))
    ]
    for one, two in (saved, (a, b), (a, saved[1]), (saved[0].tree, b)):
        diff = ec.diff(one, two)
        assert diff and _whats(diff) == expected
        assert dict(diff.added) == {"new": "i8[]"}
        assert dict(diff.removed) == {"gone": "f32[3]"}
        assert diff.same == 1
        assert not ec.diff(one, one)
        measured = ec.diff(one, two, values=True)
        assert _whats(measured) == expected
        largest = {name: x.largest for name, x in measured.changed.items()}
        assert largest == {
            **dict.fromkeys(expected),
            "dtype": 0,
            "scalar": 1,
            "type": 0,
            "value": 1,
        }
    assert diff.changed["dtype"][1:3] == ("bf16[3]", "f32[3]")
    assert diff.changed["weak"][1:3] == ("f32[]", "f32[](weak)")
    assert pickle.loads(pickle.dumps(diff)) == diff


def test_bits_count(tmp_path):
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    a = {"nan": nan[:1], "zero": np.zeros(3), "same": nan}
    b = {"nan": nan[1:], "zero": -np.zeros(3), "same": nan.copy()}
    one, two = _save(tmp_path / "a", a), _save(tmp_path / "b", b)
    # Other chunks, so that no digests are compared, and a format without any.
    other = _save(tmp_path / "c", b, chunks=lambda name, shape, dtype: (1,))
    ec.export_safetensors(tmp_path / "d.safetensors", b, skip=["zero"])
    for x in (b, two, other):
        diff = ec.diff(one, x, values=True)
        assert _whats(diff) == {"nan": ("value",), "zero": ("value",)}
        assert {c[3:] for c in diff.changed.values()} == {(0.0, 0.0)}
    diff = ec.diff(other, ec.open(tmp_path / "d.safetensors"))
    assert _whats(diff) == {x: ("kind",) for x in ("nan", "same")}
    assert list(diff.removed) == ["zero"]


def test_bits_that_do_not_count(tmp_path):
    """Of a number of less than a byte the rest of it is anything."""
    bits = np.array([0x13, 0x05], np.uint8)
    a, b = bits.view(ml_dtypes.uint4), (bits & 0xF).view(ml_dtypes.uint4)
    one, two = _save(tmp_path / "a", {"x": a}), _save(tmp_path / "b", {"x": b})
    for pair in ((a, b), (one, two), (one["x"], b)):
        assert not ec.diff(*pair)
    assert ec.diff({"x": b[::-1]}, one)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_tree(seed, tmp_path):
    """A leaf is in the diff if it is not what it was down to its bits."""
    tree = trees.make(seed)
    rng = random.Random(seed)
    done: dict = {}

    def change(x):
        if id(x) not in done:
            done[id(x)] = trees.another(x, rng) if rng.random() < 0.5 else x
        return done[id(x)]

    other = jtu.tree_map(change, tree)
    names = jtu.tree_leaves(ec.leaf_names(tree))
    rows = zip(names, jtu.tree_leaves(tree), jtu.tree_leaves(other))
    stored = {name: (x, y) for name, x, y in rows if ec.is_storable(x)}
    if not stored:
        return
    changed = {name for name, (x, y) in stored.items() if facts(x) != facts(y)}
    one = _save(tmp_path / "a", tree)
    two = _save(tmp_path / "b.zip", other)
    pairs = (tree, other), (one, two), (tree, two), (one, other), (one.tree, two.tree)
    for pair in pairs:
        diff = ec.diff(*pair, values=True)
        assert set(diff.changed) == changed
        assert not (diff.added or diff.removed or diff.static or diff.metadata)
        assert bool(diff) == bool(changed) and repr(diff)
    assert not ec.diff(tree, one) and not ec.diff(two, other)


def _lora(key):
    keys = jr.split(key, 3)
    layer = lambda k: {
        "base": jr.normal(k, (512, 512)),
        "a": jnp.zeros((512, 4)),
        "b": jr.normal(k, (4, 512)),
    }
    return {"layers": [layer(k) for k in keys], "step": 1}


@pytest.fixture
def lora(tmp_path):
    """Two steps of a run in which only adapters are trained."""
    first = _lora(jr.key(0))
    second = eqx.tree_at(
        lambda t: [x["a"] for x in t["layers"]], first, replace_fn=lambda x: x + 0.5
    )
    second["step"] = 2
    return _save(tmp_path / "1", first), _save(tmp_path / "2", second)


def test_nothing_is_read_where_digests_decide(lora):
    with BytesRead() as read:
        diff = ec.diff(*lora)
    assert list(diff.changed) == [*(f"layers.{i}.a" for i in range(3)), "step"]
    assert diff.same == 6
    # The two files of digests are all.
    assert read.total < 2000


def test_only_what_differs_is_read(lora):
    with BytesRead() as read:
        diff = ec.diff(*lora, values=True)
    assert {x.largest for x in diff.changed.values()} == {0.5, 1.0}
    assert diff.changed["layers.0.a"].relative == math.inf
    differs = 2 * (3 * 512 * 4 * 4 + 8)
    assert differs <= read.total < differs + 3000
    assert repr(diff).splitlines()[1:] == [
        "  changed:",
        "    layers.{0..2}.a  f32[512,4]: value  (largest 0.5, relative inf)",
        "    step  int: value  (largest 1, relative 1)",
    ]


def test_values_are_read_some_at_a_time(tmp_path):
    """Of arrays that have no digests, up to the first difference."""
    a = np.arange(2**18, dtype=np.float32).reshape(512, 512)
    b, c = a.copy(), a.copy()
    b[3, 5], c[-1, -1] = 7, 9
    for name, x in (("a", a), ("b", b), ("c", c)):
        ec.export_safetensors(tmp_path / f"{name}.safetensors", {"x": x})
    one, two, three = (tmp_path / f"{name}.safetensors" for name in "abc")
    for other, most in ((two, 2**19), (three, 2**21), (one, 2**21)):
        with BytesRead() as read:
            diff = ec.diff(one, other, max_bytes=2**18)
        assert bool(diff) == (other != one)
        assert read.total <= most + 3000
    # Chunks that do not lie alike are read once each, all the same.
    one = _save(tmp_path / "a", a, chunks=lambda *x: (40, 512))
    two = _save(tmp_path / "b", b, chunks=lambda *x: (512, 64))
    three = _save(tmp_path / "c", a, chunks=lambda *x: (100, 100))
    for max_bytes in (1, 2**18, None):
        assert ec.diff(one, two, max_bytes=max_bytes, values=True)
        assert not ec.diff(one, three, max_bytes=max_bytes)
        assert not ec.diff(three, a, max_bytes=max_bytes)


def test_distances(tmp_path):
    inf, nan = math.inf, math.nan
    pairs = [
        (np.array([3.0, 4]), np.array([3.0, 4.5]), 0.5, 0.1),
        (np.zeros(2), np.ones(2), 1, inf),
        (np.array([1, nan, inf]), np.array([2, nan, inf]), 1, 1),
        (np.array([1, nan]), np.array([1.0, 2]), nan, nan),
        (np.array([1, inf]), np.array([1.0, 2]), inf, inf),
        (np.array([inf]), np.array([-inf]), inf, inf),
        (np.array([-(2**63), 5]), np.array([2**63 - 1, 5]), 2.0**64, 2),
        (np.array([0], "u8"), np.array([2**64 - 1], "u8"), 2.0**64, inf),
        (np.array([2**62]), np.array([2**62 + 1]), 1, 2.0**-62),
        (np.array([True, False]), np.array([True, True]), 1, 1),
        (np.array([3 + 4j]), np.array([0j]), 5, 1),
        (np.array([1e300]), np.array([-1e300]), 2e300, 2),
        (np.array([1e-320]), np.array([3e-320]), 2e-320, 2),
        (np.array([1.7e308]), np.array([-1.7e308]), inf, inf),
        (np.ones(3, np.float16), np.zeros(3, np.float32), 1, 1),
        (np.array([-4, 3], ml_dtypes.int4), np.array([-4, 2], ml_dtypes.int4), 1, 0.2),
        (2, 5, 3, 1.5),
        (2, 5.5, 3.5, 1.75),
    ]
    a = {str(i): x[0] for i, x in enumerate(pairs)}
    b = {str(i): x[1] for i, x in enumerate(pairs)}
    for one, two in ((a, b), (_save(tmp_path / "a", a), _save(tmp_path / "b", b))):
        changed = ec.diff(one, two, values=True).changed
        for i, (_, _, *expected) in enumerate(pairs):
            found = changed[str(i)][3:]
            assert np.allclose(found, expected, rtol=1e-12, equal_nan=True), i


def test_distances_of_many(getkey):
    a, b = jr.normal(getkey(), (300, 1000)), jr.normal(getkey(), (300, 1000))
    change = ec.diff([a], [b], values=True).changed["0"]
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert change.largest == np.abs(y - x).max()
    relative = np.linalg.norm(y - x) / np.linalg.norm(x)
    assert np.isclose(change.relative, relative, rtol=1e-12, atol=0)


class Net(eqx.Module):
    w: jax.Array
    width: int = eqx.field(static=True)
    mode: dict = eqx.field(static=True)


def test_static_fields_and_metadata(tmp_path):
    a = [Net(jnp.ones(2), 1, {"x": 1, "y": 2}), jnp.ones(2)]
    b = [Net(jnp.ones(2), 2, {"x": 1, "y": 3}), jnp.ones(2)]
    old = {"lr": 0.1, "deep": {"a.b": 1, "gone": [1]}, "kept": None}
    new = {"lr": 0.1, "deep": {"a.b": True, "new": 2}, "kept": None}
    one = _save(tmp_path / "a", a, metadata=old)
    two = _save(tmp_path / "b", b, metadata=new)
    static = {"0.width": ("1", "2"), "0.mode.y": ("2", "3")}
    for pair in ((a, b), (one, two), (one.tree, b), (a, two)):
        diff = ec.diff(*pair)
        assert dict(diff.static) == static and diff and not diff.changed
        if pair != (one, two):
            assert not diff.metadata
    diff = ec.diff(one, two)
    assert dict(diff.metadata) == {
        "deep.a%2Eb": ("1", "true"),
        "deep.gone": ("[1]", "nothing"),
        "deep.new": ("nothing", "2"),
    }
    assert "    0.width  1 -> 2" in repr(diff).splitlines()
    assert "    deep.new  nothing -> 2" in repr(diff).splitlines()
    assert not ec.diff(one, a)


class Ab(eqx.Module):
    a: eqx.nn.StateIndex
    b: eqx.nn.StateIndex


class Ba(eqx.Module):
    b: eqx.nn.StateIndex
    a: eqx.nn.StateIndex


def _with_state(cls):
    make = lambda: cls(
        a=eqx.nn.StateIndex(jnp.zeros(2)), b=eqx.nn.StateIndex(jnp.ones(2))
    )
    return eqx.nn.make_with_state(make)()


def test_entries_of_states_go_by_what_they_belong_to(tmp_path):
    """Fields in another order put the entries into another order."""
    one, two = _with_state(Ab), _with_state(Ba)
    entries = lambda x: [leaf.tolist() for leaf in jtu.tree_leaves(x[1])]
    assert entries(one) == entries(two)[::-1]
    saved = _save(tmp_path / "a", one), _save(tmp_path / "b", two)
    for pair in ((one, two), saved, (one, saved[1])):
        assert not ec.diff(*pair)
    model, state = two
    changed = model, state.set(model.a, jnp.full(2, 5.0, jnp.float32))
    diff = ec.diff(saved[0], changed, values=True)
    assert {name: x.largest for name, x in diff.changed.items()} == {"1.0": 5}


def test_formats_without_digests(tmp_path):
    model = eqx.nn.MLP(3, 3, 4, 2, key=jr.key(0))
    other = eqx.tree_at(lambda m: m.layers[1].weight, model, replace_fn=lambda x: -x)
    for name, x in (("a", model), ("b", other)):
        eqx.tree_serialise_leaves(tmp_path / f"{name}.eqx", x)
        ec.tree_serialise_leaves(tmp_path / name, x)
        ec.export_safetensors(tmp_path / f"{name}.safetensors", x)
    forms = [
        lambda name: ec.open(tmp_path / f"{name}.eqx", like=model),
        lambda name: tmp_path / name,
        lambda name: tmp_path / f"{name}.safetensors",
        lambda name: model if name == "a" else other,
    ]
    for one in forms:
        for two in forms:
            diff = ec.diff(one("a"), two("b"), values=True)
            assert _whats(diff) == {"layers.1.weight": ("value",)}
            assert diff.changed["layers.1.weight"].relative == 2
            assert not ec.diff(one("b"), two("b"))


def test_views_and_casts(tmp_path):
    w = jr.normal(jr.key(0), (30, 40))
    ckpt = _save(tmp_path / "a", {"w": w, "tied": w, "s": jnp.float32(2)})
    assert not ec.diff({"w": ckpt["w"][3:9:2].T}, {"w": w[3:9:2].T})
    assert not ec.diff(ckpt["w"].astype(jnp.float16), w.astype(jnp.float16))
    assert ec.diff(ckpt["w"].astype(jnp.float16), ckpt["w"]).changed["%root"].what == (
        "dtype",
    )
    assert _whats(ec.diff([ckpt["w"]], [ckpt["tied"][::-1]])) == {"0": ("value",)}
    # A lazy leaf is what it would be read as.
    like = {"w": np.zeros((30, 40), "f4"), "s": 1.0}
    spliced = ckpt.splice(like, unexpected="ignore")
    assert _whats(ec.diff(spliced, {"w": w, "s": 2.0})) == {"w": ("kind",)}


def test_an_array_is_read_once(tmp_path):
    w = np.arange(2**17, dtype=np.float64)
    one = _save(tmp_path / "a", {"w": w, "tied": w})
    two = _save(tmp_path / "b", {"w": w + 1, "tied": w}, chunks=2**18)
    with BytesRead() as read:
        assert list(ec.diff(one, two).changed) == ["w"]
    assert read.total < 3.1 * w.nbytes
    with BytesRead() as read:
        assert not ec.diff(one, {"w": w, "tied": w})
    assert read.total < 1.1 * w.nbytes


def test_damage_and_replacement(tmp_path):
    w = np.arange(2**17, dtype=np.float64)
    one = _save(tmp_path / "a", {"w": w})
    two = _save(tmp_path / "b", {"w": w + 1})
    files = (tmp_path / "a" / "d" / one.save_id).rglob("*")
    file = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert ec.diff(one, two)  # By the digests.
    with pytest.raises(ec.DamagedError, match="w: its bytes are not those"):
        ec.diff(one, two, values=True)
    with pytest.raises(ec.DamagedError, match="w: its bytes are not those"):
        ec.diff(one, {"w": w})
    assert ec.diff(one, {"w": w}, verify=False)
    ec.tree_serialise_leaves(tmp_path / "b", {"w": w})
    with pytest.raises(RuntimeError, match="replaced or deleted"):
        ec.diff(two, {"w": w})
    # A path is opened anew.
    assert not ec.diff(tmp_path / "b", {"w": w})


def test_errors(tmp_path):
    ckpt = _save(tmp_path / "a", {"w": jnp.ones(3)})
    skeleton = jax.eval_shape(lambda: {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="Leaf `w`: it is abstract"):
        ec.diff(ckpt, skeleton)
    with pytest.raises(FileNotFoundError):
        ec.diff(ckpt, tmp_path / "none")
    with pytest.raises(TypeError, match="Leaf `w`: its dtype"):
        ec.diff(ckpt, {"w": np.array([None])})
    with pytest.raises(ValueError, match="Two leaves of a tree are called `1`"):
        ec.diff(ckpt, trees.Keyed([jtu.DictKey("1"), jtu.DictKey(1)], [1.0, 2.0]))
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(ValueError, match="Leaf `w`: it has been deleted"):
        ec.diff(ckpt, {"w": deleted})


def test_leaves_that_are_no_data(tmp_path):
    a = {"w": 1.0, "f": jax.nn.relu, "text": "a"}
    ckpt = _save(tmp_path / "a", a)
    assert not ec.diff(ckpt, a)
    for one in (ckpt, a):
        found = ec.diff(one, {**a, "f": print})
        assert found.static == {"f": ("jax.nn.relu", "builtins.print")}
    assert _whats(ec.diff(a, {**a, "text": "b"})) == {"text": ("value",)}


def test_registered_types(tmp_path):
    from fractions import Fraction

    with ec.register_leaf(Fraction, str, Fraction):
        ckpt = _save(tmp_path / "a", {"x": Fraction(3, 4)})
        assert not ec.diff(ckpt, {"x": Fraction(3, 4)})
        assert ec.diff(ckpt, {"x": Fraction(3, 5)})


def test_a_large_report(tmp_path):
    a = {"layers": [{"w": jnp.ones(2), "b": jnp.ones(2)} for _ in range(100)]}
    b = jtu.tree_map(lambda x: x + 1, a)
    lines = repr(ec.diff(a, b, values=True)).splitlines()
    text = "f32[2]: value  (largest 1, relative 1)"
    assert lines[2:] == [f"    layers.{{0..99}}.{name}  {text}" for name in "bw"]


@pytest.mark.parametrize("seed", range(40))
def test_children_without_keys_that_only_one_has(tmp_path, seed):
    """No child stands for one that is another attribute, wherever the two are."""
    rng = random.Random(seed)
    one, two = (tuple(rng.sample("abcd", rng.randrange(1, 5))) for _ in range(2))
    number = {name: float(i) for i, name in enumerate("abcd")}
    leaf = lambda name: jnp.full(2, number[name])
    both = [
        {"l": [trees.without_keys(*some)(**{x: [leaf(x)] for x in some})]}
        for some in (one, two)
    ]
    made = ec.diff(*both, values=True)
    added, removed = {*two} - {*one}, {*one} - {*two}
    assert (len(made.added), len(made.removed)) == (len(added), len(removed))
    assert not made.changed and made.same == len({*one} & {*two})
    for path, tree in zip("ab", both):
        ec.tree_serialise_leaves(tmp_path / path, tree)
    for some in (both, [tmp_path / "a", tmp_path / "b"]):
        if added or removed:
            with pytest.raises(ValueError, match="not in all of the trees"):
                ec.merge(some, ec.merging.average())
            continue
        got = jtu.tree_leaves(ec.materialise(ec.merge(some, ec.merging.average())))
        assert [float(x[0]) for x in got] == [number[x] for x in one]
