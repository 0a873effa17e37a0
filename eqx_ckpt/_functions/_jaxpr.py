"""Jaxprs of functions: the arrays that they close over, and their callbacks."""

import functools as ft
import itertools as it
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.tree_util as jtu
import numpy as np

from .._kernel._tree import _host_copy, _identity


# What is closed over may have so many bytes.
MOST = 1024
# Frames of these say nothing to who wrote the function.
_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep
    for file in (jax.__file__, eqx.__file__, os.path.dirname(__file__))
)


def callbacks(jaxpr: object) -> Iterator[str]:
    """The primitives that call Python, or the host, and where."""
    for eqn, _ in _equations(jaxpr):
        name = eqn.primitive.name
        if re.search("callback|debug_print|infeed|outfeed", name):
            yield f"`{name}`{_place(eqn)}"


def captured(closed: object) -> Iterator[tuple[Any, str]]:
    """The arrays of more than `MOST` bytes that a function closes over, and where it
    uses each."""
    seen: set[int] = set()
    for one in _closed(closed):
        uses = _uses(one.jaxpr)
        for var, value in zip(one.jaxpr.constvars, one.consts):
            if var in uses and _nbytes(value) > MOST and id(value) not in seen:
                seen.add(id(value))
                eqn = uses[var]
                yield value, "" if eqn is None else _place(eqn)


def constants(closed: object) -> list[Any]:
    """All that are neither arguments nor computed."""
    return [value for one in _closed(closed) for value in one.consts]


def key(closed: Any) -> Any:
    """Equal for functions that compute the same of the same arrays."""
    consts = map(_host_copy.as_numpy, constants(closed))
    text = re.sub("0x[0-9a-f]+", "", str(closed.jaxpr))
    return text, *map(_identity.key, consts)


def _closed(closed: Any) -> list[Any]:
    return [closed, *(c for _, c in _equations(closed.jaxpr) if c is not None)]


def _nbytes(value: Any) -> int:
    return int(np.prod(np.shape(value))) * getattr(value.dtype, "itemsize", 8)


def _uses(jaxpr: Any) -> dict[Any, Any]:
    """The equation that uses each variable first; None for one that is a result."""
    out: dict[Any, Any] = {}
    uses = [(var, eqn) for eqn in jaxpr.eqns for var in eqn.invars]
    for var, eqn in [*uses, *((var, None) for var in jaxpr.outvars)]:
        if not isinstance(var, jex_core.Literal):
            out.setdefault(var, eqn)
    return out


def _equations(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """All equations, also inside of others, and the jaxprs with constants in them: an
    equation, and one of its jaxprs or None."""
    todo = [jaxpr]
    for one in todo:
        for eqn in one.eqns:
            yield eqn, None
            for value in eqn.params.values():
                for x in value if isinstance(value, (tuple, list)) else (value,):
                    if hasattr(x, "eqns") and not hasattr(x, "consts"):
                        todo.append(x)
                    elif hasattr(x, "jaxpr") and hasattr(x, "consts"):
                        todo.append(x.jaxpr)
                        yield eqn, x


def _place(eqn: Any) -> str:
    """Where a primitive was called: the last frame that is not of a library."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_LIBRARIES):
            return f" at {frame.file_name}:{frame.line_num} (`{frame.function_name}`)"
    return ""


def is_same(leaf: Any, value: Any) -> bool:
    """Whether a leaf is what a function was seen to use: JAX makes arrays of NumPy's
    its own."""
    if leaf is value or not isinstance(leaf, np.ndarray):
        return leaf is value
    same = leaf.shape == np.shape(value) and leaf.dtype == value.dtype
    return same and np.array_equal(leaf, np.asarray(value))


# ---- What a function can see of its surroundings.


def name_of(fn: Callable[..., Any], value: object, depth: int = 0) -> str | None:
    """The name by which a function has a value; None if that is not found."""
    for name, held in _held(fn):
        for path, leaf in jtu.tree_flatten_with_path(held)[0]:
            if is_same(leaf, value):
                return f"`{name}{jtu.keystr(path)}`".replace("``", "`")
        if depth < 3 and callable(held):
            found = name_of(held, value, depth + 1)
            if found is not None:
                return found
    return None


def _held(fn: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function closes over, and their names."""
    if isinstance(fn, ft.partial):
        yield from (("an argument of the partial", x) for x in fn.args)
        yield from fn.keywords.items()
        yield from _held(fn.func)
        return
    bound = getattr(fn, "__self__", None)
    if bound is not None:
        yield "self", bound
    elif isinstance(fn, eqx.Module):
        yield type(fn).__name__, fn
    fn = getattr(fn, "__wrapped__", getattr(fn, "__func__", fn))
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:
            pass  # It has no value yet.
    known = fn.__globals__
    yield from ((name, known[name]) for name in code.co_names if name in known)
    defaults = it.chain(fn.__defaults__ or (), (fn.__kwdefaults__ or {}).values())
    yield from (("a default", x) for x in defaults)
