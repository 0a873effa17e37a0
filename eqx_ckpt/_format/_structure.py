"""The nodes of the tree that was saved: what is known of it besides its leaves.

Nodes that are alike are one row, so that a model of many blocks has those of one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast, NamedTuple

from . import _names


class Structure(NamedTuple):
    """The rows of `nodes` are `[kind, children, ...]`; each comes after those of its
    children, and the last is the tree. `types` are the classes that they name. See
    FORMAT.md."""

    types: list[list[Any]]
    nodes: list[list[Any]]


# The first row: a leaf that is stored, and comes back as what it was stored as.
LEAF = 0
# What the other entries of a row are, after its kind and its children.
_ROWS: dict[str, tuple[type, ...]] = {
    "leaf": (),
    "leaf of": (list,),
    "value": (object,),
    "none": (),
    "tuple": (),
    "list": (),
    "dict": (object,),
    "ordered": (object,),
    "default": (object, object),
    "namedtuple": (int,),
    "module": (int, list),
    "dataclass": (int, list),
    "partial": (object,),
    "state": (list,),
    "index": (str,),
    "other": (int, str),
}
# Of a tree, with the leaves that are not stored, and nodes without any.
_MAX_NODES = 2**22


def packed(children: Sequence[int]) -> list[int]:
    """Rows of children, in which `-n` stands for `n` more of the one before."""
    out: list[int] = []
    if len({*children}) == 1:
        return [children[0], 1 - len(children)][: len(children)]
    for child in children:
        if len(out) > 1 and out[-1] < 0 and out[-2] == child:
            out[-1] -= 1
        elif out and out[-1] == child:
            out.append(-1)
        else:
            out.append(child)
    return out


def unpacked(children: Sequence[int]) -> Iterator[int]:
    """The inverse of `packed`."""
    last = 0
    for child in children:
        if child >= 0:
            last = child
            yield child
        else:
            yield from [last] * -child


def parse(value: Any) -> Structure:
    """**Raises:** `ValueError` for what is no structure at all."""
    columns = [value.get(name) if type(value) is dict else None for name in _COLUMNS]
    if not all(type(x) is list and {*map(type, x)} <= {list} for x in columns):
        raise ValueError("the index has a malformed structure")
    return Structure(*cast(list[list[Any]], columns))


_COLUMNS = Structure._fields


def check(structure: Structure, names: Sequence[str]) -> list[int]:
    """Looks at all rows, in time that grows with them and not with the tree.

    **Returns:** for each row how many leaves are stored in it.

    **Raises:** `ValueError` for what is never saved with leaves of these names.
    """
    for kind in structure.types:
        _check_type(kind)
    leaves: list[int] = []
    sizes: list[int] = []
    depths: list[int] = []
    for row in structure.nodes:
        _check_row(row, len(leaves))
        lengths = [1 if child >= 0 else -child for child in row[1]]
        _check_fields(structure, row, sum(lengths))
        count, size, depth, last = int(row[0] in ("leaf", "leaf of")), 1, 0, 0
        for child, times in zip(row[1], lengths):
            last = child if child >= 0 else last
            count += times * leaves[last]
            size += times * sizes[last]
            depth = max(depth, depths[last] + 1)
        if row[0] == "other":
            count = row[2]
        leaves.append(count)
        sizes.append(size)
        depths.append(depth)
        if depth > _names.MAX_DEPTH + 1 or size > _MAX_NODES + depth * len(names):
            raise ValueError("it has more nodes than are made")
    if not leaves or leaves[-1] != len(names):
        raise ValueError("it has not as many leaves as there are")
    return leaves


def _check_type(kind: list[Any]) -> None:
    texts = kind[:2] + [name for names in kind[2:] for name in names]
    if len(kind) != 5 or not all(type(x) is str for x in texts):
        raise ValueError("it has a malformed type")
    if len({*texts[2:]}) != len(texts) - 2:
        raise ValueError("it has a type with two fields of one name")


def _check_row(row: list[Any], number: int) -> None:
    if len(row) < 2 or type(row[0]) is not str or row[0] not in _ROWS:
        raise ValueError("it has a node of no known kind")
    wanted, children, rest = _ROWS[row[0]], row[1], row[2:]
    good = len(wanted) == len(rest) and all(map(_is_a, rest, wanted))
    good = good and type(children) is list and {*map(type, children)} <= {int}
    # The children of a row are before it, and what is repeated before that.
    if not good or (children and not (0 <= children[0] and max(children) < number)):
        raise ValueError("it has a malformed node")


def _check_fields(structure: Structure, row: list[Any], count: int) -> None:
    """Whether a row has `count` children, and values, as its kind has."""
    kind, _, *rest = row
    good = True
    if kind in ("dict", "ordered", "default"):
        good = rest[0] is None or (type(rest[0]) is list and len(rest[0]) == count)
    elif kind in ("namedtuple", "module", "dataclass"):
        good = 0 <= rest[0] < len(structure.types)
        names = structure.types[rest[0]][2:4] if good else [[], []]
        good = good and len(names[0]) == count
        good = good and (kind == "namedtuple" or len(names[1]) == len(rest[1]))
    elif kind == "partial":
        good = count == 2
    elif kind == "state":
        good = len(rest[0]) == count and all(map(_is_marker, rest[0]))
    elif kind == "index":
        good = count < 2 and _is_marker(rest[0])
    elif kind == "other":
        good = 0 <= rest[0] < 2**40
    if not good or (kind in _CHILDLESS and count):
        raise ValueError("it has a malformed node")


_CHILDLESS = ("leaf", "leaf of", "value", "none", "other")


def _is_marker(x: Any) -> bool:
    return type(x) is str and x[:1] in ("=", "#")


def _is_a(x: Any, kind: type) -> bool:
    return kind is object or type(x) is kind
