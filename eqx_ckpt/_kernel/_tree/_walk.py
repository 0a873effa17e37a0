"""The walk of a tree: its leaves, their names and keys, and all that `_recorder.py`
makes a record of.

It goes down a layer at a time: all nodes and leaves of one depth. Nodes of one type in
a layer are opened together. Nothing calls itself by the depth of a tree, so that none
is too deep.

A *place* is where a node or leaf is in its layer. Leaves are found layer by layer, and
given in JAX's order, which goes down each branch first.
"""

import functools as ft
import itertools as it
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._format import _names
from .._format._record import Kind
from . import _opening
from ._filters import IsLeaf
from ._opening import BAD, Opener
from ._statics import Likeness, Statics, Values


T = TypeVar("T")
# Leaves of a walk that is kept, and results that are kept with it.
_MAX_LEAVES, _MAX_RESULTS = 2**16, 16


class Group(NamedTuple):
    """Nodes of a layer that are of one type and kind.

    - `letters`: of the keys of their children, as in `Template.keys`.
    - `places`: of the nodes in the layer.
    - `start`, `by_node`: their children are in the next layer from `start` on: node
        after node; or, if not `by_node`, all first children, all second ones and so on.
    - `value_numbers`: for each name of `kind.data` a column with the number that each
        node's value has in `Walk.values`.
    - `kept`: the same columns of the values themselves. `_statics._UNKEPT` stands for
        one that has to be encoded again to be compared.
    """

    cls: type
    kind: Kind
    letters: str
    places: Sequence[int]
    start: int
    by_node: bool
    value_numbers: list[list[int]]
    kept: list[list[Any]]

    def rows(self, of: Sequence[T]) -> Iterable[Sequence[T]]:
        """The entries of the next layer for the children of each node."""
        width, count, start = len(self.kind.parts), len(self.places), self.start
        stop = start + width * count
        if width == 0:
            return [()] * count
        if self.by_node:
            return [of[at : at + width] for at in range(start, stop, width)]
        return zip(*(of[at : at + count] for at in range(start, stop, count)))

    def lay(self, texts: Sequence[str], ends: Sequence[str], into: list[str]) -> None:
        """Lays into the next layer the text of each child: that of its node, and its
        own end."""
        at, count, width = self.start, len(self.places), len(ends)
        if self.by_node:
            for text in texts:
                into[at : at + width] = [text + end for end in ends]
                at += width
            return
        for end in ends:
            into[at : at + count] = [text + end for text in texts]
            at += count


class Layer(NamedTuple):
    """All nodes and leaves of one depth: how many, the groups of the nodes, and the
    places of the leaves."""

    size: int
    groups: list[Group]
    leaves: list[int]


class TypeCheck(NamedTuple):
    """All that is compared of the nodes of one type in a layer, which `pick_nodes`
    takes out of it, and `opener` opens. `node_numbers`: for each of the groups, those
    of its nodes among the nodes of the type."""

    cls: type
    opener: Opener
    pick_nodes: Callable[[Any], Sequence[Any]]
    groups: list[Group]
    node_numbers: list[list[int]]


class LayerCheck(NamedTuple):
    """All that is compared of a layer: its size, and the nodes of each type.
    `pick_leaves` takes the leaves out of it."""

    size: int
    pick_leaves: Callable[[Any], Sequence[Any]]
    types: list[TypeCheck]


class NodeTexts(NamedTuple):
    """The names of nodes and leaves in each layer, and the letters of their keys."""

    names: list[list[str]]
    letters: list[list[str]]


class _Chosen:
    """The type of a node that `is_leaf` takes for a leaf."""


