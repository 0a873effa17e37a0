"""`load_or_init`, and `unloaded`: trees of which only a part is in a checkpoint."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._kernel._format import _names
from .._kernel._load import _checkpoint, _deserialise, _load_options, _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._load._load_options import FilteredKeywords, LoadOptions
from .._kernel._runtime import _arguments
from .._kernel._tree import _flatten
from . import _skeleton


@_arguments.checked(
    _load_options.DEFAULTS, init_fn=_arguments.FUNCTION, where=_arguments.NODES
)
@_open.retried_if_replaced(1, "path")
def load_or_init(
    init_fn: Callable[..., PyTree],
    path: str | os.PathLike[str] | Checkpoint,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sharding: object = None,
    **options: Unpack[FilteredKeywords],
) -> PyTree:
    """`init_fn(*args, **kwargs)`, with a part of it loaded instead of initialised.

    `init_fn` runs in one jit that returns only what is not loaded. So XLA drops the
    initialisers of all that is loaded, and no leaf is ever in memory twice.

    **Arguments:**

    - `init_fn`: the function to call, such as the class of a Module. It is traced, so
        it must be one that `jax.jit` takes.
    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `args`, `kwargs`: the arguments of `init_fn`, as a tuple and a dict.
    - `sharding`: as in [`skeleton`][], for what is loaded and what is initialised.
    - `options`: those of [`tree_deserialise_leaves`][]. What `where` and `filter_spec`
        do not select is initialised. With `missing="init"`, what they select and the
        checkpoint lacks is initialised too.

    **Returns:** the tree. What is initialised is what a jitted `init_fn` gives.

    **Raises:** as [`tree_deserialise_leaves`][] and [`skeleton`][], before anything is
    read; `ValueError` if `init_fn` makes another tree the second time.

    !!! example

        ```python
        >>> import equinox as eqx, jax.random as jr, eqx_ckpt as ec
        >>> mlp = eqx.nn.MLP(2, 2, 8, 1, key=jr.key(0))
        >>> ec.tree_serialise_leaves("memory://init", mlp)
        >>> new = ec.load_or_init(
        ...     eqx.nn.MLP, "memory://init", (2, 5, 8, 1), {"key": jr.key(1)},
        ...     where=lambda m: m.layers[0],
        ... )
        >>> bool(eqx.tree_equal(new.layers[0], mlp.layers[0])), new.layers[1].bias.shape
        (True, (5,))

        ```
    """
    given = _load_options.check(LoadOptions(**options), "init")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping | None):
        raise TypeError(
            "`args` must be a tuple, and `kwargs` a dict, of the arguments of "
            '`init_fn`: `ec.load_or_init(eqx.nn.MLP, path, (2, 5, 8, 1), {"key": key})`'
            "."
        )
    kwargs = dict(kwargs or {})
    like = _skeleton.skeleton(init_fn, *args, sharding=sharding, **kwargs)
    loaded = _deserialise.load(path, like, given)
    return initialise(loaded, init_fn, *args, **kwargs)


def initialise(
    tree: PyTree, init_fn: Callable[..., PyTree], *args: Any, **kwargs: Any
) -> PyTree:
    """`tree` with its abstract leaves computed by `init_fn`, and nothing else."""
    flat = _flatten.flatten(tree, None)
    numbers = [
        number
        for number, leaf in enumerate(flat.leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, LazyArray)
    ]
    if not numbers:
        return tree
    arrays, static = eqx.partition((args, kwargs), eqx.is_array)

    def run(arrays: PyTree) -> list[Any]:
        args, kwargs = eqx.combine(arrays, static)
        made = _flatten.flatten(init_fn(*args, **kwargs), None)
        if made.paths != flat.paths:
            raise ValueError(
                "The initialiser makes a tree of another structure than the model."
            )
        for number in numbers:
            have, want = made.leaves[number], flat.leaves[number]
            if (jnp.shape(have), jnp.result_type(have)) != (want.shape, want.dtype):
                name = _names.name_of(flat.paths[number]).name
                raise ValueError(
                    f"The initialiser makes `{name}` of another shape or dtype than "
                    "the model's."
                )
        # All else that `init_fn` computes is dead code.
        return [made.leaves[number] for number in numbers]

    shardings = [flat.leaves[number].sharding for number in numbers]
    leaves = list(flat.leaves)
    for number, leaf in zip(numbers, jax.jit(run, out_shardings=shardings)(arrays)):
        leaves[number] = leaf
    return jtu.tree_unflatten(flat.structure, leaves)


def unloaded(tree: PyTree) -> list[str]:
    """The dotted names of the leaves of a tree that have no value yet: abstract
    leaves, and lazy leaves that have not been read.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, eqx_ckpt as ec
        >>> ec.unloaded({"a": jnp.ones(2), "b": jax.ShapeDtypeStruct((2,), "float32")})
        ['b']

        ```
    """
    _checkpoint.check_tree(tree)
    _checkpoint.check_no_path(tree)
    flat = _flatten.flatten(tree, None)
    return [
        _names.name_of(path).name
        for path, leaf in zip(flat.paths, flat.leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
