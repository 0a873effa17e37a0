"""Functions of the tree of a save, exported with `jax.export` as it is planned.

A function is traced with all arrays of the tree as its arguments. Arrays that it does
not use are dropped. The rest is exported as a function of a flat dict of stored leaves,
by name, and of the other arguments. All else in the tree is baked in.
"""

import functools as ft
import importlib.util
import itertools as it
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.extend.core as jex_core
import jax.tree_util as jtu
import numpy as np

from .._kernel._format import _index
from .._kernel._format._index import StoredFunction
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._runtime import _log
from .._kernel._save._options import Functions
from .._kernel._save._payload import PlannedFunction, PlannedLeaf
from .._kernel._tree import _folding, _identity
from .._kernel._tree._flatten import Flat
from . import _index_functions, _jaxpr, _keep_functions, _signature, _traced, _tracing
from ._function import Unexported
from ._stored_function import Function
from ._tracing import FunctionTrace, SavedTree


_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# So many trees that are not alike, whose functions are kept.
_KNOWN = 4


def plan(
    functions: Functions, flat: Flat, stored: dict[int, PlannedLeaf]
) -> dict[str, PlannedFunction]:
    """Exports functions of a tree, or keeps those of the checkpoints that its lazy
    leaves are of.

    **Raises:** the error of a function that cannot be exported, with a note that names
    it.
    """
    leaves = list(stored.values())
    if functions is None:
        return _numbered(_keep_functions.plan_all_kept(leaves))
    checked = check_functions(functions)
    arrays = [i for i, leaf in enumerate(flat.leaves) if _tracing.is_array(leaf)]
    tree = SavedTree(flat, stored, arrays)
    likeness = ft.cache(ft.partial(_likeness, tree))
    out: dict[str, PlannedFunction] = {}
    for name, wanted in checked.items():
        if isinstance(wanted, Function):
            out[name] = _keep_functions.plan_kept(wanted, leaves)
            continue
        try:
            out[name] = _export_once(wanted, tree, likeness)
        except Exception as e:
            takes = _signature.show(_signature.fold(wanted.nest))
            e.add_note(
                f"This is of `functions[{name!r}]`, a function of the tree and of "
                f"{takes}. Nothing was saved."
            )
            raise
    return _numbered(out)


def _numbered(functions: dict[str, PlannedFunction]) -> dict[str, PlannedFunction]:
    """Functions with the numbers of their files."""
    return {
        name: function._replace(stored=function.stored._replace(file=file))
        for file, (name, function) in enumerate(functions.items())
    }


def check_functions(functions: object) -> Mapping[str, Unexported | Function]:
    """**Raises:** an error of functions that no save stores, whatever its tree."""
    if not isinstance(functions, Mapping):
        raise TypeError(
            '`functions` must be a dict of names to `ec.function(...)`, or "drop", not '
            f"{functions!r}."
        )
    for name, wanted in functions.items():
        _index_functions.check_name(name)
        if not isinstance(wanted, (Function, Unexported)):
            raise TypeError(
                f"`functions[{name!r}]` must be made by `ec.function`, and is a "
                f"`{type(wanted).__name__}`. Write `ec.function(fn, *args)`, with the "
                "`jax.ShapeDtypeStruct`s of what it will be called with."
            )
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            "`functions` are stored by `jax.export`, which needs flatbuffers. Install "
            "it: `pip install 'eqx_ckpt[functions]'`."
        )
    return functions


# ---- Exports of trees that were alike.


def _likeness(tree: SavedTree) -> Any:
    """Equal for trees that a function is the same of, besides what is baked in.

    **Raises:** `RecursionError` for a tree that is too deep.
    """
    flat = tree.flat
    arrays = tuple(
        (i, tree.name(i), x.shape, x.dtype, _tracing.is_weak(x), tree.stored_dtype(i))
        for i, x in ((i, flat.leaves[i]) for i in tree.arrays)
    )
    known = {*tree.arrays, *tree.stored}
    # A function may look at the type of a number that it does not use.
    numbers = [
        (i, type(flat.leaves[i]), leaf.template.dtype, leaf.template.shape)
        for i, leaf in tree.stored.items()
        if not _tracing.is_array(flat.leaves[i])
    ]
    others = [
        _lazy.body_of(x).identity if isinstance(x, LazyArray) else _identity.key(x)
        for i, x in enumerate(flat.leaves)
        if i not in known
    ]
    structure = _identity.key(flat.structure, math.inf)
    return structure, arrays, (*numbers,), (*others,), _traced.settings()


def _export_once(
    wanted: Unexported, tree: SavedTree, likeness: Callable[[], Any]
) -> PlannedFunction:
    """The export of a function for a tree that was like this one, or for this one."""
    try:
        like = _identity.key(wanted.fn), likeness()
    except RecursionError:  # It is too large.
        return _exported(wanted, tree)
    for other, exported in wanted.known:
        if other == like and _has(tree, exported.stored.baked):
            return exported
    exported = _exported(wanted, tree)
    wanted.known.insert(0, (like, exported))
    del wanted.known[_KNOWN:]
    return exported


