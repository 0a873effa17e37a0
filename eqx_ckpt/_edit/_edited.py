"""`edited`: the tree of a checkpoint with other names, or without some leaves."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._format import _names
from .._load._checkpoint import Checkpoint
from .._tree import _node
from .._tree._node import Held, Node, Spec


class _Leaf(NamedTuple):
    """A leaf of the checkpoint, and its name there."""

    old: str
    value: Any


class _Old(NamedTuple):
    """The tree that was saved. `above`: the names of nodes that have leaves."""

    tree: Any
    above: frozenset[str]

    def node(self, name: str) -> Any:
        node = self.tree
        for part in name.split(".") if name else ():
            node = _node.body_of(node).find(part)
        return node


def edited(ckpt: Checkpoint, names: Mapping[str, str]) -> Any:
    """The tree of the leaves in `names`, which maps those they have to new ones.

    A node whose leaves have only moved with it keeps its static fields, the kinds of
    its keys and its labels; Modules without leaves stay beside theirs. Nothing is read.

    **Raises:** `ValueError` for two leaves of one name, a leaf that would be a node as
    well, and what is no name.
    """
    if len(names) == len(ckpt) and all(old == new for old, new in names.items()):
        return ckpt.tree
    top: dict[str, Any] = {}
    for old, new in names.items():
        _put(top, new, _Leaf(old, ckpt[old]))
    above: set[str] = {""}
    for name in ckpt:
        while (name := name.rpartition(".")[0]) not in above:
            above.add(name)
    return _made(_Old(ckpt.tree, frozenset(above)), top, "")


def _put(top: dict[str, Any], name: str, leaf: _Leaf) -> None:
    *parents, last = name.split(".")
    node: Any = top
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node
    there = node.get(last) if isinstance(node, dict) else {}
    if isinstance(there, dict):
        raise ValueError(f"`{name}` would be a leaf, and a node as well.")
    if there is not None:
        raise ValueError(f"`{there.old}` and `{leaf.old}` would both be `{name}`.")
    node[last] = leaf


def _made(old: _Old, new: dict[str, Any] | _Leaf, name: str) -> Any:
    """The node of this new name, or the leaf."""
    if isinstance(new, _Leaf):
        return new.value
    was = _origin(new, name)
    spec = Spec((), "", ())
    if was is not None:
        spec = _node.body_of(old.node(was)).spec()
    known = dict(zip(_node.components(spec), spec.keys))
    place = {part: number for number, part in enumerate(known)}
    bare = [part for part in known if part not in new and _is_bare(old, was, part)]
    parts = [*new, *bare]
    kind = "k" if known or not all(map(_number.fullmatch, new)) else "s"
    key = {part: known.get(part) or _key(kind, part, name) for part in parts}
    if all(kind in "sf" for kind, _ in key.values()):
        parts.sort(key=int)
    keys = tuple(key[part] for part in parts)
    labels = ()
    if spec.labels and all(part in known for part in parts):
        labels = tuple(spec.labels[place[part]] for part in parts)
    children = [
        _made(old, new[part], f"{name}.{part}" if name else part)
        if part in new
        else old.node(f"{was}.{part}" if was else part)
        for part in parts
    ]
    return Node(Held(Spec(keys, spec.fields, labels), children))


_number = re.compile(r"0|[1-9][0-9]*")


def _is_bare(old: _Old, node: str | None, part: str) -> bool:
    """Whether a child of a node has no leaves, only static fields."""
    name = f"{node}.{part}" if node else part
    return name not in old.above and isinstance(old.node(name), Node)


def _origin(node: dict[str, Any], name: str) -> str | None:
    """The name that a node had; None of one that is new."""
    parts, leaf = [], node
    while isinstance(leaf, dict):
        part, leaf = next(iter(leaf.items()))
        parts.append(part)
    below = ".".join(parts)
    if _names.is_under(leaf.old, name):
        return name
    if leaf.old == below:
        return ""
    is_moved = leaf.old.endswith(f".{below}")
    return leaf.old[: -len(below) - 1] if is_moved else None


def _key(kind: str, part: str, node: str) -> tuple[str, str | int]:
    try:
        return kind, _names.key_of(kind, part, not node)
    except ValueError as e:
        name = f"{node}.{part}" if node else part
        raise ValueError(f"`{name}` is no name of a leaf: {e}.") from e
