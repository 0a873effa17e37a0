"""The codec of static values: JSON that is exact, by type and bits.

A part that cannot be encoded is a mark in its place, so that the parts beside it are
there. See FORMAT.md for the kinds, and `_format/_values.py` for how they compare.
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import inspect
import json
import math
import operator
import pathlib
import re
import struct
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import xxhash

from .._format import _json, _names, _template, _values
from .._limits import limits
from . import _named


# The depth of one value, and the characters of its JSON.
MAX_DEPTH, _MAX_CHARACTERS = 50, 2**14
BUILTINS = {
    x.__name__: x
    for x in (bool, int, float, complex, str, bytes, list, tuple, dict, set, object)
}
# Types whose `repr` says all of a value.
_BY_REPR: tuple[Any, ...] = (
    *(complex, bytearray, decimal.Decimal, fractions.Fraction, pathlib.PurePath),
    *(uuid.UUID, datetime.date, datetime.time, datetime.timedelta),
    *(datetime.tzinfo, operator.attrgetter, operator.itemgetter, jtu.PyTreeDef),
    *(operator.methodcaller, types.GenericAlias, types.UnionType),
    *(type(typing.List[int]), type(typing.Union[int, str])),  # noqa: UP006, UP007
)

# What is in a list that may be long, as a vocabulary, as parts of a value.
_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_ATOM_COST = 1 / 64

# Encodes, or decodes, a part of a value.
Recurse = Callable[[Any], Any]


def encode(value: object, owner: type | None = None) -> Any:
    """A value as JSON. `owner` is the class of the node that it is a field of: the
    default of a parameter of that class is marked as such."""
    if value is None or type(value) is bool:
        return value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if type(value) is str and len(value) < 100 and value.isascii():
        return value
    left = limits.value_parts

    def encode(x: object, depth: int) -> Any:
        nonlocal left
        left -= _ATOM_COST if type(x) in _ATOMS else 1
        if left < 0 or depth > MAX_DEPTH:
            return {"unknown": ["builtins", "object"]}
        try:
            return _encode(x, lambda part: encode(part, depth + 1))
        except Exception:  # Of the methods of a class that we do not know.
            return _unknown(x)

    out = encode(value, 0)
    if _values.split(out)[0] == "made" and owner is not None:
        found = [name for name, x in defaults(owner).items() if x is value]
        out = {"default": [found[0], out]} if found else out
    return _shortened(out)


def is_by_class(x: object) -> bool:
    """Whether a value is encoded as its class alone, whatever it holds."""
    try:
        return _values.split(_encode(x, lambda part: None))[0] == "unknown"
    except Exception:
        return True


def _shortened(x: object) -> Any:
    """An encoded value with digests in the place of long parts."""
    if len(json.dumps(x)) <= _MAX_CHARACTERS:
        return x
    if type(x) is list:
        x = list(map(_shortened, x))
    elif type(x) is dict:
        parts = lambda own: list(map(_shortened, own)) if type(own) is list else own
        x = {kind: parts(own) for kind, own in x.items()}
    if len(json.dumps(x)) <= _MAX_CHARACTERS:
        return x
    text = json.dumps(_values.compared(x))
    return {"digest": xxhash.xxh3_128_hexdigest(text.encode())}


def _encode(x: Any, below: Recurse) -> Any:
    cls = type(x)
    if x is None or cls is bool:
        return x
    if cls in _EXACT:
        return _EXACT[cls](x, below)
    if isinstance(x, enum.Enum):
        return {"enum": [*_named.class_name(cls), x.name, below(x.value)]}
    if isinstance(x, np.generic) and not isinstance(x, (str, bytes)):
        return _scalar(x)
    if isinstance(x, re.Pattern):  # Its `repr` cuts it.
        flags = re.RegexFlag(x.flags)
        return {"repr": [cls.__name__, f"re.compile({x.pattern!r}, {flags!r})"]}
    if isinstance(x, _BY_REPR):
        text = repr(x)
        return (
            _unknown(x)
            if _names.ADDRESS.search(text)
            else {"repr": [cls.__name__, text]}
        )
    if isinstance(x, type):
        return _class(x)
    if isinstance(x, np.dtype):
        return {"dtype": x.name} if _is_number(x) else {"repr": ["dtype", str(x)]}
    for base, bare in BARE.items():
        if isinstance(x, base):  # Of a subclass, the number or the text that it is.
            return {"sub": [*_named.class_name(cls), below(bare(x))]}
    if isinstance(x, (bytes, np.ndarray, jax.Array)):
        return _array(x, below)
    if isinstance(x, tuple) and hasattr(cls, "_fields"):
        values = [*_named.class_name(cls), list(map(below, x))]
        return {"namedtuple": [*values, list(cls._fields)]}
    if isinstance(x, (list, tuple, collections.deque)):
        return {"sub": [*_named.class_name(cls), list(map(below, x))]}
    if isinstance(x, jax.ShapeDtypeStruct):
        of = "shape", "dtype", "weak_type"
        return _fields(x, [(name, getattr(x, name)) for name in of], below)
    if isinstance(x, _DEVICES):
        return {"any": cls.__name__}
    if isinstance(x, Mapping):
        return {"sub": [*_named.class_name(cls), _dict(x, below)]}
    if isinstance(x, Set):
        return {"sub": [*_named.class_name(cls), {"set": _sorted(map(below, x))}]}
    if isinstance(x, ft.partial):
        return _partial(x, below)
    if cls is _partial_in_partial():
        return below(x.fun)  # pyright: ignore[reportAttributeAccessIssue]
    if not callable(x) and cls is shared_node():
        return {"shared": []}
    if isinstance(x, types.MethodType):
        name = _named.own_name(x.__func__)
        return {"method": [list(name or ("", "")), below(x.__self__)]}
    if isinstance(x, types.BuiltinMethodType):
        if isinstance(x.__self__, types.ModuleType | None):
            return _function(x)
        return {"method": [["builtins", x.__qualname__], below(x.__self__)]}
    if isinstance(x, types.ModuleType):
        return {"module": x.__name__}
    if dataclasses.is_dataclass(x):
        return _dataclass(x, below)
    if hasattr(cls, "__attrs_attrs__"):
        names = [field.name for field in cls.__attrs_attrs__ if field.eq]
        return _fields(x, [(n, getattr(x, n)) for n in names if hasattr(x, n)], below)
    if isinstance(x, (types.SimpleNamespace, argparse.Namespace)):
        return _fields(x, list(vars(x).items()), below)
    return _function(x)


# The value of an instance of a subclass, whatever methods that has.
BARE: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
# What is saved on some devices is loaded on any.
_DEVICES = (
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.Sharding,
    jax.Device,
)


def _unknown(x: object) -> Any:
    """The mark of a part that cannot be encoded: the class that it is of."""
    return {"unknown": list(_named.class_name(type(x)))}


def _function(x: object) -> Any:
    """A function or a class by its name, which is marked where it does not lead to it:
    as of a lambda, a closure or what `jax.grad` returns."""
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype) and getattr(jnp, dtype.name, None) is x:
        return {"jax": dtype.name}
    name = _named.name_of(x)
    if name is not None:
        return {"name": list(name)}
    if isinstance(x, np.ufunc) and getattr(np, x.__name__, None) is x:
        return {"name": ["numpy", x.__name__]}
    if _is_extended(x):
        return {"repr": ["dtype", str(x)]}
    has_name = callable(x) and not _named.is_module(type(x))
    name = _named.own_name(x) if has_name else None
    return _unknown(x) if name is None else {"made": list(name)}


def _is_extended(x: Any) -> bool:
    try:
        return bool(jnp.issubdtype(x, jax.dtypes.extended))
    except (TypeError, ValueError):
        return False


def _class(x: type) -> Any:
    if BUILTINS.get(x.__name__) is x:
        return {"builtin": x.__name__}
    if issubclass(x, np.generic) and np.dtype(x).type is x:
        return {"numpy": np.dtype(x).name}
    return _function(x)


def _fields(x: object, items: Iterable[tuple[str, Any]], below: Recurse) -> Any:
    """The parts of an object that cannot be made again of them."""
    pairs = [[name, below(part)] for name, part in items]
    return {"fields": [*_named.class_name(type(x)), pairs]}


def _dataclass(x: Any, below: Recurse) -> Any:
    fields = dataclasses.fields(x)
    pairs = [[f.name, below(getattr(x, f.name))] for f in fields if hasattr(x, f.name)]
    skipped = [field.name for field in fields if not field.compare]
    own = getattr(x, "__dict__", {})
    kind = "object" if own.keys() <= {field.name for field in fields} else "fields"
    more = [skipped] if skipped else []
    return {kind: [*_named.class_name(type(x)), pairs, *more]}


def _is_number(x: np.dtype) -> bool:
    """Whether the name of a dtype says all of it, also the order of bytes."""
    try:
        return _template.dtype_of(x.name) == x
    except ValueError:
        return False


def _scalar(x: np.generic) -> Any:
    name = x.dtype.name
    if _is_number(x.dtype) and type(x) is x.dtype.type:
        return {"scalar": [name, x.tobytes().hex()]}
    return {"repr": [name, f"{name} {x}"]}


# The bytes of an array that are part of a text, and not a digest in it.
_MAX_BYTES = 2**10


def _array(x: Any, below: Recurse) -> Any:
    """An array by its digest; one of objects by them; one of JAX, whose values a device
    may have computed, by its shape and dtype."""
    if isinstance(x, jax.Array):
        return {"array": [str(x.dtype), list(x.shape), ""]}
    if isinstance(x, bytes):
        if type(x) is bytes and len(x) <= _MAX_BYTES:
            return {"bytes": x.hex()}
        x = np.frombuffer(x, np.uint8)
    if x.dtype.hasobject:
        return _fields(x, [("shape", x.shape), ("items", x.tolist())], below)
    digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(x).tobytes())
    dtype = x.dtype.name if _is_number(x.dtype) else str(x.dtype)
    return {"array": [dtype, list(x.shape), digest]}


def _dict(x: Any, below: Recurse) -> Any:
    return {"dict": [[below(key), below(item)] for key, item in x.items()]}


def _sorted(items: Iterable[Any]) -> list[Any]:
    return sorted(items, key=json.dumps)


def _partial(x: ft.partial, below: Recurse) -> Any:
    keywords = [[name, below(part)] for name, part in x.keywords.items()]
    return {"partial": [below(x.func), list(map(below, x.args)), keywords]}


def _float(x: float, below: Recurse) -> Any:
    if math.isfinite(x):
        return x
    bits = struct.pack("<d", x).hex()
    return {"float": _values.RARE.get(bits, bits)}


def _int(x: int, below: Recurse) -> Any:
    return {"int": hex(x)} if x.bit_length() > _json.MAX_BITS else x


def _str(x: str, below: Recurse) -> Any:
    if _json.is_unicode(x):
        return x
    return {"str": x.encode("utf-8", "surrogatepass").hex()}


def _steps(kind: str) -> Callable[[Any, Recurse], Any]:
    return lambda x, below: {kind: list(map(below, (x.start, x.stop, x.step)))}


@ft.cache
def _partial_in_partial() -> type:
    """The type that JAX has for a `functools.partial` in a `jax.tree_util.Partial`."""
    return type(jtu.Partial(ft.partial(len)).func)


@ft.cache
def shared_node() -> type:
    """The type that `eqx.nn.Shared` has in the places of nodes that are elsewhere."""
    shared = eqx.nn.Shared([0, 0], lambda x: x[0], lambda x: x[1])
    return type(shared.pytree[0])


_EXACT: dict[type, Callable[[Any, Recurse], Any]] = {
    int: _int,
    float: _float,
    str: _str,
    list: lambda x, below: list(map(below, x)),
    tuple: lambda x, below: {"tuple": list(map(below, x))},
    set: lambda x, below: {"set": _sorted(map(below, x))},
    frozenset: lambda x, below: {"frozenset": _sorted(map(below, x))},
    dict: _dict,
    complex: lambda x, below: {"complex": [x.real.hex(), x.imag.hex()]},
    range: _steps("range"),
    slice: _steps("slice"),
    type(...): lambda x, below: {"ellipsis": []},
    ft.partial: _partial,
    types.FunctionType: lambda x, below: _function(x),
    jax.sharding.PartitionSpec: lambda x, below: {"spec": list(map(below, x))},
}


@ft.lru_cache(maxsize=1024)
def defaults(owner: type) -> dict[str, Any]:
    """The functions that are defaults of the parameters and the fields of a class."""
    out: dict[str, Any] = {}
    if dataclasses.is_dataclass(owner):
        out |= {field.name: field.default for field in dataclasses.fields(owner)}
    for base in reversed(owner.__mro__[:-1]):
        init = vars(base).get("__init__")
        if inspect.isfunction(init):
            parameters = inspect.signature(init).parameters.values()
            out |= {x.name: x.default for x in parameters}
    empty = inspect.Parameter.empty
    return {name: x for name, x in out.items() if callable(x) and x is not empty}
