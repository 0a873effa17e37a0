"""Values of static fields: encoded, compared and shown.

An encoded value is JSON, in which an object has one entry, its kind: see FORMAT.md.
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import json
import math
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from .._format import _json, _names
from . import _identity, _named


# What cannot be compared: functions without a name, arrays of JAX, and objects of
# classes not known.
OTHER: dict[str, Any] = {"other": None}
# Those whose `repr` is all that they are.
_BY_REPR = (
    complex,
    bytes,
    bytearray,
    range,
    slice,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    re.Pattern,
    types.EllipsisType,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    uuid.UUID,
)
# Before 2026-11-23 these were recorded as what cannot be compared.
_NEW_REPRS = ("datetime.", "zoneinfo.", "UUID(")
_MAX_DEPTH, _MAX_NODES, _MAX_LENGTH = 100, 2**18, 2**14
# Of lists and objects in the JSON of a value of that depth.
_MAX_NESTED = 4 * _MAX_DEPTH


def encode(value: Any) -> Any:
    """A value as JSON that can be compared with that of another by `is_alike`."""
    try:
        out = bounded(value, _encode, _MAX_DEPTH, _MAX_NODES)
        text = json.dumps(out)
    except Exception:  # Of the methods of a class that we do not know.
        return OTHER
    if len(text) <= _MAX_LENGTH:
        return out
    return {"digest": xxhash.xxh3_128_hexdigest(json.dumps(unnamed(out)).encode())}


def bounded(
    value: Any, encode: Callable[[Any, Callable], Any], most_depth: int, most: int
) -> Any:
    """`encode(value, below)`, where `below` encodes the values that are in one: of most
    so many, nested so deep.

    **Raises:** `ValueError` for more than that.
    """
    count = 0

    def walk(x: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > most or depth > most_depth:
            raise ValueError("too large to be recorded")
        return encode(x, ft.partial(walk, depth=depth + 1))

    return walk(value, 0)


def _encode(x: Any, below: Callable[[Any], Any]) -> Any:
    def pairs(items: Any) -> list[list[Any]]:
        return [[below(key), below(item)] for key, item in items]

    if isinstance(x, enum.Enum):
        return {"enum": [x.name, below(x.value)]}
    if isinstance(x, np.generic) and not isinstance(x, (str, bytes)):
        item = x.item()
        good = isinstance(item, (bool, int, float, complex))
        return {"scalar": [x.dtype.name, below(item) if good else str(x)]}
    if x is None or type(x) is bool:
        return x
    # Of a subclass the number or the text that it is.
    if isinstance(x, int):
        x = int.__int__(x)
        return {"repr": hex(x)} if x.bit_length() > _json.MAX_BITS else x
    if isinstance(x, float):
        x = float.__float__(x)
        return x if math.isfinite(x) else {"repr": repr(x)}
    if isinstance(x, str):
        x = str.__str__(x)
        return x if _json.is_unicode(x) else {"repr": ascii(x)}
    if isinstance(x, _BY_REPR):
        return {"repr": repr(x)}
    dtype = _dtype_name(x)
    if dtype is not None:
        return {"dtype": dtype}
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(x).tobytes())
        return {"array": [x.dtype.name, list(x.shape), digest]}
    if isinstance(x, (list, tuple, collections.deque, jax.sharding.PartitionSpec)):
        return list(map(below, x))
    if isinstance(x, jax.ShapeDtypeStruct):
        of = "shape", "dtype", "weak_type"
        return {"object": pairs((name, getattr(x, name)) for name in of)}
    if isinstance(x, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        return OTHER  # What is saved on one mesh is loaded on any.
    if isinstance(x, Mapping):
        return {"dict": pairs(x.items())}
    if isinstance(x, Set):
        key = lambda item: (json.dumps(unnamed(item)), json.dumps(item))
        return {"set": sorted(map(below, x), key=key)}
    if isinstance(x, ft.partial):
        return {"partial": [below(x.func), below(x.args), below(x.keywords)]}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        of = [field.name for field in dataclasses.fields(x) if field.compare]
        return {"object": pairs((n, getattr(x, n)) for n in of if hasattr(x, n))}
    if isinstance(x, (types.SimpleNamespace, argparse.Namespace)):
        return {"object": pairs(vars(x).items())}
    name = _named.name_of(x)
    return OTHER if name is None else {"name": list(name)}


def unnamed(x: Any, depth: int = 0) -> Any:
    """An encoded value as it was before functions and classes had names in it."""
    if type(x) is dict and "name" in x or depth > _MAX_NESTED:
        return OTHER
    below = ft.partial(unnamed, depth=depth + 1)
    if type(x) is dict:
        return {kind: below(value) for kind, value in x.items()}
    return list(map(below, x)) if type(x) is list else x


def _dtype_name(x: Any) -> str | None:
    """The name of a dtype, or of a class that stands for one."""
    if isinstance(x, type):
        if x in (bool, int, float, complex):
            return x.__name__
        if issubclass(x, np.generic):
            return np.dtype(x).name
        x = getattr(x, "dtype", None)  # As `jnp.float32` has it.
    if isinstance(x, np.dtype):
        return str(x) if x.names else x.name
    try:
        return str(x) if jnp.issubdtype(x, jax.dtypes.extended) else None
    except TypeError:
        return None


# ---- Comparing two encoded values.

_KINDS = frozenset(
    "other name enum scalar repr dtype array dict set partial object digest".split()
)


def _split(x: Any) -> tuple[str, Any]:
    """The kind of an encoded value ("": plain JSON), and what is encoded."""
    if type(x) is not dict:
        return "", x
    kind, value = next(iter(x.items()), ("", None))
    return (kind, value) if kind in _KINDS else ("unknown", None)


def _bare(kind: str, value: Any) -> Any:
    """The plain value of an enum, a scalar of NumPy or a dtype."""
    if kind in ("enum", "scalar") and type(value) is list and value:
        return value[-1]
    return value if kind in ("", "dtype") else {kind: value}


def is_alike(a: Any, b: Any) -> bool:
    """Whether two encoded values are the same, as far as they can be compared."""
    (one, x), (two, y) = _split(a), _split(b)
    if "unknown" in (one, two) or one == two == "other":
        return True
    if {one, two} == {"other", "name"}:
        return True  # One of them has no name, or nothing recorded it.
    if {one, two} == {"other", "repr"}:
        return str(x if one == "repr" else y).startswith(_NEW_REPRS)
    if one == two == "name":
        names = _named.parse(x), _named.parse(y)
        return names[0] is None or names[1] is None or names[0].is_alike(names[1])
    if one != two:
        bare = _bare(one, x), _bare(two, y)
        return bare != (a, b) and is_alike(*bare)
    if type(x) is list and type(y) is list:
        return len(x) == len(y) and all(map(is_alike, x, y))
    return _identity.is_same(x, y)


# In the place of what only one side has.
NOTHING = object()


def members(x: Any) -> dict[str, Any] | None:
    """The fields of an object and the values of a dict, by the parts of their names."""
    kind, value = _split(x)
    if kind not in ("dict", "object") or type(value) is not list:
        return None
    out = {}
    for pair in value:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
            return None
        out[_names.quote(pair[0])] = pair[1]
    return out


def show(x: Any, most: int = 200) -> str:
    """An encoded value for people."""
    text = _shown(x, 0)
    return text if len(text) <= most else text[:most] + "..."


def _shown(x: Any, depth: int) -> str:
    if x is NOTHING:
        return "nothing"
    if depth > _MAX_DEPTH:
        return "..."
    below = ft.partial(_shown, depth=depth + 1)
    kind, value = _split(x)
    parts = members(x)
    if parts is not None:
        items = ", ".join(f"{key!r}: {below(item)}" for key, item in parts.items())
        return f"{{{items}}}"
    if type(value) is list:
        if kind == "name" and (name := _named.parse(value)) is not None:
            return name.shown
        if kind == "enum" and len(value) == 2:
            return f"{value[0]} ({below(value[1])})"
        if kind == "scalar" and len(value) == 2:
            return f"{value[0]} {below(value[1])}"
        if kind == "array" and len(value) == 3:
            return f"an array, {value[0]} {below(value[1])}, digest {value[2]!s:.8}"
        return f"[{', '.join(map(below, value))}]"
    if kind in ("repr", "dtype"):
        return str(value)
    if kind:
        return "another value" if kind == "digest" else "an object"
    return repr(value)
