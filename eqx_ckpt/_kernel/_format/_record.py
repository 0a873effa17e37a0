"""The record of a tree: all of it but its stored leaves. See FORMAT.md, "The tree".

A *row* is a node or a leaf, with the rows of its children. Nodes that are alike are one
row, so that a model of many blocks has the rows of one. Comparing, storing and showing
go by rows and not by leaves. Rows share *kinds* and static *values*, by their numbers.
"""

import dataclasses
import functools as ft
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import _names, _values
from ._state_labels import Label, labels_of_states, StateNode


class Kind(NamedTuple):
    """What nodes share that differ only in their children and their values.

    - `how`: the sort of node or leaf, such as `"module"`: a key of `HOWS`.
    - `cls`: the module and the qualified name of the class; `""` for Python's own.
    - `parts`: the part that each child adds to its dotted name. Empty for a dict
      whose keys are not recorded, as the names of its leaves tell them.
    - `data`: the part that each static value adds to it.
    - `attributes`: for children without keys, the attribute that each is; None if none.
        In an index it is called `labels`.
    - `keys`: the keys of a dict, encoded as JSON, if not all are strings.
    """

    how: str
    cls: tuple[str, str] = ("", "")
    parts: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    attributes: tuple[str | None, ...] = ()
    keys: str = ""


class How(NamedTuple):
    """What all nodes or leaves of one `how` have in common.

    - `data`: the `data` of their kinds, unless each has its own (`has_own_data`).
    - `width`: the number of their children; None for any.
    - `is_compared`: whether their static values are compared.
    - `has_markers`: whether their value says which entry of an eqx.nn.State is which.
    - `is_dict`: whether they are dicts, whose keys `Kind.keys` may record.
    - `are_fields`: whether their children and static values are fields of one class.
    """

    data: tuple[str, ...] = ()
    width: int | None = None
    has_own_data: bool = False
    is_compared: bool = True
    has_markers: bool = False
    is_dict: bool = False
    are_fields: bool = False


# A "leaf" is stored; a "value" is a leaf that is compared instead; a "left" one is
# neither stored nor compared: for example an array that `filter_spec` leaves out. An
# "absent" one stands for a field that a Module has not set; it has a value if the class
# has one for it. All others are nodes: the table in FORMAT.md, "The tree", says what
# each is.
HOWS = {
    "leaf": How(width=0),
    "value": How(("",), 0),
    "left": How(("",), 0, is_compared=False),
    "none": How(width=0),
    "absent": How(width=0, has_own_data=True),
    "list": How(),
    "tuple": How(),
    "dict": How(is_dict=True),
    "ordered": How(is_dict=True),
    "default": How(("default_factory",), is_dict=True),
    "namedtuple": How(),
    "module": How(has_own_data=True, are_fields=True),
    "wrapper": How(has_own_data=True, are_fields=True),
    "dataclass": How(has_own_data=True, are_fields=True),
    "partial": How(("func",), 2),
    "static": How(("",), 0),
    "state": How(("markers",), is_compared=False, has_markers=True),
    "index": How(("marker",), 1, is_compared=False, has_markers=True),
    "node": How(has_own_data=True),
    "custom": How(has_own_data=True),
}


