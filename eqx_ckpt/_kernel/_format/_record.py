"""The record of a tree: all of it but its leaves. See FORMAT.md, "The tree".

A *row* is a node or a leaf, with the rows of its children. Nodes that are alike are one
row, so that a model of many blocks has the rows of one. Comparing, storing and showing
go by rows and not by leaves. Rows share *kinds* and static *values*, by their numbers.
"""

import dataclasses
import functools as ft
import itertools as it
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._limits import limits
from . import _json, _names, _values
from ._schema import fields, fits, optional


class Kind(NamedTuple):
    """All that nodes have in common which differ in children and values only.

    - `how`: one of `HOWS`.
    - `cls`: the module and the qualified name of the class; `""` for Python's own.
    - `parts`: the part that each child adds to its dotted name. There are none for a
      dict whose keys only the names of its leaves tell.
    - `data`: the names of the static values.
    - `labels`: for children without keys, the attribute that each is.
    - `keys`: the keys of a dict, encoded as JSON, if not all are strings.
    """

    how: str
    cls: tuple[str, str] = ("", "")
    parts: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    labels: tuple[str | None, ...] = ()
    keys: str = ""


# A "leaf" is stored; a "value" is a leaf that is compared instead; a "left" one is
# neither, such as an array that `filter_spec` leaves out. All others are nodes: the
# table in FORMAT.md, "The tree", says what each is.
HOWS = (
    *("leaf", "value", "left", "none", "absent", "list", "tuple", "dict", "ordered"),
    *("default", "namedtuple", "module", "wrapper", "dataclass", "partial", "static"),
    *("state", "index", "node", "custom"),
)
DICTS = "dict", "ordered", "default"
# Kinds whose values are not compared. Those of a State and a StateIndex say which entry
# belongs to which.
_UNCOMPARED = "left", "state", "index"
# The names of the static values, of kinds that always have the same ones.
DATA: dict[str, tuple[str, ...]] = {
    "value": ("",),
    "left": ("",),
    "static": ("",),
    "partial": ("func",),
    "state": ("markers",),
    "index": ("marker",),
    "default": ("default_factory",),
}


class Row(NamedTuple):
    """Nodes or leaves that are alike: the number of their kind, the rows of their
    children, which come before, and the numbers of their values."""

    kind: int
    children: tuple[int, ...]
    values: tuple[int, ...]


# The first row: a leaf that is stored, and comes back as what it was stored as.
LEAF = 0


class Label(NamedTuple):
    """Identifies an entry of an eqx.nn.State, or a child without a key.

    An entry has the dotted names of its StateIndex, and as its marker the path from the
    model that Equinox has put there. The marker of a child is its attribute."""

    names: frozenset[str] = frozenset()
    marker: str | None = None


class StateNode(NamedTuple):
    """A State or a StateIndex of a tree: its name, its kind, and its encoded value,
    which has its markers."""

    name: str
    how: str
    value: Any


