"""`load_or_init`, and `unloaded`: trees of which only a part is in a checkpoint."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._format import _names
from .._runtime import _processes
from .._tree import _flatten, _leaf, _skeleton
from .._tree._static import Static
from . import _checkpoint, _deserialise, _match, _open, _renamed
from ._checkpoint import Checkpoint
from ._lazy import LazyArray
from ._rename import Renaming


@_open.again(1, "path")
def load_or_init(
    init_fn: Callable[..., PyTree],
    path: str | os.PathLike[str] | Checkpoint,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    source: str | Callable[[Any], Any] | None = None,
    rename: Renaming = None,
    missing: str = "error",
    unexpected: str = "error",
    static: Static = "error",
    cast: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    timeout: int | float = _processes.TIMEOUT,
    tag: str | int | None = None,
    reshard: str = "auto",
    broadcast: bool = False,
    sharding: Any = None,
) -> PyTree:
    """`init_fn(*args, **kwargs)`, with a part of it loaded instead of initialised.

    `init_fn` runs in one jit that returns only what is not loaded. So XLA drops the
    initialisers of all that is loaded, and no leaf is ever in memory twice.

    **Arguments:**

    - `init_fn`: the function to call, such as a Module. It is traced, and so must be
        one that `jax.jit` takes.
    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `args`, `kwargs`: the arguments of `init_fn`: a tuple, and a dict.
    - `where`: a function from the tree to the nodes to load; the rest of it is
        initialised. All of it is loaded by default.
    - `source`, `rename`, `unexpected`, `static`, `cast`, `verify`: as in
        [`tree_deserialise_leaves`][].
    - `max_bytes`, `progress`, `timeout`, `tag`, `reshard`, `broadcast`: as there.
    - `missing`: `"error"`, or `"init"` to initialise also those leaves of `where` that
        the checkpoint lacks.
    - `sharding`: as in [`skeleton`][], for what is loaded and what is initialised.

    **Returns:** the tree. What is initialised is what a jitted `init_fn` gives.

    **Raises:** as [`tree_deserialise_leaves`][] and [`skeleton`][], before anything is
    read.

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
    if missing not in ("error", "init"):
        raise ValueError(f'`missing` must be "error" or "init", not {missing!r}.')
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping | None):
        raise TypeError(
            "`args` must be a tuple, and `kwargs` a dict, of the arguments of "
            '`init_fn`: `ec.load_or_init(eqx.nn.MLP, path, (2, 5, 8, 1), {"key": key})`'
            "."
        )
    kwargs = dict(kwargs or {})
    like = _skeleton.skeleton(init_fn, *args, sharding=sharding, **kwargs)
    ckpt = _checkpoint.open(path)
    loaded = _deserialise.tree_deserialise_leaves(
        ckpt,
        like,
        _stored(ckpt, like, source, rename) if missing == "init" else _leaf.is_storable,
        where=where,
        source=source,
        rename=rename,
        unexpected=unexpected,
        static=static,
        cast=cast,
        verify=verify,
        max_bytes=max_bytes,
        progress=progress,
        timeout=timeout,
        tag=tag,
        reshard=reshard,
        broadcast=broadcast,
    )
    return initialise(loaded, init_fn, *args, **kwargs)


def _stored(ckpt: Checkpoint, like: PyTree, source: Any, rename: Renaming) -> PyTree:
    """The tree that says of each leaf whether it is there to be loaded."""
    flat = _flatten.flatten(like, None)
    renamed = _renamed.renamed(ckpt._source.index.leaves, rename)
    leaves = renamed.leaves
    under = _checkpoint.resolve_source(ckpt, source, renamed)
    names = [_names.name_of(path, under)[0] for path in flat.paths]
    stored = _match.stored_names(leaves, like, flat, names, under)
    both = zip(flat.leaves, stored)
    good = [_leaf.is_storable(x) and n in leaves.places for x, n in both]
    if names and not any(good):
        raise RuntimeError(
            f"None of the leaves, such as `{names[0]}`, is in the checkpoint at "
            f"`{ckpt.path}`{f' under `{under}`' if under else ''}. Pass its `source`."
        )
    return jtu.tree_unflatten(flat.structure, good)


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
            raise ValueError("`init` makes a tree of another structure than the model.")
        for number in numbers:
            have, want = made.leaves[number], flat.leaves[number]
            if (jnp.shape(have), jnp.result_type(have)) != (want.shape, want.dtype):
                name = _names.name_of(flat.paths[number])[0]
                raise ValueError(
                    f"`init` makes `{name}` of another shape or dtype than the model's."
                )
        # All else that `init_fn` computes is dead code.
        return [made.leaves[number] for number in numbers]

    shardings = [flat.leaves[number].sharding for number in numbers]
    leaves = list(flat.leaves)
    for number, leaf in zip(numbers, jax.jit(run, out_shardings=shardings)(arrays)):
        leaves[number] = leaf
    return jtu.tree_unflatten(flat.structure, leaves)


def unloaded(tree: PyTree) -> list[str]:
    """The dotted names of the leaves of a tree that have no value yet: abstract ones,
    and lazy ones that have not been read.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, eqx_ckpt as ec
        >>> ec.unloaded({"a": jnp.ones(2), "b": jax.ShapeDtypeStruct((2,), "float32")})
        ['b']

        ```
    """
    flat = _flatten.flatten(tree, None)
    return [
        _names.name_of(path)[0]
        for path, leaf in zip(flat.paths, flat.leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
