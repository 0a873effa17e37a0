"""`merge`: one tree of lazy leaves from several, by the names of their leaves."""

import functools as ft
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._functions._computed import ComputedLeaf, Formula
from .._kernel._format import _names, _template, _text
from .._kernel._format._template import Template
from .._kernel._load import _lazy
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._load._load_options import LoadOptions
from .._kernel._runtime import _arguments, _gc
from .._kernel._runtime._arguments import Rule
from .._kernel._tree import (
    _compare,
    _filters,
    _flatten,
    _folding,
    _host_copy,
    _select,
    _target,
)
from .._kernel._tree._compare import Static
from .._kernel._tree._flatten import Flat
from .._kernel._tree._folding import Problems
from ..merging import _methods
from ..merging._methods import MergedLeaf, Method
from . import _diff, _elements
from ._elements import Leaf, Side


_METHOD = Rule(
    "a method that `ec.merging` gives, such as `ec.merging.average()`",
    lambda x: isinstance(x, Method),
)


@_arguments.checked(method=_METHOD)
@_gc.paused()
def merge(
    trees: Sequence[PyTree | str | os.PathLike[str] | Checkpoint],
    method: Method,
    *,
    base: PyTree | str | os.PathLike[str] | Checkpoint = None,
    where: Callable[[PyTree], Any] | None = None,
    static: Static = "error",
) -> PyTree:
    """Merges trees leaf by leaf into a tree of lazy leaves, which are not read yet.

    A merged leaf is computed block by block, as you read or save it. So checkpoints of
    any size can be merged in the memory that the save takes.

    **Arguments:**

    - `trees`: each a path, an open [`Checkpoint`][], a node of its tree, such as
        `ckpt.tree.model`, or any tree of lazy leaves and of values.
    - `method`: what a function of `ec.merging` gives, or an `ec.merging.Method` of your
        own.
    - `base`: for methods that take one, the tree that the others were trained from.
    - `where`: a function from the first tree to the nodes to merge. The rest is taken
        from the first tree, and not compared. By default all is merged.
    - `static`: what to do if static fields differ: `"error"`; or `"ignore"`, which
        takes those of the first tree; or a list of names and patterns to ignore, as in
        [`tree_deserialise_leaves`][].

    Floating arrays are merged. All other leaves (integers, bools, Python's numbers,
    PRNG keys, str) have to be equal, and stay as the first tree has them. Arrays in
    memory that are merged are copied, so you may change them afterwards.

    **Returns:** the first tree, with lazy leaves in the place of floating arrays.

    **Raises:** one `ValueError` that lists by name all leaves and static fields that
    differ; `ValueError` if the method merges another number of trees, or wants a base,
    or if a number or a pattern given to it fits no leaf.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> for step in (1, 3):
        ...     tree = {"w": jnp.full(2, step, jnp.float32), "name": 7}
        ...     ec.tree_serialise_leaves(f"memory://merge/{step}", tree)
        >>> paths = ["memory://merge/1", "memory://merge/3"]
        >>> mean = ec.merge(paths, ec.merging.average())
        >>> ec.materialise(mean)
        {'name': 7, 'w': Array([2., 2.], dtype=float32)}
        >>> ec.tree_serialise_leaves("memory://merge/mean", mean)

        ```
    """
    if method.base != (base is not None):
        wants = "takes a `base`" if method.base else "takes no `base`"
        raise ValueError(f"`{method.name}` {wants}.")
    if not trees:
        raise ValueError("There are no trees to merge.")
    _compare.check_static(static)
    every = trees if base is None else [*trees, base]
    sides = [_elements.look(x) for x in every]
    shown = [f"tree {i}" for i in range(len(trees))] + ["the base"]
    flat = sides[0].flat
    chosen = _chosen(flat, where)
    rows = {
        name: row
        for name, row in _rows(sides, shown, chosen, static).items()
        if _is_merged(row[0].template)
    }
    shapes = {name: row[0].template.shape for name, row in rows.items()}
    places = method.leaves(shapes, len(trees))
    # The base is the first of the sources.
    order = [-1, *range(len(trees))] if method.base else range(len(trees))
    merged: dict[Any, tuple[str, LazyArray]] = {}
    leaves = list(flat.leaves)
    for number, name in enumerate(flat.names()):
        row = rows.get(name)
        if row is not None:
            sources = [row[i] for i in order]
            # What is one array in all of the trees stays one.
            key = tuple(leaf.identity for leaf in sources)
            if key not in merged:
                like = flat.leaves[number]
                leaf = _lazily(method, places[name], sources, row[0], like)
                merged[key] = name, leaf
            first, leaves[number] = merged[key]
            if places[first].options != places[name].options:
                raise ValueError(
                    f"`{first}` and `{name}` are one array in all of the trees, and "
                    f"`{method.name}` has other numbers for each."
                )
    return jtu.tree_unflatten(flat.structure, leaves)


