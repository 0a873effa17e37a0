"""`edited`: the tree of a checkpoint with other names, or without some leaves."""

import dataclasses
import functools as ft
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from .._kernel._format import _names, _state_labels
from .._kernel._format._names import NodeKey
from .._kernel._format._state_labels import Label
from .._kernel._load import _checkpoint, _nodes
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._tree import _folding, _node
from .._kernel._tree._node import Body, Node, Spec
from .._rename import _rename, _renamed
from .._rename._rename import Rename
from .._rename._renamed import Moves


def edited(ckpt: Checkpoint, names: Sequence[str], how: Rename) -> Any:
    """The tree of the leaves of these names, under those that a rename gives them.

    A node goes where a load with that rename finds it, with its static fields, the
    kinds of its keys and the attributes of its children; Modules without leaves stay
    beside theirs. Entries of States stay with what they belong to. Nothing is read.

    **Raises:** `ValueError` for two leaves of one name, a leaf that would be a node as
    well, and what is no name.
    """
    new = _rename.renamed_names(how, names)
    if list(names) == new == list(ckpt):
        return ckpt.tree
    top: dict[str, Any] = {}
    for old, name in zip(names, new):
        _put(top, name, old)
    moves = _renamed.Moves(how, [*names], new, set())
    return _build(_Edit(ckpt, moves), top, "")


@dataclasses.dataclass(frozen=True)
class _Edit:
    """A checkpoint, and the moves of its leaves."""

    ckpt: Checkpoint
    moves: Moves

    @ft.cached_property
    def _of_states(self) -> tuple[Sequence[str], Mapping[int, Label], dict[int, Label]]:
        leaves = _checkpoint.source_of(self.ckpt).index.leaves
        moved = _renamed.moved_labels(leaves.labels, self.moves)
        return leaves.names, leaves.labels, moved

    @ft.cached_property
    def labels(self) -> dict[str, Label]:
        """The moved labels of leaves of entries of States, by their old names."""
        names, _, moved = self._of_states
        return {names[leaf_index]: label for leaf_index, label in moved.items()}

    @ft.cached_property
    def _moved_texts(self) -> dict[str | None, str | None]:
        """The moved labels by those that they were, as texts."""
        _, labels, moved = self._of_states
        text = _state_labels.label_text
        return {text(label): text(moved[i]) for i, label in labels.items()}

    def indices(self, spec: Spec) -> tuple[tuple[str, str], ...]:
        """The StateIndices of a node, with the moved labels of their entries."""
        moved = self._moved_texts
        return tuple((part, moved[label] or "") for part, label in spec.indices)

    @ft.cached_property
    def full(self) -> Set[str]:
        """The names of the checkpoint's leaves, and of its nodes that have some."""
        return _names.by_prefix([*self.ckpt]).keys()

    @ft.cached_property
    def origins(self) -> dict[str, str]:
        """The name that each node had in the checkpoint, unless it is new. If several
        become one, it is the one that was there, or else the first."""
        out: dict[str, str] = {}
        for node in self.moves.below:
            if node in self.ckpt or not isinstance(self.ckpt.tree, Node):
                continue
            for new in self.moves.node(node):
                if new == node:
                    out[new] = node
                out.setdefault(new, node)
        return out


def _put(top: dict[str, Any], name: str, old: str) -> None:
    """Adds a leaf to nested dicts, under the parts of its new `name`. Its value there
    is `old`, the name that it has in the checkpoint."""
    *parents, last = name.split(".")
    node: Any = top
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node
    there = node.get(last) if isinstance(node, dict) else {}
    if isinstance(there, dict):
        raise ValueError(f"`{name}` would be a leaf, and a node as well.")
    if there is not None:
        raise ValueError(f"`{there}` and `{old}` would both be `{name}`.")
    node[last] = old


def _build(edit: _Edit, new: dict[str, Any] | str, name: str) -> Any:
    """The leaf or the node of this new `name`. `new`: what `_put` has made at it."""
    tree = edit.ckpt.tree
    if isinstance(new, str):
        return edit.ckpt[new]
    was = edit.origins.get(name)
    spec = Spec((), "", ())
    if was is not None:
        spec = _node.body_of(_nodes.node_at(tree, was)).spec
    # The keys that its children had.
    old_keys = dict(zip(_node.components(spec), spec.keys))
    bare = [
        part
        for part in old_keys
        if part not in new and _is_bare(edit, _below(was, part))
    ]
    parts = [*new, *bare]
    kind = "k" if old_keys or not all(map(_folding.is_number, new)) else "s"
    keys = {part: old_keys.get(part) or _key(kind, part, name) for part in parts}
    if all(key.kind in "sf" for key in keys.values()):
        parts.sort(key=int)
    children = [
        _build(edit, new[part], _below(name, part))
        if part in new
        else _moved(edit, _nodes.node_at(tree, _below(was, part)))
        for part in parts
    ]
    labels = ()
    if spec.labels:
        labels = _entry_labels(edit.labels, [new.get(part, {}) for part in parts])
    attributes = ()
    if spec.attributes:
        attribute_of = dict(zip(old_keys, spec.attributes))
        attributes = tuple(map(attribute_of.get, parts))
    in_order = tuple(keys[part] for part in parts)
    own = labels, attributes, 0, edit.indices(spec)
    return Node(Body(Spec(in_order, spec.fields, *own), children))


def _moved(edit: _Edit, node: Node) -> Node:
    """A node without leaves, whose StateIndices have the moved labels too."""
    body = _node.body_of(node)
    spec = dataclasses.replace(body.spec, indices=edit.indices(body.spec))
    return Node(Body(spec, [_moved(edit, child) for child in body.children]))


def _entry_labels(
    labels: Mapping[str, Label], entries: Sequence[dict[str, Any] | str]
) -> tuple[str, ...]:
    """The label of each entry of a State, which are as `_put` has made them; none if
    one has none, or two have one."""
    texts: list[str | None] = []
    for entry in entries:
        of = {labels.get(old, Label()) for old in _leaves(entry)}
        texts.append(_state_labels.label_text(of.pop()) if len(of) == 1 else None)
    known = tuple(text for text in texts if text is not None)
    return known if len({*known}) == len(texts) else ()


def _leaves(new: dict[str, Any] | str) -> Iterator[str]:
    if isinstance(new, str):
        yield new
    else:
        for child in new.values():
            yield from _leaves(child)


def _below(node: str | None, part: str) -> str:
    return _names.joined(node or "", part)


def _is_bare(edit: _Edit, name: str) -> bool:
    """Whether a child of a node has no leaves, only static fields."""
    if name in edit.full:
        return False
    return isinstance(_nodes.node_at(edit.ckpt.tree, name), Node)


def _key(kind: str, part: str, node: str) -> NodeKey:
    try:
        return NodeKey(kind, _names.key_of(kind, part, not node))
    except ValueError as e:
        raise ValueError(f"`{_below(node, part)}` is no name of a leaf: {e}.") from e
