"""Nests: what functions that are stored take and give, without anyone's classes.

A nest is of dicts with string keys, lists and tuples, and its leaves are arrays.
Modules, States and all other nodes become dicts of what they hold, by name.
"""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _functions, _names, _template
from . import _leaf, _target


_NUMBERS = (bool, int, float, complex)


def is_array(x: Any) -> bool:
    """Whether a leaf is an array, a tracer, or stands for one."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def nest(tree: PyTree, where: str) -> Any:
    """A tree as a nest. What a Module holds besides arrays is left out.

    **Raises:** `TypeError` that says `where` something is that no nest holds.
    """
    if tree is None or is_array(tree):
        return tree
    if type(tree) is dict:
        for key in tree:
            if type(key) is not str:
                raise TypeError(
                    f"{where} is a dict with the key {key!r}. Use strings as keys."
                )
        return {key: nest(child, f"{where}[{key!r}]") for key, child in tree.items()}
    if type(tree) in (list, tuple):
        rows = enumerate(tree)
        return type(tree)(nest(child, f"{where}[{i}]") for i, child in rows)
    if isinstance(tree, _NUMBERS):
        return tree
    if jtu.all_leaves([tree]):
        raise TypeError(
            f"{where} is a `{type(tree).__name__}`, and functions that are stored take "
            "and give arrays, in dicts, lists, tuples and Modules."
        )
    children = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    out: dict[str, Any] = {}
    for path, child in children:
        if not is_array(child) and jtu.all_leaves([child]):
            continue
        name = _names.name_of(path)[0]
        out[name] = nest(child, f"{where}.{name}")
    return out


# ---- As an index has them.


def dtype_text(dtype: Any) -> str:
    """The name of a dtype; that of typed PRNG keys says their implementation."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key:{_target.impl_of(jax.ShapeDtypeStruct((), dtype))}"
    return np.dtype(dtype).name


def dtype_from(text: str) -> Any:
    """**Raises:** `ValueError` for a dtype that is not known here."""
    kind, _, impl = text.partition(":")
    if kind == "key":
        return _leaf.key_dtype(impl)
    return _template.dtype_of(text)


def shape_text(shape: tuple[Any, ...]) -> list[int | str]:
    return [int(n) if isinstance(n, (int, np.integer)) else str(n) for n in shape]


def folded(tree: Any) -> Any:
    """A nest of arrays, or of what stands for them, as an index has it."""

    def leaf(x: Any) -> list[Any]:
        return [dtype_text(x.dtype), shape_text(x.shape)]

    return _functions.fold(tree, leaf)


def structs(folded: Any) -> Any:
    """The inverse of `folded`: a nest of `jax.ShapeDtypeStruct`s, in one symbolic scope
    of their own."""
    scope = jax.export.SymbolicScope()

    def leaf(dtype: str, shape: list[int | str]) -> jax.ShapeDtypeStruct:
        dimensions: Any = shape
        if any(isinstance(n, str) for n in shape):
            text = ", ".join(map(str, shape)) + ","
            dimensions = jax.export.symbolic_shape(text, scope=scope)
        return jax.ShapeDtypeStruct(tuple(dimensions), dtype_from(dtype))

    return _functions.unfold(folded, leaf)