@ft.lru_cache
def _is_merged(t: Template) -> bool:
    if t.kind not in ("jax", "numpy") or 0 in t.shape or t.dtype == "float0":
        return False
    return _template.is_floating(_template.dtype_of(t.dtype))


# ---- Leaves.


def _lazily(
    method: Method, leaf: MergedLeaf, sources: list[Leaf], first: Leaf, like: PyTree
) -> LazyArray:
    """The merged leaf: of the kind, weak type and sharding that `like` has."""
    t = first.template
    given = method, leaf, _template.dtype_of(t.dtype)
    formula = Formula(
        first.name,
        tuple(_part(x) for x in sources),
        ft.partial(_methods.combine, *given),
        t.shape,
        given[2],
        weak=t.weak,
        blockwise=not method.whole,
        prepare=ft.partial(_methods.look, *given) if method.look else None,
    )
    target = _target.target_of(like)
    if target.registered is not None:
        target = target._replace(registered=None)
    return LazyArray(ComputedLeaf(formula, None, target))


def _part(leaf: Leaf) -> LazyArray | np.ndarray:
    x = leaf.value
    return x if isinstance(x, LazyArray) else _host_copy.owned(x)


# ---- What does not fit.


def _chosen(flat: Flat, where: Callable[[PyTree], Any] | None) -> list[str]:
    """The names of the nodes and leaves that `where` selects ("": all)."""
    if where is None:
        return [""]
    stored = list(map(_filters.by_default, flat.leaves))
    picked = _select.select(where, flat, stored, None)
    names = flat.names()
    nodes = [_flatten.node_name(path, "") for path in picked.whole_paths]
    return [*nodes, *(names[number] for number in picked.leaves or ())]


def _rows(
    sides: list[Side], shown: list[str], chosen: list[str], static: Static
) -> dict[str, list[Leaf]]:
    """The leaves of each chosen name in all trees.

    **Raises:** one `ValueError` that lists all that does not fit.
    """
    first, *others = sides
    within = _names.within(chosen)
    is_chosen = lambda name: within(name) is not None
    problems = Problems()
    rows = {name: [leaf] for name, leaf in first.leaves.items() if is_chosen(name)}
    kept: list[tuple[Leaf, Leaf, str]] = []
    for other, who in zip(others, shown[1:]):
        before, after = _diff.paired(first, other)
        for name in filter(is_chosen, {**before, **after}):
            if name not in after:
                problems.add("missing", name, f"not in {who}")
            elif name not in before:
                text = _diff.show(after[name].template)
                problems.add("missing", name, f"{text} only in {who}")
            elif _is_merged(before[name].template):
                rows[name].append(after[name])
                t, u = before[name].template, after[name].template
                if (t.shape, t.dtype) != (u.shape, u.dtype) or not _is_merged(u):
                    problems.add(
                        "other", name, f"{_diff.show(t)}, in {who} {_diff.show(u)}"
                    )
            else:
                kept.append((before[name], after[name], who))
    pairs = [(leaf, other) for leaf, other, _ in kept]
    found = _diff.changes(pairs, False, LoadOptions())
    for (leaf, _, who), change in zip(kept, found):
        if change is not None:
            what = " and ".join(change.what)
            problems.add("kept", leaf.name, f"{change.a}, in {who} another {what}")
    for other, who in zip(others, shown[1:]):
        passes = _compare.passing(static, lambda: [(first.record, "")], "first tree")
        for name, pair in _diff.static(first, other, passes).items():
            if is_chosen(name):
                problems.add("static", name, f"{pair[0]}, in {who} {pair[1]}")
    if problems.rows:
        passes = _compare.how_to_pass(problems.names("static"))
        titles = {kind: title.replace("{}", passes) for kind, title in _titles.items()}
        lines = ["The trees do not fit each other; nothing was merged:"]
        lines += _paths(sides, shown) + _folding.sections(problems.rows, titles)
        raise ValueError(_text.message(lines))
    return rows


def _paths(sides: list[Side], shown: list[str]) -> list[str]:
    """Lines that say which checkpoint each tree is of."""
    lines: list[str] = []
    for side, who in zip(sides, shown):
        values = (leaf.value for leaf in side.leaves.values())
        lazies = [x for x in values if isinstance(x, LazyArray)]
        paths = dict.fromkeys(x.root.url for x in _lazy.sources_of(lazies[:1]))
        lines += [f"  {who} is of `{path}`" for path in paths]
    return lines


_titles = {
    "missing": "not in all of the trees",
    "other": "of another shape or dtype",
    "kept": "not floating arrays, and not equal (`where` leaves them out)",
    "static": "static fields that differ ({})",
}
