"""The static values of two trees, compared; and those that a call lets pass."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._format import _names, _values
from .._format._record import HOWS, TreeRecord
from . import _nearest, _pairing


Static = str | Sequence[str]

# Of these nothing tells whether there is a value: None may be in the place of one.
_UNCERTAIN = ("left", "absent", "none")
# The forms of empty containers.
_EMPTY: dict[str, Any] = {"list": [], "tuple": [], "dict": {"dict": []}}
_LISTED = 8  # So many names of fields are shown as code.


class Difference(NamedTuple):
    """A static value that has changed, or a part of one: its name here, what was saved
    and what is here, as they are shown, whether it may differ, and its stored name."""

    name: str
    saved: str
    here: str
    may_differ: bool
    stored: str


class _Change(NamedTuple):
    """A value of a node that has changed: its name below the node, that of the part of
    it that has ("": all of it), and its forms as saved and here."""

    name: str
    part: str
    saved: Any
    here: Any


class _RowPair(NamedTuple):
    """Two children that stand for each other, as saved and here: the parts that they
    add to names, and their rows."""

    saved_part: str
    part: str
    saved_row: int
    row: int


class _Side(NamedTuple):
    """What one of two trees has at a name: the class, as far as it is known, and the
    forms of the values at and below the name, by their names there."""

    cls: object
    forms: dict[str, Any]


class Comparison:
    """Finds in what the static values of two trees differ.

    A value may be on one side only. That is a difference if the other side has a node
    without leaves there. It is none if the other side lacks the part, as classes gain
    and lose fields, or has None there, which `eqx.filter` leaves in the place of a
    function. Nodes of two classes differ, too, if only one of them has values.

    A class may have been registered as a node since, or no more, and a field may have
    become static, or be so no more. Then a value on one side stands for a node on the
    other, and is compared by its parts with the values of that node.

    It goes down both records at once, from nodes that stand for each other. It finds
    once for each pair of rows whether they differ, however many nodes have these rows.
    `above` is the name of the tree that is `here`.
    """

    def __init__(self, saved: TreeRecord, here: TreeRecord, above: str = ""):
        self._saved, self._here, self._above = saved, here, above
        # What `_is_clean` and `_children` have found so far, by the two rows.
        self._clean_found: dict[tuple[int, int], bool] = {}
        self._children_found: dict[tuple[int, int], list[_RowPair]] = {}

    def differences(
        self, pairs: Iterable[tuple[str, str]], passes: Callable[[str], bool]
    ) -> Iterator[Difference]:
        """The differences of nodes that stand for each other, as saved and here, and of
        all below them. Of a leaf that is not stored, only the value is compared."""
        for stored, name in pairs:
            a, b = self._saved.row_at(stored), self._row_here(name)
            if a is None or b is None:
                continue
            if self._saved.is_value[a] or self._here.is_value[b]:
                # A value belongs to the node that it is in: of the differences of that
                # node, those at or below this name count.
                stored_above, above = (x.rpartition(".")[0] for x in (stored, name))
                own = _names.below(name, above)
                for x in self.of_nodes(stored_above, above, passes):
                    if _names.is_under(_names.below(x.name, above), own):
                        yield x
                continue
            yield from self._below(a, b, stored, name, passes)

    def of_nodes(
        self, stored: str, name: str, passes: Callable[[str], bool]
    ) -> Iterator[Difference]:
        """The differences of two nodes themselves, without those of nodes in them."""
        a, b = self._saved.row_at(stored), self._row_here(name)
        if a is not None and b is not None:
            yield from self._own_differences(a, b, stored, name, passes)

    def _row_here(self, name: str) -> int | None:
        if not _names.is_under(name, self._above):
            return None
        return self._here.row_at(_names.below(name, self._above))

    def _below(
        self, a: int, b: int, stored: str, name: str, passes: Callable[[str], bool]
    ) -> Iterator[Difference]:
        stack = [(a, b, stored, name)]
        while stack:
            a, b, stored, name = stack.pop()
            if self._is_clean(a, b):
                continue
            yield from self._own_differences(a, b, stored, name, passes)
            some = [
                (x, y, _names.child(stored, saved_part), _names.child(name, part))
                for saved_part, part, x, y in self._children(a, b)
            ]
            stack += reversed(some)

    def _is_clean(self, a: int, b: int) -> bool:
        """Whether nothing differs at and below two rows."""
        found, stack = self._clean_found, [(a, b)]
        while stack:
            x, y = rows = stack[-1]
            if rows in found:
                stack.pop()
            elif not (self._saved.has_values[x] or self._here.has_values[y]):
                found[rows] = True
            else:
                below = {(pair.saved_row, pair.row) for pair in self._children(x, y)}
                # Not `below - found.keys()`, which goes through all that was found.
                if new := below.difference(found):
                    stack += new
                else:
                    is_clean_below = all(map(found.__getitem__, below))
                    found[rows] = is_clean_below and not any(self._changed(x, y))
        return found[a, b]

    def _children(self, a: int, b: int) -> list[_RowPair]:
        """The children of two rows that stand for each other, and in which something is
        compared."""
        if (a, b) not in self._children_found:
            saved, here = self._saved, self._here
            self._children_found[a, b] = [
                pair
                for pair in self._pairs(a, b)
                if here.has_values[pair.row] or saved.has_values[pair.saved_row]
                if not (here.is_value[pair.row] or saved.is_value[pair.saved_row])
            ]
        return self._children_found[a, b]

    def _pairs(self, a: int, b: int) -> Iterator[_RowPair]:
        """All children of two rows that stand for each other."""
        parts, rows = self._saved.kind(a).parts, self._saved.rows[a].children
        places = _pairing.pair_children(self._saved, a, self._here, b)
        for (part, row), place in zip(self._here.children(b), places):
            if place is not None:
                yield _RowPair(parts[place], part, rows[place], row)

    def _changed(self, a: int, b: int) -> Iterator[_Change]:
        """The changes of two nodes; those of two children of which only one is a value,
        or has values; and those of fields that are static on one side only."""
        saved, here, pairs = self._saved, self._here, list(self._pairs(a, b))
        old, new = saved.compared_values(a), here.compared_values(b)
        if ("" in old) != ("" in new):
            # One of them is a value. Both get one class, as only the parts that both
            # have are compared then.
            sides = _side_of(saved, a), _side_of(here, b)
            yield from _changes_below("", *(x._replace(cls=None) for x in sides))
            return
        yield from self._changed_values(a, b, pairs)
        for _, part, saved_row, row in pairs:
            if saved.has_values[saved_row] != here.has_values[row] or (
                saved.is_value[saved_row] != here.is_value[row]
            ):
                yield from self._one_sided(part, saved_row, row)
        if all(HOWS[x.how].are_fields for x in (saved.kind(a), here.kind(b))):
            yield from self._once_static(a, b, old, new)

    def _changed_values(
        self, a: int, b: int, pairs: Iterable[_RowPair]
    ) -> Iterator[_Change]:
        """The changes of the values that both of two nodes have."""
        saved, here = self._saved, self._here
        old, new = saved.compared_values(a), here.compared_values(b)
        moved: dict[str, str | None] = {}
        if saved.kind(a).attributes and here.kind(b).attributes:
            # A child that is in no pair has no saved value then, whatever was saved
            # under its part. Else its part may be that of a static field.
            moved = dict.fromkeys(here.kind(b).parts)
        moved |= {pair.part: pair.saved_part for pair in pairs}
        for part, value in new.items():
            saved_part = moved.get(part, part)
            saved_value = None if saved_part is None else old.get(saved_part)
            if saved_value is None or saved.texts[saved_value] == here.texts[value]:
                continue
            forms = saved.form(saved_value), here.form(value)
            if not _values.is_alike(*forms):
                yield _Change(part, "", *forms)

    def _one_sided(self, name: str, a: int, b: int) -> Iterator[_Change]:
        """The changes of two children that stand for each other, of which only one is a
        value, or only one has values, as an `eqx.nn.Lambda` and an `Identity`. Nothing
        is given if either is not certain (`_is_certain`)."""
        sides = (self._saved, a), (self._here, b)
        if not any(x.is_value[row] or _is_bare(x, row) for x, row in sides):
            return  # Two nodes: what is in them is compared.
        if all(_is_certain(*side) for side in sides):
            yield from _changes_below(name, *(_side_of(*side) for side in sides))

    def _once_static(
        self, a: int, b: int, old: dict[str, int], new: dict[str, int]
    ) -> Iterator[_Change]:
        """The changes of fields that are static in one of two nodes, and children in
        the other. `old` and `new` are the compared values of the two."""
        saved, here = self._saved, self._here
        for part in dict.fromkeys([*old, *new]):
            if part in old and part in new:
                continue
            x, y = saved.child_at(a, part), here.child_at(b, part)
            if part in old and x is None and y is not None and _is_certain(here, y):
                field = _side_of_field(saved, old[part])
                yield from _changes_below(part, field, _side_of(here, y))
            if part in new and y is None and x is not None and _is_certain(saved, x):
                field = _side_of_field(here, new[part])
                yield from _changes_below(part, _side_of(saved, x), field)

    def _own_differences(
        self, a: int, b: int, stored: str, name: str, passes: Callable[[str], bool]
    ) -> Iterator[Difference]:
        """The differences of two rows themselves, by the names of these."""
        for below, part, *forms in self._changed(a, b):
            ends = [_names.joined(x, below) or _names.ROOT for x in (stored, name)]
            whole_passes = any(map(passes, ends))
            for inner, was, now in _values.changes(*forms):
                rest = _names.joined(part, inner)
                there, here = (_names.joined(end, rest) for end in ends)
                may_differ = whole_passes or _passes_any(passes, (there, here), rest)
                shown = _values.show(was), _values.show(now)
                yield Difference(here, *shown, may_differ, there)


def _side_of(record: TreeRecord, row: int) -> _Side:
    """The side of a node or a value. The class of a container of Python's own is its
    `how`."""
    if record.is_value[row]:
        return _side_of_field(record, record.rows[row].values[0])
    kind = record.kind(row)
    cls = _values.Name(*kind.cls) if kind.cls[1] else kind.how
    if _is_bare(record, row) and kind.how in _EMPTY:
        return _Side(cls, {"": _EMPTY[kind.how]})
    return _Side(cls, dict(record.values_below(row)))


def _side_of_field(record: TreeRecord, value: int) -> _Side:
    return _Side(_values.class_of(record.values[value]), {"": record.form(value)})


def _changes_below(name: str, saved: _Side, here: _Side) -> Iterator[_Change]:
    """The changes of all at and below a name. If both sides are of one class, only the
    fields that both have are compared, as classes gain and lose fields."""
    is_value = "" in saved.forms or "" in here.forms
    old = _values.spread(saved.forms, here.forms)
    new = _values.spread(here.forms, saved.forms)
    for rest in dict.fromkeys([*old, *new]):
        forms = [x.get(rest, _values.NOTHING) for x in (old, new)]
        if saved.cls == here.cls and not (rest in old and rest in new):
            continue
        if not _values.is_alike(*forms):
            whole = name if is_value else _names.joined(name, rest)
            yield _Change(whole, rest if is_value else "", *forms)


def _is_certain(record: TreeRecord, row: int) -> bool:
    """Whether all that a row has is known, and nothing but its values tells a change:
    it has no stored leaves, which would be on one side only."""
    return record.kind(row).how not in _UNCERTAIN and not record.leaf_counts[row]


def _is_bare(record: TreeRecord, row: int) -> bool:
    """Whether a row is a node without children and values."""
    return not record.rows[row].children and not record.has_values[row]


def _passes_any(passes: Callable[[str], bool], names: Iterable[str], rest: str) -> bool:
    """Whether a part of a value may differ, or a part that it is in."""
    count = len(_names.parts(rest))
    for name in names:
        for _ in range(count):
            if passes(name):
                return True
            name = name.rpartition(".")[0]
    return False


# ---- What may differ.


def check_static(static: Any) -> None:
    """**Raises:** `ValueError` or `TypeError` for what `static=` does not take."""
    wanted = '`static` must be "error", "ignore" or a list of names of static fields'
    if isinstance(static, str):
        if static not in ("error", "ignore"):
            raise ValueError(
                f"{wanted}, not {static!r}. If it names a field, put it into a list: "
                f"`static=[{static!r}]`."
            )
    elif not all(isinstance(x, str) and x for x in static):
        raise TypeError(f'{wanted} that may differ, such as ["*.vocab_size"].')


def how_to_pass(names: Sequence[str]) -> str:
    """The argument that lets changed fields pass, as code."""
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    listed = ", ".join(f'"*.{name}"' for name in last[:_LISTED])
    more = ", ..." if len(last) > _LISTED else ""
    which = "those of that name" if len(last) == 1 else "those of these names"
    return f'`static="ignore"` lets them pass, `static=[{listed}{more}]` {which}'


def passing(
    static: Static,
    sides: Callable[[], Sequence[tuple[TreeRecord | None, str]]],
    what: str,
) -> Callable[[str], bool]:
    """A function that says whether the static value of a name may differ. `sides` gives
    the records of both, each with the name of its tree.

    **Raises:** `ValueError` for a pattern that matches the name of no static field.
    `what` is what the fields are in, as the error says it.
    """
    check_static(static)
    if isinstance(static, str):
        return lambda name: static == "ignore"
    patterns = list(static)
    # Both sides mostly have the same ones.
    names = dict.fromkeys(
        name
        for record, above in (sides() if patterns else ())
        if record is not None
        for name in record.value_names(above)
    )
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            near = _nearest.NameIndex(names).nearest(pattern, 3)
            some = ", ".join(f"`{x}`" for x in near or [*names][:3])
            head = "The nearest there are" if near else "It has"
            raise ValueError(
                f"`static` has {pattern!r}, which names no static field of the {what}. "
                f"{head} {some or 'none'}."
            )
    return lambda name: any(matches(x, name) for x in patterns)


def matches(pattern: str, name: str) -> bool:
    """Whether a name is as a pattern says, in which `*` stands for any text. A leading
    `*.` may also stand for nothing: `*.size` is `size` at the root, too."""
    # Only `*` is special here. `fnmatch` takes the first place at which a piece of the
    # pattern fits, and so never tries all ways to divide a name.
    pattern = re.sub(r"[?[]", r"[\g<0>]", pattern)
    return fnmatch.fnmatchcase(name, pattern) or (
        pattern.startswith("*.") and fnmatch.fnmatchcase(name, pattern[2:])
    )


def selects(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a leaf, or is that of a node above it."""
    return _names.is_under(name, pattern) or matches(pattern, name)