@dataclasses.dataclass(eq=False)
class TreeRecord:
    """All of a tree but its leaves. `rows[-1]` is the tree; `values` are encoded."""

    kinds: list[Kind]
    values: list[Any]
    rows: list[Row]

    def kind(self, row: int) -> Kind:
        return self.kinds[self.rows[row].kind]

    @ft.cached_property
    def encoded(self) -> dict[str, Any]:
        """The field `tree` of an index."""
        return encode(self)

    @ft.cached_property
    def texts(self) -> list[str]:
        """The JSON of each value."""
        return list(map(json.dumps, self.values))

    def form(self, value: int) -> Any:
        """A form of a value: two values are the same if their forms are equal."""
        return _values.compared(self.values[value])

    @ft.cached_property
    def counts(self) -> list[int]:
        """The number of stored leaves at and below each row."""
        out: list[int] = []
        for kind, children, _ in self.rows:
            own = self.kinds[kind].how == "leaf"
            out.append(own + sum(map(out.__getitem__, children)))
        return out

    def _any_below(self, has_it: Callable[[Kind], bool]) -> list[bool]:
        """Whether any kind at or below each row has it."""
        goods = list(map(has_it, self.kinds))
        out: list[bool] = []
        for kind, children, _ in self.rows:
            out.append(goods[kind] or any(map(out.__getitem__, {*children})))
        return out

    @ft.cached_property
    def has_values(self) -> list[bool]:
        """Whether static values at or below each row are compared."""
        return self._any_below(lambda k: bool(k.data) and k.how not in _UNCOMPARED)

    @ft.cached_property
    def has_labels(self) -> list[bool]:
        """Whether there are Labels, or nodes that give them, at or below each row."""
        return self._any_below(lambda k: k.how in ("state", "index") or bool(k.labels))

    @ft.cached_property
    def has_either(self) -> list[bool]:
        return list(map(operator.or_, self.has_values, self.has_labels))

    @ft.cached_property
    def is_value(self) -> list[bool]:
        """Whether each row is a leaf that is not stored, and is compared."""
        goods = [k.how == "value" or k.how == "absent" and k.data for k in self.kinds]
        return [bool(goods[kind]) for kind, _, _ in self.rows]

    @ft.cached_property
    def _places(self) -> dict[int, dict[str, int]]:
        return {}

    def place_of(self, row: int, part: str) -> int | None:
        """The place of the child of a row that has this part of a name."""
        number = self.rows[row].kind
        if number not in self._places:
            parts = self.kinds[number].parts
            self._places[number] = dict(zip(parts, range(len(parts))))
        return self._places[number].get(part)

    def row_at(self, name: str) -> int | None:
        """The row of the node of a name ("": the tree)."""
        row = len(self.rows) - 1
        for depth, part in enumerate(_names.parts(name)):
            place = self.place_of(row, part)
            if place is None and depth == 0:  # Some first parts are reserved.
                place = self.place_of(row, _names.below(part, ""))
            if place is None:
                return None
            row = self.rows[row].children[place]
        return row

    def children(self, row: int) -> Iterator[tuple[str, int]]:
        """The part of its name and the row of each child, as far as parts are known."""
        return zip(self.kind(row).parts, self.rows[row].children)

    def nodes(
        self, wanted: Sequence[bool], above: str = ""
    ) -> Iterator[tuple[str, int]]:
        """Names and rows of nodes and leaves, in order, whose rows are `wanted`, as the
        rows of all above them are. `above` is the name of the tree."""
        stack = [(above, len(self.rows) - 1)]
        while stack:
            name, row = stack.pop()
            if wanted[row]:
                yield name, row
                some = [(_names.child(name, x), y) for x, y in self.children(row)]
                stack += reversed(some)

    # ---- Static values.

    @ft.cached_property
    def _fields(self) -> dict[int, dict[str, int]]:
        return {}

    def fields(self, row: int) -> dict[str, int]:
        """The values of a node that are compared, by their names below it, quoted: its
        own, and the leaves in it that are not stored."""
        if row not in self._fields:
            kind = self.kind(row)
            out: dict[str, int] = {}
            if kind.how not in _UNCOMPARED:
                own = zip(kind.data, self.rows[row].values)
                out = {n: x for n, x in own if self.values[x] != _values.ABSENT}
            for part, child in self.children(row):
                if self.is_value[child]:
                    out.setdefault(part, self.rows[child].values[0])
            self._fields[row] = out
        return self._fields[row]

    def nodes_with_fields(self, above: str = "") -> Iterator[tuple[str, int]]:
        """Names and rows of nodes that have values."""
        for name, row in self.nodes(self.has_values, above):
            if not self.is_value[row] and self.fields(row):
                yield name, row

    def field_names(self, above: str = "") -> Iterator[str]:
        """The names of all values, and of the parts of those that have parts."""
        for name, row in self.nodes_with_fields(above):
            for field, value in self.fields(row).items():
                todo = [(_names.joined(name, field) or _names.ROOT, self.form(value))]
                for whole, x in todo:  # Parts are added meanwhile.
                    yield whole
                    if len(whole) - len(name) - len(field) <= _values.MAX_NAMED:
                        parts = _values.parts(x) or {}
                        todo += [(f"{whole}.{part}", y) for part, y in parts.items()]

    # ---- States.

    def states(self, above: str = "") -> dict[str, list[Label]]:
        """The labels of the entries of each eqx.nn.State, by its name."""
        found = (
            StateNode(name, how, self.values[self.rows[row].values[0]])
            for name, row in self.nodes(self.has_labels, above)
            if (how := self.kind(row).how) in ("state", "index")
        )
        return labels_of_states(found)


