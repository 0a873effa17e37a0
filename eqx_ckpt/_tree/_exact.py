"""Values as JSON that gives them back, with their types: those of static fields, and of
leaves that are not stored. See FORMAT.md.

`_encoded` is for comparing values. There, a tuple is as good as a list.
"""

import dataclasses
import enum
import functools as ft
import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._format import _json, _names, _template
from . import _named
from ._named import Name


_MAX_DEPTH, _MAX_NODES, _MAX_LENGTH = 50, 2**12, 2**14
_BUILTINS = {
    x.__name__: x
    for x in (bool, int, float, complex, str, bytes, list, tuple, dict, set, object)
}
_SIMPLE = (bool, str, type(None))


class _Unnamed(Exception):
    """For what cannot be given back."""


def encode(value: Any, owner: type | None = None) -> Any:
    """A value as JSON; one that cannot be given back as `{"unknown": what it is}`.

    `owner`: the class of the Module that it is a field of.
    """
    if type(value) in _SIMPLE and (type(value) is not str or _json.is_unicode(value)):
        out = value
    else:
        count = 0

        def walk(x: Any, depth: int) -> Any:
            nonlocal count
            count += 1
            if count > _MAX_NODES or depth > _MAX_DEPTH:
                raise _Unnamed
            return _encode(x, ft.partial(walk, depth=depth + 1))

        try:
            out = walk(value, 0)
        except Exception:  # Also of the methods of a class that we do not know.
            default = _default_of(owner, value)
            out = {"unknown": _text(value)} if default is None else {"default": default}
    if type(out) in (bool, type(None)) or len(json.dumps(out)) <= _MAX_LENGTH:
        return out
    return {"unknown": _text(value)}


def _encode(x: Any, below: Callable[[Any], Any]) -> Any:
    cls = type(x)
    if cls in _SIMPLE or cls is int or cls is float:
        return _encode_plain(x)
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
    if cls is _shared_node():
        return {"shared": []}
    if cls is jax.sharding.PartitionSpec:
        return {"spec": list(map(below, x))}
    if cls is ft.partial:
        keywords = [[name, below(y)] for name, y in x.keywords.items()]
        return {"partial": [below(x.func), list(map(below, x.args)), keywords]}
    return _encode_of_class(x, below)


@ft.cache
def _shared_node() -> type:
    """Of what `eqx.nn.Shared` has in the places of nodes that are elsewhere."""
    shared = eqx.nn.Shared([0, 0], lambda x: x[0], lambda x: x[1])
    return type(shared.pytree[0])


def _encode_plain(x: Any) -> Any:
    if type(x) is float and (not math.isfinite(x)):
        return {"float": repr(x)}
    if type(x) is int and x.bit_length() > _json.MAX_BITS:
        return {"int": hex(x)}
    if type(x) is str and not _json.is_unicode(x):
        return {"str": x.encode("utf-8", "surrogatepass").hex()}
    return x


def _encode_of_class(x: Any, below: Callable[[Any], Any]) -> Any:
    if isinstance(x, np.dtype) and _template.dtype_of(x.name) == x:
        return {"dtype": x.name}
    if isinstance(x, np.generic) and type(x) is x.dtype.type:
        name = x.dtype.name
        if _template.dtype_of(name) == x.dtype and x.dtype.kind not in "OSUMmV":
            return {"scalar": [name, x.tobytes().hex()]}
    if isinstance(x, type):
        if _BUILTINS.get(x.__name__) is x:
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
        raise _Unnamed
    if isinstance(x, enum.Enum) and type(x).__members__.get(x.name) is x:
        return {"enum": [*cls, x.name]}
    if isinstance(x, tuple) and hasattr(type(x), "_fields"):
        return {"namedtuple": [*cls, list(map(below, x))]}
    if dataclasses.is_dataclass(x):
        names = [field.name for field in dataclasses.fields(x)]
        if not vars(x).keys() <= {*names}:
            raise _Unnamed
        items = [[name, below(getattr(x, name))] for name in names if hasattr(x, name)]
        return {"object": [*cls, items]}
    raise _Unnamed


def _text(x: Any) -> str:
    """What a value is, for people."""
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
    if owner is None or not callable(value):
        return None
    some = defaults(owner)
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


# ---- The values.


class Malformed(ValueError):
    """For what is never recorded."""


class Resolver:
    """What `decode` asks for what is not in the JSON. It says what it lacks by itself,
    and returns anything then."""

    def find(self, name: Name, what: str) -> Any:
        """A `"class"`, or a `"function"`, which may be a class."""
        raise NotImplementedError

    def unknown(self, text: str) -> Any:
        raise NotImplementedError

    def default(self, parameter: str) -> Any:
        raise NotImplementedError


def decode(value: Any, resolver: Resolver) -> Any:
    """The value that was encoded.

    **Raises:** `Malformed` for what is never encoded.
    """
    try:
        return _decode(value, resolver, 0)
    except _WRONG as e:
        raise Malformed(str(e)) from e


_WRONG = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    AssertionError,
)


