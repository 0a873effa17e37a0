"""Selector lambdas to names: `where` on a tree of ours, `source` on a checkpoint's."""

import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from . import _names
from ._filters import IsLeaf


class _Tag:
    """Stands for a stored leaf while a `where` runs, and is of no other use."""

    __slots__ = ("_path", "_place", "_called")

    def __init__(self, path: tuple, place: int, called: str):
        self._path = path
        self._place = place
        self._called = called

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"`{self._called}` uses the value of the leaf "
            f"`{_names.name_of(self._path)[0]}`. It may only pick nodes: use static "
            "fields, indices and attributes to choose."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"`{self._called}` takes `.{name}` of the leaf "
            f"`{_names.name_of(self._path)[0]}`, and leaves have no values and no "
            "attributes there. It may only pick nodes."
        )

    def __repr__(self) -> str:
        return f"<leaf {_names.name_of(self._path)[0]}>"

    __hash__ = object.__hash__


for _operator in (
    "eq ne lt le gt ge bool len iter getitem contains int float complex index array "
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv "
    "mod rmod divmod rdivmod pow rpow neg pos abs round trunc floor ceil invert "
    "and rand or ror xor rxor lshift rlshift rshift rrshift"
).split():
    setattr(_Tag, f"__{_operator}__", _Tag._refuse)


# What people take for containers, and JAX does not.
_iterables = (
    types.GeneratorType,
    map,
    filter,
    zip,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class Selection:
    """What a `where` picks: the leaves, and the nodes that it picks as a whole."""

    def __init__(self, places: set[int] | None, wholes: list[tuple]):
        self.places = places  # None: all of them.
        self.wholes = wholes  # Key paths.


EVERYTHING = Selection(None, [()])


def select(
    where: Callable[[PyTree], Any] | None,
    paths: Sequence[tuple],
    leaves: Sequence[Any],
    structure: Any,
    storable: Sequence[bool],
    is_leaf: IsLeaf,
    called: str = "where",
) -> Selection:
    """Runs `where` on the tree, with a tag in the place of every storable leaf.

    `called` is what the user knows it as.
    """
    if where is None:
        return EVERYTHING
    if not callable(where):
        raise TypeError(
            f"`{called}` must be a function of the tree, such as "
            f"`lambda m: m.layers[0]`, not a `{type(where).__name__}`."
        )
    tagged = [
        _Tag(path, place, called) if good else leaf
        for place, (path, leaf, good) in enumerate(zip(paths, leaves, storable))
    ]
    others = {id(leaf) for leaf, good in zip(leaves, storable) if not good}
    picked = where(jtu.tree_unflatten(structure, tagged))
    places: set[int] = set()
    wholes: list[tuple] = []
    stored = [path for path, good in zip(paths, storable) if good]
    _collect(picked, is_leaf, others, stored, places, wholes, called)
    if not places:
        raise ValueError(
            f"`{called}` selects no leaf that is stored. "
            + (
                "It returned None: the field has no value, or the lambda no result."
                if picked is None
                else f"Filtering inside `{called}` sees no arrays: pick nodes, and use "
                "`filter_spec` to filter."
            )
        )
    return Selection(places, wholes)


def _collect(
    node: Any,
    is_leaf: IsLeaf,
    others: set[int],
    stored: Sequence[tuple],
    places: set[int],
    wholes: list[tuple],
    called: str,
) -> None:
    if isinstance(node, _Tag):
        places.add(node._place)
        wholes.append(node._path)
        return
    below, _ = jtu.tree_flatten_with_path(
        node,
        is_leaf=lambda x: (
            isinstance(x, (_Tag, *_iterables)) or (is_leaf is not None and is_leaf(x))
        ),
    )
    roots = set()
    count = 0
    for path, leaf in below:
        if isinstance(leaf, _Tag):
            places.add(leaf._place)
            count += 1
            cut = len(leaf._path) - len(path)
            roots.add(leaf._path[:cut] if leaf._path[cut:] == path else None)
        elif id(leaf) not in others:
            advice = " Make a list of it." if isinstance(leaf, _iterables) else ""
            raise ValueError(
                f"`{called}` returned {_shown(leaf)}, which is not a node of the tree "
                f"but a static field, or a value made in the lambda.{advice}"
            )
    # A node of the tree has all of its leaves below one key path; other containers, as
    # a slice of a list, are looked into.
    root = roots.pop() if len(roots) == 1 else None
    if root is not None and count == sum(p[: len(root)] == root for p in stored):
        wholes.append(root)
    elif count:
        method = getattr(node, "__func__", None)
        if isinstance(node, eqx.Module) and method is not None:
            # Its only child is what it is a method of: all of that would be selected.
            raise ValueError(
                f"`{called}` returned the method `{method.__name__}` without calling "
                "it."
            )
        for child in jtu.tree_leaves(node, is_leaf=lambda x: x is not node):
            _collect(child, is_leaf, others, stored, places, wholes, called)


def _shown(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 60 else f"a `{type(x).__name__}`"
