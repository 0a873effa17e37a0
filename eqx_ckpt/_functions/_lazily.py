"""`lazy`: functions of lazy arrays, computed when their result is read."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._kernel._format import _template
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._runtime import _arguments
from .._kernel._tree import _folding, _host_copy, _identity, _leaf
from . import _computed, _jaxpr, _traced
from ._computed import Formula, Operand
from ._traced import Traced


@_arguments.checked()
def lazy(
    fn: Callable[..., Any], *, elementwise: bool = False
) -> Callable[..., LazyArray]:
    """A function of lazy arrays that gives a lazy array: `fn` of them, once it is read.

    `fn` is traced by JAX, as in `jax.jit`, and nothing is read. What it gives can be
    read, sliced, saved and put into a tree as any other [`LazyArray`][].

    **Arguments:**

    - `fn`: takes arrays, and returns one. It may be any callable, such as a Module.
    - `elementwise`: whether each element of the result is made of those at the same
        place. Then it is computed block by block, and a slice reads and computes the
        blocks that it touches; its bits are those of the whole. This is checked, and
        all arrays have the shape of the result, or none. Otherwise a slice computes the
        whole.

    **Returns:** a function of [`LazyArray`][]s, arrays and numbers. It pickles if `fn`
    does. It is computed on a CPU, with the setting of x64 that it is called under.
    Arrays in memory that it is given, or that `fn` uses, are copied as it is called:
    changing them later changes nothing.

    **Raises:** errors of the function that is returned, which name the leaf:
    `TypeError` for leaves that are no arrays, such as Python's numbers and PRNG keys.
    `TypeError` for dtypes of 64 bits that JAX would narrow, and for an `fn` that cannot
    be traced; `ValueError` for one that is not elementwise.

    !!! example

        ```python
        >>> import equinox as eqx, eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://halves", {"w": jnp.arange(4.)})
        >>> tree = ec.open("memory://halves").tree
        >>> half = ec.lazy(lambda w: w / 2, elementwise=True)
        >>> half(tree.w)[1:].read()
        Array([0.5, 1. , 1.5], dtype=float32)

        ```
    """
    return ft.partial(_lazily, fn, elementwise)


def _lazily(fn: Callable[..., Any], elementwise: bool, *args: Any) -> LazyArray:
    parts = tuple(_part(x) for x in args if not _is_number(x))
    numbers = tuple(x if _is_number(x) else ... for x in args)
    # JAX keeps what it has traced of a callable by its equality: this has its own.
    called = ft.partial(_call, fn, numbers)
    names = [x.name for x in parts if isinstance(x, LazyArray)]
    structs = [_struct(x) for x in parts]
    given = ", ".join(map(_shown, parts))
    try:
        traced = _traced.trace(called, structs, elementwise)
    except ValueError as e:
        raise ValueError(f"The function given to `ec.lazy`, of {given}: {e}.") from e
    except Exception as e:
        why = str(e).strip().split("\n")[0]
        raise TypeError(
            f"The function given to `ec.lazy` cannot be traced for {given}: {why}"
        ) from e
    label = f"{getattr(fn, '__name__', 'fn')}({', '.join(names)})"
    formula = Formula(
        label,
        parts,
        traced,
        traced.shape,
        traced.dtype,
        traced.weak,
        traced.elementwise,
        key=_key(called, traced, parts),
    )
    return _computed.computed(formula)


@dataclasses.dataclass(eq=False)  # A tuple has a `!=` of its own.
class _Jaxpr:
    """What was traced of a function, which may have read a global number too, or an
    object, that has changed since. It is looked at if all else is equal."""

    closed: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Jaxpr):
            return NotImplemented
        return _jaxpr.key(self.closed) == _jaxpr.key(other.closed)

    def __hash__(self) -> int:
        return 0


def _key(called: Callable[..., Any], traced: Traced, parts: Sequence[Operand]) -> Any:
    """Equal for results that are the same; None if nothing is known to be the same, as
    of what calls back into Python."""
    if any(_jaxpr.callbacks(traced.jaxpr.jaxpr)):
        return None
    try:
        arrays = [
            _lazy.body_of(x).identity if isinstance(x, LazyArray) else _identity.key(x)
            for x in parts
        ]
        own = _identity.key(called), traced.settings
        return "lazy", *own, *arrays, _Jaxpr(traced.jaxpr)
    except RecursionError:  # It is too large.
        return None


def _call(fn: Callable[..., Any], given: tuple[Any, ...], *arrays: Any) -> Any:
    """Calls a function of the arrays among its arguments, for each of which `given` has
    an `...`: the others are known."""
    rest = iter(arrays)
    return fn(*(next(rest) if x is ... else x for x in given))


def _is_number(x: object) -> bool:
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def _part(x: object) -> Operand:
    if isinstance(x, LazyArray):
        what = f"The leaf `{x.name}`"
        kind = _lazy.body_of(x).target.kind
        if kind not in _template.ARRAY_KINDS:
            raise TypeError(
                f"{what} is a {kind}, and `ec.lazy` takes arrays: read it, "
                "or leave it out."
            )
        dtype = x.dtype
    elif isinstance(x, (jax.Array, np.ndarray, np.generic)):
        what, dtype = "An array", x.dtype
        if _leaf.is_key(x):
            raise TypeError("A PRNG key is no array that `ec.lazy` takes.")
    else:
        raise TypeError(
            f"`ec.lazy` takes lazy arrays, arrays and numbers, not a "
            f"`{type(x).__name__}`. For all leaves of a tree: `jax.tree.map`."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{what} is {np.dtype(dtype)}, which JAX would narrow to "
            f"{jax.dtypes.canonicalize_dtype(dtype)}. Enable x64 (`jax_enable_x64`), "
            "or cast it first (`.astype`)."
        )
    return x if isinstance(x, LazyArray) else _host_copy.owned(x)


def _shown(x: Operand) -> str:
    array = _folding.short_array(x.dtype.name, x.shape)
    return f"the leaf `{x.name}` ({array})" if isinstance(x, LazyArray) else array


def _struct(x: Operand) -> jax.ShapeDtypeStruct:
    weak = x.weak_type if isinstance(x, LazyArray) else False
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)
