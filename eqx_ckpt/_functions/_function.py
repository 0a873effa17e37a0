"""`function`: a function that a save exports, to be run without the tree's classes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._kernel._runtime import _arguments
from . import _signature


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Unexported:
    """A function of a tree that a save exports: made by [`function`][].

    `args` are trees of abstract arrays. `nest` has the same arrays without anyone's
    classes: see `_signature`. `known` keeps the exports for the last few trees that
    differ.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    nest: tuple[Any, ...]
    platforms: tuple[str, ...] | None
    order: int
    known: list[Any] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"ec.function({name})"


@_arguments.checked()
def function(
    fn: Callable[..., Any],
    *args: PyTree,
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
) -> Unexported:
    """A function of a tree that is stored with the tree, and runs without its classes.

    Give it to a save, as `functions={"forward": ec.function(...)}`. The save exports
    `fn(tree, *args)` with `jax.export` before it writes a byte, and stores the export
    beside the leaves, without them. Once the checkpoint is open, it is in
    [`Checkpoint.functions`][eqx_ckpt.Checkpoint]. This needs `eqx_ckpt[functions]`.

    The arrays of the tree that `fn` uses become arguments, and have to be saved too.
    Everything else in the tree, such as numbers and activation functions, becomes part
    of the export, as in `eqx.filter_jit`. A training loop exports once: a tree that
    differs from the one before only in the values of arrays is not exported again.

    **Arguments:**

    - `fn`: a function of the tree that is saved and of `args`, pure as for `jax.jit`:
        a global that it reads is as it was when it was exported.
        It may already be wrapped in `jax.jit` or `eqx.filter_jit`. It may return
        arrays in dicts with string keys, lists, tuples, Modules and States. Modules
        and States become dicts by name.
    - `args`: what the other arguments will look like: arrays, or
        `jax.ShapeDtypeStruct`s, in trees of the same kinds. Dimensions may be symbolic,
        and may be written as text: `jax.ShapeDtypeStruct("batch, 384", jnp.float32)`.
        All such texts share one symbolic scope.
    - `platforms`: the platforms that it will run on, by their names in `jax.export`,
        such as `"cpu"` and `"cuda"`. By default, those of cpu, cuda, rocm and tpu that
        it can be lowered for; a warning names each that is left out.
    - `vjp_order`: how often it can be differentiated.

    **Returns:** what `functions=` takes; nothing is traced yet.

    **Raises:** `TypeError` or `ValueError` for arguments that are not such trees. The
    save raises a `ValueError` that names the function if it calls back into Python, or
    uses leaves that are not saved. The same goes for arrays of more than 1 KiB that are
    no leaves.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.numpy as jnp, jax.random as jr
        >>> import eqx_ckpt as ec
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jr.key(0))
        >>> x = jax.ShapeDtypeStruct("batch, 2", jnp.float32)
        >>> forward = ec.function(lambda tree, x: jax.vmap(tree["model"])(x), x)
        >>> functions = {"forward": forward}
        >>> ec.tree_serialise_leaves("mlp", {"model": model}, functions=functions)
        >>> ec.open("mlp").functions["forward"](jnp.ones((5, 2))).shape
        (5, 3)

        ```
    """
    if isinstance(platforms, str):
        raise TypeError(f"`platforms` is a list of names, such as `[{platforms!r}]`.")
    if platforms is not None and not platforms:
        raise ValueError("`platforms` has no names.")
    if type(vjp_order) is not int or vjp_order < 0:
        raise ValueError(f"`vjp_order` must be 0, 1, ..., not {vjp_order!r}.")
    given = _one_scope(args)
    nest = _signature.nest(given, "The argument")
    for leaf in jtu.tree_leaves(nest):
        if not _signature.is_array(leaf):
            raise TypeError(
                f"`ec.function` was given {_arguments.shown(leaf)} as an argument. "
                "Give an array, or a `jax.ShapeDtypeStruct`; or take what is fixed "
                "into the function, with `functools.partial`."
            )
    names = None if platforms is None else tuple(platforms)
    return Unexported(fn, given, nest, names, vjp_order)


def _one_scope(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as abstract arrays, each an object of its own. Dimensions that are
    written as text share the scope of the other symbolic ones."""
    shapes = [x.shape for x in jtu.tree_leaves(args) if _signature.is_array(x)]
    symbols = [n for shape in shapes for n in shape if jax.export.is_symbolic_dim(n)]
    scopes = {id(n.scope): n.scope for n in symbols}
    if len(scopes) > 1:
        raise ValueError(
            "The symbolic dimensions of the arguments are in several scopes, as each "
            "call of `jax.export.symbolic_shape` makes one. Give the shapes as text, "
            '`jax.ShapeDtypeStruct("b, 3", dtype)`, or pass one `scope=` to all calls.'
        )
    scope = next(iter(scopes.values()), None) or jax.export.SymbolicScope()

    def struct(x: Any) -> Any:
        if not _signature.is_array(x):
            return x
        shape = x.shape
        if any(isinstance(n, str) for n in shape):
            shape = jax.export.symbolic_shape(_text(shape), scope=scope)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jtu.tree_map(struct, args)


def _text(shape: tuple[Any, ...]) -> str:
    """The text of a shape. JAX takes `"b, 3"` for the dimensions `b`, `,`, ` `, `3`."""
    parts = [str(n) for n in shape]
    is_cut = len(parts) > 1 and all(isinstance(n, str) and len(n) == 1 for n in shape)
    if not is_cut:
        return ", ".join(parts) + ","
    text = "".join(parts)
    if "," in text:
        return text
    raise ValueError(
        f'The shape "{text}" is of one dimension or of several: write "{text}," or '
        f'"{", ".join(parts)}".'
    )
