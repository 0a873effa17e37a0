"""Trees and their names: each node and leaf of a checkpoint's own tree under another
name, and what is at a name."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax.tree_util as jtu
import pytest

from eqx_ckpt._kernel._format import _names, _state_labels
from eqx_ckpt._kernel._tree import _flatten, _node, _states
from eqx_ckpt._rename import _renamed


class Mover:
    """A checkpoint's own tree with other keys. `moves`: from each new name to the old
    one."""

    def __init__(self, tree, choose):
        self.choose = choose
        self.moves = {}
        states = _states_of(tree).values()
        labels = [x for some in states for x in some.values() if x.names]
        self.indices = {_state_labels.label_text(x): sorted(x.names) for x in labels}

    def move(self, node, old=(), new=()):
        self.moves[".".join(new)] = ".".join(old)
        if not isinstance(node, _node.Node):
            return node
        body = _node.body_of(node)
        spec, children = body.spec, body.children
        keys = spec.keys if spec.is_sequence else self.choose(spec.keys)
        rows = zip(spec.keys, keys, children, strict=True)
        made = [
            self.move(child, (*old, _text(was)), (*new, _text(now)))
            for was, now, child in rows
        ]
        return _node.Node(_node.Body(dataclasses.replace(spec, keys=keys), made))

    def relabel(self, node):
        """The labels of States, once all names are known."""
        if not isinstance(node, _node.Node):
            return node
        body = _node.body_of(node)
        spec, children = body.spec, list(map(self.relabel, body.children))
        labels = tuple(map(self._label, spec.labels))
        return _node.Node(
            _node.Body(dataclasses.replace(spec, labels=labels), children)
        )

    def _label(self, label):
        if label is None:
            return label
        if label[0] == "=" and label not in self.indices:
            # Its model is not in the tree, where another may look like it.
            pytest.skip("a State without its model")
        there = {old: new for new, old in self.moves.items()}
        names = label[1:].split(",") if label[0] == "@" else self.indices[label]
        moved = [replaced(name, there) for name in names]
        if label[0] == "=" and len(moved) == 1:
            count = len(re.findall(r"\w+", label))
            return "=." + ".".join(moved[0].split(".")[-count:])
        return "@" + ",".join(sorted(moved))


def _states_of(tree):
    return _states.states_of(_flatten.flatten(tree, None))


def _text(key):
    kind, text = key
    if kind in "sfi":
        return str(text)
    return text if kind == "o" else _names.quote(text)


def replaced(name, moves):
    """The name with its beginning moved, as far as that is known."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        if head in moves:
            return ".".join([moves[head], *parts[count:]])
    return name


def below(name: str, top: str) -> bool:
    """Whether a name is that of something in the node `top`, or of itself."""
    return _names.is_under(name, top)


def modules_of(
    ckpt: Any, rename: Callable[[str], str]
) -> tuple[Iterable[str], Callable[[str], list[str]]]:
    """The names of which static fields are recorded, and the function that says which
    of them stand for a new name."""
    stored = ckpt._source.index.leaves
    return stored.node_names, _renamed.renamed(stored, rename)[0].stored_nodes


def value_at(tree: Any, name: str, here: str = "") -> Any:
    """The node, leaf or attribute of a name."""
    if name in (here, "%root"):
        return tree
    children = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    for path, child in children:
        below = _names.name_of(path, here).name
        if path and _names.is_under(name, below):
            return value_at(child, name, below)
    return getattr(tree, name[len(here) + 1 :] if here else name)
