"""Values as JSON that gives them back, with their types: those of static fields, and of
leaves that are not stored. See FORMAT.md.

`_tree/_encoded.py` is for comparing values. There, a tuple is as good as a list.
"""

import dataclasses
import enum
import functools as ft
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._format import _json, _template
from .._tree import _encoded, _named


MAX_DEPTH, _MAX_NODES, _MAX_LENGTH = 50, 2**12, 2**14
BUILTINS = {
    x.__name__: x
    for x in (bool, int, float, complex, str, bytes, list, tuple, dict, set, object)
}


def encode(value: Any, owner: type | None = None) -> Any:
    """A value as JSON; one that cannot be given back as `{"unknown": what it is}`.

    `owner`: the class of the Module that it is a field of.
    """
    if _is_simple(value):
        return value
    try:
        out = _encoded.bounded(value, _encode, MAX_DEPTH, _MAX_NODES)
    except Exception:  # Also of the methods of a class that we do not know.
        default = _default_of(owner, value)
        out = {"unknown": _text(value)} if default is None else {"default": default}
    if type(out) in (bool, type(None)) or len(json.dumps(out)) <= _MAX_LENGTH:
        return out
    return {"unknown": _text(value)}


def _is_simple(value: Any) -> bool:
    """Whether a value is its own JSON, as most are."""
    cls = type(value)
    if cls is int:
        return -(2**63) <= value < 2**63
    if cls is str:
        return len(value) < 100 and value.isascii()
    return value is None or cls is bool


def _encode(x: Any, below: Callable[[Any], Any]) -> Any:
    cls = type(x)
    if cls is float and not math.isfinite(x):
        return {"float": repr(x)}
    if cls is int and x.bit_length() > _json.MAX_BITS:
        return {"int": hex(x)}
    if cls is str and not _json.is_unicode(x):
        return {"str": x.encode("utf-8", "surrogatepass").hex()}
    if cls in (bool, int, float, str, type(None)):
        return x
    if cls is list:
        return list(map(below, x))
    if cls in (tuple, set, frozenset):
        items = list(map(below, x))
        return {cls.__name__: items if cls is tuple else sorted(items, key=json.dumps)}
    if cls is dict:
        return {"dict": [[below(key), below(item)] for key, item in x.items()]}
    if cls is complex:
        return {"complex": [x.real.hex(), x.imag.hex()]}
    if cls is bytes:
        return {"bytes": x.hex()}
    if cls is range or cls is slice:
        return {cls.__name__: [below(y) for y in (x.start, x.stop, x.step)]}
    if x is ...:
        return {"ellipsis": []}
    if cls is shared_node():
        return {"shared": []}
    if cls is jax.sharding.PartitionSpec:
        return {"spec": list(map(below, x))}
    if cls is ft.partial:
        keywords = [[name, below(y)] for name, y in x.keywords.items()]
        return {"partial": [below(x.func), list(map(below, x.args)), keywords]}
    return _encode_of_class(x, below)


@ft.cache
def shared_node() -> type:
    """The type that `eqx.nn.Shared` has in the places of nodes that are elsewhere."""
    shared = eqx.nn.Shared([0, 0], lambda x: x[0], lambda x: x[1])
    return type(shared.pytree[0])


def _encode_of_class(x: Any, below: Callable[[Any], Any]) -> Any:
    if isinstance(x, np.dtype) and _template.dtype_of(x.name) == x:
        return {"dtype": x.name}
    if isinstance(x, np.generic) and type(x) is x.dtype.type:
        name = x.dtype.name
        if _template.dtype_of(name) == x.dtype and x.dtype.kind not in "OSUMmV":
            return {"scalar": [name, x.tobytes().hex()]}
    if isinstance(x, type):
        if BUILTINS.get(x.__name__) is x:
            return {"builtin": x.__name__}
        if issubclass(x, np.generic) and np.dtype(x).type is x:
            return {"numpy": np.dtype(x).name}
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype) and getattr(jnp, dtype.name, None) is x:
        return {"jax": dtype.name}
    name = _named.name_of(x)
    if name is not None:
        return {"name": list(name)}
    cls = _named.own(type(x))
    if cls is None or isinstance(x, type):
        raise ValueError  # It cannot be given back.
    if isinstance(x, enum.Enum) and type(x).__members__.get(x.name) is x:
        return {"enum": [*cls, x.name]}
    if isinstance(x, tuple) and hasattr(type(x), "_fields"):
        return {"namedtuple": [*cls, list(map(below, x))]}
    if dataclasses.is_dataclass(x):
        names = [field.name for field in dataclasses.fields(x)]
        if not vars(x).keys() <= {*names}:
            raise ValueError  # It cannot be given back.
        items = [[name, below(getattr(x, name))] for name in names if hasattr(x, name)]
        return {"object": [*cls, items]}
    raise ValueError  # It cannot be given back.


def _text(x: Any) -> str:
    """A value in a few words, for people."""
    cls = _named.own(type(x))
    name = _named.own(x) if callable(x) else None
    text = "an object" if cls is None else f"a `{cls.shown}`"
    if isinstance(x, type):
        text = "a class"
    elif name is not None and cls is not None and name.module != cls.module:
        text = "a function"
    if isinstance(x, jax.Array):
        text = "an array"
    if name is not None and text in ("a class", "a function"):
        text += f" that calls itself `{name.shown}`"
    return text[:200]


# ---- Values that are the default of a parameter or a field.


def _default_of(owner: type | None, value: Any) -> str | None:
    """The name of a parameter of a class whose default is this function."""
    some = defaults(owner) if owner is not None and callable(value) else {}
    return next((name for name, default in some.items() if default is value), None)


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
