"""The lines of nodes and lazy leaves."""

import math
from collections.abc import Iterator

from .._kernel._format import _template
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._load._nodes import StoredBody
from .._kernel._tree import _folding, _node
from .._kernel._tree._node import Node
from . import _lines
from ._lines import TreeLine


def of_node(node: Node) -> Iterator[TreeLine]:
    """The lines of a node, with the names below it."""
    body = _node.body_of(node)
    if isinstance(body, StoredBody):
        yield from _of_stored(body)
        return
    for component, child in zip(body.components(), body.children):
        if isinstance(child, Node):
            for line in of_node(child):
                yield line._replace(name=f"{component}.{line.name}")
        elif isinstance(child, LazyArray):
            yield of_lazy(child, component)
        elif hasattr(child, "shape") and hasattr(child, "dtype"):
            size = math.prod(child.shape) * child.dtype.itemsize
            array = _folding.short_array(child.dtype.name, child.shape)
            yield TreeLine(component, array + _spec_text(child), size)
        else:
            yield TreeLine(component, _lines.short(child))
    yield from _lines.of_fields([("", body.fields)])


def _of_stored(body: StoredBody) -> Iterator[TreeLine]:
    leaves = body.source.index.leaves
    labels = _lines.labels(leaves)
    cut = len(body.name) + 1 if body.name else 0
    modules: list[tuple[str, str]] = []
    for member in body.members:
        if isinstance(member, int):
            line = _lines.of_record(leaves.record(member), labels.get(member))
            yield line._replace(name=line.name[cut:])
        else:
            fields = leaves.fields_text(member)
            modules.append((member[cut:], fields))
    yield from _lines.of_fields(modules)


def of_lazy(lazy: LazyArray, name: str) -> TreeLine:
    """The line that a node has for a lazy leaf under a name."""
    body = _lazy.body_of(lazy)
    nbytes = body.template.nbytes
    if body.target.kind in _template.ARRAY_KINDS:
        nbytes = math.prod(lazy.shape) * lazy.dtype.itemsize
    return TreeLine(name, _lazy.shown(lazy) + _spec_text(lazy), nbytes)


def _spec_text(array: object) -> str:
    """The specification of an array's sharding, as it is shown behind the array."""
    spec = getattr(getattr(array, "sharding", None), "spec", None)
    return "" if spec is None else f"  {spec}"
