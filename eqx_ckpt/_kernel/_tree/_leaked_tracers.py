"""Finds tracers that a traced function has left in closures and static fields."""

import dataclasses
import gc
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.core as jax_core
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _names, _values
from .._format._record import TreeRecord
from . import _folding
from ._flatten import Flat


def check_no_tracers(flat: Flat, record: TreeRecord) -> None:
    """**Raises:** `ValueError` naming a field that holds a tracer out of JAX's sight,
    such as a function with one in its closure.

    Only a skeleton, which a traced function has made, has such a field. The tree is
    searched if a static value of it, or a leaf that is no array, may hold one.
    """
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in flat.leaves):
        return
    if not any(map(_may_hold, record.values)):
        return
    seen: dict[int, Any] = {}
    for path, value in _not_arrays(flat.tree):
        tracer = _find_tracer(value, seen)
        if tracer is not None:
            name = _names.name_of(path).name
            shape = _folding.short_array(str(tracer.dtype), tracer.shape)
            what = "a function" if callable(value) else f"a `{type(value).__name__}`"
            raise ValueError(
                f"`{name}` is {what}, which holds an array of {shape} that is "
                "no leaf of the tree. The function that makes the tree is traced here, "
                "so that this array has no value, and none can be loaded into it: it "
                "has no name. Call that function yourself and load into what it "
                "returns, with `ec.tree_deserialise_leaves`; or keep the array in a "
                "field that is a leaf."
            )


def _not_arrays(tree: PyTree) -> Iterator[tuple[tuple, Any]]:
    """`(key path, value)` of all that a tree holds and JAX does not look into: leaves
    of any type, static fields, and what else its nodes keep."""
    nodes: list[tuple[tuple, Any]] = [((), tree)]
    while nodes:
        path, node = nodes.pop()
        pairs, structure = jtu.tree_flatten_with_path(
            node, is_leaf=lambda x: x is not node
        )
        if structure.num_nodes == structure.num_leaves:
            yield path, node
            continue
        nodes += [((*path, *key), child) for key, child in pairs]
        if not dataclasses.is_dataclass(node):
            yield path, structure.node_data()[1]
            continue
        children = {id(child) for _, child in pairs}
        for field in dataclasses.fields(node):
            value = getattr(node, field.name, None)
            if id(value) not in children:
                yield (*path, jtu.GetAttrKey(field.name)), value


# At most so many objects are searched for one tree: functions can lead anywhere.
_MAX_OBJECTS = 100_000

# Kinds of encoded values that say nothing of the objects that a value leads to. The
# default of a parameter was there before the function that makes the tree was traced.
_MAY_HOLD = frozenset(("made", "unknown", "method", "digest"))


def _may_hold(x: object) -> bool:
    """Whether a value, of which this is the encoding, may hold an array of JAX."""
    kind, own = _values.split(x)
    if kind == "default" or own == ["", "array"]:
        return False
    if kind == "array":
        return own[2] == ""
    below = own if type(own) is list else ()
    return kind in _MAY_HOLD or any(
        type(y) in (list, dict) and _may_hold(y) for y in below
    )


_ENDS = (
    *(type, types.ModuleType, str, bytes, int, float, complex, type(None)),
    *(np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct),
)


def _find_tracer(value: object, seen: dict[int, Any]) -> Any:
    """A tracer that a value leads to, without the names that functions look up."""
    todo = [value]
    while todo and len(seen) < _MAX_OBJECTS:
        x = todo.pop()
        if isinstance(x, jax_core.Tracer):
            return x
        if not isinstance(x, _ENDS) and id(x) not in seen:
            seen[id(x)] = x
            todo += _held(x)
    return None


def _held(x: object) -> list[Any]:
    """The objects that an object refers to, but for the globals of a function."""
    names = getattr(x, "__globals__", None)
    return [y for y in gc.get_referents(x) if y is not names]
