"""`skeleton`: a tree without the values of its arrays, and their shardings by name."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._kernel._format import _names
from .._kernel._runtime import _arguments
from .._kernel._tree import _filters, _flatten, _folding, _leaked_tracers, _sharding
from .._kernel._tree._flatten import Flat


@_arguments.checked()
def skeleton(
    fn: Callable[..., PyTree], *args: Any, sharding: object = None, **kwargs: Any
) -> PyTree:
    """`eqx.filter_eval_shape` that keeps NumPy leaves, and puts shardings on the rest.

    Nothing is allocated for JAX arrays. NumPy arrays and scalars, which
    `filter_eval_shape` would turn into abstract JAX ones (and float64 into float32),
    stay what `fn` made them, so that they load as NumPy.

    **Arguments:**

    - `fn`, `args`, `kwargs`: the function to call, such as a Module, and its arguments.
    - `sharding`: None; or a `jax.sharding.Sharding` for every abstract leaf; or a
        function `(name, jax.ShapeDtypeStruct) -> sharding or None`, such as
        [`partition_rules`][] gives; or a pytree prefix of the result made of those.

    **Returns:** the result of `fn`, with a `jax.ShapeDtypeStruct` for each JAX array.

    **Raises:** `ValueError` naming the leaf that its sharding does not divide; or the
    field where `fn` has put an array out of JAX's sight, such as in the closure of a
    function: nothing can be loaded into that.

    !!! example

        ```python
        >>> import equinox as eqx, jax.random as jr, eqx_ckpt as ec
        >>> ec.skeleton(eqx.nn.Linear, 3, 2, key=jr.key(0)).weight
        ShapeDtypeStruct(shape=(2, 3), dtype=float32)

        ```
    """

    is_numpy = lambda x: isinstance(x, (np.ndarray, np.generic))
    made: tuple[list[Any], Any] = [], None

    # Only its leaves: JAX would compare the static fields of two trees, which it cannot
    # of arrays.
    def call(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal made
        made = jtu.tree_flatten(fn(*args, **kwargs))
        return [None if is_numpy(x) else x for x in made[0]]

    abstract = eqx.filter_eval_shape(call, *args, **kwargs)
    leaves, structure = made
    rows = zip(leaves, abstract, strict=True)
    out = jtu.tree_unflatten(structure, [x if is_numpy(x) else y for x, y in rows])
    flat = _flatten.flatten(out, None)
    _leaked_tracers.check_no_tracers(
        flat, flat.record(list(map(_filters.by_default, flat.leaves)))
    )
    return out if sharding is None else _with_shardings(out, flat, sharding)


def _with_shardings(tree: PyTree, flat: Flat, sharding: object) -> PyTree:
    parts, structure = jtu.tree_flatten(sharding, is_leaf=lambda x: x is None)
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError as e:
        raise ValueError(f"`sharding` is no prefix of the tree. {e}") from e
    out = []
    specs = [part for part, sub in zip(parts, subtrees) for _ in jtu.tree_leaves(sub)]
    for path, leaf, spec in zip(flat.paths, flat.leaves, specs):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            chosen = _sharding.of_leaf(spec, _names.name_of(path).name, leaf)
            if chosen is not None:
                leaf = leaf.update(sharding=chosen)
        out.append(leaf)
    return jtu.tree_unflatten(flat.structure, out)


def partition_rules(
    mesh: jax.sharding.Mesh, rules: Sequence[tuple[str, PartitionSpec]]
) -> Callable[[str, jax.ShapeDtypeStruct], NamedSharding]:
    """Shardings by the names of leaves: a function for `skeleton(..., sharding=)`.

    The idea is that of T5X's partition rules.

    **Arguments:**

    - `mesh`: the devices.
    - `rules`: pairs `(pattern, spec)`. A leaf gets the spec of the first pattern that
        `re.search` finds in its dotted name. So `(".*", PartitionSpec())` at the end
        replicates the rest.

    **Returns:** a function `(name, leaf) -> jax.sharding.NamedSharding`. It raises
    `ValueError` for a leaf that no rule matches, or that has fewer axes than its spec.

    **Raises:** `ValueError` or `TypeError`, naming the rule, for a pattern that is no
    regular expression, or a spec with axes that the mesh lacks.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.random as jr, eqx_ckpt as ec
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> rules = ec.partition_rules(mesh, [("weight$", P("model")), ("bias$", P())])
        >>> like = ec.skeleton(eqx.nn.Linear, 4, 8, key=jr.key(0), sharding=rules)
        >>> like.weight.sharding.spec == P("model"), like.bias.sharding.spec == P()
        (True, True)

        ```
    """
    compiled = [_rule(mesh, pattern, spec) for pattern, spec in rules]

    def sharding_of(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for pattern, sharding in compiled:
            if pattern.search(name):
                if len(sharding.spec) > leaf.ndim:
                    array = _folding.short_array(str(leaf.dtype), leaf.shape)
                    raise ValueError(
                        f"The rule {(pattern.pattern, sharding.spec)} has "
                        f"{len(sharding.spec)} axes, and the leaf `{name}`, which it "
                        f"matches, is {array}. Put a rule for it first."
                    )
                return sharding
        raise ValueError(
            f"No partition rule matches the leaf `{name}`, "
            f"{_folding.short_array(str(leaf.dtype), leaf.shape)}. Add one, such as "
            '`(".*", PartitionSpec())` for the rest.'
        )

    return sharding_of


def _rule(
    mesh: jax.sharding.Mesh, pattern: str, spec: object
) -> tuple[re.Pattern[str], NamedSharding]:
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"The rule {(pattern, spec)!r} must have a `PartitionSpec` for the leaves "
            "that its pattern matches."
        )
    try:
        return re.compile(pattern), NamedSharding(mesh, spec)
    except re.error as e:
        raise ValueError(
            f"The pattern {pattern!r} is not a regular expression: {e}."
        ) from e
    except ValueError as e:
        raise ValueError(
            f"The rule {(pattern, spec)!r} does not fit the mesh: {e}"
        ) from e
