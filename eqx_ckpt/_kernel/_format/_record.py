"""The record of a tree: all of it but its leaves. See FORMAT.md, "The tree".

Nodes that are alike are one row, so that a model of many blocks has the rows of one.
Comparing, storing and showing go by rows and not by leaves.
"""

import dataclasses
import functools as ft
import itertools as it
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
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


# A leaf is stored; a value is a leaf that is compared instead; what is left is neither,
# such as an array that `filter_spec` leaves out.
HOWS = (
    *("leaf", "value", "left", "none", "absent", "list", "tuple", "dict", "ordered"),
    *("default", "namedtuple", "module", "wrapper", "dataclass", "partial", "static"),
    *("state", "index", "node", "custom"),
)
DICTS = "dict", "ordered", "default"
# Kinds whose values are not compared: of a State and a StateIndex they say which entry
# belongs to which.
_UNCOMPARED = "left", "state", "index"
# The names of the static values of nodes and leaves of which all have the same ones.
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

    An entry has the dotted names of its StateIndex, and as its marker a path from the
    model. The marker of a child is its attribute."""

    names: frozenset[str] = frozenset()
    marker: str | None = None


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

    @ft.cached_property
    def _forms(self) -> dict[int, Any]:
        return {}

    def form(self, value: int) -> Any:
        """A value as `_values.compared` gives it: two that are the same are equal."""
        if value not in self._forms:
            self._forms[value] = _values.compared(self.values[value])
        return self._forms[value]

    @ft.cached_property
    def counts(self) -> list[int]:
        """The number of stored leaves at and below each row."""
        out: list[int] = []
        for kind, children, _ in self.rows:
            own = self.kinds[kind].how == "leaf"
            out.append(own + sum(map(out.__getitem__, children)))
        return out

    def _any_below(self, has_it: Callable[[Kind], bool]) -> list[bool]:
        goods = list(map(has_it, self.kinds))
        out: list[bool] = []
        for kind, children, _ in self.rows:
            out.append(goods[kind] or any(map(out.__getitem__, {*children})))
        return out

    @ft.cached_property
    def has_values(self) -> list[bool]:
        """Whether anything at or below each row is compared but leaves."""
        return self._any_below(lambda k: bool(k.data) and k.how not in _UNCOMPARED)

    @ft.cached_property
    def has_labels(self) -> list[bool]:
        """Whether children at or below each row go by labels, or labels by them."""
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
            if place is None and depth == 0:
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
                values = self.rows[row].values
                out = dict(zip(kind.data, values))
                out = {n: x for n, x in out.items() if self.values[x] != _values.ABSENT}
            for part, child in self.children(row):
                if self.is_value[child]:
                    out.setdefault(part, self.rows[child].values[0])
            self._fields[row] = out
        return self._fields[row]

    def fields_at(self, name: str) -> dict[str, Any]:
        """The encoded values of the node of a name, by their names below it."""
        row = self.row_at(name)
        some = {} if row is None else self.fields(row)
        return {part: self.values[x] for part, x in some.items()}

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
                for whole, x in todo:
                    yield whole
                    some = _values.parts(x) or {}
                    if len(whole) - len(name) - len(field) > _values.MAX_NAMED:
                        some = {}
                    todo += [(f"{whole}.{part}", y) for part, y in some.items()]

    # ---- States.

    def states(self, above: str = "") -> dict[str, list[Label]]:
        """The labels of the entries of each eqx.nn.State, by its name."""
        found = (
            (name, how, self.values[self.rows[row].values[0]])
            for name, row in self.nodes(self.has_labels, above)
            if (how := self.kind(row).how) in ("state", "index")
        )
        return labels_of_states(found)


def labels_of_states(found: Iterable[tuple[str, str, Any]]) -> dict[str, list[Label]]:
    """The labels of the entries of each eqx.nn.State, by its name. `found`: the name,
    the kind and the encoded markers of each State and each StateIndex of a tree."""
    states: dict[str, list[str | int]] = {}
    names: dict[str | int, list[str]] = {}
    for name, how, value in found:
        if how == "state":
            states[name] = value["markers"]
        else:
            names.setdefault(value["markers"][0], []).append(name)
    labels: dict[str | int, Label] = {}  # States share them.
    for marker in it.chain.from_iterable(states.values()):
        own = label_of(marker) if type(marker) is str else Label()
        labels[marker] = own._replace(names=own.names.union(names.get(marker, ())))
    paths = {path_of(label) for label in labels.values()}
    for marker, label in labels.items():
        if any(_is_of_another(name, path_of(label), paths) for name in label.names):
            labels[marker] = label._replace(marker=None)
    return {name: [labels[x] for x in markers] for name, markers in states.items()}


def _is_of_another(
    name: str, own: tuple[str, ...] | None, paths: Set[tuple[str, ...] | None]
) -> bool:
    """Whether the name of a StateIndex is not where its marker leads to, and the marker
    of another one leads there: its module has been moved since it was made."""
    if own is None:
        return False
    parts = tuple(name.split("."))
    ends = {parts[start:] for start in range(len(parts))}
    return own not in ends and not ends.isdisjoint(paths)


def path_of(label: Label) -> tuple[str, ...] | None:
    """The path of a StateIndex from its model, which a marker of Equinox is, without
    the name of the class."""
    if label.marker is None:
        return None
    return tuple(re.findall(r"\w+", re.sub(r"^\w+", "", label.marker)))


def label_of(text: str) -> Label:
    """The label of a text: `=` is before a marker, `@` before names with commas between
    them."""
    if text[:1] == "@":
        return Label(frozenset(text[1:].split(",")))
    return Label(marker=text[1:])


def label_text(label: Label) -> str | None:
    """The inverse of `label_of`, of one of the two that a label has; None of neither.
    The name of the class goes, with which a marker of Equinox begins."""
    if label.marker is not None:
        return "=" + re.sub(r"^\w+", "", label.marker)
    return "@" + ",".join(sorted(label.names)) if label.names else None


# ---- In an index.


def packed(children: Sequence[int]) -> list[int]:
    """Rows of children, in which `-n` stands for `n` more of the one before."""
    out: list[int] = []
    for child, count in _runs(children):
        out += [child] if count == 1 else [child, 1 - count]
    return out


def encode(record: TreeRecord) -> dict[str, Any]:
    """The field `tree` of an index."""
    bare = _bare_kinds(record)
    widths = {row.kind: len(row.children) for row in record.rows if row.kind in bare}
    made = [_encode_kind(kind, widths.get(n)) for n, kind in enumerate(record.kinds)]
    texts = list(map(json.dumps, made))
    kinds = dict(zip(texts, made))
    number_of = dict(zip(kinds, range(len(kinds))))
    numbers = list(map(number_of.__getitem__, texts))
    rows = [[numbers[x.kind], *x.values, *packed(x.children)] for x in record.rows]
    return {"kinds": list(kinds.values()), "values": record.values, "rows": rows}


def _bare_kinds(record: TreeRecord) -> set[int]:
    """The kinds of dicts whose keys the names of leaves tell, and in which nothing is
    compared."""
    out = {n for n, kind in enumerate(record.kinds) if kind.how in DICTS}
    for n in [*out]:  # Only the record tells keys that are no strings or integers.
        keys = record.kinds[n].keys
        if keys and not {*map(type, json.loads(keys))} <= {str, int}:
            out.discard(n)
    for row in record.rows:
        if row.kind in out:
            below = {*row.children}
            if not all(map(record.counts.__getitem__, below)) or any(
                record.has_values[x] or record.has_labels[x] for x in below
            ):
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


# The children of all rows, and the cost of a part, as `_check_costs` counts it.
_MOST_CHILDREN, _PART = 2**22, 3 * 128
_NODE, _VALUE = 128, 4
# The characters of one value, and how deep its JSON is: more than those of any that
# `_tree/_codec.py` makes.
_MOST_LONG, _MOST_DEEP = 2**16, 250
_KIND = (
    *(str, str, str),
    lambda x: fits(x, range(_MOST_CHILDREN)) or fits(x, [str]),
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
    _json.check_depth(value, _MOST_DEEP)
    kinds, values, rows = fields(
        value, {"kinds": [[Any]], "values": [Any], "rows": [[int]]}, "tree"
    )
    if not rows:
        raise ValueError("the tree has no rows")
    raw = list(map(_checked_kind, kinds))
    counts = [1 + len(kind.data) for kind in raw]
    found: list[_RawRow] = []
    total = 0
    for number, row in enumerate(rows):
        if not row or not 0 <= row[0] < len(raw):
            raise ValueError("the tree has a row of no known kind")
        own, children = row[1 : counts[row[0]]], row[counts[row[0]] :]
        good = len(row) >= counts[row[0]] and all(0 <= x < len(values) for x in own)
        good = good and max(children, default=-1) < number
        if not good or children and children[0] < 0:
            raise ValueError("the tree has a malformed row")
        found.append(_RawRow(row[0], own, runs := _unpacked(children)))
        total += (width := _width(runs))
        if width != raw[row[0]].width or total > _MOST_CHILDREN:
            raise ValueError("the tree has a row of other children than its kind")
    if len({row.kind for row in found}) != len(raw):
        raise ValueError("the tree has a kind that no row is of")
    # Before all children are there: few bytes stand for very many.
    if _check_costs(raw, values, found, leaves) != leaves:
        raise ValueError("the tree has not as many leaves as there are")
    known = list(map(_kind_of, raw))
    made = [Row(kind, _expand(runs), tuple(own)) for kind, own, runs in found]
    record = TreeRecord(known, values, made)
    _check_values(record)
    return record


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


def _width(runs: list[tuple[int, int]]) -> int:
    """The number of children in runs."""
    return sum(map(operator.itemgetter(1), runs))


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
    good = len({*names}) == len(names) and len({*data}) == len(data)
    good = good and all(map(_names.is_component, (*names, *filter(None, data))))
    good = good and DATA.get(how, data) == data and len(labels) in (0, width)
    good = good and (how not in _FIELDS or {*names}.isdisjoint(data))
    good = good and (keys is None or how in DICTS and len(keys) == len(names))
    if not good or width != _WIDTHS.get(how, width):
        raise ValueError("the tree has a malformed kind")
    return checked


def _kind_of(kind: _RawKind) -> Kind:
    """A kind that was checked, as a record has it."""
    how, module, name, parts, data, labels, keys = kind
    if isinstance(parts, int):
        parts = () if how in DICTS else list(map(str, range(parts)))
    keys = "" if keys is None else json.dumps(keys)
    return Kind(how, (module, name), tuple(parts), data, tuple(labels), keys)


# Kinds whose children and static values are fields of one class.
_FIELDS = "module", "dataclass"
_WIDTHS = {"partial": 2, "index": 1}
_WIDTHS |= dict.fromkeys(("leaf", "value", "left", "none", "absent", "static"), 0)


def _check_values(record: TreeRecord) -> None:
    """**Raises:** `ValueError` unless States and their indices have markers."""
    for kind, children, values in record.rows:
        how = record.kinds[kind].how
        if how in ("state", "index"):
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


def _runs(children: Sequence[int]) -> list[tuple[int, int]]:
    """Children that follow each other and are of one row: that, and how many."""
    return [(child, len(list(some))) for child, some in it.groupby(children)]


def _check_costs(
    kinds: Sequence[_RawKind],
    encoded: Sequence[Any],
    rows: Iterable[_RawRow],
    most: int,
) -> int:
    """Bounds a tree of `most` leaves by what it would take to walk it, in time that
    grows with its rows. Returns how many leaves it has.
    """
    # Where each part ends in the text of all parts of its kind.
    texts = [
        None
        if isinstance(kind.parts, int)
        else [*it.accumulate(map(len, kind.parts), initial=0)]
        for kind in kinds
    ]
    heads = [_VALUE * len(json.dumps(kind[:5])) for kind in kinds]
    lengths = [len(json.dumps(x)) for x in encoded]
    # Of each row the leaves, the nodes and values, and their cost, at and below it.
    leaves: list[int] = []
    sizes: list[int] = []
    costs: list[int] = []
    for kind, values, runs in rows:
        how = kinds[kind].how
        stored, size = int(how == "leaf"), 1 + len(values)
        own = list(map(lengths.__getitem__, values))
        if max(own, default=0) > _MOST_LONG and how not in ("state", "index"):
            raise ValueError("the tree has a static value that is too long")
        cost = _NODE + heads[kind] + _VALUE * sum(own)
        at, ends = 0, texts[kind]
        for child, count in runs:
            stored += count * leaves[child]
            size += count * sizes[child]
            own = 4 * count
            if ends is not None and len(ends) > at + count:
                own = ends[at + count] - ends[at]
            # The part of a name is in the names of all nodes below.
            cost += count * (costs[child] + sizes[child]) + own * sizes[child]
            at += count
        if how == "leaf":
            cost = _NODE
        leaves.append(stored)
        sizes.append(size)
        costs.append(cost)
        if stored > most:
            raise ValueError("the tree has not as many leaves as there are")
        if cost > limits.tree_cost + _PART * _names.MAX_DEPTH * stored:
            raise ValueError("the tree has more nodes and static values than are read")
    return leaves[-1]
