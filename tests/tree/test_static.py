"""Static fields: each kind of value is compared, in every call, or let pass."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import itertools
import json
import math
import operator
import pathlib
import re
import struct
import types
import typing
import uuid
import warnings
from collections.abc import Callable

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from support import inside
from support.values import Flags, Plain, Text

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _values
from eqx_ckpt._kernel._tree import _codec, _compare


class Numbers(enum.IntEnum):
    FOUR = 4
    EIGHT = 8


class Width(int):
    pass


class Name(str):
    pass


class Rate(float):
    pass


class Pair(tuple):
    pass


class Point(collections.namedtuple("Point", "x y")):
    pass


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int = 4
    act: object = jax.nn.relu
    sub: object = None
    seen: int = dataclasses.field(default=0, compare=False)


class Opaque:
    """An object of which only the class can be compared."""


class Other:
    """Another one."""


@attrs.frozen
class Attrs:
    x: int


def _closure(x):
    return lambda: x


def _other_closure(x):
    return lambda: x


# What was saved, the same again, and what has changed.
_IDS = range(40_000)
_WORDS = tuple(f"word {i}" for i in _IDS)
KINDS = {
    "enum": (Plain.ONE, Plain.ONE, Plain.TWO),
    "int enum": (Numbers.FOUR, Numbers.FOUR, Numbers.EIGHT),
    "int enum as a number": (Numbers.FOUR, 4, 8),
    "a number as int enum": (4, Numbers.FOUR, Numbers.EIGHT),
    "str enum": (Text.A, "a", Text.B),
    "flags": (Flags.X | Flags.Y, Flags.Y | Flags.X, Flags.X),
    "int subclass": (Width(4), Width(4), Width(8)),
    "str subclass": (Name("a"), Name("a"), Name("b")),
    "float subclass": (Rate(0.5), 0.5, Rate(0.25)),
    "numpy int": (np.int64(4), np.int64(4), np.int64(8)),
    "numpy int as a number": (np.int64(4), 4, 8),
    "numpy float": (np.float32(2), np.float32(2), np.float64(2)),
    "numpy bool": (np.bool_(True), np.True_, np.False_),
    "numpy str": (np.str_("a"), "a", np.str_("b")),
    "ml_dtypes": (ml_dtypes.bfloat16(2), ml_dtypes.bfloat16(2), ml_dtypes.bfloat16(3)),
    "numpy time": (*[np.datetime64("2020")] * 2, np.datetime64("2021")),
    "long double": (np.longdouble(2), np.longdouble(2), np.longdouble(3)),
    "dtype": (np.dtype("float32"), jnp.float32, jnp.bfloat16),
    "jnp dtype": (jnp.float32, np.float32, jnp.float16),
    "dtype by name": (jnp.bfloat16, "bfloat16", "float32"),
    "builtin dtype": (float, float, int),
    "key dtype": (jr.key(0).dtype, jr.key(1).dtype, jr.key(0, impl="rbg").dtype),
    "function": (jax.nn.relu, jax.nn.relu, jax.nn.gelu),
    "builtin": (print, print, len),
    "class": (Opaque, Opaque, Config),
    "jitted": (jnp.tanh, jnp.tanh, jnp.sin),
    "nameless": (lambda x: x, lambda x: 2 * x, jax.grad(jnp.sin)),
    "a name, and none": (print, print, lambda x: x),
    "a closure": (_closure(1), _closure(2), _other_closure(1)),
    "a method": (Pair([1]).count, Pair([1]).count, Pair([2]).count),
    "tuple with a function": ((1, print), (1, print), (1, len)),
    "tuple with a lambda": ((1, lambda: 1), (1, lambda: 0), (2, lambda: 0)),
    "beside an object": ((1, Opaque()), (1, Opaque()), (2, Opaque())),
    "an object of another class": (Opaque(), Opaque(), Other()),
    "a dtype beside": (*[Config(act=jnp.bfloat16)] * 2, Config(8, jnp.bfloat16)),
    "module of Python": (math, math, re),
    "attrs": (*[Attrs(1)] * 2, Attrs(2)),
    "generic alias": (list[int], list[int], list[str]),
    "getter": (*[operator.itemgetter(1)] * 2, operator.itemgetter(2)),
    "nested": ([{"a": (1, print)}], [{"a": (1, print)}], [{"a": (2, print)}]),
    "length": ((print, 1), (print, 1), (print, 1, 1)),
    "tuple subclass": (Pair([1, print]), (1, print), Pair([2, print])),
    "namedtuple": (Point(1, print), Point(1, print), Point(1, len)),
    "deque": (*[collections.deque([1, 2])] * 2, collections.deque([2, 1])),
    "dict with a function": (
        {"a": 1, "f": print},
        {"a": 1, "f": print},
        {"a": 2, "f": len},
    ),
    "dict of other keys": ({1: 2}, {1: 2}, {1: 3}),
    "dict in another order": (
        {"a": 1, "b": print, "c": {3: 0, 4: 0}},
        {"c": {4: 0, 3: 0}, "b": print, "a": 1},
        {"a": 1, "b": print, "c": {3: 0, 4: 1}},
    ),
    "keys that look alike": (
        types.MappingProxyType({Opaque(): 1, Opaque(): 2}),
        types.MappingProxyType({Opaque(): 1, Opaque(): 2}),
        types.MappingProxyType({Opaque(): 3, Opaque(): 2}),
    ),
    "ordered dict": (*[collections.OrderedDict(a=1)] * 2, collections.OrderedDict(a=2)),
    "ordered dict in another order": (
        collections.OrderedDict(a=1, b=2),
        {"b": 2, "a": 1},
        collections.OrderedDict(b=2, a=1),
    ),
    "mapping": (*[types.MappingProxyType({"a": 1})] * 2, {"a": 2}),
    "vocabulary": (_WORDS, list(_WORDS), (*_WORDS[:-1], "last")),
    "ids": (*[dict(zip(_WORDS, _IDS))] * 2, dict(zip(_WORDS, _IDS)) | {_WORDS[-1]: 0}),
    "set": ({1, "b", 3}, {3, 1, "b"}, {1, "c", 3}),
    "frozenset": (frozenset("ab"), frozenset("ba"), frozenset("ac")),
    "dataclass": (Config(), Config(seen=5), Config(act=print)),
    "dataclasses": (*[Config(sub=Config())] * 2, Config(sub=Config(heads=8))),
    "module": (*[eqx.nn.Lambda(print)] * 2, eqx.nn.Lambda(None)),
    "namespace": (*[types.SimpleNamespace(a=1)] * 2, types.SimpleNamespace(a=2)),
    "arguments": (*[argparse.Namespace(a=1)] * 2, argparse.Namespace(a=2)),
    "partial": (*[ft.partial(print, 1, b=2)] * 2, ft.partial(len, 1, b=2)),
    "keywords in another order": (
        ft.partial(print, a=1, b=2),
        ft.partial(print, b=2, a=1),
        ft.partial(print, a=2, b=1),
    ),
    "array": (np.arange(3), np.arange(3), np.array([0, 1, 3])),
    "array of other dtype": (np.arange(3), np.arange(3), np.arange(3).astype("f4")),
    "array in another order": (*[np.array([1], ">u2")] * 2, np.array([256], "<u2")),
    "array with fields": (
        *[np.zeros(2, [("a", "f4")])] * 2,
        np.zeros(2, [("b", "f4")]),
    ),
    "array of objects": (*[np.array(["a", None])] * 2, np.array(["b", None])),
    "dtype in another order": (*[np.dtype(">f4")] * 2, np.dtype("<f4")),
    "dtype of parts": (*[np.dtype(("f4", 2))] * 2, np.dtype(("i4", 2))),
    "scalar of ml_dtypes": (
        *[jnp.bfloat16.dtype.type(2)] * 2,
        jnp.bfloat16.dtype.type(3),
    ),
    "complex": (1 + 2j, 1 + 2j, 1 - 2j),
    "nan": (math.nan, math.nan, math.inf),
    "large int": (10**5000, 10**5000, 10**5000 + 1),
    "bytes": (b"a", b"a", b"b"),
    "surrogate": ("\ud800", "\ud800", "\ud801"),
    "range": (range(3), range(3), range(4)),
    "slice": (slice(3), slice(3), slice(4)),
    "path": (pathlib.Path("a"), pathlib.Path("a"), pathlib.Path("b")),
    "decimal": (decimal.Decimal(1), decimal.Decimal(1), decimal.Decimal(2)),
    "fraction": (*[fractions.Fraction(1, 3)] * 2, fractions.Fraction(1, 2)),
    "date": (*[datetime.date(2026, 1, 2)] * 2, datetime.date(2026, 1, 3)),
    "time": (
        *[datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)] * 2,
        datetime.datetime(2026, 1, 2),
    ),
    "uuid": (uuid.UUID(int=1), uuid.UUID(int=1), uuid.UUID(int=2)),
    "pattern": (re.compile("a"), re.compile("a"), re.compile("b")),
    "long pattern": (*[re.compile("a" * 300)] * 2, re.compile("a" * 299 + "b")),
    "flags of a pattern": (*[re.compile("a", re.I)] * 2, re.compile("a")),
    "a function, and none": (print, print, None),
    "none, and a function": (None, None, print),
    "long": (*[[print, "a" * 20000]] * 2, [print, "b" * 20000]),
    "PartitionSpec": (P("a", None), P("a", None), P(None, "a")),
    "abstract array": (
        *[jax.ShapeDtypeStruct((2,), jnp.float32)] * 2,
        jax.ShapeDtypeStruct((2,), jnp.int32),
    ),
    "plain": ({"a": [1, (2,)]}, {"a": (1, [2])}, {"a": [1, (3,)]}),
}


class Net(eqx.Module):
    w: float | jax.ShapeDtypeStruct
    value: object = eqx.field(static=True)
    width: int = eqx.field(static=True, default=3)


def net(value, width=3):
    with warnings.catch_warnings():  # Equinox warns of arrays, and of NumPy's too.
        warnings.simplefilter("ignore")
        return Net(1.0, value, width)


def _adder(number):
    return lambda x: x + number


class Adds3(eqx.Module):
    w: float
    act: Callable = eqx.field(static=True, default=_adder(3))


class Adds100(eqx.Module):
    w: float
    act: Callable = eqx.field(static=True, default=_adder(100))


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_the_default_of_one_class_is_none_of_another(tmp_path, names):
    """Though both have one function, in whichever order they are saved."""
    one, other = names
    tree = {one: Adds3(1.0), other: Adds100(1.0, Adds3(1.0).act)}
    ec.tree_serialise_leaves(tmp_path / "x", tree)
    with pytest.raises(RuntimeError, match=rf"'{other}.act': a function"):
        ec.rebuild(tmp_path / "x", [Adds3, Adds100])
    tree[other] = Adds100(1.0)
    ec.tree_serialise_leaves(tmp_path / "x", tree)
    tree = ec.rebuild(tmp_path / "x", [Adds3, Adds100])
    assert [tree[name].act(0) for name in names] == [3, 100]


def load(path, like, **options):
    return ec.tree_deserialise_leaves(path, like, **options)


def splice(path, like, **options):
    return ec.materialise(ec.open(path).splice(like, **options))


def init(path, like, **options):
    return ec.load_or_init(lambda: like, path, **options)


def graft(path, like, **options):
    return ec.graft(like, path, [(lambda m: m, lambda c: c)], **options)[0]


CALLS = {x.__name__: x for x in (load, splice, init, graft)}


@pytest.mark.parametrize("call", [load, graft])
def test_every_kind(tmp_path, call):
    saved, same, changed = (
        {kind: net(values[i]) for kind, values in KINDS.items()} for i in range(3)
    )
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    call(tmp_path / "a", same)
    leaves = ec.leaf_names(saved)
    names = {kind: leaves[kind].w[:-1] + "value" for kind in KINDS}
    kinds = list(KINDS)
    for some in (kinds[::3], kinds[1::3], kinds[2::3]):
        may = [names[kind] for kind in kinds if kind not in some]
        with pytest.raises(RuntimeError) as info:
            call(tmp_path / "a", changed, static=may)
        rows = re.findall(r"\n    (\S+)  saved ", str(info.value))
        found = {re.sub(r"[.]value([.].*)?$", ".value", row) for row in rows}
        assert found == {names[kind] for kind in some}
    call(tmp_path / "a", changed, static="ignore")
    call(tmp_path / "a", changed, static=["*.value"])


@pytest.mark.parametrize("call", CALLS)
def test_every_call(tmp_path, call):
    call = CALLS[call]
    tree = {"model": [net(Numbers.FOUR)]}
    like = {"model": [net(Numbers.EIGHT)]}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    text = r"model\.0\.value  saved FOUR \(4\), .* has EIGHT \(8\)"
    with pytest.raises(RuntimeError, match=text) as info:
        call(tmp_path / "a", like)
    assert 'static=["*.value"]' in str(info.value)
    # Nothing else gets through.
    other = {"model": [net(Numbers.EIGHT, width=4)]}
    with pytest.raises(RuntimeError, match=r"model\.0\.width  saved 3") as info:
        call(tmp_path / "a", other, static=["*.value"])
    assert "0.value" not in str(info.value)
    for names in (["model.0.value"], ["*value"], ("model*",), ["*"], ["*.0.*", "*.w*"]):
        call(tmp_path / "a", like, static=names)
    for names in (["value"], ["*.valu"], ["model.0"], ["*.width", "*.x"], ["*.w"]):
        message = "names no static field of the checkpoint .*[.] (The nearest|It has) "
        with pytest.raises(ValueError, match=message) as info:
            call(tmp_path / "a", like, static=names)
        shown = re.findall("`model[^`]*`", str(info.value))
        assert len(shown) == len({*shown})
    for wrong in ("maybe", "*.value"):
        with pytest.raises(ValueError, match="`static` must be .*put it into a list"):
            call(tmp_path / "a", like, static=wrong)


# Those that are leaves, and that no save stores by itself.
LEFT_OUT = {
    kind: values
    for kind, values in KINDS.items()
    if all(
        jtu.all_leaves([x])
        and x is not None
        and not (callable(x) or ec.is_storable(x) or hasattr(x, "shape"))
        for x in values
    )
}


class Holder(eqx.Module):
    a: object
    w: float = 1.0


class Field(typing.NamedTuple):
    a: object
    w: float = 1.0


# Where a leaf may stand, and what it is called there.
PLACES = {
    "dict": (lambda x: {"w": 1.0, "a b": x}, "a%20b"),
    "alone in a dict": (lambda x: {"w": 1.0, "a": {"b": x}}, "a.b"),
    "list": (lambda x: [1.0, x], "1"),
    "tuple": (lambda x: {"a": (x, 1.0)}, "a.0"),
    "namedtuple": (Field, "a"),
    "Module": (Holder, "a"),
    "in a Module": (lambda x: Holder([x]), "a.0"),
    "beside static fields": (lambda x: Net(x, 1.0), "w"),
}


@pytest.mark.parametrize(
    "place, call", [*((x, "load") for x in PLACES), *(("tuple", x) for x in CALLS)]
)
def test_leaves_that_are_left_out(tmp_path, place, call):
    """A value that no save stores is recorded, and is the same at a load, or passes."""
    (tree, name), call = PLACES[place], CALLS[call]
    if place == "beside static fields":
        tree = lambda x, tree=tree: {"w": 1.0, "net": tree(x)}
        name = "net." + name
    kinds = {re.sub(r"\W", "", kind): values for kind, values in LEFT_OUT.items()}
    assert len(kinds) > 15
    saved, same, changed = (
        {kind: tree(values[i]) for kind, values in kinds.items()} for i in range(3)
    )
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    call(tmp_path / "a", same)
    with pytest.raises(RuntimeError) as info:
        call(tmp_path / "a", changed)
    # Of those that have members, these are named.
    names = {f"{kind}.{name}" for kind in kinds}
    own = lambda x: next(n for n in names if x == n or x.startswith(n + "."))
    found = re.findall(r"\n    (\S+)  saved ", str(info.value))
    assert set(map(own, found)) == names
    out = call(tmp_path / "a", changed, static=[f"*.{name}"])
    values = [x[2] for x in kinds.values()]
    assert all(any(x is y for y in jtu.tree_leaves(out)) for x in values)
    # A pruned tree carries them, and a difference is one.
    ec.tree_serialise_leaves(tmp_path / "b", ec.open(tmp_path / "a").tree)
    assert not ec.diff(tmp_path / "a", tmp_path / "b")
    assert not ec.diff(tmp_path / "b", same)
    difference = ec.diff(tmp_path / "b", changed)
    assert set(map(own, difference.static)) == names
    # Those that a `filter_spec` stores are leaves.
    spec = lambda x: ec.is_storable(x) or type(x) is str
    ec.tree_serialise_leaves(tmp_path / "c", {"w": 1.0, "a": "x"}, spec)
    loaded = ec.tree_deserialise_leaves(tmp_path / "c", {"w": 0.0, "a": "y"}, spec)
    assert loaded == {"w": 1.0, "a": "x"}


def test_what_is_asked_for_decides(tmp_path):
    """Of a part, only what is left out of it is compared. Only what both sides have
    is."""
    tree = {"model": {"w": 1.0}, "meta": {"phase": "main", "w": 2.0}}
    like = {"model": {"w": 0.0}, "meta": {"phase": "warmup", "w": 0.0}}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    load(tmp_path / "a", like, where=lambda t: t["model"])
    load(tmp_path / "a", like["model"], source="model")
    with pytest.raises(
        RuntimeError, match="\n    meta.phase  saved 'main', `like` has"
    ):
        load(tmp_path / "a", like)
    with pytest.raises(
        RuntimeError, match="\n    meta.phase  saved 'main', `like` has"
    ):
        load(tmp_path / "a", like["meta"], source="meta")
    load(tmp_path / "a", {"model": {"w": 0.0}, "meta": {"w": 0.0, "other": "x"}})
    assert ec.open(tmp_path / "a").tree.meta.phase == "main"


def test_the_state_of_an_iterator(tmp_path):
    """It goes on where it was."""
    state = {"w": jnp.ones(2), "batches": b'{"next": 7}'}
    like = {"w": jnp.zeros(2), "batches": b'{"next": 0}'}
    ec.tree_serialise_leaves(tmp_path / "a", state)
    assert load(tmp_path / "a", like)["batches"] == state["batches"]
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
        manager.wait()
        assert manager.restore(like)[0]["batches"] == state["batches"]


def test_bytes_and_managers(tmp_path):
    like = net(Numbers.EIGHT)
    data = ec.to_bytes(net(Numbers.FOUR))
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, net(Numbers.FOUR))
        manager.wait()
        for call in (ft.partial(ec.from_bytes, data), manager.restore):
            with pytest.raises(RuntimeError, match="value  saved FOUR"):
                call(like)
            call(like, static=["value"])


def test_a_node_carries_them(tmp_path):
    """What is pruned without its class, and saved again, is compared as it was."""
    ec.tree_serialise_leaves(tmp_path / "a", {"m": net((Numbers.FOUR, 1)), "x": 1.0})
    node = jax.tree.map(lambda x: x.read(), ec.open(tmp_path / "a").tree.m)
    ec.tree_serialise_leaves(tmp_path / "b", node)
    load(tmp_path / "b", net((Numbers.FOUR, 1)))
    load(tmp_path / "b", node)
    with pytest.raises(RuntimeError, match="value  saved .FOUR"):
        load(tmp_path / "b", net((Numbers.EIGHT, 1)))
    ec.tree_serialise_leaves(tmp_path / "c", net((Numbers.EIGHT, 1)))
    with pytest.raises(RuntimeError, match="value  saved .EIGHT"):
        load(tmp_path / "c", node)


def test_graft_takes_names_of_both_sides(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"old": net(Numbers.FOUR)})
    pairs = [(lambda m: m["new"], lambda c: c.old)]
    like = {"new": net(Numbers.EIGHT)}
    for name in ("old.value", "new.value"):
        _, report = ec.graft(like, tmp_path / "a", pairs, static=[name])
        assert report.differences == (("new.value", "FOUR (4)", "EIGHT (8)"),)
    with pytest.raises(ValueError, match="names no static field"):
        ec.graft(like, tmp_path / "a", pairs, static=["neither.value"])


def test_parts_of_a_field(tmp_path):
    """A new vocabulary lets nothing else through."""
    saved = {"vocab_size": 10, "heads": 4, "act": print, "sub": Config()}
    ec.tree_serialise_leaves(tmp_path / "a", net(saved))
    like = net(saved | {"vocab_size": 11})
    with pytest.raises(RuntimeError, match="value.vocab_size  saved 10, `like` has 11"):
        load(tmp_path / "a", like)
    load(tmp_path / "a", like, static=["*.vocab_size"])
    like = net(saved | {"vocab_size": 11, "sub": Config(heads=8)})
    with pytest.raises(RuntimeError, match="value.sub.heads  saved 4, `like` has 8"):
        load(tmp_path / "a", like, static=["*.vocab_size"])
    load(tmp_path / "a", like, static=["*.vocab_size", "*.sub.heads"])
    load(tmp_path / "a", like, static=["value"])
    like = net({key: x for key, x in saved.items() if key != "heads"})
    with pytest.raises(RuntimeError, match="value.heads  saved 4, `like` has nothing"):
        load(tmp_path / "a", like)
    load(tmp_path / "a", like, static=["value.heads"])
    # In another order, only what differs is said.
    like = net(dict(reversed(list(saved.items()))) | {"heads": 8})
    with pytest.raises(RuntimeError, match="value.heads  saved 4, `like` has 8"):
        load(tmp_path / "a", like)


@pytest.mark.parametrize("length", (1000, 1001))
def test_each_part_that_is_reported_can_be_named(tmp_path, length):
    """Up to the length of a name from which on a part is reported as a whole."""
    key = "a" * length
    ec.tree_serialise_leaves(tmp_path / "a", {"m": net({key: {"b": 1}})})
    like = {"m": net({key: {"b": 2}})}
    name = f"m.value.{key}.b" if length <= 1000 else f"m.value.{key}"
    with pytest.raises(RuntimeError, match=f"{name[-9:]}  saved "):
        load(tmp_path / "a", like)
    load(tmp_path / "a", like, static=[name])


def test_parts_that_cannot_be_encoded(tmp_path, monkeypatch):
    """Objects of other classes, and what is too deep or too much: never an error, and
    what is beside them is compared."""

    class Broken(dict):
        def items(self):
            raise KeyError("x")

    deep = circular = []
    circular.append(circular)
    for _ in range(200):
        deep = [deep]
    doubled = print
    inside.limit(monkeypatch, value_parts=1000)
    for _ in range(60):
        doubled = (doubled, doubled)
    for value in (deep, circular, doubled, Broken(a=1), jnp.ones(2)):
        one, same, other = (
            _values.compared(_codec.encode((x, value))) for x in (1, 1, 2)
        )
        assert _values.is_alike(one, same) and not _values.is_alike(one, other)
    ec.tree_serialise_leaves(tmp_path / "a", net((1, jnp.ones(2))))
    # Of arrays of JAX, which a device may have computed, shapes and dtypes.
    load(tmp_path / "a", net((1, jnp.zeros(2))))
    for other in (jnp.ones(3), jnp.ones(2, int)):
        with pytest.raises(RuntimeError, match="value  saved"):
            load(tmp_path / "a", net((1, other)))


def test_nothing_recorded_and_nothing_to_name(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": 1.0})
    with pytest.raises(ValueError, match="It has none"):
        load(tmp_path / "a", {"w": 0.0}, static=["*.w"])
    load(tmp_path / "a", {"w": 0.0}, static=[])


def test_what_is_saved_on_one_mesh_is_loaded_on_any(tmp_path):
    meshes = [jax.make_mesh((n,), ("x",), devices=jax.devices()[:n]) for n in (1, 2)]
    ec.tree_serialise_leaves(tmp_path / "a", net(meshes[0]))
    for mesh in (*meshes, meshes[1].abstract_mesh):
        load(tmp_path / "a", net(mesh))


def test_functions_are_compared_by_package_and_name():
    """A package moves its functions, and a script is a module where it is imported."""
    own = _values.compared(_codec.encode(jax.nn.relu))
    is_alike = lambda *name: _values.is_alike(own, {"name": list(name)})
    assert is_alike("jax.elsewhere", "relu") and is_alike("__main__", "relu")
    assert not is_alike("jax.nn", "gelu") and not is_alike("flax.nn", "relu")


def test_a_leaf_that_is_a_function_is_compared(tmp_path):
    """So is the activation of an MLP, which is no static field."""

    def mlp(activation):
        return {"m": eqx.nn.MLP(1, 1, 1, 1, activation=activation, key=jr.key(0))}

    ec.tree_serialise_leaves(tmp_path / "a", mlp(jax.nn.relu))
    load(tmp_path / "a", mlp(jax.nn.relu))
    with pytest.raises(RuntimeError, match=r"m\.activation  saved jax.*relu.*<lambda>"):
        load(tmp_path / "a", mlp(lambda x: x))
    with pytest.raises(RuntimeError, match=r"m\.activation  saved jax.*relu.*gelu"):
        load(tmp_path / "a", mlp(jax.nn.gelu))
    load(tmp_path / "a", mlp(jax.nn.gelu), static=["*.activation"])
    assert not ec.diff(tmp_path / "a", mlp(jax.nn.relu))
    assert "m.activation" in ec.diff(tmp_path / "a", mlp(jax.nn.gelu)).static


def test_functions_wherever_they_stand(tmp_path):
    """With no static field beside them, in a Partial, and as what a Module wraps."""
    trees = [
        lambda f: eqx.nn.Sequential([eqx.nn.Identity(), eqx.nn.Lambda(f)]),
        lambda f: {"f": f},
        lambda f: jtu.Partial(f, 1.0),
        lambda f: [jtu.Partial(ft.partial(f, 2), x=1.0)],
        lambda f: eqx.nn.Lambda(jax.jit(f)),
    ]
    for tree in trees:
        saved, same, other = ({"w": 1.0, "t": tree(f)} for f in (jnp.sin, jnp.sin, len))
        ec.tree_serialise_leaves(tmp_path / "a", saved)
        for call in CALLS.values():
            call(tmp_path / "a", same)
            with pytest.raises(RuntimeError, match=r"\n    t\S*  saved .*sin"):
                call(tmp_path / "a", other)


def test_a_key_that_is_called_as_what_a_dict_has(tmp_path):
    make = lambda factory, text: {
        "d": collections.defaultdict(factory, default_factory=text, w=1.0)
    }
    ec.tree_serialise_leaves(tmp_path / "x", make(list, "relu"))
    load(tmp_path / "x", make(list, "relu"))
    for like in (make(list, "gelu"), make(set, "relu"), make(set, "gelu")):
        with pytest.raises(RuntimeError, match=r"`d.default_factory%?` was"):
            load(tmp_path / "x", like)


def test_a_value_where_the_other_tree_has_a_node_without_any(tmp_path):
    """No array tells that a function is gone."""
    w, lone = eqx.nn.Linear(1, 1, key=jr.key(0)), eqx.nn.Lambda(jax.nn.relu)
    trees = {
        "sequence": lambda *x: eqx.nn.Sequential([w, x[0]]),
        "of functions": lambda *x: [w, eqx.nn.Sequential([x[0], x[0]])],
        "node": lambda *x: {"w": w, "act": x[1]},
    }
    sides = (lone, lone), (eqx.nn.Identity(), jax.nn.relu)
    for name, tree in trees.items():
        for one, two in (sides, sides[::-1]):
            ec.tree_serialise_leaves(tmp_path / name, tree(*one))
            for call in CALLS.values():
                call(tmp_path / name, tree(*one))
                with pytest.raises(RuntimeError, match="saved .*(relu|nothing)") as e:
                    call(tmp_path / name, tree(*two))
                (shown,) = re.findall(r'static=(\["[^]]*"\])', str(e.value))
                call(tmp_path / name, tree(*two), static=json.loads(shown))
            assert ec.diff(tmp_path / name, tree(*two)).static
    # What the other tree does not have at all, or has arrays in the place of; or None,
    # which may be what a filter has left.
    whole = {"w": w, "act": jax.nn.relu}
    ec.tree_serialise_leaves(tmp_path / "x", whole)
    load(tmp_path / "x", {"w": w})
    load(tmp_path / "x", {"w": w, "act": 1.0}, missing="keep")
    load(tmp_path / "x", eqx.filter(whole, eqx.is_array))
    ec.tree_serialise_leaves(tmp_path / "y", eqx.filter(whole, eqx.is_array))
    assert load(tmp_path / "y", whole)["act"] is jax.nn.relu


def _as_leaf(cls):
    return cls


def _as_aux(cls):
    """Its fields are what it gives JAX beside its children."""
    flatten = lambda x: ((), (x.a, x.b))
    jtu.register_pytree_node(cls, flatten, lambda aux, _: cls(*aux))
    return cls


REGISTERED = {
    "leaf": _as_leaf,
    "static": jtu.register_static,
    "fields": lambda cls: jtu.register_dataclass(cls, [], ["a", "b"]),
    "children": lambda cls: jtu.register_dataclass(cls, ["a"], ["b"]),
    "aux": _as_aux,
}


@pytest.mark.parametrize("saved, here", [*itertools.permutations(REGISTERED, 2)])
def test_a_class_that_is_registered_in_another_way(saved, here):
    """Be it a leaf, a node of one static value, or one of several: its values are the
    same, and those that are not are told."""

    def make(way, a):
        @dataclasses.dataclass(frozen=True)
        class Config:
            a: object
            b: object = 3

        return {"f": REGISTERED[way](Config)(a), "w": np.ones(2)}

    path = "memory://registered"
    ec.tree_serialise_leaves(path, make(saved, "relu"))
    load(path, make(here, "relu"))
    with pytest.raises(
        RuntimeError, match="\n    f.a  saved 'relu', `like` has 'gelu'"
    ) as e:
        load(path, make(here, "gelu"))
    assert "f.b" not in str(e.value)
    load(path, make(here, "gelu"), static=["*.a"])
    if {saved, here} & {"leaf", "static"}:
        load(path, make(here, "gelu"), static=["f"])


def test_a_class_without_values_that_has_become_a_node():
    def make(register):
        @dataclasses.dataclass(frozen=True)
        class Nothing:
            pass

        return {"f": register(Nothing)(), "w": np.ones(2)}

    ways = _as_leaf, lambda cls: jtu.register_dataclass(cls, [], [])
    for saved, here in itertools.permutations(ways):
        ec.tree_serialise_leaves("memory://nothing", make(saved))
        load("memory://nothing", make(here))
        # The class itself is no object of it.
        with pytest.raises(RuntimeError, match="\n    f  saved "):
            like = make(here)
            load("memory://nothing", like | {"f": type(like["f"])})


FIELDS = {
    "number": lambda x: x,
    "tuple": lambda x: (x, jnp.sin),
    "empty": lambda x: () if x == "relu" else (x,),
    "emptied": lambda x: (x,) if x == "relu" else (),
    "dict": lambda x: {"a": x, "b": {"c": jnp.sin}},
    "Lambda": lambda x: eqx.nn.Lambda(getattr(jax.nn, x)),
    "Identity": lambda x: eqx.nn.Identity() if x == "relu" else x,
}


@pytest.mark.parametrize("field", [*FIELDS, *REGISTERED])
@pytest.mark.parametrize("was_static", [True, False])
def test_a_field_that_is_static_on_one_side(field, was_static):
    """Its value is compared with the node that it has become, or that it was."""

    def make(is_static, a):
        class Net(eqx.Module):
            w: object
            config: object = eqx.field(static=is_static)

        if field in FIELDS:
            return Net(np.ones(2), FIELDS[field](a))

        @dataclasses.dataclass(frozen=True)
        class Config:
            a: object
            b: object = 3

        return Net(np.ones(2), REGISTERED[field](Config)(a))

    path = "memory://once_static"
    ec.tree_serialise_leaves(path, make(was_static, "relu"))
    load(path, make(not was_static, "relu"))
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match=r"\n    config\S*  saved") as e:
            call(path, make(not was_static, "gelu"))
        (shown,) = re.findall(r"static=(\[.*?\])", str(e.value))
        call(path, make(not was_static, "gelu"), static=json.loads(shown))
    assert ec.diff(path, make(not was_static, "gelu")).static


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text("ab{"),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("abr", max_size=5), x),
    max_leaves=8,
)


@settings(max_examples=30)
@given(json_values, json_values)
def test_whatever_the_file_says(saved, here):
    """Its texts are data: they compare and are shown, whatever they are."""
    for kind in _values._FORMS:
        encoded = _values.compared({kind: saved})
        _values.is_alike(encoded, _values.compared(_codec.encode(here)))
        assert _values.is_alike(encoded, encoded)
        assert len(_values.show(encoded)) <= 203
        _values.changes(encoded, _values.compared({kind: here}))
    own = _values.compared(_codec.encode(saved))
    assert _values.is_alike(own, own)


@given(
    st.lists(st.sampled_from(["a", "b", ".", "ab", "*", "*."]), max_size=6),
    st.text("ab."),
)
@example(["*.", "*."], "")
@example(["*.", "*.", "a"], "a")
def test_patterns_are_those_of_a_regex(parts, name):
    pattern = "".join(parts)

    def regex(text):
        return ".*".join(map(re.escape, text.split("*")))

    expected = re.fullmatch(regex(pattern), name) is not None
    if pattern.startswith("*."):
        expected |= re.fullmatch(regex(pattern[2:]), name) is not None
    assert _compare.matches(pattern, name) == expected


class _Configured(eqx.Module):
    w: jax.Array
    config: object = eqx.field(static=True)


def test_what_the_error_shows_of_a_field_that_is_new_lets_it_pass(tmp_path):
    path = tmp_path / "c"
    for was, now, name in (
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"a": 1, "f": jnp.sin}, {"a": 1, "f": jnp.sin, "b": 2}, "b"),
    ):
        ec.tree_serialise_leaves(path, {"m": _Configured(jnp.ones(2), was)})
        like = {"m": _Configured(jnp.zeros(2), now)}
        with pytest.raises(RuntimeError) as error:
            ec.tree_deserialise_leaves(path, like)
        shown = re.search(r'static=(\["[^"]*"\])', str(error.value))
        assert shown is not None
        static = json.loads(shown[1])
        for source in (None, "m"):
            inner = like if source is None else like["m"]
            ec.tree_deserialise_leaves(path, inner, source=source, static=static)
        pairs = [(lambda m: m, lambda c: c)]
        ec.graft(like, path, pairs, static=static)


def test_each_nan_is_another_value():
    """Also where the tree before was one like it."""
    others = [math.nan, struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]]
    for value in (*others, *others):
        ec.tree_serialise_leaves("memory://nans", Net(1.0, value))
        found = ec.rebuild("memory://nans", [Net]).value
        assert struct.pack("<d", found) == struct.pack("<d", value)


def test_fields_of_a_named_tuple_that_have_changed(tmp_path):
    """A static named tuple goes by the names of its fields, alone and inside of others.
    As a plain tuple it has none."""
    saved = collections.namedtuple("Sizes", "depth width")(2, 8)
    trees = {"a": lambda x: Net(1.0, x), "b": lambda x: Net(1.0, {"k": [x]})}
    for name, tree in trees.items():
        ec.tree_serialise_leaves(tmp_path / name, tree(saved))
        for fields in ("width depth", "depth height", "depth"):
            cls = collections.namedtuple("Sizes", fields)
            like = tree(cls(*saved[: len(cls._fields)]))
            with pytest.raises(RuntimeError, match="changed a static field"):
                ec.tree_deserialise_leaves(tmp_path / name, like)
            with pytest.raises(RuntimeError, match="`Sizes`, which has other fields"):
                ec.rebuild(tmp_path / name, [Net, cls])
        for like in (tree(saved), tree(tuple(saved)), tree(list(saved))):
            ec.tree_deserialise_leaves(tmp_path / name, like)
        out = ec.rebuild(tmp_path / name, [Net, type(saved)])
        assert eqx.tree_equal(out, tree(saved))


def test_a_member_of_an_enum_whose_value_has_changed(tmp_path):
    old = enum.Enum("Mode", {"A": 1, "B": 2}, module=__name__)
    new = enum.Enum("Mode", {"B": 1, "A": 2}, module=__name__)
    ec.tree_serialise_leaves(tmp_path, Net(1.0, old.A))
    assert ec.rebuild(tmp_path, [Net, old]).value is old.A
    with pytest.raises(RuntimeError, match="`A` of `Mode`, which has another value"):
        ec.rebuild(tmp_path, [Net, new])