def labels_of_states(found: Iterable[StateNode]) -> dict[str, list[Label]]:
    """The labels of the entries of each eqx.nn.State, by its name, of all States and
    StateIndices of a tree. Their markers are texts of labels (see `label_of`), or
    numbers, which only say which StateIndices an entry has."""
    states: dict[str, list[str | int]] = {}
    # By the marker of an entry, the names of the StateIndices that have it.
    names: dict[str | int, list[str]] = {}
    for name, how, value in found:
        if how == "state":
            states[name] = value["markers"]
        else:
            names.setdefault(value["markers"][0], []).append(name)
    labels: dict[str | int, Label] = {}  # States share them.
    for marker in it.chain.from_iterable(states.values()):
        own = label_of(marker) if type(marker) is str else Label()
        # The names that it had are no more, if its StateIndex is here.
        labels[marker] = own._replace(names=frozenset(names.get(marker, own.names)))
    # The marker of a module that was moved counts for nothing.
    ends = _finder_of_ends(
        path for label in labels.values() if (path := path_of(label))
    )
    for marker, label in labels.items():
        own = path_of(label)
        paths_of = map(ends, label.names if own else ())
        if any(paths and own not in paths for paths in paths_of):
            labels[marker] = label._replace(marker=None)
    return {name: [labels[x] for x in markers] for name, markers in states.items()}


def _finder_of_ends(
    paths: Iterable[tuple[str, ...]],
) -> Callable[[str], list[tuple[str, ...]]]:
    """A function that finds those of some paths that a name ends with, the longest
    last. It takes time that grows with the name: both are data from a file."""
    # The paths from their last part on. Where one begins, it is itself at "".
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for part in reversed(path):
            node = node.setdefault(part, {})
        node[""] = path

    def find(name: str) -> list[tuple[str, ...]]:
        out, node = [], tree
        for part in reversed(name.split(".")):
            node = node.get(part) if part else None
            if node is None:
                break
            if "" in node:
                out.append(node[""])
        return out

    return find


def path_of(label: Label) -> tuple[str, ...] | None:
    """The path of a StateIndex from its model, which a marker of Equinox is, without
    the name of the class."""
    if label.marker is None:
        return None
    return tuple(_words.findall(re.sub(r"^\w+", "", label.marker)))


_words = re.compile(r"\w+")


def names_by_markers(
    labels: Iterable[Label], nodes: Iterable[str]
) -> dict[Label, list[str]]:
    """The names that the StateIndices of labels have in a tree of these nodes, where
    only their markers are known: below each node whose name ends as a marker does, but
    for its last part. If several do, it is the longest."""
    fields: dict[tuple[str, ...], dict[Label, str]] = {}
    for label in labels:
        path = path_of(label)
        if not label.names and path is not None and len(path) > 1:
            fields.setdefault(path[:-1], {})[label] = path[-1]
    out: dict[Label, list[str]] = {}
    ends = _finder_of_ends(fields)
    for node in nodes if fields else ():
        for path in ends(node)[-1:]:
            for label, field in fields[path].items():
                out.setdefault(label, []).append(f"{node}.{field}")
    return out


def label_of(text: str) -> Label:
    """The label of a text: `=` is before a marker, `@` before names with commas between
    them."""
    if text[:1] == "@":
        return Label(frozenset(text[1:].split(",")))
    return Label(marker=text[1:])


def label_text(label: Label) -> str | None:
    """The inverse of `label_of`: by the marker, unless it leads to none of the names;
    else by these. None of a label without either. Equinox begins a marker with the name
    of a class, which goes."""
    if label.marker is not None and (not label.names or _leads_to_any(label)):
        return "=" + re.sub(r"^\w+", "", label.marker)
    return "@" + ",".join(sorted(label.names)) if label.names else None


def _leads_to_any(label: Label) -> bool:
    """Whether the marker of a label ends one of its names. If not, its module has been
    moved since it was made."""
    path = path_of(label) or ()
    words = (_words.findall(_names.unquote(name)) for name in label.names)
    return any(tuple(x[len(x) - len(path) :]) == path for x in words)


# ---- In an index.


