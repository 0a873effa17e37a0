"""Selection by a `filter_spec`: as `eqx.filter` would, on skeletons too."""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from . import _held, _leaf


FilterSpec = Any  # A pytree prefix of bools and of `leaf -> bool`.
IsLeaf = Callable[[Any], bool] | None


def selected(
    filter_spec: FilterSpec, tree: PyTree, leaves: Sequence[Any], is_leaf: IsLeaf
) -> list[bool]:
    """For each of the `leaves` of `tree`, whether `filter_spec` selects it.

    Callables see the abstract leaves of a skeleton as the tracers of `jax.eval_shape`,
    so that `eqx.is_array` is true of them.
    """
    if filter_spec is _leaf.is_storable:
        # There are many leaves of few types.
        types = {*map(type, leaves)}
        own = {*filter(_leaf.is_own_type, types)}
        if types == own:
            return [True] * len(leaves)
        # Functions and strings are few, and stand at many places.
        others = {id(x): x for x in leaves if type(x) not in own}
        goods = {i: by_default(x) for i, x in others.items()}
        return [goods.get(id(leaf), True) for leaf in leaves]
    return evaluate(_per_leaf(filter_spec, tree, len(leaves), is_leaf), leaves)


def by_default(leaf: object) -> bool:
    """Whether a leaf is selected where nobody has said otherwise: if it is storable, or
    is data that cannot be stored, such as a `jax.Ref`. That is an error then, and is
    not left out in silence as functions and strings are."""
    return _leaf.is_storable(leaf) or is_other_data(leaf)


# What a type has whose values NumPy or JAX take for arrays.
_OF_ARRAYS = ("__array__", "__array_interface__", "__dlpack__", "__jax_array__")


def is_other_data(leaf: Any) -> bool:
    """Whether a leaf that is not storable looks like an array, or holds one, as
    an object whose class JAX does not know; or is a generator of random numbers, whose
    next ones depend on those that were drawn."""
    # A class has descriptors of these names, and a NumPy scalar here is a string. A
    # bytearray is compared, as a string is.
    if isinstance(leaf, (type, np.generic, bytearray)):
        return False
    of_numpy = np.random.Generator, np.random.BitGenerator, np.random.RandomState
    if isinstance(leaf, (*of_numpy, random.Random)):
        return True
    if any(hasattr(type(leaf), name) for name in _OF_ARRAYS):
        return True
    try:
        if leaf.shape is not None and leaf.dtype is not None:
            return True
    except Exception:
        pass
    try:
        memoryview(leaf)  # As of an `array.array`, or of a file in memory.
    except TypeError:
        return _held.array_in(leaf) is not None
    return True


def _per_leaf(spec: FilterSpec, tree: PyTree, count: int, is_leaf: IsLeaf) -> list[Any]:
    parts, structure = jtu.tree_flatten(spec)
    if len(parts) == 1 and jtu.treedef_is_leaf(structure):
        return parts * count
    wanted = (
        "`filter_spec` must be a bool, a function of a leaf, or a pytree prefix of the "
        "tree made of those: "
    )
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError as e:
        raise ValueError(f"{wanted}{e}") from e
    out = []
    for part, subtree in zip(parts, subtrees):
        out += [part] * len(jtu.tree_leaves(subtree, is_leaf=is_leaf))
    if len(out) != count:
        raise ValueError(f"{wanted}it does not end at what `is_leaf` takes for leaves.")
    return out


def _traced(dtype: Any) -> Any:
    """The dtype that a tracer has: what JAX narrows it may warn of."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def evaluate(specs: Sequence[Any], leaves: Sequence[Any]) -> list[bool]:
    """`spec(leaf)` for each pair, or `spec` itself where it is a bool."""
    out: list[Any] = [None] * len(leaves)
    abstract = []
    checked = set()
    for i, (spec, leaf) in enumerate(zip(specs, leaves)):
        if isinstance(spec, (bool, np.bool_)):
            out[i] = bool(spec)
        elif not callable(spec):
            raise TypeError(
                "`filter_spec` must be a bool, a function of a leaf, or a pytree "
                f"prefix of the tree made of those; a `{type(spec).__name__}` is none."
            )
        else:
            if id(spec) not in checked:
                _check_not_equinox(spec)
                checked.add(id(spec))
            if spec is _leaf.is_storable:
                out[i] = by_default(leaf)
            elif isinstance(leaf, jax.ShapeDtypeStruct):
                abstract.append(i)
            else:
                out[i] = _bool(spec(leaf))
    if abstract:

        def trace(tracers: list[Any]) -> None:
            for i, tracer in zip(abstract, tracers):
                spec = specs[i]
                if spec is eqx.is_inexact_array_like:
                    # It calls the `__jax_array__` of tracers, which is None.
                    spec = eqx.is_inexact_array
                out[i] = _bool(spec(tracer))

        # Plain structs: a LazyArray is one, and is hashed by what it reads.
        jax.eval_shape(
            trace,
            [
                jax.ShapeDtypeStruct(x.shape, _traced(x.dtype), weak_type=x.weak_type)
                for x in (leaves[i] for i in abstract)
            ],
        )
    return out


def _bool(value: object) -> bool:
    try:
        return bool(value)
    except Exception as e:
        raise TypeError(
            f"`filter_spec` gave a `{type(value).__name__}` for a leaf, and must give "
            "a bool. It can ask for types, shapes and dtypes, and not for values."
        ) from e


def _check_not_equinox(spec: Any) -> None:
    if not takes(spec, 1) and takes(spec, 2):
        raise TypeError(
            f"`filter_spec` {getattr(spec, '__name__', spec)!r} takes two arguments, "
            "like Equinox's `(f, x)` specs, which read and write a stream. Leaves are "
            "stored by name here, not in a stream: pass a function `leaf -> bool` that "
            "says which to store, such as "
            "`lambda x: ec.is_storable(x) and not isinstance(x, jax.Array)`."
        )


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes so many arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # It has none, such as some of C.
        pass
    return True
