"""Checkpoints, nodes, lazy leaves, saves and runs as text, as HTML and in Treescope.

No array is read.
"""

import functools as ft
import importlib
import itertools as it
from typing import Any

from .._kernel._format import _text
from .._kernel._load import _checkpoint, _lazy
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._run import _manager
from .._kernel._save import _background
from .._kernel._save._background import SaveHandle
from .._kernel._tree import _node
from .._kernel._tree._node import Node
from . import _facts, _html, _lines, _node_lines, _summary, _tables, _terminal


def text(x: Checkpoint | Node, limit: int | None) -> str:
    """A tree in at most so many lines (None: all of them) below its title."""
    if isinstance(x, Node):
        body = _node.body_of(x)
        head = f"Node({_text.escape(body.name) or '.'})"
        lines = _node_lines.of_node(x)
    else:
        leaves = _facts.leaf_count(len(x))
        head = f"Checkpoint({_text.escape(x.path)}: {leaves}, {_text.size(x.nbytes)})"
        lines = _facts.leaf_lines(_checkpoint.source_of(x))
    return "\n".join([head, *("  " + line for line in _terminal.text(lines, limit))])


@ft.singledispatch
def html(x: object) -> str:
    """An object as a notebook shows it."""
    raise NotImplementedError(type(x))


@html.register
def _of_checkpoint(x: Checkpoint) -> str:
    source = _checkpoint.source_of(x)
    leaves = source.index.leaves
    fields = _lines.of_fields((n, leaves.fields_text(n)) for n in leaves.node_names)
    facts = _facts.facts(source)
    rows = [(title, fact.replace("\n", ", ")) for title, fact in facts.items()]
    metadata = _html.text("metadata", _facts.metadata(source))
    about = _html.section("about", rows, folds=True)
    tree = _html.tree(it.chain(_facts.leaf_lines(source), fields))
    return _html.card(x.path, _facts.headline(source), metadata, about, tree)


@html.register
def _of_node(x: Node) -> str:
    name = _node.body_of(x).name
    return _html.card("Node", name, _html.tree(_node_lines.of_node(x)), prefix=name)


@html.register
def _of_lazy(x: LazyArray) -> str:
    line = _node_lines.of_lazy(x, x.name)
    of = ", ".join(str(source.root) for source in _lazy.sources_of([x]))
    return _html.card(type(x).__name__, f"not read, of {of}", _html.row(line))


@html.register
def _of_save(x: SaveHandle) -> str:
    done, total = map(_text.size, x.progress)
    state = f"{_background.state_of(x)}, {done} of {total}"
    return _html.card(f"SaveHandle {_background.root_of(x)}", state)


# Of a run, the newest steps.
_MOST = 20


@html.register
def _of_run(x: _manager.CheckpointManager) -> str:
    steps = _manager.steps_of(x)
    title = f"CheckpointManager {steps.root}"
    if steps.root.is_remote:
        # It would take requests to know.
        return _html.card(title, "see .steps()")
    found = _summary.summaries(steps, _MOST)
    count = len(steps.listing().steps)
    subtitle = _facts.counted(count, "step")
    if count > _MOST:
        subtitle += f": here are the newest {_MOST}"
    return _html.card(title, subtitle, _html.table(_tables.steps(found[::-1])))


def treescope(x: Checkpoint | Node, path: object, render: object) -> Any:
    """The value of `__treescope_repr__`, whose modules are there when it is called."""
    if isinstance(x, Node):
        body = _node.body_of(x)
        keys = [key for _, key in body.spec.keys]
        items = {**dict(zip(keys, body.children)), **_node.static_fields(x)}
    else:
        items = {"path": x.path, "metadata": x.metadata, "tree": x.tree}
    lib = importlib.import_module("treescope.repr_lib")
    return lib.render_dictionary_wrapper(
        object_type=type(x), wrapped_dict=items, path=path, subtree_renderer=render
    )