class Walk:
    """A tree that was walked: the name and the keys of each leaf, in JAX's order. Its
    leaves are not here: `walk_of` gives them.

    Of its nodes only types and static values are kept. So the walk of one tree stands
    for that of another one like it, of which `leaves_of_like` gives the leaves.
    """

    def __init__(self, above: str = ""):
        # The name of the tree.
        self.above = above
        self.values = Values()
        self.layers: list[Layer] = []
        # For each leaf in JAX's order its index in the order of the layers. Its place
        # in JAX's order is its *number*, here and elsewhere.
        self.order: list[int] = []
        # The results of `kept_result`, each with the objects that it keeps.
        self._made: dict[Any, tuple[object, Any]] = {}
        # What opens the nodes of each type; None for leaves.
        self._openers: dict[type, Opener | None] = {_Chosen: None}

    @property
    def is_kept(self) -> bool:
        """Whether it is small enough to be kept for a later tree."""
        return len(self.order) <= _MAX_LEAVES

    def descend(self, tree: PyTree, is_leaf: IsLeaf) -> list[Any]:
        """Opens all nodes of a tree. **Returns:** its leaves, in JAX's order."""
        found = self._open_layers(tree, is_leaf)
        self.order = self._find_order()
        return list(map(found.__getitem__, self.order))

    def _open_layers(self, tree: PyTree, is_leaf: IsLeaf) -> list[Any]:
        """Opens all nodes. **Returns:** the leaves, layer by layer."""
        statics = Statics(self.values)
        nodes, found = [tree], []
        # How many nodes and leaves there are.
        size = 0
        while nodes:
            types = list(map(type, nodes))
            if is_leaf is not None:
                goods = map(is_leaf, nodes)
                types = [_Chosen if good else cls for good, cls in zip(goods, types)]
            layer, below = self._open_layer(nodes, types, statics)
            self.layers.append(layer)
            found += _pick(layer.leaves, nodes)
            before, size = size, size + len(nodes)
            is_deep = len(self.layers) in (_SUSPECT_DEPTH, 8 * _SUSPECT_DEPTH)
            if is_deep or before <= _SUSPECT_SIZE < size:
                check_cycles(tree)
            nodes = below
        return found

    def _open_layer(
        self, nodes: Sequence[Any], types: Sequence[type], statics: Statics
    ) -> tuple[Layer, list[Any]]:
        """The layer of these nodes and leaves, and what is in the next one: the
        children of one group after those of another."""
        openers = self._openers
        groups: list[Group] = []
        leaves: list[int] = []
        below: list[Any] = []
        for cls, places in _opening.by_signature(types).items():
            if cls not in openers:
                openers[cls] = _opening.opener_of(cls, nodes[places[0]])
            opener = openers[cls]
            if opener is None:
                leaves += places
                continue
            for opened in opener(cls, _pick(places, nodes)):
                how = opened.kind.how
                columns = [statics.column(x, how, cls) for x in opened.data]
                group = Group(
                    cls=cls,
                    kind=opened.kind,
                    letters=opened.letters,
                    places=_pick(opened.numbers, places),
                    start=len(below),
                    by_node=opened.by_node,
                    value_numbers=[numbers for numbers, _ in columns],
                    kept=[kept for _, kept in columns],
                )
                groups.append(group)
                below += opened.children
        return Layer(len(types), groups, sorted(leaves)), below

    def _find_order(self) -> list[int]:
        """For each leaf in JAX's order its index in the order of the layers."""
        count = sum(len(layer.leaves) for layer in self.layers)
        # An int for a leaf, and for a node the sequence of those of its children.
        nested: Any = self.fold(range(count), Group.rows)
        rest, out = [nested], []
        while rest:
            x = rest.pop()
            if type(x) is int:
                out.append(x)
            else:
                rest += reversed(x)
        return out

    def fold(
        self,
        leaves: Sequence[T],
        join: Callable[[Group, list[T]], Iterable[T]],
    ) -> T:
        """Computes a value for the tree, from the lowest layer up. `leaves` has the
        value of each leaf, layer by layer. `join` gives those of the nodes of a group,
        from the list of all values in the next layer."""
        below: list[Any] = []
        stop = len(leaves)
        for layer in reversed(self.layers):
            own: list[Any] = [None] * layer.size
            start = stop - len(layer.leaves)
            for place, x in zip(layer.leaves, leaves[start:stop]):
                own[place] = x
            for group in layer.groups:
                for place, x in zip(group.places, join(group, below)):
                    own[place] = x
            below, stop = own, start
        return below[0]

    # ---- Another tree.

    @ft.cached_property
    def _checks(self) -> list[LayerCheck]:
        out = []
        for layer in self.layers:
            types = []
            of_types = [group.cls for group in layer.groups]
            for cls, own in _opening.by_signature(of_types).items():
                groups = [layer.groups[i] for i in own]
                places = sorted(it.chain.from_iterable(x.places for x in groups))
                number_of = {place: i for i, place in enumerate(places)}
                numbers = [[number_of[x] for x in group.places] for group in groups]
                opener = self._openers[cls]
                assert opener is not None
                types.append(TypeCheck(cls, opener, _picker(places), groups, numbers))
            out.append(LayerCheck(layer.size, _picker(layer.leaves), types))
        return out

    @ft.cached_property
    def _sort(self) -> Callable[[Any], Sequence[Any]]:
        """Sorts leaves that are in the order of the layers."""
        return _picker(self.order)

    def leaves_of_like(self, tree: PyTree) -> list[Any] | None:
        """The leaves of a tree, if its nodes are of the same types and have the same
        static values: so that all else that the walk says is true of it. Leaves may be
        of other types, as those of a skeleton."""
        likeness = Likeness(self.values)
        nodes: Any = [tree]
        leaves: list[Any] = []
        for size, pick_leaves, types in self._checks:
            if len(nodes) != size:
                return None
            leaves += pick_leaves(nodes)
            below: list[Any] = []
            for check in types:
                children = _children_of_like(check, check.pick_nodes(nodes), likeness)
                if children is None:
                    return None
                below += children
            nodes = below
        # One leaf of each type tells whether JAX takes that type for a leaf.
        examples = dict(zip(map(type, leaves), leaves))
        if not jtu.all_leaves(examples.values()):
            return None
        return list(self._sort(leaves))

    def kept_result(self, key: object, keeps: object, make: Callable[[], T]) -> T:
        """The result of `make`, which all trees that have this walk share: it is called
        again only if there were many other keys since. `keeps`: objects whose `id` is
        in the key, which are kept so that no others get it. So the facts of a record
        have `id(record)` in their key, and keep the record."""
        found = self._made.get(key)
        if found is None:
            found = keeps, make()
            if len(self._made) >= _MAX_RESULTS:
                self._made.clear()
            self._made[key] = found
        return found[1]

    # ---- Names.

    def named(self, above: str) -> "Walk":
        """The same, if the name of the tree is `above`."""
        if above == self.above:
            return self

        def make() -> Walk:
            out = Walk(above)
            out.layers, out.values, out.order = self.layers, self.values, self.order
            return out

        return self.kept_result(("named", above), None, make)

    @ft.cached_property
    def nodes(self) -> NodeTexts:
        """The names and letters of all nodes and leaves. Below the largest depth they
        have the names of the nodes above."""
        names, letters = [self.above], [""]
        out = NodeTexts([], [])
        sizes = [layer.size for layer in self.layers[1:]] + [0]
        for depth, (layer, size_below) in enumerate(zip(self.layers, sizes)):
            out.names.append(names)
            out.letters.append(letters)
            names_below, letters_below = [""] * size_below, [""] * size_below
            for group in layer.groups:
                parts, ends = group.kind.parts, group.letters
                own, keys = _pick(group.places, names), _pick(group.places, letters)
                if depth > _names.MAX_DEPTH:
                    parts = ends = [""] * len(parts)
                elif own[0] or depth:
                    parts = ["." + part for part in parts]
                else:  # Some first parts are reserved.
                    parts = [_names.child("", part) for part in parts]
                group.lay(own, parts, names_below)
                group.lay(keys, ends, letters_below)
            names, letters = names_below, letters_below
        return out

    def of_leaves(self, columns: Sequence[Sequence[T]]) -> list[T]:
        """For each leaf the entry that it has in the column of its layer."""
        found: list[T] = []
        for layer, column in zip(self.layers, columns):
            found += _pick(layer.leaves, column)
        return list(map(found.__getitem__, self.order))

    @ft.cached_property
    def names(self) -> list[str]:
        """The dotted name of each leaf, which `check_names` may refuse."""
        found = self.of_leaves(self.nodes.names)
        return [x or _names.ROOT for x in found] if "" in found else found

    @ft.cached_property
    def letters(self) -> list[str]:
        """The kinds of the keys of each leaf, in a letter for each: see
        `Template.keys`."""
        return self.of_leaves(self.nodes.letters)

    @ft.cached_property
    def _places(self) -> list[tuple[int, int]]:
        """The depth of each leaf, and its place in the layer there."""
        columns = [
            [(depth, place) for place in range(layer.size)]
            for depth, layer in enumerate(self.layers)
        ]
        return self.of_leaves(columns)

    @ft.cached_property
    def _are_names_good(self) -> bool:
        longest = max(map(len, self.names), default=0)
        is_flat = len(self.layers) <= _names.MAX_DEPTH and longest <= _names.MAX_NAME
        return is_flat and BAD not in "".join(self.names)

    def check_names(self, numbers: Iterable[int]) -> None:
        """**Raises:** `ValueError` for a leaf of these that cannot have a name."""
        if self._are_names_good:
            return
        for number in numbers:
            name = self.names[number]
            if BAD in name:
                text = next(x for x in name.split(".") if x.startswith(BAD))
                raise ValueError(text[1:].replace(BAD, "."))
            _names.check_size(name, self._places[number][0])

    @ft.cached_property
    def are_names_apart(self) -> bool:
        """Whether no two nodes or leaves have one name: no two children of a node have
        one part."""
        return all(len({*kind.parts}) == len(kind.parts) for kind in self.kinds)

    def owner(self, number: int) -> type | None:
        """The class of the Module or the dataclass that a leaf is a field of."""
        depth, place = self._places[number]
        for group in self.layers[depth - 1].groups if depth else ():
            count = len(group.places) * len(group.kind.parts)
            if group.start <= place < group.start + count:
                has_fields = group.kind.how in ("module", "dataclass", "index")
                return group.cls if has_fields else None
        return None

    @ft.cached_property
    def kinds(self) -> set[Kind]:
        """The kinds of its nodes."""
        return {group.kind for layer in self.layers for group in layer.groups}

    @ft.cached_property
    def types(self) -> set[type]:
        """The types of its nodes."""
        return {group.cls for layer in self.layers for group in layer.groups}


