"""A pytree as the rest sees it: leaves with key paths, Modules and States."""

import dataclasses
import functools as ft
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _names
from .._runtime import _arguments
from . import _node, _seen
from ._filters import IsLeaf
from ._node import Node
from ._seen import SeenStructure


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A flattened tree. `paths[i]` leads to `leaves[i]`. `seen`: what is kept of its
    structure."""

    paths: list[tuple]
    leaves: list[Any]
    structure: Any
    seen: SeenStructure | None = None

    @ft.cached_property
    def types(self) -> set[type]:
        """The types of its nodes."""
        known = self.seen and self.seen.types
        return known or _seen.node_types(self.structure)

    def names(self, source: str = "") -> list[str]:
        """The dotted names of the leaves, if that of the tree is `source`."""
        named = _names.namer(source)
        make = lambda: [named(path)[0] for path in self.paths]
        return self.once(("names", source), make)

    def once(
        self, what: Any, make: Callable[[], T], numbers: Iterable[int] | None = None
    ) -> T:
        """A result of `make`, which nobody changes: of trees of one structure it is
        made once. `numbers`: it follows from leaves as well, from the types of those of
        these numbers and from the values of the others."""
        if self.seen is None:
            return make()
        key = ((), ()) if numbers is None else _seen.key_of(self.leaves, numbers)
        return make() if key is None else self.seen.once((what, key[0]), key[1], make)


def flatten(tree: PyTree, is_leaf: IsLeaf) -> Flat:
    if is_leaf is None:
        seen, leaves = _seen.find(tree)
        if seen is None:
            leaves, structure = jtu.tree_flatten(tree)
            seen = _seen.seen(structure)
        if seen is not None:
            if len(seen.paths) < len(leaves):
                seen.paths = [x for x, _ in jtu.tree_flatten_with_path(tree)[0]]
            return Flat(seen.paths, leaves, seen.structure, seen)
    pairs, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)
    leaves = list(map(operator.itemgetter(1), pairs))
    return Flat(list(map(operator.itemgetter(0), pairs)), leaves, structure)


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


# ---- Modules, and the nodes of Modules that were saved.


# In the place of a field that a Module does not have.
ABSENT = object()


def field_values(module: Any, names: Iterable[str]) -> list[Any]:
    """The fields of a Module, or `ABSENT`. Equinox looks at each attribute that it
    gives, and so is slow."""
    own = object.__getattribute__(module, "__dict__")
    try:
        return list(map(own.__getitem__, names))
    except KeyError:
        return [getattr(module, name, ABSENT) for name in names]


@ft.lru_cache(maxsize=4096)
def is_module(cls: type) -> bool:
    """Whether nodes of a type are Modules, or those of Modules that were saved."""
    return issubclass(cls, (eqx.Module, Node))


# What has no nodes in it, as most children.
_BARE = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, types.FunctionType, np.generic)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, object)
_CONTAINERS = (list, tuple, dict)


@ft.lru_cache(maxsize=4096)
def _is_bare(cls: type) -> bool:
    return cls in _SCALARS or issubclass(cls, _BARE)


def modules(
    tree: PyTree, is_leaf: IsLeaf, source: str = ""
) -> Iterable[tuple[str, Any]]:
    """The name and the Module of every Module in a tree, without those inside leaves.
    `source` is the name of the tree itself."""
    out: list[tuple[str, Any]] = []

    def add(x: Any, name: str, depth: int) -> None:
        if is_leaf is not None and is_leaf(x):
            return
        cls, depth = type(x), depth + 1
        if is_module(cls):
            out.append((name, x))
        if cls is list or cls is tuple:
            pairs = zip(map(str, range(len(x))), x)
        elif cls is Node:
            body = _node.body_of(x)
            pairs = zip(_node.components(body.spec()), body.children())
        elif is_module(cls):
            parts = _seen.module_fields(cls)[0]
            pairs = zip(parts.values(), field_values(x, parts))
        else:
            some = jtu.tree_flatten_with_path(x, lambda y: y is not x)[0]
            some = [(path, y) for path, y in some if path and not _is_bare(type(y))]
            pairs = [(_names.component(path[0])[1], y) for path, y in some]
        for part, child in pairs:
            if not _is_bare(type(child)):
                below = _names.child(name, part)
                _names.check_size(below, depth)
                add(child, below, depth)

    add(tree, source, 0)
    return out


def empty_nodes(tree: PyTree, is_leaf: IsLeaf) -> list[tuple[int, tuple, Any]]:
    """All nodes without children, as None and empty containers: the number of the leaf
    that comes next, the key path, and the node."""
    stop = _is_empty
    if is_leaf is not None:
        stop = lambda x: is_leaf(x) or _is_empty(x)
    out: list[tuple[int, tuple, Any]] = []
    for i, (path, x) in enumerate(jtu.tree_flatten_with_path(tree, is_leaf=stop)[0]):
        if _is_empty(x) and not (is_leaf is not None and is_leaf(x)):
            out.append((i - len(out), path, x))
    return out


def _is_empty(x: Any) -> bool:
    if x is None:
        return True
    cls = type(x)
    if cls in _CONTAINERS:
        return not x
    if _is_full(cls):
        return False
    found = jtu.default_registry.flatten_one_level(x)
    return found is not None and not list(found[0])


@ft.lru_cache(maxsize=4096)
def _is_full(cls: type) -> bool:
    """Whether no value of a type is a node without children."""
    is_module = issubclass(cls, eqx.Module)
    return _is_bare(cls) or is_module and bool(_seen.module_fields(cls)[0])


def module_name(path: tuple, source: str) -> str:
    return _names.name_of(path, source)[0] if path else source