def _has(tree: SavedTree, baked: dict[str, str]) -> bool:
    own = {leaf.name: leaf for leaf in tree.stored.values() if leaf.name in baked}
    return own.keys() == baked.keys() and all(
        _tracing.digest(leaf) == baked[name] for name, leaf in own.items()
    )


# ---- Exporting.


def _exported(wanted: Unexported, tree: SavedTree) -> PlannedFunction:
    traced = _tracing.trace(wanted, tree)
    used, count = traced.used, len(tree.arrays)
    _check_traced(traced)
    names = [tree.stored[i].name for i in used]
    avals = {tree.stored[i].name: _signature.struct(tree.weight(i)) for i in used}
    fun = jex_core.jaxpr_as_fun(traced.closed)

    def kept(weights: dict[str, Any], *args: Any) -> Any:
        rest = it.compress(jtu.tree_leaves(args), traced.is_used[count:])
        out = fun(*(weights[name] for name in names), *rest)
        return jtu.tree_unflatten(traced.structure, out)

    exported = _lowered(kept, (avals, *wanted.nest), wanted.platforms)
    if exported.nr_devices > 1:
        _log.warn(
            f"A function is stored for {exported.nr_devices} devices, and runs on no "
            "other number of them: it is saved within `jax.set_mesh`, or has a "
            "sharding in it. For one that runs anywhere, save outside of "
            "`jax.set_mesh`."
        )
    data = bytes(exported.serialize(vjp_order=wanted.order))
    args = _signature.fold(wanted.nest)
    result = jtu.tree_unflatten(exported.out_tree, exported.out_avals)
    result = _signature.fold(result)
    # What would not be read is not written.
    for nest in (args, result):
        _index_functions.check_nest(nest)
    is_used = {*used}.__contains__
    stored = StoredFunction(
        file=0,
        digest=_index.digest(data),
        nbytes=len(data),
        leaves=[leaf_index for leaf_index, i in enumerate(tree.stored) if is_used(i)],
        names=names,
        args=args,
        result=result,
        platforms=list(exported.platforms),
        order=wanted.order,
        baked=traced.baked(),
        versions={"jax": jax.__version__},
    )
    return PlannedFunction(stored, data)


def _check_traced(traced: FunctionTrace) -> None:
    """**Raises:** `ValueError` for what cannot be stored beside the leaves."""
    tree, closed = traced.tree, traced.closed
    lost = [tree.name(i) for i in traced.used if i not in tree.stored]
    if lost:
        raise ValueError(
            f"The function uses the leaf `{lost[0]}`, which is not saved"
            f"{f', and {len(lost) - 1} more' if lost[1:] else ''}. Save what it uses, "
            "with another `filter_spec` or `where`, or leave the function out."
        )
    calls = list(dict.fromkeys(_jaxpr.callbacks(closed.jaxpr)))
    if calls:
        raise ValueError(
            f"The function calls back into Python: {', '.join(calls[:3])}. What is "
            "stored has no Python. Take out `jax.debug` and other callbacks; those of "
            "`eqx.error_if` are left out if the environment variable "
            "EQX_ON_ERROR=off is set before Equinox is imported."
        )
    for value, place in _jaxpr.captured(closed):
        raise _captured(traced, value, place)


def _captured(traced: FunctionTrace, value: Any, place: str) -> ValueError:
    tree = traced.tree
    what = _folding.short_array(str(value.dtype), np.shape(value))
    for i, leaf in enumerate(tree.flat.leaves):
        if _jaxpr.is_same(leaf, value):
            return ValueError(
                f"The function uses the leaf `{tree.name(i)}`, {what}, which is no "
                "jax.Array, so that its values would be stored once more, in the "
                f"function. Make it one, with `jnp.asarray`. It is used{place}."
            )
    name = _jaxpr.name_of(traced.wanted.fn, value)
    return ValueError(
        f"The function closes over an array that is no leaf of the tree, {what}"
        f"{f', {name}' if name else ''}. Arrays of over {_jaxpr.MOST} bytes are not "
        "stored in a function: put it into the tree, or make it an argument. It is "
        f"used{place}."
    )


def _lowered(
    fn: Callable[..., Any], args: tuple[Any, ...], platforms: Sequence[str] | None
) -> jax.export.Exported:
    def export(platforms: Sequence[str]) -> jax.export.Exported:
        return jax.export.export(jax.jit(fn), platforms=platforms)(*args)

    if platforms is not None:
        return export(platforms)
    try:
        return export(_PLATFORMS)
    except Exception:
        good, errors = [], []
        for platform in _PLATFORMS:
            try:
                export([platform])
                good.append(platform)
            except Exception as e:
                errors.append((platform, e))
        if not good:
            raise
        for platform, error in errors:
            why = str(error).strip().partition("\n")[0]
            _log.warn(
                f"A function is stored without the platform {platform!r}, for which it "
                f"cannot be lowered: {why}. Pass `platforms={good!r}` to `ec.function`."
            )
        return export(good)
