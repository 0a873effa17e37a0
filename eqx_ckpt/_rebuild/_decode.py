"""Values of the JSON that `_tree/_codec.py` has made of them."""

import dataclasses
import enum
import functools as ft
import struct
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from .._kernel._format import _names, _template, _values
from .._kernel._format._values import Name, name_of
from .._kernel._tree import _codec, _opening
from .._kernel._tree._codec import Recurse


class Malformed(ValueError):
    """For what is never recorded."""


@runtime_checkable
class Resolver(Protocol):
    """Gives `decode` objects that are not in the JSON. It notes by itself those that it
    lacks, and returns anything then."""

    def find_object(self, name: Name, /) -> Any: ...

    def unknown(self, text: str, /) -> Any: ...

    def default(self, parameter: str, /) -> Any: ...


def decode(value: object, resolver: Resolver) -> Any:
    """Decodes a value from its JSON.

    **Raises:** `Malformed` for JSON that no value is encoded as.
    """
    try:
        return _decode(value, resolver, 0)
    except _WRONG as e:
        raise Malformed(str(e)) from e


_WRONG = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    AssertionError,
)


def _decode(value: object, resolver: Resolver, depth: int) -> Any:
    if depth > 2 * _codec.MAX_DEPTH:
        raise Malformed("too deep")
    below = ft.partial(_decode, resolver=resolver, depth=depth + 1)
    if type(value) is list:
        return list(map(below, value))
    if type(value) is not dict:
        return value
    if len(value) != 1:
        raise Malformed("an object has one kind")
    kind, content = next(iter(value.items()))
    if kind == "default" and type(content) is list and type(content[0]) is str:
        return resolver.default(content[0])
    if kind in _NOT_MADE:
        return resolver.unknown(_said(kind, content))
    if kind in _TEXTS and type(content) is str:
        return _TEXTS[kind](content)
    if kind in _LISTS and type(content) is list:
        return _LISTS[kind](content, below, resolver)
    raise Malformed(f"{kind!r} is no kind")


# Parts that are there to be compared, and from which a value is not made again.
_NOT_MADE = frozenset(
    "unknown made sub repr array fields any digest method module".split()
)


def _said(kind: str, content: object) -> str:
    """A part that is not made again, in a few words."""
    name = name_of(content)
    if kind == "made" and name is not None:
        return f"a function that calls itself `{name.shown}`"
    if kind == "array" or content == ["", "array"]:
        return "an array, not saved" if kind == "unknown" else "an array"
    if kind == "unknown" and name is not None:
        return f"a `{name.shown}`"
    if kind == "unknown" and type(content) is list and len(content) == 2:
        return str(content[1])
    cls = name_of(content[:2]) if type(content) is list else None
    if kind in ("sub", "fields") and cls is not None:
        return f"a `{cls.shown}`"
    if kind == "repr" and type(content) is list and len(content) == 2:
        return f"a `{content[0]}`"
    if kind == "any" and type(content) is str:
        return f"a `{content}`"
    return "a bound method" if kind == "method" else "an object"


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


def _float_of(bits: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(bits))
    return value


_TEXTS: dict[str, Callable[[str], Any]] = {
    "float": lambda x: _float_of(_values.FLOATS.get(x, x)),
    "int": lambda x: int(x, 16),
    "str": lambda x: bytes.fromhex(x).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "dtype": _dtype,
    "builtin": _codec.BUILTINS.__getitem__,
    "numpy": lambda x: _dtype(x).type,
    "jax": _jax_type,
}


def _pairs(x: list[Any], below: Recurse, resolver: Resolver) -> dict[Any, Any]:
    return dict(zip(_keys([key for key, _ in x], below), (below(y) for _, y in x)))


def _keys(x: list[Any], below: Recurse) -> list[Any]:
    keys = list(map(below, x))
    _names.check_hashes(keys)
    return keys


def _scalar(x: list[Any], below: Recurse, resolver: Resolver) -> Any:
    name, data = x
    return np.frombuffer(bytes.fromhex(data), _dtype(name), 1)[0]


def _name(x: list[Any], below: Recurse, resolver: Resolver) -> Any:
    return resolver.find_object(_parsed(x))


def _parsed(x: list[Any]) -> Name:
    name = name_of(x)
    if name is None:
        raise Malformed("no name")
    return name


def _partial(x: list[Any], below: Recurse, resolver: Resolver) -> Any:
    function, arguments, keywords = x
    function = below(function)
    arguments = list(map(below, arguments))
    keywords = {str.__str__(name): below(y) for name, y in keywords}
    return ft.partial(function, *arguments, **keywords) if callable(function) else None


def _enum(x: list[Any], below: Recurse, resolver: Resolver) -> Any:
    module, qualified, member, value = x
    cls = resolver.find_object(_parsed([module, qualified]))
    if not isinstance(cls, type):
        return None
    if not issubclass(cls, enum.Enum) or member not in cls.__members__:
        text = f"`{member}` of `{qualified}`, which has no such member"
        return resolver.unknown(text)
    found = cls.__members__[member]
    both = map(_values.compared, (value, _codec.encode(found.value)))
    if not _values.is_alike(*both):
        return resolver.unknown(f"`{member}` of `{qualified}`, which has another value")
    return found


def _namedtuple(x: list[Any], below: Recurse, resolver: Resolver) -> Any:
    module, qualified, items = x[:3]
    cls, values = resolver.find_object(_parsed([module, qualified])), below(items)
    if not isinstance(cls, type):
        return None
    names = list(getattr(cls, "_fields", ()))
    # Saves may be without the names of fields.
    is_same = names == x[3] if len(x) > 3 else len(names) == len(values)
    if not _opening.is_namedtuple(cls) or not is_same:
        return resolver.unknown(f"a `{qualified}`, which has other fields now")
    return tuple.__new__(cls, values)


def _object(x: list[Any], below: Recurse, resolver: Resolver) -> Any:
    module, qualified, items = x[:3]
    cls = resolver.find_object(_parsed([module, qualified]))
    values = {name: below(item) for name, item in items}
    if not isinstance(cls, type):
        return None
    names: set[str] = set()
    if dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls)}
    if names != values.keys():
        return resolver.unknown(f"a `{qualified}`, which has other fields now")
    return made(cls, values)


def made(cls: type, values: dict[str, Any]) -> Any:
    """An object with these attributes, whose `__init__` has not run."""
    out = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(out, name, value)
    return out


_LISTS: dict[str, Callable[[list[Any], Recurse, Resolver], Any]] = {
    "tuple": lambda x, below, resolver: tuple(map(below, x)),
    "set": lambda x, below, resolver: set(_keys(x, below)),
    "frozenset": lambda x, below, resolver: frozenset(_keys(x, below)),
    "dict": _pairs,
    "complex": lambda x, below, resolver: complex(*map(float.fromhex, x)),
    "range": lambda x, below, resolver: range(*map(below, x)),
    "slice": lambda x, below, resolver: slice(*map(below, x)),
    "ellipsis": lambda x, below, resolver: ...,
    "shared": lambda x, below, resolver: _codec.shared_node()(),
    "spec": lambda x, below, resolver: jax.sharding.PartitionSpec(*map(below, x)),
    "scalar": _scalar,
    "name": _name,
    "partial": _partial,
    "enum": _enum,
    "namedtuple": _namedtuple,
    "object": _object,
}
