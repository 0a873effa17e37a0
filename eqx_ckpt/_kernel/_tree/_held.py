"""Arrays that objects hold which JAX takes for leaves: no call of JAX sees them, and a
save would leave them out."""

import collections
import enum
import functools as ft
import itertools as it
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.core as jax_core
import numpy as np

from . import _codec, _opening


# The parts of one leaf that are looked at, and how deep.
_MOST, _DEEPEST = 2**14, 8
# Code, and what holds nothing. A function is compared by its name, whatever it closes
# over.
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type),
    *(np.ndarray, np.generic, np.dtype, types.ModuleType, types.FunctionType),
    *(types.MethodType, types.BuiltinFunctionType, np.ufunc),
)
_SEQUENCES = list, tuple, collections.deque
_OF_PARTIALS = "func", "args", "keywords"


def is_of_jax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("jax", "jaxlib")


def array_in(x: object) -> str | None:
    """The place of the first array that an object holds, as code after its name: in its
    attributes, its items, and those of what it holds. None if it has none.

    NumPy's arrays count in what is compared by its class alone: others are compared
    with all that they hold."""
    todo: list[tuple[str, Any, int, bool]] = []
    if _is_open(x):
        todo.append(("", x, 0, _codec.is_by_class(x)))
    seen, rest = {id(x)}, _MOST
    for place, one, depth, is_by_class in todo:
        for part, held in it.islice(_parts(one), rest):
            rest -= 1
            if _is_array(held) if is_by_class else _is_jax_array(held):
                return place + part
            if id(held) not in seen and depth < _DEEPEST and _is_open(held):
                seen.add(id(held))
                below = is_by_class or _codec.is_by_class(held)
                todo.append((place + part, held, depth + 1, below))
    return None


def _is_jax_array(x: object) -> bool:
    # One of a traced function is told by `_leaked_tracers`.
    return isinstance(x, jax.Array) and not isinstance(x, jax_core.Tracer)


def _is_array(x: object) -> bool:
    if isinstance(x, np.ndarray):
        return not x.dtype.hasobject
    return _is_jax_array(x)


def _is_open(x: object) -> bool:
    return not isinstance(x, _ATOMS) and not is_of_jax(type(x))


def _parts(x: object) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with its place in it."""
    if isinstance(x, (dict, types.MappingProxyType)):
        pairs: Mapping[Any, Any] = x
        yield from ((f"[{key!r}]", held) for key, held in pairs.items())
    elif isinstance(x, _SEQUENCES):
        yield from ((f"[{i}]", held) for i, held in enumerate(x))
    elif isinstance(x, ft.partial):
        yield from ((f".{name}", getattr(x, name)) for name in _OF_PARTIALS)
    yield from ((f".{name}", held) for name, held in _opening.attributes(x).items())
