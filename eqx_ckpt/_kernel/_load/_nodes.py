"""The checkpoint's own tree: nodes that are in an index."""

import contextlib
import functools as ft
from collections.abc import Iterable
from typing import Any

from jaxtyping import PyTree

from .._errors import DamagedError
from .._format import _names, _state_labels
from .._format._names import NodeKey
from .._format._record import Kind
from .._format._state_labels import Label
from .._runtime import _handlers
from .._storage._backend import Backend
from .._tree import _node
from .._tree._node import Body, Node, Spec
from . import _lazy, _open
from ._lazy import LazyArray
from ._source import Source


# The most gaps that the sequences of one tree have together. A gap is where a function
# stood, or nothing was stored.
_MAX_GAPS = 2**22


class StoredBody(Body):
    """A node that is in the index. What is below it is made as it is asked for.

    `members` are the indices of the leaves below it, and the names of the nodes there
    that have static values. `gaps_left` has one number, which all nodes of the tree
    share: how many more gaps their sequences may have, as names are data from a file.
    `above` is the node that it is in, and its component there: the part that it adds to
    names.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        members: list[int | str],
        gaps_left: list[int],
        above: "tuple[StoredBody, str] | None" = None,
    ):
        self.source = source
        self._above = above
        self.name = name
        self.members = members
        self._gaps_left = gaps_left
        self._depth = name.count(".") + 1 if name else 0
        self._made: dict[str, Any] = {}
        self._keys: dict[str, NodeKey] = {}
        self._is_checked = False

    def called(self) -> str:
        return f"`{self.name}`" if self.name else "The checkpoint"

    @ft.cached_property
    @_handlers.pass_through
    def fields(self) -> str:
        return self.source.index.leaves.fields_text(self.name)

    @ft.cached_property
    def _groups(self) -> dict[str, list[int | str]]:
        """The members at and below each child, by its component."""
        names = self.source.index.leaves.names
        start = len(self.name) + 1 if self.name else 0
        out: dict[str, list[int | str]] = {}
        for member in self.members:
            name = names[member] if isinstance(member, int) else member
            if name == self.name:
                if isinstance(member, int):
                    raise DamagedError(f"The index has a leaf and a node at {name!r}.")
                continue
            end = name.find(".", start)
            component = name[start:] if end < 0 else name[start:end]
            out.setdefault(component, []).append(member)
        return out

    def components(self) -> list[str]:
        return list(self._groups)

    @_handlers.pass_through
    def child_at(self, component: str) -> Any:
        return self._child_at(component)

    def _child_at(self, component: str) -> Any:
        if component not in self._groups and not self.name:
            # A first component that is reserved is escaped in a name.
            component = _names.child("", component)
        if component not in self._made:
            child = self._make(component, self._groups[component])
            self._made.setdefault(component, child)
        return self._made[component]

    def _make(self, component: str, members: list[int | str]) -> Any:
        self._key(component)  # It refuses a component that is never saved.
        leaves = self.source.index.leaves
        name = _names.joined(self.name, component)
        leaf_indices = _leaf_indices(members)
        # A leaf of this very name is the only one. If it is not, either the check below
        # or `_groups` of the child raises.
        if not leaf_indices or leaves.names[leaf_indices[0]] != name:
            if self._depth + 1 >= _names.MAX_DEPTH:
                # Functions that walk a tree call themselves, and JAX does not recover
                # if that goes too deep.
                most = f"at most {_names.MAX_DEPTH} can be stored"
                raise DamagedError(f"The index has more nodes in each other: {most}.")
            above = self, component
            return Node(StoredBody(self.source, name, members, self._gaps_left, above))
        if len(leaf_indices) > 1:
            raise DamagedError(f"The index has a leaf and a node at {name!r}.")
        # This node and those above it have each checked one component (`_key`).
        keys = leaves.templates[leaves.template_of[leaf_indices[0]]].keys
        is_checked = len(keys) == self._depth + 1 and len(name) <= _names.MAX_NAME
        record = leaves.record(leaf_indices[0], is_name_checked=is_checked)
        return _lazy.lazy_of(self.source, record)

    def _letters(self, members: list[int | str]) -> set[str]:
        """The letters of the keys (see `Template.keys`) by which the node leads to the
        leaves among these members."""
        leaves, depth, out = self.source.index.leaves, self._depth, set[str]()
        for number in {leaves.template_of[x] for x in _leaf_indices(members)}:
            keys = leaves.templates[number].keys
            if not isinstance(keys, str):
                raise DamagedError("The index has a malformed template.")
            out.add(keys[depth : depth + 1])
        return out

    def _key(self, component: str) -> NodeKey:
        if component not in self._keys:
            self._keys[component] = self._read_key(component)
        return self._keys[component]

    def _read_key(self, component: str) -> NodeKey:
        letters = self._letters(self._groups[component])
        if len(letters) > 1:
            name = _names.joined(self.name, component)
            raise DamagedError(f"The index has keys of two kinds at {name!r}.")
        if not letters:
            return self._likely_key(component)
        letter = letters.pop()
        try:
            return NodeKey(letter, _names.key_of(letter, component, self._depth == 0))
        except ValueError as e:
            raise DamagedError(f"The index has a name that is never saved: {e}.") from e

    def _likely_key(self, component: str) -> NodeKey:
        """A likely key of a child without leaves. The index does not say of which kind
        it is, so it gets the kind of those beside it, if it can have that."""
        # First the letters of the children beside it; then the first of these that can
        # have this component: s for an index, i for another integer, o for an odd key,
        # a for all others. (f and k look like s and a.)
        for letter in [*filter(self._all_letters.__contains__, "sfiak"), *"sioa"]:
            with contextlib.suppress(ValueError):
                key = _names.key_of(letter, component, self._depth == 0)
                return NodeKey(letter, key)
        raise DamagedError("The index has static values of what is never saved.")

    @ft.cached_property
    def _all_letters(self) -> set[str]:
        return self._letters(self.members)

    @ft.cached_property
    @_handlers.pass_through
    def _keyed(self) -> list[tuple[NodeKey, str]]:
        """The key and the component of each child, in their order. The gaps of a
        sequence are taken off `gaps_left`.

        **Raises:** `DamagedError` if no more are left."""
        keyed = [(self._key(component), component) for component in self._groups]
        if all(letter in "sf" for (letter, _), _ in keyed):
            keyed.sort(key=lambda both: both[0].key)
            if keyed:
                size = max(self._length, int(keyed[-1][0].key) + 1)
                self._gaps_left[0] -= size - len(keyed)
        if self._gaps_left[0] < 0:
            raise DamagedError("The index has sequences that are mostly gaps.")
        return keyed

    @ft.cached_property
    def spec(self) -> Spec:
        keys = tuple(key for key, _ in self._keyed)
        indices = self.source.index.leaves.state_indices.get(self.name, [])
        return Spec(
            keys,
            self.fields,
            labels=self._labels,
            attributes=self._attributes,
            length=self._length,
            indices=tuple(indices),
        )

    @ft.cached_property
    def _places(self) -> dict[str, int]:
        return {component: i for i, component in enumerate(self._groups)}

    @ft.cached_property
    def _row(self) -> int | None:
        """The row of the node in `Leaves.labelled`, if there is one: the record of the
        tree, or one of nothing but attributes."""
        record = self.source.index.leaves.labelled
        if record is None:
            return None
        if self._above is None:
            return len(record.rows) - 1
        body, component = self._above
        if body._row is None:
            return None
        children = record.rows[body._row].children
        if record.has_unknown_parts(body._row) and len(children) == len(body._groups):
            # The names of leaves tell them, in order.
            return children[body._places[component]]
        return record.child_at(body._row, component)

    @property
    def _kind(self) -> Kind:
        """The kind of the node in that record; else a plain `node`."""
        record, row = self.source.index.leaves.labelled, self._row
        return Kind("node") if record is None or row is None else record.kind(row)

    @ft.cached_property
    def _length(self) -> int:
        """The number of children of a sequence, with those that are not stored."""
        names = *self._kind.parts, *self._kind.data
        numbers = map(_names.number_of, names)
        return 1 + max((x for x in numbers if x is not None), default=-1)

    @property
    def _attributes(self) -> tuple[str | None, ...]:
        """The attribute that each child without a key is; else none."""
        kind = self._kind
        if not kind.attributes:
            return ()
        known = dict(zip(kind.parts, kind.attributes))
        found = tuple(known.get(component) for _, component in self._keyed)
        return found if any(found) else ()

    @ft.cached_property
    def _labels(self) -> tuple[str, ...]:
        """The labels of the entries of an eqx.nn.State, which all differ; else none."""
        leaves = self.source.index.leaves
        known = leaves.labels
        if not known or any(letter not in "sf" for (letter, _), _ in self._keyed):
            return ()
        # Without a record, a node whose children have labels is a State, unless it is
        # in one: all leaves in an entry have the label of that. The outermost node is
        # asked first, so that none asks many others.
        outer, above = list[StoredBody](), self._above
        while above is not None:
            outer.append(above[0])
            above = above[0]._above
        is_in_state = any(body._labels for body in reversed(outer))
        is_state = not is_in_state if leaves.tree is None else self._kind.how == "state"
        if not is_state:
            return ()
        labels = []
        for _, component in self._keyed:
            leaf_indices = _leaf_indices(self._groups[component])
            found = {known.get(leaf_index, Label()) for leaf_index in leaf_indices}
            text = _state_labels.label_text(found.pop()) if len(found) == 1 else None
            if text is None:
                return ()
            labels.append(text)
        return tuple(labels) if len({*labels}) == len(labels) else ()

    @ft.cached_property
    @_handlers.pass_through
    def children(self) -> list[Any]:
        return [self._child_at(component) for _, component in self._keyed]

    def check_below(self) -> None:
        if self._is_checked:
            return
        bodies: list[StoredBody] = [self]
        for body in bodies:  # To make the children of a node is to check them.
            nodes = [x for x in body.children if isinstance(x, Node)]
            bodies += [
                x for x in map(_node.body_of, nodes) if isinstance(x, StoredBody)
            ]
        for body in bodies:
            body._is_checked = True

    def reduce(self) -> tuple[Any, ...]:
        return reopen_node, (self.source.root, self.source.index.save, self.name)


def _leaf_indices(members: Iterable[int | str]) -> list[int]:
    """Those of the `members` of a node that are leaves."""
    return [member for member in members if isinstance(member, int)]


def node_at(tree: PyTree, name: str) -> Any:
    """The node of a name, or the leaf, in a checkpoint's own tree."""
    for component in name.split(".") if name else ():
        tree = _node.body_of(tree).child_at(component)
    return tree


def reopen_node(root: Backend, save: str, name: str) -> Any:
    return node_at(tree_of(_open.reopen(root, save)), name)


def tree_of(source: Source) -> Any:
    """The checkpoint's own tree: its root node, or its only leaf."""
    leaves = source.index.leaves
    if leaves.names == [_names.ROOT]:
        return _lazy.lazy_of(source, leaves.record(0))
    for name in leaves.node_names:
        if len(name) > _names.MAX_NAME or name.count(".") >= _names.MAX_DEPTH:
            raise DamagedError("The index has static values of what is never saved.")
    members = [*range(len(leaves.names)), *leaves.node_names]
    return Node(StoredBody(source, "", members, [_MAX_GAPS]))


def stored_place(x: object) -> tuple[Source, str] | None:
    """Where a node or a lazy leaf of a checkpoint's own tree is: its name there, ""
    for all of it. None for any other value, and for nodes that have been edited."""
    if isinstance(x, Node):
        body = _node.body_of(x)
        return (body.source, body.name) if isinstance(body, StoredBody) else None
    if isinstance(x, LazyArray) and (leaf := _lazy.stored_leaf(x)) is not None:
        return leaf.source, "" if x.name == _names.ROOT else x.name
    return None
