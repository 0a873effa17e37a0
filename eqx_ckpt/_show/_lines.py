"""The lines that trees are shown in: one of each leaf, and one of each static field."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._format import _names, _template
from .._format._leaves import Record
from .._load import _partial
from .._load._lazy import LazyArray
from .._load._nodes import StoredBody
from .._tree import _folding, _node
from .._tree._node import Node


class TreeLine(NamedTuple):
    """A leaf, or a static field (`nbytes` is None), as it is shown."""

    name: str
    text: str
    nbytes: int | None = None


def of_record(record: Record) -> TreeLine:
    return TreeLine(record.name, _partial.show(record), record.template.nbytes)


def of_node(node: Node) -> Iterator[TreeLine]:
    """The lines of a node, with the names below it."""
    body = _node.body_of(node)
    if isinstance(body, StoredBody):
        yield from _of_stored(body)
        return
    for component, child in zip(body.components(), body.children()):
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
            yield TreeLine(component, _short(child))
    yield from of_fields([("", body.fields())])


def _of_stored(body: StoredBody) -> Iterator[TreeLine]:
    leaves = body.source.index.leaves
    cut = len(body.name) + 1 if body.name else 0
    modules: list[tuple[str, str]] = []
    for member in body.members:
        if isinstance(member, int):
            line = of_record(leaves.record(member))
            yield line._replace(name=line.name[cut:])
        else:
            fields = leaves.fields_text(member)
            modules.append((member[cut:], fields))
    yield from of_fields(modules)


def of_lazy(lazy: LazyArray, name: str) -> TreeLine:
    """The line that a node has for a lazy leaf under a name."""
    nbytes = lazy._template.nbytes
    if lazy._target.kind in _template.ARRAY_KINDS:
        nbytes = math.prod(lazy.shape) * lazy.dtype.itemsize
    return TreeLine(name, lazy._shown() + _spec_text(lazy), nbytes)


# So many static fields of a tree are printed one by one.
_MOST_FIELDS = 2**14


def of_fields(modules: Iterable[tuple[str, str]]) -> Iterator[TreeLine]:
    """The static fields of Modules, each with its `fields_text`, as they are printed;
    where there are very many, how many each has. Many may have one text."""
    shown: dict[str, list[tuple[str, str]]] = {}
    most = _MOST_FIELDS
    for module, text in modules:
        if text not in shown:
            fields = _node.plain_fields(text).items()
            rows = [(_names.quote(name), f"= {_short(x)}") for name, x in fields]
            shown[text] = rows
        rows = shown[text]
        most -= len(rows)
        if rows and most < 0:
            rows = [("*", f"= {len(rows)} static fields")]
        for name, value in rows:
            yield TreeLine(f"{module}.{name}" if module else name, value)


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


def _spec_text(array: Any) -> str:
    """The specification of an array's sharding, as it is shown behind the array."""
    spec = getattr(getattr(array, "sharding", None), "spec", None)
    return "" if spec is None else f"  {spec}"
