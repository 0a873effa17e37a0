"""A pytree as the rest sees it: leaves with names, and the record of all else."""

import functools as ft
import itertools as it
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._format import _names, _values
from .._format._record import TreeRecord
from .._runtime import _arguments
from . import _recorder, _walk
from ._filters import IsLeaf
from ._walk import Walk


T = TypeVar("T")


class Flat:
    """A flattened tree: its `leaves` in JAX's order, and its `walk`, which may be that
    of an earlier tree like it."""

    def __init__(self, tree: PyTree, is_leaf: IsLeaf, walk: Walk, leaves: list[Any]):
        self.tree, self._is_leaf = tree, is_leaf
        self.walk, self.leaves = walk, leaves
        # Whether results for trees like it are kept with its walk.
        self.is_walk_kept = is_leaf is None and walk.is_kept

    @ft.cached_property
    def structure(self) -> Any:
        return self._kept(
            "structure", lambda: jtu.tree_structure(self.tree, self._is_leaf)
        )

    @ft.cached_property
    def paths(self) -> list[tuple]:
        """The key path of each leaf."""
        find = lambda: jtu.tree_flatten_with_path(self.tree, self._is_leaf)[0]
        return self._kept("paths", lambda: [path for path, _ in find()])

    def _kept(self, what: str, make: Callable[[], T]) -> T:
        """A result that has static values and keys of the tree in it: kept for others
        like it, if all of them have the very same ones."""
        walk = self.walk
        if self.is_walk_kept and walk.kept_result("told", None, lambda: _is_told(walk)):
            return walk.kept_result(what, None, make)
        return make()

    def names(self, above: str = "") -> list[str]:
        """The dotted names of the leaves, if that of the tree is `above`.

        **Raises:** `ValueError` for a leaf that cannot have one.
        """
        walk = self.walk.named(above)
        walk.check_names(range(len(self.leaves)))
        return walk.names

    def by_name(self, numbers: Sequence[int]) -> dict[str, int]:
        """The leaves of these numbers by their names.

        **Raises:** `ValueError` for a leaf that cannot have one, and for two leaves of
        one name.
        """
        self.walk.check_names(numbers)
        names = self.walk.names
        out = dict(zip(map(names.__getitem__, numbers), numbers))
        for number in numbers if len(out) < len(numbers) else ():
            # Of one name the last is there.
            if (other := out[names[number]]) != number:
                paths = self.paths[number], self.paths[other]
                raise _names.twins_error(names[number], *paths)
        return out

    def record(self, chosen: Sequence[bool]) -> TreeRecord:
        """The record of the tree, of which the `chosen` leaves are stored."""
        return _recorder.record(self.walk, self.leaves, chosen)


def flatten(tree: PyTree, is_leaf: IsLeaf) -> Flat:
    if is_leaf is None:
        return Flat(tree, None, *_walk.find_walk(tree))
    return Flat(tree, is_leaf, *_walk.walk_of(tree, is_leaf))


# Nodes that give JAX their children, keys and static values, and nothing else. Others
# have a function of the caller's, which may give more than is recorded.
_TOLD = frozenset(
    "none absent list tuple dict ordered default namedtuple module state index".split()
)


def _is_told(walk: Walk) -> bool:
    """Whether a walk tells all that JAX has of a tree beside its leaves."""
    keys = (json.loads(kind.keys or "[]") for kind in walk.kinds)
    values = it.chain(walk.values.encoded, *keys)
    are_told = all(kind.how in _TOLD for kind in walk.kinds)
    return are_told and all(map(_is_fixed, values))


# Kinds of encoded values that cannot change in place, and have no other value in them.
# What is encoded alike is equal, as a NaN is not. Of "tuple" and "absent" the list of
# values in them is looked at, if they have one.
_FIXED = frozenset(
    "int str bytes ellipsis dtype numpy jax builtin absent markers tuple range".split()
)


def _is_fixed(x: object) -> bool:
    kind, own = _values.split(x)
    if type(own) is list and kind in ("tuple", "absent"):
        return all(map(_is_fixed, own))
    return type(x) not in (dict, list) or kind in _FIXED


@_arguments.checked()
def leaf_names(tree: PyTree, is_leaf: IsLeaf = None) -> PyTree:
    """The tree of the dotted names of the leaves of `tree`.

    **Arguments:**

    - `tree`: any pytree.
    - `is_leaf`: called on every node; if true, it is treated as a leaf.

    **Returns:** a tree of the same structure, with a str for every leaf: the name under
    which [`tree_serialise_leaves`][] stores it if it is stored.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.leaf_names({"layers": [1.0, 2.0], "a.b": 3})
        {'a.b': 'a%2Eb', 'layers': ['layers.0', 'layers.1']}

        ```
    """
    flat = flatten(tree, is_leaf)
    return jtu.tree_unflatten(flat.structure, flat.names())


def node_name(path: tuple, above: str) -> str:
    """The dotted name of the node that a key path leads to."""
    return _names.name_of(path, above).name if path else above
