"""The nodes of a tree in an index: their rows, and which can be. See FORMAT.md.

Nodes that are alike are one row, so that a model of many blocks has those of one.
"""

import itertools as it
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .._format import _names
from .._format._leaves import Structure
from .._format._schema import fits, Kind, NUMBER


# The first row: a leaf that is stored, and comes back as what it was stored as.
LEAF = 0
# What the other entries of a row are, after its kind and its children.
_MARKER = re.compile("[=#].*", re.DOTALL)
_ROWS: dict[str, tuple[Kind, ...]] = {
    "leaf": (),
    "leaf of": ([Any],),
    "value": (Any,),
    "none": (),
    "tuple": (),
    "list": (),
    "dict": (Any,),
    "ordered": (Any,),
    "default": (Any, Any),
    "namedtuple": (NUMBER,),
    "module": (NUMBER, [Any]),
    "dataclass": (NUMBER, [Any]),
    "partial": (Any,),
    "state": ([_MARKER],),
    "index": (_MARKER,),
    "other": (NUMBER, str),
}
# What a node costs to make, in characters of JSON that is decoded; what a tree may cost
# besides, for each part of the names of its leaves, and for each row of its own.
_NODE, _VALUE, _BASE, _PART = 128, 4, 2**24, 3 * 128


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


def check(structure: Structure, count: int, parts: int) -> list[int]:
    """Looks at all rows, in time that grows with them and not with the tree. `count`
    leaves are stored, and their names have so many `parts`.

    **Returns:** for each row how many leaves are stored in it.

    **Raises:** `ValueError` for what is never saved with such leaves.
    """
    for kind in structure.types:
        _check_type(kind)
    texts = [[*it.accumulate(map(len, kind[2]), initial=0)] for kind in structure.types]
    heads = [_VALUE * len(json.dumps(kind)) for kind in structure.types]
    most = _BASE + _PART * parts
    leaves: list[int] = []
    # Of each row the nodes at and below it, and what those cost.
    sizes: list[int] = []
    costs: list[int] = []
    depths: list[int] = []
    for row in structure.nodes:
        _check_row(row, len(leaves))
        lengths = [1 if child >= 0 else -child for child in row[1]]
        _check_fields(structure, row, sum(lengths))
        is_of_type = row[0] in ("namedtuple", "module", "dataclass")
        below, size, depth, last = int(row[0] in ("leaf", "leaf of")), 1, 0, 0
        cost = _NODE + _VALUE * len(json.dumps(row[2:]))
        cost += heads[row[2]] if is_of_type else 0
        # The parts of names are in those of all nodes below.
        letters = texts[row[2]] if is_of_type else _letters(row)
        at = 0
        for child, times in zip(row[1], lengths):
            last = child if child >= 0 else last
            below += times * leaves[last]
            size += times * sizes[last]
            own = letters[at + times] - letters[at] if letters else 4 * times
            cost += times * (costs[last] + sizes[last]) + own * sizes[last]
            depth = max(depth, depths[last] + 1)
            at += times
        if row[0] == "other":
            below = row[2]
        leaves.append(below)
        sizes.append(size)
        costs.append(cost)
        depths.append(depth)
        if depth > _names.MAX_DEPTH + 1 or cost > most:
            raise ValueError("it has more nodes and values than are made")
    if not leaves or leaves[-1] != count:
        raise ValueError("it has not as many leaves as there are")
    return leaves


def _letters(row: list[Any]) -> list[int]:
    """The letters of the keys of a dict before each of them, if the row has them."""
    keys = row[2] if row[0] in ("dict", "ordered", "default") else None
    lengths = [len(key) if type(key) is str else 64 for key in keys or ()]
    return [*it.accumulate(lengths, initial=0)] if keys else []


def _check_type(kind: list[Any]) -> None:
    names = [name for names in kind[2:] for name in names]
    if len({*names}) != len(names):
        raise ValueError("it has a type with two fields of one name")


def _check_row(row: list[Any], number: int) -> None:
    if len(row) < 2 or type(row[0]) is not str or row[0] not in _ROWS:
        raise ValueError("it has a node of no known kind")
    wanted, children, rest = _ROWS[row[0]], row[1], row[2:]
    good = fits(rest, wanted) and fits(children, [int])
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
        good = rest[0] < len(structure.types)
        names = structure.types[rest[0]][2:4] if good else [[], []]
        good = good and len(names[0]) == count
        good = good and (kind == "namedtuple" or len(names[1]) == len(rest[1]))
    elif kind == "partial":
        good = count == 2
    elif kind == "state":
        good = len(rest[0]) == count
    elif kind == "index":
        good = count < 2
    if not good or (kind in _CHILDLESS and count):
        raise ValueError("it has a malformed node")


_CHILDLESS = ("leaf", "leaf of", "value", "none", "other")