def walk_of(tree: PyTree, is_leaf: IsLeaf = None) -> tuple[Walk, list[Any]]:
    """A walk of a tree, and its leaves in JAX's order."""
    walk = Walk()
    return walk, walk.descend(tree, is_leaf)


# ---- Parts of a layer.


def _pick(places: Sequence[int], of: Sequence[T]) -> Sequence[T]:
    """The entries at these places, in their order."""
    return _picker(places)(of)


def _picker(places: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """A function that does what `_pick` does."""
    if len(places) > 1:
        first, last = places[0], places[-1]
        if list(places) == [*range(first, last + 1)]:
            return operator.itemgetter(slice(first, last + 1))
        return operator.itemgetter(*places)
    start = places[0] if places else 0
    return operator.itemgetter(slice(start, start + len(places)))


# ---- A tree that may be like another.


def _children_of_like(
    check: TypeCheck, nodes: Sequence[Any], likeness: Likeness
) -> list[Any] | None:
    """The children of all nodes of a type in a layer, if their kinds and static values
    are those of the walk."""
    if {*map(type, nodes)} != {check.cls}:
        return None
    found = check.opener(check.cls, nodes)
    if len(found) != len(check.groups):
        return None
    below: list[Any] = []
    for one, group, numbers in zip(found, check.groups, check.node_numbers):
        ours = group.kind, group.letters, group.by_node, numbers
        if (one.kind, one.letters, one.by_node, one.numbers) != ours:
            return None
        columns, how = zip(one.data, group.kept, group.value_numbers), one.kind.how
        if not all(likeness.is_same(*x, how, check.cls) for x in columns):
            return None
        below += one.children
    return below


# ---- A node inside of itself.

# Where a tree is looked at for one.
_SUSPECT_DEPTH, _SUSPECT_SIZE = 1000, 2**20


def check_cycles(tree: PyTree) -> None:
    """**Raises:** `ValueError` for a node that is inside of itself. It looks at each
    object once, and so ends where the walk would not."""
    done: set[int] = set()
    above: set[int] = set()
    alive: list[Any] = []  # Some nodes make their children when they are opened.
    stack: list[tuple[Any, Iterator[Any]]] = []

    def enter(x: object) -> None:
        if id(x) in above:
            raise ValueError("The tree has a node that is inside of itself.")
        if id(x) in done or (found := _opening.open_one_level(x)) is None:
            return
        children = list(found[0])
        alive.append((x, children))
        above.add(id(x))
        stack.append((x, iter(children)))

    enter(tree)
    end = object()
    while stack:
        x, rest = stack[-1]
        child = next(rest, end)
        if child is not end:
            enter(child)
        else:
            stack.pop()
            above.discard(id(x))
            done.add(id(x))


# ---- The one cache of walks.

# The last few, the last one first. Threads put another list into its place.
_last: list[Walk] = []
_MAX_WALKS = 4


def find_walk(tree: PyTree) -> tuple[Walk, list[Any]]:
    """The walk of a tree, or of an earlier one like it, and the leaves of the tree."""
    global _last
    for known in _last:
        leaves = known.leaves_of_like(tree)
        if leaves is not None:
            if _last[0] is not known:
                _last = [known, *(x for x in _last if x is not known)][:_MAX_WALKS]
            return known, leaves
    walk, leaves = walk_of(tree)
    if walk.is_kept:
        _last = [walk, *_last][:_MAX_WALKS]
    return walk, leaves
