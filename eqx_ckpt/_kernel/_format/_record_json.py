"""The record of a tree as JSON: the field `tree` of an index.

`encode` writes it. `parse` reads that of anyone, and refuses what no tree has. A few
bytes may stand for very many nodes, so the cost of a walk of the tree is counted row by
row before any is made.
"""

import itertools as it
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._limits import limits
from . import _json, _names, _schema
from ._record import HOWS, Kind, Row, TreeRecord
from ._schema import fits, optional


def encode(record: TreeRecord) -> dict[str, Any]:
    """The field `tree` of an index."""
    bare = _bare_kinds(record)
    widths = {row.kind: len(row.children) for row in record.rows if row.kind in bare}
    made = [_encode_kind(kind, widths.get(n)) for n, kind in enumerate(record.kinds)]
    texts = list(map(json.dumps, made))
    # Kinds of bare dicts may have become the same.
    kinds = dict(zip(texts, made))
    number_of = dict(zip(kinds, range(len(kinds))))
    numbers = list(map(number_of.__getitem__, texts))
    rows = [[numbers[x.kind], *x.values, *packed(x.children)] for x in record.rows]
    return {"kinds": list(kinds.values()), "values": record.values, "rows": rows}


def _bare_kinds(record: TreeRecord) -> set[int]:
    """The kinds of dicts whose keys the names of leaves tell."""
    out = set()
    for number, kind in enumerate(record.kinds):
        # Only the record tells keys that are no strings or integers.
        keys = json.loads(kind.keys) if kind.keys else []
        if HOWS[kind.how].is_dict and {*map(type, keys)} <= {str, int}:
            out.add(number)
    for row in record.rows:
        # Below it a node without leaves may be compared with a value in its place.
        are_empty = any(map(record.has_empty.__getitem__, {*row.children}))
        if row.kind in out and (are_empty or not _do_names_tell(record, row.children)):
            out.discard(row.kind)
    return out


def _do_names_tell(record: TreeRecord, children: Sequence[int]) -> bool:
    """Whether the names of leaves tell the parts of these children: each has leaves,
    and nothing in it is compared."""
    below = {*children}
    have_leaves = all(map(record.leaf_counts.__getitem__, below))
    return have_leaves and not any(map(record.has_values_or_labels.__getitem__, below))


def _encode_kind(kind: Kind, width: int | None) -> list[Any]:
    """A kind as JSON; `width`: of a bare dict, how many keys it has."""
    known = HOWS[kind.how]
    parts: Any = list(kind.parts)
    if width is not None:
        parts = width
    elif not known.is_dict and parts == [*map(str, range(len(parts)))]:
        parts = len(parts)
    keys = json.loads(kind.keys) if kind.keys and width is None else None
    data = [] if kind.data == known.data else list(kind.data)
    own = [kind.how, *kind.cls, parts, data, list(kind.attributes), keys]
    while own[-1] in ("", 0, None) or own[-1] == []:
        own.pop()
    return own


def packed(children: Sequence[int]) -> list[int]:
    """Rows of children, in which `-n` stands for `n` more of the one before."""
    out: list[int] = []
    for child, same in it.groupby(children):
        count = len(list(same))
        out += [child] if count == 1 else [child, 1 - count]
    return out


