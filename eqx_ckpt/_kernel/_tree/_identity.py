"""Identity: a key of a value that only values of the same types and bits have.

To `==` 1, 1.0 and True are one, so are 0.0 and -0.0, and a NaN is not itself. And what
can be changed in place is to itself the same as ever. A key is of what a value is now.
"""

import collections
import contextlib
import dataclasses
import enum
import functools as ft
import math
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.core as jax_core
import jax.tree_util as jtu
import numpy as np
import xxhash

from .._format import _digests
from . import _held, _host_copy, _opening


# Values that are looked at for a key.
_MOST = 2**16
# Bytes of arrays of JAX that are looked at. A larger one is the same as itself only.
_SMALL = 1024
_ATOMS = frozenset((type(None), bool, int, str, bytes))
_PLAIN: tuple[Any, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.generic,
)
_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (list, tuple, collections.deque, set, frozenset, *_MAPPINGS)


@dataclasses.dataclass(frozen=True, eq=False)
class _Object:
    """An object that is the same as itself only, and lives as long as this."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key(value: object, most: float = _MOST) -> Any:
    """A key of plain containers, Modules, structures of trees and other objects, with
    all that is in them; and of functions, with the data that they close over.

    **Raises:** `RecursionError` for a value that is too large, or too deep.
    """
    count = 0
    above: dict[int, int] = {}

    def walk(x: object, is_closed_over: bool) -> Any:
        nonlocal count
        count += 1
        if count > most:
            raise RecursionError
        if type(x) in _ATOMS:
            return type(x), x
        if id(x) in above:
            return "above", above[id(x)]
        above[id(x)] = len(above)
        try:
            if is_closed_over and not _is_data(x):
                return _Object(x)
            return _key(x, lambda y: walk(y, is_closed_over), walk)
        finally:
            del above[id(x)]

    return walk(value, False)


def is_same(a: object, b: object) -> bool:
    """Whether two values are of the same types and bits."""
    try:
        return key(a, math.inf) == key(b, math.inf)
    except RecursionError:
        return False


def _key(x: Any, below: Callable[[Any], Any], walk: Callable[[Any, bool], Any]) -> Any:
    cls: Any = type(x)
    if cls is float:
        return cls, struct.pack("d", x)
    if cls is complex:
        return cls, struct.pack("dd", x.real, x.imag)
    if isinstance(x, (np.ndarray, np.generic, *_CONTAINERS)):
        return _of_items(x, below)
    if isinstance(x, jax.Array):
        return _of_array(x)
    if isinstance(x, (slice, range)):
        return cls, *map(below, (x.start, x.stop, x.step))
    if isinstance(x, ft.partial):
        return cls, below(x.func), below(x.args), below(x.keywords)
    if isinstance(x, jtu.PyTreeDef):
        return _of_structure(x, below)
    if isinstance(x, types.FunctionType):
        return _Object(x), *(walk(y, True) for y in _closed_over(x))
    if isinstance(x, types.MethodType):
        return cls, walk(x.__self__, True), below(x.__func__)
    return _of_object(x, below)


def _of_items(x: Any, below: Callable[[Any], Any]) -> Any:
    """The key of a container or an array."""
    own: Any = type(x)
    if _has_attributes(own):
        held = _opening.attributes(x)
        own = own, *((name, below(y)) for name, y in held.items())
    if isinstance(x, (np.ndarray, np.generic)):
        if x.dtype.hasobject:
            return own, x.dtype, x.shape, *map(below, x.reshape(-1).tolist())
        digest = xxhash.xxh3_128_digest(_digests.as_bytes(np.asarray(x)).data)
        return own, x.dtype, x.shape, digest
    if isinstance(x, _MAPPINGS):
        factory = getattr(x, "default_factory", None)
        return own, below(factory), *((below(k), below(y)) for k, y in x.items())
    if isinstance(x, (set, frozenset)):
        return own, frozenset(map(below, x))
    return own, *map(below, x)


@ft.lru_cache(maxsize=4096)
def _has_attributes(cls: type) -> bool:
    """Whether objects of a class may have attributes: those of the caller's may, and
    plain containers have none."""
    has_slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    return cls.__dictoffset__ != 0 or has_slots


def _of_structure(x: Any, below: Callable[[Any], Any]) -> Any:
    kind, data = x.node_data() or (None, None)
    if x.num_nodes == 1 + x.num_leaves:  # Most nodes have leaves only.
        return kind, below(data), x.num_leaves
    return kind, below(data), *map(below, x.children())


def _of_array(x: jax.Array) -> Any:
    is_known = not isinstance(x, jax_core.Tracer) and not x.is_deleted()
    is_known = is_known and isinstance(x.dtype, np.dtype) and x.is_fully_addressable
    if not is_known or x.nbytes > _SMALL:
        return _Object(x)
    return (
        jax.Array,
        x.dtype,
        x.shape,
        bool(x.weak_type),
        _host_copy.as_numpy(x).tobytes(),
    )


def _closed_over(fn: types.FunctionType) -> Iterator[Any]:
    yield fn.__defaults__
    yield fn.__kwdefaults__
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "nothing yet"


def _is_data(x: object) -> bool:
    """Whether something that a function closes over is looked into: other objects, and
    dicts of them, are the business of whoever made the function, such as caches."""
    if isinstance(x, _CONTAINERS):
        items = x.values() if isinstance(x, _MAPPINGS) else x
        return all(map(_is_data, items))
    kinds = (*_PLAIN, np.ndarray, jax.Array, eqx.Module, ft.partial)
    return isinstance(x, (*kinds, types.FunctionType, types.CellType))


def _of_object(x: object, below: Callable[[Any], Any]) -> Any:
    cls = type(x)
    if isinstance(x, (type, types.ModuleType, enum.Enum)):
        return _Object(x)
    if isinstance(x, np.dtype) or _held.is_of_jax(cls):
        # Such as shardings, which are compared by what they are.
        return (cls, x) if cls.__hash__ is not None else _Object(x)
    held = _opening.attributes(x)
    plain = [below(base(x)) for base in _PLAIN[:6] if isinstance(x, base)]
    with contextlib.suppress(TypeError, ValueError):  # Such as a bytearray.
        view = memoryview(x)  # pyright: ignore[reportArgumentType]
        digest = xxhash.xxh3_128_digest(view.tobytes())
        plain += [view.format, view.shape, digest]
    if not held and not plain:
        return _Object(x)
    return cls, *plain, *((name, below(value)) for name, value in held.items())