class Row(NamedTuple):
    """Nodes or leaves that are alike: the number of their kind, the rows of their
    children, which come before, and the numbers of their values."""

    kind: int
    children: tuple[int, ...]
    values: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class TreeRecord:
    """All of a tree but its stored leaves. `rows[-1]` is the tree itself, and `values`
    are encoded. A `row` or a `value` is here its number; a property called `is_...` or
    `has_...` has an answer for each row."""

    kinds: list[Kind]
    values: list[Any]
    rows: list[Row]
    # What `compared_values` has found so far, by row.
    _compared: dict[int, dict[str, int]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def kind(self, row: int) -> Kind:
        return self.kinds[self.rows[row].kind]

    @ft.cached_property
    def encoded(self) -> dict[str, Any]:
        """The field `tree` of an index."""
        from ._record_json import encode  # It imports this module.

        return encode(self)

    @ft.cached_property
    def texts(self) -> list[str]:
        """The JSON of each value."""
        return list(map(json.dumps, self.values))

    def form(self, value: int) -> Any:
        """A form of a value: two values are the same if their forms are equal."""
        return _values.compared(self.values[value])

    @ft.cached_property
    def leaf_counts(self) -> list[int]:
        """The number of stored leaves at and below each row."""
        out: list[int] = []
        for kind, children, _ in self.rows:
            is_leaf = self.kinds[kind].how == "leaf"
            out.append(is_leaf + sum(map(out.__getitem__, children)))
        return out

    def _by_kind(self, is_wanted: Callable[[Kind], bool]) -> list[bool]:
        """Whether the kind of each row is wanted."""
        wanted = list(map(is_wanted, self.kinds))
        return [wanted[kind] for kind, *_ in self.rows]

    def _any_below(self, wanted: Sequence[bool]) -> list[bool]:
        """Whether any row at or below each row is wanted."""
        out: list[bool] = []
        for is_wanted, (_, children, _) in zip(wanted, self.rows):
            # Children that are alike are one row, which is looked at once.
            out.append(is_wanted or any(map(out.__getitem__, {*children})))
        return out

    @ft.cached_property
    def has_values(self) -> list[bool]:
        """Whether there may be static values to compare at or below each row. There may
        be none after all: `compared_values` leaves out those that are
        `_values.ABSENT`."""
        is_compared = lambda k: bool(k.data) and HOWS[k.how].is_compared
        return self._any_below(self._by_kind(is_compared))

    @ft.cached_property
    def has_empty(self) -> list[bool]:
        """Whether a row without children that is not stored, such as None or a value,
        is at or below each row."""
        is_unstored = self._by_kind(lambda k: k.how != "leaf")
        found = zip(is_unstored, self.rows)
        return self._any_below([is_own and not row.children for is_own, row in found])

    @ft.cached_property
    def has_labels(self) -> list[bool]:
        """Whether a State, a StateIndex, or a node whose children are known by their
        attributes is at or below each row."""
        gives_labels = lambda k: HOWS[k.how].has_markers or bool(k.attributes)
        return self._any_below(self._by_kind(gives_labels))

    @ft.cached_property
    def has_values_or_labels(self) -> list[bool]:
        return list(map(operator.or_, self.has_values, self.has_labels))

    @ft.cached_property
    def is_value(self) -> list[bool]:
        """Whether each row is a leaf that is not stored, and is compared. An absent one
        has a value if its class has one for it."""
        return self._by_kind(lambda k: k.how in ("value", "absent") and bool(k.data))

    @ft.cached_property
    def _places(self) -> list[dict[str, int]]:
        """Of each kind, the place of the child that has a part of a name."""
        return [{part: i for i, part in enumerate(kind.parts)} for kind in self.kinds]

    def place_of(self, row: int, part: str) -> int | None:
        """The place of the child of a row that has this part of a name, as far as parts
        are known."""
        places = self._places[self.rows[row].kind]
        if part not in places and row == len(self.rows) - 1:
            # A first part that is reserved is escaped in a name, and not in a kind.
            part = _names.below(part, "")
        return places.get(part)

    def child_at(self, row: int, part: str) -> int | None:
        """The row of that child; None if there is none."""
        place = self.place_of(row, part)
        return None if place is None else self.rows[row].children[place]

    def row_at(self, name: str) -> int | None:
        """The row of the node or leaf of a name ("": the tree). None if there is none,
        or if it is below a dict whose keys only the names of leaves tell."""
        row: int | None = len(self.rows) - 1
        for part in _names.parts(name):
            if row is None:
                return None
            row = self.child_at(row, part)
        return row

    def has_unknown_parts(self, row: int) -> bool:
        """Whether a row is a dict of which only the names of leaves tell the keys."""
        return not self.kind(row).parts and bool(self.rows[row].children)

    def children(self, row: int) -> Iterator[tuple[str, int]]:
        """The part of its name and the row of each child, as far as parts are known."""
        return zip(self.kind(row).parts, self.rows[row].children)

    def nodes(
        self, wanted: Sequence[bool], root_name: str = ""
    ) -> Iterator[tuple[str, int]]:
        """Names and rows of nodes and leaves, in order, whose rows are `wanted`, as far
        as parts are known. Nothing below an unwanted row is visited. `root_name` is
        that of the tree."""
        stack = [(root_name, len(self.rows) - 1)]
        while stack:
            name, row = stack.pop()
            if wanted[row]:
                yield name, row
                some = [(_names.child(name, x), y) for x, y in self.children(row)]
                stack += reversed(some)

    def node_names(self, root_name: str = "") -> list[str]:
        """The names of all nodes with children or values."""
        # A row without children has no values but its own.
        found = zip(self.rows, self.has_values, self.is_value)
        wanted = [
            bool(row.children) or has_values and not is_value
            for row, has_values, is_value in found
        ]
        return [name for name, _ in self.nodes(wanted, root_name)]

    # ---- Static values.

    def compared_values(self, row: int) -> dict[str, int]:
        """The values of a node that are compared, by the parts that they add to its
        name: its own, and the leaves in it that are not stored."""
        if row not in self._compared:
            kind, places = self.kind(row), self._places[self.rows[row].kind]
            out: dict[str, int] = {}
            if HOWS[kind.how].is_compared:
                # A defaultdict may have the key "default_factory", which is the name of
                # its own value, too: that gets a "%", as no key has one at its end.
                own = (f"{n}%" if n in places else n for n in kind.data)
                values = zip(own, self.rows[row].values)
                out = {n: x for n, x in values if self.values[x] != _values.ABSENT}
            for part, child in self.children(row):
                if self.is_value[child]:
                    out[part] = self.rows[child].values[0]
            self._compared[row] = out
        return self._compared[row]

    def values_below(self, row: int) -> Iterator[tuple[str, Any]]:
        """The forms of all compared values at and below a row, by their names there."""
        stack = [("", row)]
        while stack:
            name, row = stack.pop()
            if self.is_value[row]:
                yield name, self.form(self.rows[row].values[0])
                continue
            below = dict(self.children(row))
            for part, value in self.compared_values(row).items():
                if part not in below:
                    yield _names.joined(name, part), self.form(value)
            stack += [(_names.joined(name, part), x) for part, x in below.items()]

    def nodes_with_values(self, root_name: str = "") -> Iterator[tuple[str, int]]:
        """Names and rows of nodes that have `compared_values`."""
        for name, row in self.nodes(self.has_values, root_name):
            # A value belongs to the node that it is in. No tree is one value alone.
            if not self.is_value[row] and self.compared_values(row):
                yield name, row

    def value_names(self, root_name: str = "") -> Iterator[str]:
        """The names of all compared values, and of the parts that some of them have."""
        for name, row in self.nodes_with_values(root_name):
            for part, value in self.compared_values(row).items():
                whole = _names.joined(name, part) or _names.ROOT
                yield whole
                for rest in _values.part_names(self.form(value)):
                    yield f"{whole}.{rest}"

    # ---- States.

    def states(self) -> dict[str, dict[int, Label]]:
        """The labels of the entries of each eqx.nn.State, by its name and by their
        positions."""
        found = (
            StateNode(name, kind.how, kind.parts, self.values[self.rows[row].values[0]])
            for name, row in self.nodes(self.has_labels)
            if HOWS[(kind := self.kind(row)).how].has_markers
        )
        return labels_of_states(found)


# For nodes whose children have no keys: by the name of the node, and by the part of
# names of the child, the attribute that the child is, or None.
Attributes = Mapping[str, Mapping[str, str | None]]


def of_attributes(names: Sequence[str], attributes: Attributes) -> TreeRecord:
    """The record of a tree with leaves of these names, of which only the attributes of
    some children are known. A child in which none is known is a leaf here, so
    `leaf_counts` do not hold."""
    parts = {
        node: dict.fromkeys(attributes.get(node, ()))
        for node in _names.by_prefix([*attributes])
    }
    for name in _names.by_prefix(names):
        above = name.rpartition(".")[0]
        if name and above in parts:
            parts[above][_names.below(name, above)] = None
    kinds, rows = [Kind("leaf")], [Row(0, (), ())]
    leaf = 0  # The row of leaves, and of nodes in which nothing is known.
    row_of: dict[str, int] = {}
    for node in sorted(parts, key=lambda node: -len(_names.parts(node))):
        own, known = tuple(parts[node]), attributes.get(node, {})
        found = tuple(map(known.get, own)) if known else ()
        below = [row_of.get(_names.child(node, part), leaf) for part in own]
        row_of[node] = len(rows)
        rows.append(Row(len(kinds), tuple(below), ()))
        kinds.append(Kind("node", parts=own, attributes=found))
    return TreeRecord(kinds, [], rows)