class _RawKind(NamedTuple):
    """A `Kind` as an index has it. `parts` may be their number, and `keys` are those of
    a dict if not all are strings."""

    how: str
    module: str
    name: str
    parts: list[str] | int
    data: tuple[str, ...]
    labels: list[str | None]
    keys: list[Any] | None

    @property
    def width(self) -> int:
        """The number of children."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)


class _RawRow(NamedTuple):
    """A `Row` as an index has it: the children in runs, each the row of a child, and
    how many such children there are."""

    kind: int
    values: Sequence[int]
    runs: list[tuple[int, int]]


# The most children of all rows together.
_MAX_CHILDREN = 2**22
# As `_check_costs` counts them: the cost of a node, of a character of its kind or of a
# value, and of a part of a leaf's name.
_NODE_COST, _CHARACTER_COST, _PART_COST = 128, 4, 3 * 128
# The most characters of one value, and how deep its JSON may be: more than those of any
# that `_tree/_codec.py` makes.
_MAX_CHARACTERS, _MAX_DEPTH = 2**16, 250
# The fields of a `_RawKind`, and their values where they are left out.
_KIND = (
    *(str, str, str),
    lambda x: fits(x, range(_MAX_CHILDREN)) or fits(x, [str]),
    [str],
    [optional(str)],
    optional([Any]),
)
_DEFAULTS = ["", "", "", 0, [], [], None]


def parse(value: object, leaves: int) -> TreeRecord:
    """The inverse of `encode`, but for the keys of dicts that the names of leaves tell.
    `leaves`: how many are stored.

    **Raises:** `ValueError` for what is never recorded.
    """
    if type(value) is not dict:
        raise ValueError("the index has a malformed tree")
    _json.check_depth(value, _MAX_DEPTH)
    kinds, values, rows = _schema.fields(
        value, {"kinds": [[Any]], "values": [Any], "rows": [[int]]}, "tree"
    )
    if not rows:
        raise ValueError("the tree has no rows")
    raw_kinds = list(map(_checked_kind, kinds))
    raw_rows = _checked_rows(rows, raw_kinds, len(values))
    # Before all children are there.
    if _check_costs(raw_kinds, values, raw_rows, leaves) != leaves:
        raise ValueError("the tree has not as many leaves as there are")
    made = [Row(kind, _expand(runs), tuple(own)) for kind, own, runs in raw_rows]
    record = TreeRecord(list(map(_kind_of, raw_kinds)), values, made)
    _check_markers(record)
    for row, (_, children, _) in enumerate(made):
        if record.has_unknown_parts(row) and not _do_names_tell(record, children):
            raise ValueError("the tree has a dict with keys that nothing tells")
    return record


def check(record: TreeRecord) -> None:
    """**Raises:** `ValueError` for a tree that no reader takes, such as one of more
    nodes or values than are read."""
    parse(record.encoded, record.leaf_counts[-1])


def _checked_kind(kind: list[Any]) -> _RawKind:
    """A kind as an index has it, with the defaults of what is left out at its end.

    **Raises:** `ValueError` for one that no tree has."""
    whole = [*kind, *_DEFAULTS[len(kind) :]]
    if len(whole) > len(_DEFAULTS) or not fits(whole, _KIND):
        raise ValueError("the tree has a malformed kind")
    how, module, name, parts, data, labels, keys = whole
    if how not in HOWS:
        raise ValueError("the tree has an unknown kind of node")
    known = HOWS[how]
    data = tuple(data or known.data)
    wanted_data = data if known.has_own_data else known.data
    checked = _RawKind(how, module, name, parts, data, labels, keys)
    width, names = checked.width, parts if type(parts) is list else []
    alone = names, data, (*names, *data) if known.are_fields else ()
    are_keyed = known.is_dict and 0 < len(keys or ()) == len(names)
    faults = {
        "a name that is none": not all(
            map(_names.is_component, (*names, *filter(None, data)))
        ),
        "two things of one name": any(len({*x}) < len(x) for x in alone),
        "other static values than its own": data != wanted_data,
        "keys that are not those of its children": keys is not None and not are_keyed,
        "more or fewer children than its own": known.width not in (None, width),
        "labels that are not those of its children": len(labels) not in (0, width),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ValueError(f"the tree has a malformed kind, with {fault}")
    return checked


def _checked_rows(
    rows: list[list[int]], kinds: list[_RawKind], value_count: int
) -> list[_RawRow]:
    """The rows of an index, of which each has the number of its kind, then the numbers
    of its values, and then its children.

    **Raises:** `ValueError` for rows that no tree has.
    """
    heads = [1 + len(kind.data) for kind in kinds]
    out: list[_RawRow] = []
    total = 0
    for number, row in enumerate(rows):
        if not row or not 0 <= row[0] < len(kinds):
            raise ValueError("the tree has a row of no known kind")
        kind, head = row[0], heads[row[0]]
        values, children = row[1:head], row[head:]
        is_good = len(row) >= head and all(0 <= x < value_count for x in values)
        is_good = is_good and max(children, default=-1) < number
        if not is_good or children and children[0] < 0:
            raise ValueError("the tree has a malformed row")
        runs = _unpacked(children)
        width = sum(count for _, count in runs)
        total += width
        if width != kinds[kind].width or total > _MAX_CHILDREN:
            raise ValueError("the tree has a row of other children than its kind")
        out.append(_RawRow(kind, values, runs))
    if len({row.kind for row in out}) != len(kinds):
        raise ValueError("the tree has a kind that no row is of")
    return out


def _unpacked(children: Sequence[int]) -> list[tuple[int, int]]:
    """The inverse of `packed`, but for runs: the row of a child, and how many."""
    out: list[tuple[int, int]] = []
    for child in children:
        if child >= 0:
            out.append((child, 1))
        else:
            out.append((out[-1][0], -child))
    return out


class _RowCost(NamedTuple):
    """At and below a row: how many leaves are stored, how many nodes and values there
    are, and what a walk of them costs."""

    leaves: int
    size: int
    cost: int


def _check_costs(
    kinds: Sequence[_RawKind],
    encoded: Sequence[Any],
    rows: Iterable[_RawRow],
    most: int,
) -> int:
    """Bounds a tree of `most` leaves by the cost of a walk of it, in time that grows
    with its rows. Returns how many leaves it has.

    **Raises:** `ValueError` for a tree of more leaves, or of too high a cost.
    """
    kind_costs = [_CHARACTER_COST * len(json.dumps(kind[:5])) for kind in kinds]
    ends_of = list(map(_ends_of_parts, kinds))
    value_lengths = [len(json.dumps(x)) for x in encoded]
    known: list[_RowCost] = []
    for kind, values, runs in rows:
        how = kinds[kind].how
        lengths = list(map(value_lengths.__getitem__, values))
        is_long = max(lengths, default=0) > _MAX_CHARACTERS
        if is_long and not HOWS[how].has_markers:
            raise ValueError("the tree has a static value that is too long")
        leaves, size, cost = _cost_of_children(runs, ends_of[kind], known)
        size += 1 + len(values)
        cost += _NODE_COST + kind_costs[kind] + _CHARACTER_COST * sum(lengths)
        if how == "leaf":
            leaves, cost = 1, _NODE_COST
        if leaves > most:
            raise ValueError("the tree has not as many leaves as there are")
        if cost > limits.tree_cost + _PART_COST * _names.MAX_DEPTH * leaves:
            raise ValueError("the tree has more nodes and static values than are read")
        known.append(_RowCost(leaves, size, cost))
    return known[-1].leaves


def _ends_of_parts(kind: _RawKind) -> Sequence[int]:
    """Where each child's part begins in the text of all parts of a kind, and where the
    last ends. Numbers count as if each had four digits."""
    if isinstance(kind.parts, int):
        return range(0, 4 * kind.parts + 1, 4)
    return [*it.accumulate(map(len, kind.parts), initial=0)]


def _cost_of_children(
    runs: list[tuple[int, int]], ends: Sequence[int], known: Sequence[_RowCost]
) -> _RowCost:
    """The cost of the children of a row. The part of a child's name, and a dot, are in
    the names of all that is at and below it."""
    leaves = size = cost = place = 0
    for child, count in runs:
        below = known[child]
        characters = ends[place + count] - ends[place]
        leaves += count * below.leaves
        size += count * below.size
        cost += count * below.cost + (count + characters) * below.size
        place += count
    return _RowCost(leaves, size, cost)


# ---- What was checked, as a record has it.


def _kind_of(kind: _RawKind) -> Kind:
    """A kind that was checked, as a record has it."""
    how, module, name, parts, data, labels, keys = kind
    if isinstance(parts, int):
        parts = () if HOWS[how].is_dict else list(map(str, range(parts)))
    keys = "" if keys is None else json.dumps(keys)
    return Kind(how, (module, name), tuple(parts), data, tuple(labels), keys)


def _expand(runs: list[tuple[int, int]]) -> tuple[int, ...]:
    """The row of each child in runs."""
    return tuple(it.chain.from_iterable(it.starmap(it.repeat, runs)))


_position = re.compile("[0-9]{1,9}").fullmatch


def _check_markers(record: TreeRecord) -> None:
    """**Raises:** `ValueError` unless States and their indices have markers."""
    for kind, children, values in record.rows:
        how = record.kinds[kind].how
        if not HOWS[how].has_markers:
            continue
        found = record.values[values[0]]
        markers = found.get("markers") if type(found) is dict else None
        width = len(children) if how == "state" else 1
        if type(markers) is not list or len(markers) != width:
            raise ValueError("the tree has a State without its markers")
        if how == "state" and not all(map(_position, record.kinds[kind].parts)):
            raise ValueError("the tree has a State whose entries have no positions")
        for x in markers:
            if not (type(x) is int or type(x) is str and x[:1] in ("=", "@")):
                raise ValueError("the tree has a malformed marker")
        if len({*markers}) != width:
            raise ValueError("the tree has two entries of a State of one marker")
