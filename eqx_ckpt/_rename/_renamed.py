"""The leaves of a checkpoint under the names that a rename gives them.

Not only leaves have names. Modules have them too, whose static fields are compared, and
so has each StateIndex, which an entry of an eqx.nn.State belongs to. A rename is made
for leaves, so Modules and what they have go where the leaves below them go.
"""

import collections
import functools as ft
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from .._kernel._format import _names, _state_labels, _text
from .._kernel._format._leaves import Leaves
from .._kernel._format._state_labels import Label
from . import _rename
from ._rename import Rename


class RenamedLeaves(NamedTuple):
    """Leaves under their new names, and a function from the name of a node to its new
    names: several, if its leaves went to several nodes."""

    leaves: Leaves
    new_names: Callable[[str], list[str]]


def renamed(leaves: Leaves, given: object) -> RenamedLeaves:
    """The leaves as the `rename=` of a call says.

    **Raises:** `ValueError` for two leaves that get one name, rules that change
    nothing, and those with adapters.
    """
    how = _rename.of_names(given)
    used: set[int] = set()
    names = [record.name for record in leaves.records()]  # This checks them.
    new = [_rename.apply(how, name, used, "rename=").name for name in names]
    _check_collisions(names, new)
    moves = Moves(how, names, new, used)
    nodes: dict[str, list[str]] = {}
    for name, part in _nodes(leaves):
        if len(name) > _names.MAX_NAME or name.count(".") >= _names.MAX_DEPTH:
            raise ValueError("The index has static values of what is never saved.")
        for to in moves.node(name, part):
            nodes.setdefault(to, []).append(name)
    labels = moved_labels(leaves.labels, moves)
    _rename.check_used(how, used, names, "checkpoint")
    return RenamedLeaves(leaves.renamed(new, labels, nodes), moves.node)


def _nodes(leaves: Leaves) -> Iterator[tuple[str, str]]:
    """The nodes that a rename has to move beside leaves: those with static values, with
    children without leaves, or with children without keys. Of each, its name and the
    part that one such value or child adds to it; "" if it has none of these."""
    tree = leaves.labelled
    if tree is not None:
        wanted = map(operator.or_, tree.has_values_or_labels, tree.has_empty)
        for name, row in tree.nodes([*wanted]):
            parts = [*tree.compared_values(row)]
            parts += [
                x for x, child in tree.children(row) if not tree.leaf_counts[child]
            ]
            if parts or tree.kind(row).attributes:
                yield name, next(iter(parts), "")


def _check_collisions(old: list[str], new: list[str]) -> None:
    if len(set(new)) == len(new):
        return
    groups: dict[str, list[str]] = {}
    for a, b in zip(old, new):
        groups.setdefault(b, []).append(a)
    several = [(b, some) for b, some in groups.items() if len(some) > 1]
    lines = [f"  `{b}`: {', '.join(f'`{a}`' for a in some)}" for b, some in several]
    raise ValueError(
        "The rename gives one name to several leaves of the checkpoint; nothing was "
        "loaded. Narrow the patterns, or take those that are in the way elsewhere:\n"
        + "\n".join(_text.first(lines, 20))
    )


class Moves:
    """The moves of leaves from their `old` names to `new` ones. A node goes where the
    leaves below it go, if they keep their names from the node on. The numbers of rules
    that did something are added to `used`."""

    def __init__(self, how: Rename, old: list[str], new: list[str], used: set[int]):
        self._how, self._used = how, used
        self._old, self._new = old, new
        self._kept: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for a, b in zip(old, new):
            for here, there in _names.node_pairs(a, b):
                self._kept[here][there] = None

    @ft.cached_property
    def below(self) -> dict[str, list[int]]:
        """The leaves below each node."""
        return _names.by_prefix(self._old)

    def node(self, name: str, part: str = "") -> list[str]:
        """The names of a stored node in the tree: several, if its leaves are now in
        several. `part` is what something in the node adds to its name.

        If no leaf keeps its name from the node on, let `common` be the lowest node that
        holds all of its leaves now. Then it becomes

        - itself, if `common` is still below it;
        - else `common`, if it has several children;
        - else what is above its one child now;
        - itself, if nothing is above that.
        """
        kept = self._kept.get(name)
        if kept:
            return list(kept)
        leaves = self.below.get(name, [])
        if not leaves:
            return self._empty(name, part)
        first = leaves[0]  # It may be the node itself.
        if len(leaves) == 1 and _names.parts(self._old[first]) == _names.parts(name):
            return [self._new[first]]
        common = _names.common_node(self._new[n] for n in leaves)
        if _names.is_under(common, name):
            return [name]
        start = len(name) + 1 if name else 0
        children = {self._old[n][start:].partition(".")[0] for n in leaves}
        if len(children) > 1:
            return [common]
        child_names = self.node(_names.joined(name, children.pop()))
        above = dict.fromkeys(x.rpartition(".")[0] for x in child_names if x)
        return list(above) or [name]

    def _empty(self, name: str, part: str) -> list[str]:
        """The names of a node without leaves: as the rules say, or as its parent's."""
        moved = self.by_rules(_names.joined(name, part))
        if part and moved is not None and _names.parts(moved)[-1:] == [part]:
            return [".".join(_names.parts(moved)[:-1])]
        if not name:
            return [""]
        above, _, last = name.rpartition(".")
        return [_names.joined(x, last) for x in self.node(above)]

    def by_rules(self, name: str) -> str | None:
        """The new name of something that is not a leaf. None if that is the same, or if
        the rename is a function that knows only the names of leaves."""
        try:
            moved = _rename.apply(self._how, name, self._used, "rename=").name
        except (ValueError, TypeError):
            if not callable(self._how.rules):
                raise
            return None
        return moved if moved != name else None

    def others(self, name: str) -> list[str]:
        """The new names of something in a node that is no leaf, such as a StateIndex,
        by its full name."""
        moved = self.by_rules(name)
        if moved is not None:
            return [moved]
        owner, _, last = name.rpartition(".")
        return [_names.joined(x, last) for x in self.node(owner, last)]


# ---- Labels of the entries of States.


def moved_labels(labels: Mapping[int, Label], moves: Moves) -> dict[int, Label]:
    """The labels of entries of States, under the keys that they had, with the names
    that each StateIndex has after the moves."""
    every = dict.fromkeys(labels.values())
    by_marker = _state_labels.names_by_markers(every, moves.below)
    new = {label: _moved_label(label, moves, by_marker) for label in every}
    return {number: new[label] for number, label in labels.items()}


def _moved_label(
    label: Label, moves: Moves, by_marker: Mapping[Label, list[str]]
) -> Label:
    """Where no name is known that a marker leads to, it moves as the rules say."""
    names = label.names or frozenset(by_marker.get(label, ()))
    new = frozenset(x for name in names for x in moves.others(name))
    if names:
        return label if new == names else Label(new)
    path = ".".join(_state_labels.path_of(label) or ())
    moved = moves.by_rules(path) if path else None
    return label if moved is None else Label(marker=f".{moved}")
