"""A function of the tree of a save, traced with all arrays of the tree as arguments."""

import itertools as it
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.interpreters.partial_eval as pe
import jax.tree_util as jtu

from .._kernel._format import _index, _names
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._save import _payload
from .._kernel._save._payload import PlannedLeaf
from .._kernel._tree import _leaf, _select
from .._kernel._tree._flatten import Flat
from . import _jaxpr, _signature
from ._function import Unexported


# Lazy leaves of at most so many bytes are read, as their values may be a part of a
# function.
_SMALL = 1024


class SavedTree(NamedTuple):
    """The tree of a save. `stored` are the leaves that are saved, by their numbers, and
    `arrays` the numbers of the arrays."""

    flat: Flat
    stored: dict[int, PlannedLeaf]
    arrays: list[int]

    def name(self, i: int) -> str:
        return _names.name_of(self.flat.paths[i]).name

    def top(self, i: int) -> str:
        """The first part of the name of a leaf."""
        return self.name(i).partition(".")[0]

    def stored_dtype(self, i: int) -> Any:
        """The dtype that an array is saved as; None if it is not saved."""
        leaf = self.stored.get(i)
        return None if leaf is None else _leaf.abstract_dtype(leaf.template)

    def weight(self, i: int) -> jax.ShapeDtypeStruct:
        """The shape and dtype of an array of the tree, as it is stored."""
        x, dtype = self.flat.leaves[i], self.stored_dtype(i)
        weak = is_weak(x) and dtype in (None, x.dtype)
        dtype = x.dtype if dtype is None else dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, weak_type=weak)


def is_array(leaf: object) -> bool:
    if isinstance(leaf, LazyArray):
        return _lazy.body_of(leaf).target.kind in ("jax", "key")
    return isinstance(leaf, jax.Array)


def digest(leaf: PlannedLeaf) -> str:
    return _index.digest(_payload.whole(leaf))


def is_weak(x: object) -> bool:
    return bool(getattr(x, "weak_type", False))


class FunctionTrace(NamedTuple):
    """A function of a tree, as it was traced: its jaxpr without the arguments that it
    does not use, the structure of its result, and which of its arguments it uses."""

    wanted: Unexported
    tree: SavedTree
    closed: jex_core.ClosedJaxpr
    structure: Any
    is_used: list[bool]

    @property
    def used(self) -> list[int]:
        """The numbers of the arrays of the tree that it uses."""
        return list(it.compress(self.tree.arrays, self.is_used))

    def baked(self) -> dict[str, str]:
        """The names and digests of the stored leaves whose values may be a part of the
        function: of those that are no arrays, such as Python's numbers.

        A jaxpr does not say which of them the function has looked at. Those whose names
        begin like the name of an array that it uses are taken for a part of it, and so
        is each bool, as `is` cannot be hooked. Any other, such as the step of a run, is
        none if the function comes out the same without it: see `_Hidden`.
        """
        tree, arrays = self.tree, {*self.tree.arrays}
        baked = {i: leaf for i, leaf in tree.stored.items() if i not in arrays}
        near = set(map(tree.top, self.used))
        far: dict[str, list[int]] = {}
        for i, leaf in baked.items():
            if tree.top(i) not in near and leaf.template.dtype != "bool":
                far.setdefault(tree.top(i), []).append(i)
        hidden = [i for group in far.values() for i in group]
        if hidden and not self._is_same_without(hidden):
            alone = (g for g in far.values() if len(g) < len(hidden))
            good = [g for g in alone if self._is_same_without(g)]
            hidden = [i for group in good for i in group]
        seen = baked.keys() - {*hidden}
        return {leaf.name: digest(leaf) for i, leaf in baked.items() if i in seen}

    def _is_same_without(self, hidden: Sequence[int]) -> bool:
        """Whether the function is the same without the values of some leaves."""
        try:
            other = trace(self.wanted, self.tree, hidden)
            return _jaxpr.key(other.closed) == _jaxpr.key(self.closed)
        except Exception:
            return False


def trace(
    wanted: Unexported, tree: SavedTree, hidden: Iterable[int] = frozenset()
) -> FunctionTrace:
    """Traces a function, of a tree in which the values of some leaves are hidden."""
    leaves = list(map(_value, tree.flat.leaves))
    for i in hidden:
        leaves[i] = _Hidden()
    rebuilt = _rebuild(wanted)

    def run(weights: list[Any], nest: object) -> Any:
        own = list(leaves)
        for i, weight in zip(tree.arrays, weights):
            dtype = tree.flat.leaves[i].dtype
            own[i] = weight if weight.dtype == dtype else weight.astype(dtype)
        out = wanted.fn(jtu.tree_unflatten(tree.flat.structure, own), *rebuilt(nest))
        return _signature.nest(out, "The result")

    weights = list(map(tree.weight, tree.arrays))
    traced = jax.jit(run).trace(weights, wanted.nest)
    closed = traced.jaxpr
    jaxpr, used = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    closed = jex_core.ClosedJaxpr(jaxpr, closed.consts)
    structure = jtu.tree_structure(traced.out_info)
    return FunctionTrace(wanted, tree, closed, structure, list(used))


def _value(leaf: object) -> Any:
    """A leaf as functions see it: a small lazy one that is no array is read."""
    if isinstance(leaf, LazyArray) and not is_array(leaf):
        if _lazy.body_of(leaf).template.nbytes <= _SMALL:
            return leaf.read()
    return leaf


def _rebuild(wanted: Unexported) -> Callable[[Any], tuple[Any, ...]]:
    """A function from the nest of the arguments to the arguments."""
    leaves, structure = jtu.tree_flatten(wanted.args)
    place = {id(x): i for i, x in enumerate(jtu.tree_leaves(wanted.nest))}

    def rebuilt(nest: object) -> tuple[Any, ...]:
        values = jtu.tree_leaves(nest)
        own = [values[place[id(x)]] if id(x) in place else x for x in leaves]
        return jtu.tree_unflatten(structure, own)

    return rebuilt


class _Hidden:
    """Stands for the value of a leaf, to see whether a function does without it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError

    __getattr__ = _refuse


for _operator in (*_select.OPERATORS, "call", "str", "format", "hash"):
    setattr(_Hidden, f"__{_operator}__", _Hidden._refuse)