def packed(children: Sequence[int]) -> list[int]:
    """Rows of children, in which `-n` stands for `n` more of the one before."""
    out: list[int] = []
    for child, same in it.groupby(children):
        count = len(list(same))
        out += [child] if count == 1 else [child, 1 - count]
    return out


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
    """The kinds of dicts whose keys the names of leaves tell, and in which nothing is
    compared."""
    out = set()
    for number, kind in enumerate(record.kinds):
        # Only the record tells keys that are no strings or integers.
        keys = json.loads(kind.keys) if kind.keys else []
        if kind.how in DICTS and {*map(type, keys)} <= {str, int}:
            out.add(number)
    for row in record.rows:
        if row.kind in out:
            below = {*row.children}
            have_leaves = all(map(record.counts.__getitem__, below))
            if not have_leaves or any(map(record.has_either.__getitem__, below)):
                out.discard(row.kind)
    return out


def _encode_kind(kind: Kind, width: int | None) -> list[Any]:
    """A kind as JSON; `width`: of a bare dict, how many keys it has."""
    parts: Any = list(kind.parts)
    if width is not None:
        parts = width
    elif kind.how not in DICTS and parts == [*map(str, range(len(parts)))]:
        parts = len(parts)
    keys = json.loads(kind.keys) if kind.keys and width is None else None
    data = [] if DATA.get(kind.how) == kind.data else list(kind.data)
    own = [kind.how, *kind.cls, parts, data, list(kind.labels), keys]
    while own[-1] in ("", 0, None) or own[-1] == []:
        own.pop()
    return own


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
    how often it follows itself."""

    kind: int
    values: Sequence[int]
    runs: list[tuple[int, int]]


# The most children of all rows together.
_MAX_CHILDREN = 2**22
# As `_check_costs` counts them: the cost of a node, of a character of a value, and of a
# part of a leaf's name.
_NODE_COST, _CHARACTER_COST, _PART_COST = 128, 4, 3 * 128
# The most characters of one value, and how deep its JSON may be: more than those of any
# that `_tree/_codec.py` makes.
_MAX_CHARACTERS, _MAX_DEPTH = 2**16, 250
# Kinds whose children and static values are fields of one class.
_FIELDS = "module", "dataclass"
# Kinds that always have as many children.
_WIDTHS = {"partial": 2, "index": 1}
_WIDTHS |= dict.fromkeys(("leaf", "value", "left", "none", "absent", "static"), 0)
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
    kinds, values, rows = fields(
        value, {"kinds": [[Any]], "values": [Any], "rows": [[int]]}, "tree"
    )
    if not rows:
        raise ValueError("the tree has no rows")
    raw_kinds = list(map(_checked_kind, kinds))
    raw_rows = _checked_rows(rows, raw_kinds, len(values))
    # Before all children are there: few bytes stand for very many.
    if _check_costs(raw_kinds, values, raw_rows, leaves) != leaves:
        raise ValueError("the tree has not as many leaves as there are")
    made = [Row(kind, _expand(runs), tuple(own)) for kind, own, runs in raw_rows]
    record = TreeRecord(list(map(_kind_of, raw_kinds)), values, made)
    _check_markers(record)
    return record


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
        good = len(row) >= head and all(0 <= x < value_count for x in values)
        good = good and max(children, default=-1) < number
        if not good or children and children[0] < 0:
            raise ValueError("the tree has a malformed row")
        runs = _unpacked(children)
        width = sum(map(operator.itemgetter(1), runs))
        total += width
        if width != kinds[kind].width or total > _MAX_CHILDREN:
            raise ValueError("the tree has a row of other children than its kind")
        out.append(_RawRow(kind, values, runs))
    if len({row.kind for row in out}) != len(kinds):
        raise ValueError("the tree has a kind that no row is of")
    return out


def _unpacked(children: Sequence[int]) -> list[tuple[int, int]]:
    """The inverse of `packed`: the rows of children, and how often each follows
    itself."""
    out: list[tuple[int, int]] = []
    for child in children:
        if child >= 0:
            out.append((child, 1))
        else:
            out.append((out[-1][0], -child))
    return out


def _expand(runs: list[tuple[int, int]]) -> tuple[int, ...]:
    """The row of each child in runs."""
    return tuple(it.chain.from_iterable(it.starmap(it.repeat, runs)))


def _checked_kind(kind: list[Any]) -> _RawKind:
    """A kind as an index has it, with the defaults of what is left out at its end.

    **Raises:** `ValueError` for one that no tree has."""
    whole = [*kind, *_DEFAULTS[len(kind) :]]
    if len(whole) > len(_DEFAULTS) or not fits(whole, _KIND):
        raise ValueError("the tree has a malformed kind")
    how, module, name, parts, data, labels, keys = whole
    if how not in HOWS:
        raise ValueError("the tree has an unknown kind of node")
    data = tuple(data or DATA.get(how, ()))
    checked = _RawKind(how, module, name, parts, data, labels, keys)
    width, names = checked.width, parts if type(parts) is list else []
    fields_of_one_class = (*names, *data) if how in _FIELDS else ()
    if not (
        all(map(_names.is_component, (*names, *filter(None, data))))
        and all(len({*x}) == len(x) for x in (names, data, fields_of_one_class))
        and DATA.get(how, data) == data
        and (keys is None or how in DICTS and len(keys) == len(names))
        and width == _WIDTHS.get(how, width)
        and len(labels) in (0, width)
    ):
        raise ValueError("the tree has a malformed kind")
    return checked


def _kind_of(kind: _RawKind) -> Kind:
    """A kind that was checked, as a record has it."""
    how, module, name, parts, data, labels, keys = kind
    if isinstance(parts, int):
        parts = () if how in DICTS else list(map(str, range(parts)))
    keys = "" if keys is None else json.dumps(keys)
    return Kind(how, (module, name), tuple(parts), data, tuple(labels), keys)


def _check_markers(record: TreeRecord) -> None:
    """**Raises:** `ValueError` unless States and their indices have markers."""
    for kind, children, values in record.rows:
        how = record.kinds[kind].how
        if how not in ("state", "index"):
            continue
        found = record.values[values[0]]
        markers = found.get("markers") if type(found) is dict else None
        width = len(children) if how == "state" else 1
        if type(markers) is not list or len(markers) != width:
            raise ValueError("the tree has a State without its markers")
        for x in markers:
            if not (type(x) is int or type(x) is str and x[:1] in ("=", "@")):
                raise ValueError("the tree has a malformed marker")
        if len({*markers}) != width:
            raise ValueError("the tree has two entries of a State of one marker")


def check(record: TreeRecord) -> None:
    """**Raises:** `ValueError` for a tree that no reader takes, such as one of more
    nodes or values than are read."""
    parse(record.encoded, record.counts[-1])


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
    # Where each part ends in the text of all parts of a kind; None if they are numbers.
    ends_of = [
        None
        if isinstance(kind.parts, int)
        else [*it.accumulate(map(len, kind.parts), initial=0)]
        for kind in kinds
    ]
    kind_costs = [_CHARACTER_COST * len(json.dumps(kind[:5])) for kind in kinds]
    value_lengths = [len(json.dumps(x)) for x in encoded]
    # At and below each row: the leaves, the nodes and values, and their cost.
    leaves: list[int] = []
    sizes: list[int] = []
    costs: list[int] = []
    for kind, values, runs in rows:
        how = kinds[kind].how
        stored, size = int(how == "leaf"), 1 + len(values)
        lengths = list(map(value_lengths.__getitem__, values))
        if max(lengths, default=0) > _MAX_CHARACTERS and how not in ("state", "index"):
            raise ValueError("the tree has a static value that is too long")
        cost = _NODE_COST + kind_costs[kind] + _CHARACTER_COST * sum(lengths)
        place, ends = 0, ends_of[kind]
        for child, count in runs:
            stored += count * leaves[child]
            size += count * sizes[child]
            # The parts of these children's names. The names of all nodes below have
            # them too, each with a dot.
            characters = 4 * count  # As if each number had four digits.
            if ends is not None and len(ends) > place + count:
                characters = ends[place + count] - ends[place]
            cost += count * (costs[child] + sizes[child]) + characters * sizes[child]
            place += count
        if how == "leaf":
            cost = _NODE_COST
        leaves.append(stored)
        sizes.append(size)
        costs.append(cost)
        if stored > most:
            raise ValueError("the tree has not as many leaves as there are")
        if cost > limits.tree_cost + _PART_COST * _names.MAX_DEPTH * stored:
            raise ValueError("the tree has more nodes and static values than are read")
    return leaves[-1]
