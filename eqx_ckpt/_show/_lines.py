"""The lines that trees are shown in: one of each leaf, and one of each static field. No
JAX is needed for those of an index."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .._kernel._format import _names, _text, _values
from .._kernel._format._leaves import LeafRecord, Leaves
from .._kernel._format._state_labels import Label
from .._kernel._load import _wording


class TreeLine(NamedTuple):
    """A leaf, or a static field (`nbytes` is None), as it is shown."""

    name: str
    text: str
    nbytes: int | None = None


def labels(leaves: Leaves) -> Mapping[int, Label]:
    """The labels of entries of States, by the indices of leaves in them. There are none
    if the record of the tree cannot be read: whoever loads is told why."""
    try:
        return leaves.labels
    except ValueError:
        return {}


def of_record(record: LeafRecord, label: Label | None) -> TreeLine:
    """The line of a leaf. An entry of an eqx.nn.State, which has a number, is told by
    the fields that have its StateIndex."""
    text = _wording.show(record)
    if label is not None and label.names:
        text += f"  of {', '.join(sorted(label.names))}"
    return TreeLine(record.name, text, record.template.nbytes)


# So many static fields of a tree are printed one by one.
_MOST_FIELDS = 2**14


def of_fields(modules: Iterable[tuple[str, str]]) -> Iterator[TreeLine]:
    """The static fields of Modules, each with its `fields_text`, as they are printed;
    where there are very many, how many each has. Many may have one text."""
    shown: dict[str, list[tuple[str, str]]] = {}
    most = _MOST_FIELDS
    for module, text in modules:
        if text not in shown:
            fields = _values.plain_fields(text).items()
            rows = [(_names.quote(name), f"= {short(x)}") for name, x in fields]
            shown[text] = rows
        rows = shown[text]
        most -= len(rows)
        if rows and most < 0:
            rows = [("*", f"= {len(rows)} static fields")]
        for name, value in rows:
            yield TreeLine(f"{module}.{name}" if module else name, value)


def short(value: object, most: int = 60) -> str:
    return _text.cut(repr(value), most)
