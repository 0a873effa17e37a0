"""Signatures: nests of what stored functions take and give, without anyone's classes.

A nest is of dicts with string keys, lists and tuples, and its leaves are arrays.
Modules, States and all other nodes become dicts of what they hold, by name. A nest is
folded to JSON in an index: `_index_functions` says how.
"""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _names, _template, _text
from .._kernel._tree import _leaf, _target


_NUMBERS = (bool, int, float, complex)


def is_array(x: object) -> bool:
    """Whether a leaf is an array, a tracer, or stands for one."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def struct(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without a weak type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def nest(tree: PyTree, where: str) -> Any:
    """A tree as a nest, with Python's numbers as they are. What a Module holds besides
    arrays and nodes is left out.

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
        name = _names.name_of(path).name
        out[name] = nest(child, f"{where}.{name}")
    return out


# ---- As an index has them.


def dtype_text(dtype: Any) -> str:
    """The name of a dtype; that of typed PRNG keys says their implementation."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key:{_target.impl_of(dtype)}"
    return np.dtype(dtype).name


def _dtype_from(text: str) -> Any:
    """**Raises:** `ValueError` for a dtype that is not known here."""
    kind, _, impl = text.partition(":")
    if kind == "key":
        return _leaf.key_dtype(impl)
    return _template.dtype_of(text)


def fold(tree: PyTree) -> Any:
    """A nest of arrays, or of what stands for them, as an index has it. What is no
    array has the name of its type, for errors."""
    if tree is None:
        return None
    if type(tree) is dict:
        return {"dict": {key: fold(child) for key, child in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [fold(child) for child in tree]}
    if not hasattr(tree, "dtype"):
        return [type(tree).__name__, []]
    shape = [int(n) if isinstance(n, (int, np.integer)) else str(n) for n in tree.shape]
    return [dtype_text(tree.dtype), shape]


def unfold(folded: Any, scope: jax.export.SymbolicScope | None = None) -> Any:
    """The inverse of `fold`: a nest of `jax.ShapeDtypeStruct`s, in one symbolic scope
    of their own."""
    if folded is None:
        return None
    scope = scope or jax.export.SymbolicScope()
    if isinstance(folded, list):
        dtype, dimensions = folded
        if any(isinstance(n, str) for n in dimensions):
            text = ", ".join(map(str, dimensions)) + ","
            dimensions = jax.export.symbolic_shape(text, scope=scope)
        return jax.ShapeDtypeStruct(tuple(dimensions), _dtype_from(dtype))
    ((kind, inner),) = folded.items()
    if kind == "dict":
        return {key: unfold(child, scope) for key, child in inner.items()}
    out = [unfold(child, scope) for child in inner]
    return tuple(out) if kind == "tuple" else out


def show(folded: Any) -> str:
    """A nest in a line: `(float32[b,384], {'mask': bool[b]})`."""
    if folded is None:
        return "None"
    if isinstance(folded, list):
        return f"{folded[0]}[{','.join(map(str, folded[1]))}]"
    ((kind, inner),) = folded.items()
    if kind == "dict":
        return f"{{{', '.join(f'{key!r}: {show(x)}' for key, x in inner.items())}}}"
    items = ", ".join(map(show, inner))
    if kind == "list":
        return f"[{items}]"
    return f"({items},)" if len(inner) == 1 else f"({items})"


def short(folded: object) -> str:
    """A nest out of a file, for errors."""
    return _text.bounded(show(folded), 600)
