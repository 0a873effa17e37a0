"""`edited`: the tree of a checkpoint with other names, or without some leaves."""

import re
from collections.abc import Mapping, Set
from typing import Any

from .._kernel._format import _names
from .._kernel._format._names import NodeKey
from .._kernel._load import _nodes
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._tree import _node
from .._kernel._tree._node import Body, Node, Spec


def edited(ckpt: Checkpoint, names: Mapping[str, str]) -> Any:
    """The tree of the leaves in `names`, which maps those they have to new ones.

    A node whose leaves have only moved with it keeps its static fields, the kinds of
    its keys, its labels and the attributes of its children; Modules without leaves stay
    beside theirs. Nothing is read.

    **Raises:** `ValueError` for two leaves of one name, a leaf that would be a node as
    well, and what is no name.
    """
    if len(names) == len(ckpt) and all(old == new for old, new in names.items()):
        return ckpt.tree
    top: dict[str, Any] = {}
    for old, new in names.items():
        _put(top, new, old)
    return _build(ckpt, _names.by_prefix(list(ckpt)).keys(), top, "")


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


def _build(
    ckpt: Checkpoint, full: Set[str], new: dict[str, Any] | str, name: str
) -> Any:
    """The leaf or the node of this new `name`. `new`: what `_put` has made at it.
    `full`: the names of the checkpoint's leaves, and of its nodes that have some."""
    if isinstance(new, str):
        return ckpt[new]
    was = _origin(new, name)
    spec = Spec((), "", ())
    if was is not None:
        spec = _node.body_of(_nodes.node_at(ckpt.tree, was)).spec()
    # The keys that its children had.
    old_keys = dict(zip(_node.components(spec), spec.keys))
    bare = [
        part
        for part in old_keys
        if part not in new and _is_bare(ckpt, full, _below(was, part))
    ]
    parts = [*new, *bare]
    kind = "k" if old_keys or not all(map(_number.fullmatch, new)) else "s"
    keys = {part: old_keys.get(part) or _key(kind, part, name) for part in parts}
    if all(key.kind in "sf" for key in keys.values()):
        parts.sort(key=int)
    labels = ()
    if spec.labels and all(part in old_keys for part in parts):
        label_of = dict(zip(old_keys, spec.labels))
        labels = tuple(label_of[part] for part in parts)
    children = [
        _build(ckpt, full, new[part], _below(name, part))
        if part in new
        else _nodes.node_at(ckpt.tree, _below(was, part))
        for part in parts
    ]
    attributes = ()
    if spec.attributes:
        attribute_of = dict(zip(old_keys, spec.attributes))
        attributes = tuple(map(attribute_of.get, parts))
    in_order = tuple(keys[part] for part in parts)
    return Node(Body(Spec(in_order, spec.fields, labels, attributes), children))


_number = re.compile(r"0|[1-9][0-9]*")


def _below(node: str | None, part: str) -> str:
    return _names.joined(node or "", part)


def _is_bare(ckpt: Checkpoint, full: Set[str], name: str) -> bool:
    """Whether a child of a node has no leaves, only static fields."""
    if name in full:
        return False
    return isinstance(_nodes.node_at(ckpt.tree, name), Node)


def _origin(node: dict[str, Any], name: str) -> str | None:
    """The name that a node had in the checkpoint, as its first leaf tells; None if it
    is new."""
    parts, leaf = [], node
    while isinstance(leaf, dict):
        part, leaf = next(iter(leaf.items()))
        parts.append(part)
    below = ".".join(parts)
    if _names.is_under(leaf, name):
        return name
    if leaf == below:
        return ""
    is_moved = leaf.endswith(f".{below}")
    return leaf[: -len(below) - 1] if is_moved else None


def _key(kind: str, part: str, node: str) -> NodeKey:
    try:
        return NodeKey(kind, _names.key_of(kind, part, not node))
    except ValueError as e:
        raise ValueError(f"`{_below(node, part)}` is no name of a leaf: {e}.") from e
