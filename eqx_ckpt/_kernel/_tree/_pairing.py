"""The children of two trees that stand for each other: by the parts of their names, or
by the attributes that they are where they have no keys."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .._format import _names
from .._format._record import TreeRecord


def pair_children(
    saved: TreeRecord, a: int, here: TreeRecord, b: int
) -> list[int | None]:
    """For each child of a row here the place of the saved one that it stands for: by
    the parts of their names, or by their attributes where both sides have these."""
    one, two = saved.kind(a), here.kind(b)
    if one.attributes and two.attributes:
        return _pair_attributes(one.attributes, two.attributes)
    if one.parts == two.parts:
        return list(range(len(one.parts)))
    return [saved.place_of(a, part) for part in two.parts]


def _pair_attributes(
    saved: Sequence[str | None], here: Sequence[str | None]
) -> list[int | None]:
    """For each child here the place of the saved one that its attribute leads to;
    children without an attribute go by their order."""
    known = {x: i for i, x in enumerate(saved) if x is not None}
    alone = iter([i for i, x in enumerate(saved) if x is None])
    return [next(alone, None) if x is None else known.get(x) for x in here]


class MovedNode(NamedTuple):
    """A node whose children have other parts of names than the saved ones that they
    stand for: its name, the name there, and for each part the part there."""

    name: str
    there: str
    parts: dict[str, str | None]


def moved_nodes(
    saved: TreeRecord,
    here: TreeRecord,
    there: str,
    name: str,
    above: str,
    stored_nodes: Callable[[str], Sequence[str]] = lambda there: [there],
) -> Iterator[MovedNode]:
    """The moved nodes at and below `name`, which the saved tree calls `there`. `above`
    is the name of the tree `here`. `stored_nodes`: from a name in the saved tree to the
    nodes of its record that the name stands for."""
    row = here.row_at(_names.below(name, above))
    stack = [] if row is None else [(row, there, name)]
    while stack:
        row, there, name = stack.pop()
        if not here.has_labels[row]:
            continue
        kind = here.kind(row)
        parts: list[str | None] = list(kind.parts)
        for stored in map(saved.row_at, stored_nodes(there)):
            if stored is not None and kind.attributes and saved.kind(stored).attributes:
                places = pair_children(saved, stored, here, row)
                known = saved.kind(stored).parts
                parts = [None if x is None else known[x] for x in places]
        if parts != list(kind.parts):
            yield MovedNode(name, there, dict(zip(kind.parts, parts)))
        for part, to, child in zip(kind.parts, parts, here.rows[row].children):
            if to is not None:
                ends = _names.child(there, to), _names.child(name, part)
                stack.append((child, *ends))


def moved_names(
    names: Sequence[str], nodes: Iterable[MovedNode]
) -> dict[int, str | None]:
    """The stored names of leaves and nodes below nodes whose children have moved, by
    their places in `names`; None where the node has no such child."""
    moved = {node.name: node for node in nodes}
    nearest = _names.within(moved)
    out: dict[int, str | None] = {}
    for number, name in enumerate(names if moved else ()):
        # It may itself be such a node.
        found = nearest(name.rpartition(".")[0]) if name else None
        if found is not None:
            node = moved[found]
            part, _, rest = _names.below(name, found).partition(".")
            to = node.parts.get(part)
            out[number] = None if to is None else _names.joined(node.there, to, rest)
    return out
