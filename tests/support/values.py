"""Kinds of static value: what people put into fields that are no arrays.

No test is here. Each is made anew by each call, so that another process makes the same.
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import math
import operator
import pathlib
import re
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding


class Plain(enum.Enum):
    ONE = object()
    TWO = object()


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Text(enum.StrEnum):
    A = "a"
    B = "b"


class Flags(enum.Flag):
    X = 1
    Y = 2
    Z = 4


class Mode(eqx.Enumeration):
    one = "One."
    two = "Two."


class Width(int):
    pass


class Name(str):
    pass


class Rate(float):
    pass


class Point(NamedTuple):
    x: Any
    y: Any = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    heads: Any
    dtype: Any = jnp.bfloat16
    norm: Any = dataclasses.field(default_factory=lambda: {"norm": "rms"})
    more: Any = None

    def scale(self, x: Any) -> Any:
        return x * self.heads

    @classmethod
    def made(cls) -> Any:
        return cls(8)

    @staticmethod
    def first(x: Any) -> Any:
        return x


@dataclasses.dataclass(slots=True)
class Slots:
    heads: Any
    dtype: Any = jnp.float32


@attrs.frozen
class Attrs:
    heads: Any
    dtype: Any = jnp.bfloat16


class Static(eqx.Module):
    heads: int
    act: Any = jax.nn.relu


class Opaque:
    """What nobody can compare."""

    def __init__(self, x: Any):
        self.x = x


def square(x: Any) -> Any:
    return x * x


def cube(x: Any) -> Any:
    return x * x * x


@jax.custom_jvp
def curved(x: Any) -> Any:
    return x


@jax.custom_jvp
def bent(x: Any) -> Any:
    return x


@ft.lru_cache
def cached(x: Any) -> Any:
    return x


@jax.jit
def jitted(x: Any) -> Any:
    return x


def adder(n: Any) -> Any:
    def add(x: Any) -> Any:
        return x + n

    return add


def multiplier(n: Any) -> Any:
    def multiply(x: Any) -> Any:
        return x * n

    return multiply


def _lambda() -> Any:
    return lambda x: x


def _other_lambda() -> Any:
    return lambda x: -x


def _mesh(name: str) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), (name,))


def _in_rome(hour: int) -> datetime.datetime:
    zone = zoneinfo.ZoneInfo("Europe/Rome")
    return datetime.datetime(2026, 1, 2, hour, tzinfo=zone)


Make = Callable[[], Any]


def _pair(value: Any, other: Any) -> tuple[Make, Make]:
    return lambda: value, lambda: other


def _calls(make: Callable[..., Any], value: Any, other: Any) -> tuple[Make, Make]:
    return lambda: make(value), lambda: make(other)


# A value, and another of its kind, from which a load has to tell it.
KINDS: dict[str, tuple[Make, Make]] = {
    "text": _pair("relu", "gelu"),
    "empty text": _pair("", "a"),
    "surrogate": _pair("\ud800", "\ud801"),
    "unicode": _pair("\u00fc", "u\u0308"),
    "long text": _pair("a" * 20000, "a" * 19999 + "b"),
    "odd text": _pair("a.b/%\n\0", "a.b/%\n\0\0"),
    "bytes": _pair(b"\xff\0", b"\xff\1"),
    "bytearray": _calls(bytearray, b"a", b"b"),
    "None": _pair(None, "a"),
    "bool": _pair(True, False),
    "int": _pair(8, 4),
    "big int": _pair(10**5000, 10**5000 + 1),
    "float": _pair(0.1, 0.1 + 2**-54),
    "minus zero": _pair(-0.0, 0.0),
    "nan": _pair(math.nan, 0.0),
    "inf": _pair(math.inf, -math.inf),
    "complex": _pair(complex(1, -0.0), complex(2, 0.0)),
    "enum": _pair(Plain.ONE, Plain.TWO),
    "int enum": _pair(Level.LOW, Level.HIGH),
    "str enum": _pair(Text.A, Text.B),
    "flags": _calls(lambda x: Flags.X | x, Flags.Y, Flags.Z),
    "enum of JAX": _pair(jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT),
    "enum of Equinox": _pair(Mode.one, Mode.two),
    "int subclass": _calls(Width, 4, 8),
    "str subclass": _calls(Name, "a", "b"),
    "float subclass": _calls(Rate, 0.5, 0.25),
    "date": _calls(lambda day: datetime.date(2026, 1, day), 1, 2),
    "datetime": _calls(_in_rome, 1, 2),
    "time": _calls(datetime.time, 1, 2),
    "timedelta": _calls(datetime.timedelta, 1, 2),
    "timezone": _pair(datetime.UTC, datetime.timezone(datetime.timedelta(hours=1))),
    "zone": _calls(zoneinfo.ZoneInfo, "Europe/Rome", "Asia/Tokyo"),
    "path": _calls(pathlib.Path, "a/b", "a/c"),
    "Windows path": _calls(pathlib.PureWindowsPath, r"C:\a", r"C:\b"),
    "decimal": _calls(decimal.Decimal, "1.10", "1.20"),
    "fraction": _calls(lambda n: fractions.Fraction(1, n), 3, 4),
    "UUID": _calls(lambda n: uuid.UUID(int=n), 1, 2),
    "pattern": _calls(re.compile, "a+", "a*"),
    "flags of a pattern": _calls(lambda f: re.compile("a", f), re.I, re.M),
    "range": _calls(range, 3, 4),
    "slice": _calls(slice, 3, 4),
    "ellipsis": _pair(..., None),
    "numpy float": _calls(np.float32, 1.5, 2.5),
    "numpy int": _calls(np.int64, 4, 8),
    "numpy bool": _calls(np.bool_, True, False),
    "numpy str": _calls(np.str_, "a", "b"),
    "numpy time": _calls(np.datetime64, "2026-01-01", "2026-01-02"),
    "long double": _calls(np.longdouble, 2, 3),
    "ml_dtypes": _calls(ml_dtypes.bfloat16, 2, 3),
    "numpy array": _calls(np.array, [1.0, 2.0], [1.0, 3.0]),
    "numpy array of another dtype": _calls(lambda t: np.arange(3, dtype=t), "f4", "f8"),
    "numpy array of texts": _calls(np.array, ["a", "b"], ["a", "c"]),
    "dtype": _calls(np.dtype, "float32", "float16"),
    "big-endian dtype": _calls(np.dtype, ">f4", ">f8"),
    "records dtype": _calls(lambda t: np.dtype([("a", t)]), "f4", "i4"),
    "jnp.float32": _pair(jnp.float32, jnp.float16),
    "jnp.bfloat16": _pair(jnp.bfloat16, jnp.float32),
    "np.float32": _pair(np.float32, np.float64),
    "dtype of keys": _calls(lambda x: jr.key(0, impl=x).dtype, "threefry2x32", "rbg"),
    "dtype of no numbers": _pair(jax.dtypes.float0, np.dtype("i4")),
    "ShapeDtypeStruct": _calls(lambda n: jax.ShapeDtypeStruct((n,), jnp.int8), 2, 3),
    "function": _pair(square, cube),
    "relu": _pair(jax.nn.relu, jax.nn.relu6),
    "gelu": _pair(jax.nn.gelu, jax.nn.silu),
    "tanh": _pair(jnp.tanh, jnp.sin),
    "ufunc of JAX": _pair(jnp.add, jnp.multiply),
    "ufunc of NumPy": _pair(np.tanh, np.sin),
    "builtin": _pair(print, len),
    "function of math": _pair(math.sin, math.cos),
    "jitted function": _pair(jitted, square),
    "custom_jvp": _pair(curved, bent),
    "cached function": _pair(cached, cube),
    "initialiser": _pair(jax.nn.initializers.zeros, jax.nn.initializers.ones),
    "static method": _pair(Config.first, cube),
    "method of a class": _pair(Config.scale, Slots.__init__),
    "class method": _calls(lambda cls: cls.made, Config, type("Sub", (Config,), {})),
    "bound method": _calls(lambda n: Config(n).scale, 8, 4),
    "bound method of a text": _calls(lambda x: x.upper, "a", "b"),
    "partial": _calls(lambda n: ft.partial(square, n, k=jnp.int8), 1, 2),
    "partial of another": _calls(lambda f: ft.partial(f, 1), square, cube),
    "partial of a lambda": _calls(lambda n: ft.partial(lambda x, y: x, n), 1, 2),
    "Partial": _calls(lambda f: jtu.Partial(f, 2), square, cube),
    "lambda": (_lambda, _other_lambda),
    "closure": (lambda: adder(1), lambda: multiplier(1)),
    "class": _pair(Opaque, Config),
    "type": _pair(int, float),
    "generic": _pair(list[int], list[str]),
    "union": _pair(int | None, str | None),
    "typing": _pair(typing.Any, typing.Hashable),
    "tuple": _pair((1, "a", jnp.bfloat16), (2, "a", jnp.bfloat16)),
    "nested tuple": _pair((("b", -1), ()), (("b", -2), ())),
    "list": _calls(lambda n: [3, {"kernel": [3, n]}], 3, 4),
    "namedtuple": _calls(Point, 1, 2),
    "deque": _calls(lambda n: collections.deque([1, n], maxlen=3), 2, 3),
    "dict": _calls(lambda n: {"norm": "rms", "n": n}, 1, 2),
    "dict of int keys": _calls(lambda n: {1: "a", 2: n}, "b", "c"),
    "dict of tuple keys": _calls(lambda n: {("a", 1): n, ("b", 2): 0}, 1, 2),
    "dict of odd keys": _calls(lambda n: {0.5: n, Level.HIGH: 2}, 1, 2),
    "OrderedDict": _calls(lambda n: collections.OrderedDict(b=1, a=n), 1, 2),
    "defaultdict": _calls(lambda n: collections.defaultdict(list, a=n), 1, 2),
    "Counter": _calls(collections.Counter, "aab", "abb"),
    "mapping": _calls(lambda n: types.MappingProxyType({"a": n}), 1, 2),
    "set": _calls(lambda x: {"a", "b", "c", "d", x}, "e", "f"),
    "frozenset": _calls(lambda x: frozenset({"a", "b", ("c", x)}), 1, 2),
    "mixed set": _calls(lambda x: {1, "a", None, 2.5, Level.HIGH, x}, "b", "c"),
    "set of sets": _calls(lambda x: {frozenset("abc"), frozenset(x)}, "de", "df"),
    "set of functions": _calls(lambda f: {jax.nn.relu, f}, square, cube),
    "dataclass": _calls(Config, 8, 4),
    "nested dataclass": _calls(lambda n: Config(1, more=[Config(n)]), 8, 4),
    "slots": _calls(Slots, 8, 4),
    "attrs": _calls(Attrs, 8, 4),
    "Module": _calls(Static, 8, 4),
    "namespace": _calls(lambda n: types.SimpleNamespace(a=n), 1, 2),
    "arguments": _calls(lambda n: argparse.Namespace(a=n), 1, 2),
    "PartitionSpec": _pair(P("a", None), P(None, "a")),
    "PartitionSpec of tuples": _pair(P(("a", "b"), None), P(("b", "a"), None)),
    "beside a lambda": _calls(lambda n: (lambda x: x, n), 1, 2),
    "beside an object": _calls(lambda n: {"a": Opaque(0), "b": n}, 1, 2),
    "beside a mesh": _calls(lambda n: Config(n, more=_mesh("x")), 8, 4),
}
# What a load may take for the same, as nobody can say that it is another.
UNCOMPARED: dict[str, tuple[Make, Make]] = {
    "lambda of the same name": _calls(lambda n: lambda x: x + n, 1, 2),
    "closure of the same name": _calls(adder, 1, 2),
    "transformed function": _calls(jax.vmap, square, cube),
    "object of an unknown class": _calls(Opaque, 1, 2),
    "object": (object, object),
    "callable object of a library": _calls(operator.itemgetter, "a", "b"),
    "functions of an optimiser": _calls(optax.adam, 0.1, 0.2),
    "array of JAX": _calls(jnp.arange, 3, 4),
    "key": _calls(jr.key, 1, 2),
    "mesh": _calls(_mesh, "x", "y"),
    "sharding": _calls(lambda x: NamedSharding(_mesh("x"), x), P("x"), P()),
    "sharding on a device": _pair(SingleDeviceSharding(jax.devices()[0]), None),
    "device": _pair(jax.devices()[0], None),
    "treedef": _calls(lambda x: jtu.tree_structure([1, x]), {"a": 1}, {"b": 1}),
    "generator of numbers": _calls(np.random.default_rng, 1, 2),
    "module": _pair(math, operator),
}
