"""What a notebook shows of a checkpoint. All of it is in the index."""

import json

from .._format import _text
from .._tree import _html, _node
from .._tree._show import TreeLine
from . import _nodes
from ._source import Source


def checkpoint(path: str, source: Source) -> str:
    index = source.index
    leaves = index.leaves
    lines = [_nodes.line(record) for record in leaves.records()]
    texts = ((x, _node.fields_text(leaves.statics, x)) for x in leaves.statics.of)
    lines += [TreeLine(*row) for row in _node.field_rows(texts)]
    count = len(leaves.names)
    what = f"{count:,} {'leaf' if count == 1 else 'leaves'}"
    parts = []
    if index.metadata is not None:
        text = json.dumps(index.metadata, indent=1, default=repr)
        parts.append(_html.text("metadata", text))
    if index.writer:
        written = {"save_id": index.save, **index.writer}
        if index.saved is not None:
            written["processes"] = str(index.saved.processes)
        text = "\n".join(f"{name} {value}" for name, value in written.items())
        parts.append(_html.text("saved by", text))
    quiet = f"{what}, {_text.size(leaves.nbytes)}, {index.layout}"
    return _html.card(path, quiet, *parts, _html.tree(lines))
