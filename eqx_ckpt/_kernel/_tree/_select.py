"""The leaves and nodes of a tree that a `where` picks."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._format import _names
from . import _filters, _folding
from ._filters import IsLeaf
from ._flatten import Flat


class _Tag:
    """Stands for a chosen leaf while a `where` runs, and is of no other use."""

    __slots__ = ("_path", "_number", "_tag_number", "_tagged")

    def __init__(self, path: tuple, number: int, tag_number: int, tagged: "Tagged"):
        self._path = path
        self._number = number
        self._tag_number = tag_number  # Among the tags of the tree.
        self._tagged = tagged

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._tagged.refusal = TypeError(
            f"`{self._tagged.called}` uses the value of the leaf "
            f"`{_names.name_of(self._path).name}`. It may only pick nodes: use static "
            "fields, indices and attributes to choose."
        )
        raise self._tagged.refusal

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"`{self._tagged.called}` takes `.{name}` of the leaf "
            f"`{_names.name_of(self._path).name}`, and leaves have no values and no "
            "attributes there. It may only pick nodes."
        )

    def __repr__(self) -> str:
        return f"<leaf {_names.name_of(self._path).name}>"

    __hash__ = object.__hash__


# What takes the value of an object.
OPERATORS = (
    "eq ne lt le gt ge bool len iter getitem contains int float complex index array "
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv "
    "mod rmod divmod rdivmod pow rpow neg pos abs round trunc floor ceil invert "
    "and rand or ror xor rxor lshift rlshift rshift rrshift"
).split()
for _operator in OPERATORS:
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


class Selection(NamedTuple):
    """The leaves and nodes that a `where` picks. `leaves` has the numbers of leaves
    (None: all of them). `whole_paths` has the key paths of all that it gives: nodes
    that are picked as a whole, also those without leaves, and leaves; of a leaf that is
    not among the chosen ones, those of each place at which its object stands.
    `nested` has the key paths of nodes in the containers that `where` gives them in."""

    leaves: set[int] | None
    whole_paths: list[tuple]
    nested: Any


def fields_said(error: Exception) -> str:
    """The fields of a node that lacks an attribute, in a sentence, if it has some."""
    node = error.obj if isinstance(error, AttributeError) else None
    if not dataclasses.is_dataclass(node):
        return ""
    return f" It has {_folding.some([x.name for x in dataclasses.fields(node)])}."


def select(
    where: Callable[[PyTree], Any] | None,
    flat: Flat,
    chosen: Sequence[bool],
    is_leaf: IsLeaf,
) -> Selection:
    """Selects the leaves that a `where` picks of a tree, of those that are `chosen`: by
    a `filter_spec`, or as it is by default."""
    if where is None:
        return Selection(None, [()], ())
    return Tagged(flat, chosen, is_leaf).pick(where, "where")


class Tagged:
    """A tree with a tag in the place of every chosen leaf, to run a `where` on."""

    def __init__(self, flat: Flat, chosen: Sequence[bool], is_leaf: IsLeaf):
        self.called = "where"
        self.refusal: TypeError | None = None  # What a tag has raised.
        self._is_leaf = is_leaf
        # The key paths of leaves that are not chosen, by the `id` of the leaf: they
        # have no tag.
        self._others: dict[int, list[tuple]] = {}
        self._tag_paths: list[tuple] = []
        tagged = []
        rows = zip(flat.paths, flat.leaves, chosen)
        for number, (path, leaf, good) in enumerate(rows):
            if good:
                leaf = _Tag(path, number, len(self._tag_paths), self)
                self._tag_paths.append(path)
            else:
                self._others.setdefault(id(leaf), []).append(path)
            tagged.append(leaf)
        self._tree = jtu.tree_unflatten(flat.structure, tagged)

    def pick(self, where: Callable[[PyTree], Any], called: str) -> Selection:
        """Runs `where`, which the user knows as `called`."""
        if not callable(where):
            raise TypeError(
                f"`{called}` must be a function of the tree, such as "
                f"`lambda m: m.layers[0]`, not a `{type(where).__name__}`."
            )
        self.called = called
        try:
            picked = where(self._tree)
        except TypeError as e:
            if e is self.refusal:
                raise
            if not _filters.takes(where, 1):
                raise TypeError(
                    f"`{called}` must be a function of one argument, the tree: {e}."
                ) from None
            raise TypeError(
                f"`{called}` failed. It may only pick nodes: the leaves that it sees "
                "have no values, so that nothing can be computed of them."
            ) from e
        except (AttributeError, LookupError) as e:
            e.add_note(f"`{called}` fails on the tree.{fields_said(e)}")
            raise
        numbers, paths = set(), []
        nested = self._collect(picked, numbers, paths)
        if not numbers:
            raise ValueError(
                f"`{called}` selects no leaf that is stored. "
                + (
                    "It returned None: the field has no value, or the lambda no result."
                    if picked is None
                    else f"Filtering inside `{called}` sees no arrays: pick nodes, and "
                    "use `filter_spec` to filter."
                )
            )
        return Selection(numbers, paths, nested)

    def _collect(self, node: object, numbers: set[int], paths: list[tuple]) -> Any:
        """Adds the picked nodes. Returns the key path of a node; a list of these for
        the children of a container; or nothing."""
        if isinstance(node, _Tag):
            numbers.add(node._number)
            paths.append(node._path)
            return node._path
        own = self._is_leaf
        below, _ = jtu.tree_flatten_with_path(
            node,
            is_leaf=lambda x: (
                isinstance(x, (_Tag, *_iterables)) or (own is not None and own(x))
            ),
        )
        roots = set()
        tags = []
        for path, leaf in below:
            if isinstance(leaf, _Tag):
                numbers.add(leaf._number)
                tags.append(leaf._tag_number)
                cut = len(leaf._path) - len(path)
                roots.add(leaf._path[:cut] if leaf._path[cut:] == path else None)
            elif id(leaf) not in self._others:
                advice = " Make a list of it." if isinstance(leaf, _iterables) else ""
                raise ValueError(
                    f"`{self.called}` returned {shown(leaf)}, which is not a node of "
                    "the tree but a static field, or a value made in the lambda."
                    f"{advice}"
                )
        # A node of the tree has all of its leaves below one key path; other containers,
        # as a slice of a list, are looked into.
        root = roots.pop() if len(roots) == 1 else None
        if root is not None and self._is_all_below(root, tags):
            paths.append(root)
            return root
        if tags:
            method = getattr(node, "__func__", None)
            if isinstance(node, eqx.Module) and method is not None:
                # Its only child is what it is a method of, all of which it would pick.
                raise ValueError(
                    f"`{self.called}` returned the method `{method.__name__}` without "
                    "calling it."
                )
            children = jtu.tree_leaves(node, is_leaf=lambda x: x is not node)
            some = [self._collect(child, numbers, paths) for child in children]
            return [x for x in some if x is not None]
        for _, leaf in below:
            paths.extend(self._others[id(leaf)])
        if not below:
            paths.extend(self._paths_of_bare(node))
        return None

    def _paths_of_bare(self, node: object) -> list[tuple]:
        """The key path of a node without leaves; nothing for what is one object
        wherever it stands: None, and an empty tuple."""
        if node is None or (type(node) is tuple and not node):
            return []
        is_node = lambda x: x is node
        found, _ = jtu.tree_flatten_with_path(self._tree, is_leaf=is_node)
        return [path for path, x in found if x is node]

    def _is_all_below(self, root: tuple, tags: list[int]) -> bool:
        """Whether these tags, by their numbers, are all that are below `root`."""
        # Those below one node follow each other.
        first, last = min(tags), max(tags)
        paths = self._tag_paths
        around = paths[max(first - 1, 0) : first] + paths[last + 1 : last + 2]
        return len(tags) == last - first + 1 and not any(
            path[: len(root)] == root for path in around
        )


def shown(x: object) -> str:
    """A value for a message: its `repr`, if that is short."""
    text = repr(x)
    return text if len(text) < 60 else f"a `{type(x).__name__}`"