def _decode(value: Any, resolver: Resolver, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise Malformed("too deep")
    below = ft.partial(_decode, resolver=resolver, depth=depth + 1)
    if type(value) is list:
        return list(map(below, value))
    if type(value) is not dict:
        return value
    if len(value) != 1:
        raise Malformed("an object has one kind")
    kind, content = next(iter(value.items()))
    if kind in ("unknown", "default") and type(content) is str:
        return getattr(resolver, kind)(content)
    if kind in _TEXTS and type(content) is str:
        return _TEXTS[kind](content)
    if kind in _LISTS and type(content) is list:
        return _LISTS[kind](content, below, resolver)
    raise Malformed(f"{kind!r} is no kind")


def _dtype(name: str) -> np.dtype:
    dtype = _template.dtype_of(name)
    if dtype.hasobject or dtype.names:
        raise Malformed(name)
    return dtype


def _jax_type(name: str) -> Any:
    found = getattr(jnp, _dtype(name).name)
    if getattr(found, "dtype", None) != _dtype(name):
        raise Malformed(name)
    return found


def _integer(text: str) -> int:
    return int(text, 16)


def _float(text: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


_TEXTS: dict[str, Callable[[str], Any]] = {
    "float": _float,
    "int": _integer,
    "str": lambda x: bytes.fromhex(x).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "dtype": _dtype,
    "builtin": _BUILTINS.__getitem__,
    "numpy": lambda x: _dtype(x).type,
    "jax": _jax_type,
}


Below = Callable[[Any], Any]


def _pairs(x: list[Any], below: Below, resolver: Resolver) -> dict[Any, Any]:
    return dict(zip(_keys([key for key, _ in x], below), (below(y) for _, y in x)))


def _keys(x: list[Any], below: Below) -> list[Any]:
    keys = list(map(below, x))
    _names.check_hashes(keys)
    return keys


def _scalar(x: list[Any], below: Below, resolver: Resolver) -> Any:
    name, data = x
    return np.frombuffer(bytes.fromhex(data), _dtype(name), 1)[0]


def _name(x: list[Any], below: Below, resolver: Resolver) -> Any:
    return resolver.find(_parsed(x), "function")


def _parsed(x: Sequence[Any]) -> Name:
    name = _named.parse(list(x))
    if name is None:
        raise Malformed("no name")
    return name


def _partial(x: list[Any], below: Below, resolver: Resolver) -> Any:
    function, arguments, keywords = x
    function = below(function)
    arguments = list(map(below, arguments))
    keywords = {str.__str__(name): below(y) for name, y in keywords}
    return ft.partial(function, *arguments, **keywords) if callable(function) else None


def _enum(x: list[Any], below: Below, resolver: Resolver) -> Any:
    module, qualified, member = x
    cls = resolver.find(_parsed((module, qualified)), "class")
    if not isinstance(cls, type):
        return None
    if not issubclass(cls, enum.Enum) or member not in cls.__members__:
        return resolver.unknown(
            f"`{member}` of `{qualified}`, which has no such member"
        )
    return cls.__members__[member]


def _namedtuple(x: list[Any], below: Below, resolver: Resolver) -> Any:
    module, qualified, items = x
    cls, values = resolver.find(_parsed((module, qualified)), "class"), below(items)
    if not isinstance(cls, type):
        return None
    if not is_namedtuple(cls) or len(cls._fields) != len(values):  # pyright: ignore
        return resolver.unknown(f"a `{qualified}`, which has other fields now")
    return tuple.__new__(cls, values)


def _object(x: list[Any], below: Below, resolver: Resolver) -> Any:
    module, qualified, items = x
    cls = resolver.find(_parsed((module, qualified)), "class")
    values = {name: below(item) for name, item in items}
    if not isinstance(cls, type):
        return None
    names: set[str] = set()
    if dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls)}
    if names != values.keys():
        return resolver.unknown(f"a `{qualified}`, which has other fields now")
    return made(cls, values)


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def made(cls: type, values: dict[str, Any]) -> Any:
    """An object with these attributes, whose `__init__` has not run."""
    out = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(out, name, value)
    return out


_LISTS: dict[str, Callable[[list[Any], Below, Resolver], Any]] = {
    "tuple": lambda x, below, resolver: tuple(map(below, x)),
    "set": lambda x, below, resolver: set(_keys(x, below)),
    "frozenset": lambda x, below, resolver: frozenset(_keys(x, below)),
    "dict": _pairs,
    "complex": lambda x, below, resolver: complex(*map(float.fromhex, x)),
    "range": lambda x, below, resolver: range(*map(below, x)),
    "slice": lambda x, below, resolver: slice(*map(below, x)),
    "ellipsis": lambda x, below, resolver: ...,
    "shared": lambda x, below, resolver: _shared_node()(),
    "spec": lambda x, below, resolver: jax.sharding.PartitionSpec(*map(below, x)),
    "scalar": _scalar,
    "name": _name,
    "partial": _partial,
    "enum": _enum,
    "namedtuple": _namedtuple,
    "object": _object,
}
