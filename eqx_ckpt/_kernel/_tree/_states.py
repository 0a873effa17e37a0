"""Entries of an eqx.nn.State, which is flattened by position: their labels say which
StateIndex each belongs to."""

import collections
import itertools as it
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from .._format import _names, _state_labels, _template
from .._format._leaves import Leaves
from .._format._record import HOWS
from .._format._state_labels import Label, StateNode
from . import _leaf, _register
from ._flatten import Flat
from ._node import Node


class Entry(NamedTuple):
    """One entry of a State: the name of the State, its position, and its label."""

    state: str
    position: int
    label: Label


# The labels of the entries of one State, by their positions; and what each looks like,
# by its leaves: their names below it, shapes and kinds. Entries that look alike can be
# exchanged unseen.
Labels = dict[int, Label]
Looks = dict[int, set[tuple]]


def state_entries(flat: Flat, above: str = "") -> dict[int, Entry]:
    """The entry of a State that each leaf of a tree belongs to, by the number of the
    leaf."""
    if eqx.nn.State not in flat.walk.types and Node not in flat.walk.types:
        return {}
    # These follow from the walk, and nobody changes them.
    return flat.walk.kept_result(
        ("entries", above), None, lambda: _entries(flat, above)
    )


def _entries(flat: Flat, above: str) -> dict[int, Entry]:
    states = states_of(flat, above)
    nearest = _names.within(states)
    out = {}
    for number, name in enumerate(flat.walk.named(above).names):
        state = nearest(name)
        if state is not None and state != name:
            position = int(_names.below(name, state).partition(".")[0])
            out[number] = Entry(state, position, states[state][position])
    return out


def states_of(flat: Flat, above: str = "") -> Mapping[str, Labels]:
    """The labels of the entries of each State in a tree, by its name."""
    walk = flat.walk.named(above)
    values = walk.values.encoded
    found = (
        StateNode(names[place], group.kind.how, group.kind.parts, values[number])
        for layer, names in zip(walk.layers, walk.nodes.names)
        for group in layer.groups
        if HOWS[group.kind.how].has_markers
        for place, number in zip(group.places, group.value_numbers[0])
    )
    return _state_labels.labels_of_states(found)


def stored_entries(
    leaves: Leaves, state: str, leaf_indices: Iterable[int]
) -> tuple[Labels, Looks]:
    """The entries of the State named `state`, whose leaves have these indices."""
    labels: Labels = {}
    looks: Looks = {}
    for leaf_index in leaf_indices:
        part, _, rest = _names.below(leaves.names[leaf_index], state).partition(".")
        position = _names.number_of(part)
        if position is not None:
            t = leaves.templates[leaves.template_of[leaf_index]]
            kind = t.kind if t.kind in ("key", "str", "bytes") else _number(t.dtype)
            labels[position] = leaves.labels.get(leaf_index, Label())
            looks.setdefault(position, set()).add((rest, t.logical_shape, kind))
    return labels, looks


def _number(dtype: str) -> str:
    return "int" if dtype == "int" else _template.number_type(_template.dtype_of(dtype))


def stored_names(
    saved: Leaves,
    entries: dict[int, Entry],
    names: Sequence[str],
    state_there: Callable[[str], str],
    labels_there: Callable[[Labels], Labels] = lambda labels: labels,
) -> dict[int, str | None]:
    """The name under which each leaf of an entry of a State is stored; None if the
    State there has no such entry.

    Entries have positions as names, but match by their StateIndex. `state_there` gives
    the name of a State in the checkpoint, and `labels_there` the labels that its
    entries have there, by those that they have here.
    """
    by_state: dict[str, Labels] = {}
    for entry in entries.values():
        by_state.setdefault(entry.state, {})[entry.position] = entry.label
    moves = {}
    for state, labels in by_state.items():
        there = state_there(state)
        below = there + "." if there else ""
        places = [p for name, p in saved.leaf_indices.items() if name.startswith(below)]
        known, looks = stored_entries(saved, there, places)
        moves[state] = below, match_entries(there, labels_there(labels), known, looks)
    out: dict[int, str | None] = {}
    for number, entry in entries.items():
        below, positions = moves[entry.state]
        rest = _names.below(names[number], entry.state).partition(".")[2]
        to = positions[entry.position]
        name = f"{below}{to}.{rest}" if rest else f"{below}{to}"
        out[number] = None if to is None else name
    return out


def check_order(flat: Flat, stored: Set[int]) -> None:
    """**Raises:** `ValueError` if only the order tells what some entries belong to, and
    it could change unseen. `stored` are the numbers of the leaves that are stored."""
    states: dict[str, Looks] = {}
    unlabelled = lambda: _unlabelled_entries(flat)
    for number, entry in flat.walk.kept_result("unlabelled", None, unlabelled).items():
        if number in stored:
            leaf = _register.to_leaf(flat.leaves[number])
            kind = type(leaf).__name__
            if hasattr(leaf, "dtype"):
                is_key = _leaf.is_key(leaf)
                kind = "key" if is_key else _template.number_type(np.dtype(leaf.dtype))
            rest = _names.below(flat.walk.names[number], entry.state).partition(".")[2]
            looks = states.setdefault(entry.state, {}).setdefault(entry.position, set())
            looks.add((rest, tuple(np.shape(leaf)), kind))
    for state, looks in states.items():
        twins = _twins(looks)
        if twins:
            raise ValueError(
                f"{_shown(state)} has entries of which nothing says what they belong "
                f"to, and some look alike, as {_some(state, twins)}: in a model with "
                "its fields in another order they would be exchanged unseen. Save the "
                "State in one tree with its model, or make both with "
                "`eqx.nn.make_with_state`. Nothing was saved."
            )


def _unlabelled_entries(flat: Flat) -> dict[int, Entry]:
    """The entry of each leaf of one that nothing but the order tells from others."""
    labels = it.chain.from_iterable(x.values() for x in states_of(flat).values())
    if all(map(any, labels)):
        return {}
    entries = state_entries(flat)
    return {n: entry for n, entry in entries.items() if not any(entry.label)}


def _twins(looks: Looks) -> list[int]:
    """The first positions whose entries look alike; none if there are none."""
    groups: dict[frozenset, list[int]] = {}
    for position, look in looks.items():
        groups.setdefault(frozenset(look), []).append(position)
    return next((group for group in groups.values() if len(group) > 1), [])


def _shown(state: str) -> str:
    return f"The State at `{state}`" if state else "The State"


def _some(state: str, positions: list[int]) -> str:
    below = state + "." if state else ""
    return " and ".join(f"`{below}{position}`" for position in positions[:2])


def match_entries(
    state: str, wanted: Labels, saved: Labels, looks: Looks
) -> dict[int, int | None]:
    """For each position in one State, the position in another that its label leads to,
    or None. These ways are tried in turn:

    0. a name of the StateIndex that both have;
    1. its marker, without the name of the class;
    2. unless both have names, a marker that ends the name of the other.

    Where several lead to one position, the one that does so by the first of these ways
    has it; where two do so by the same, neither. Entries without labels go by their
    positions, among those that have none either. If one of the two States has no labels
    at all, only the order is left. A State has none if it comes without its model, and
    its markers are objects.

    **Raises:** `RuntimeError` if that could have changed unseen.
    """
    labelled = {at: label for at, label in saved.items() if any(label)}
    if not labelled or not any(map(any, wanted.values())):
        _check_positions(state, set(wanted), looks, bool(labelled))
        return {position: position for position in wanted}
    others = {at: looks.get(at, set()) for at in saved.keys() - labelled.keys()}
    unlabelled = {position for position, label in wanted.items() if not any(label)}
    if unlabelled and others:
        _check_positions(state, unlabelled, others, False)
    guide = _Guide(labelled)
    led = {position: guide.lead(label) for position, label in wanted.items()}
    led |= {at: _Led(at if at in others else None, 0) for at in unlabelled}
    count = collections.Counter(led.values())
    first_way: dict[int | None, int] = {}
    for place, way in led.values():
        first_way[place] = min(way, first_way.get(place, way))
    return {
        position: x.place if count[x] == 1 and x.way == first_way[x.place] else None
        for position, x in led.items()
    }


class _Led(NamedTuple):
    """The position that a label leads to, and by which way of `match_entries`."""

    place: int | None
    way: int


# Labels are data from a file, and comparing all of them takes so many steps.
_MAX_PAIRS = 2**20


class _Guide:
    """Leads a label to the one position that it means, among those of known labels."""

    def __init__(self, known: Mapping[int, Label]):
        self._known = known
        labels = known.items()
        self._by_name = _grouped((name, at) for at, x in labels for name in x.names)
        self._by_path = _grouped((_state_labels.path_of(x), at) for at, x in labels)
        # The paths whose ends are compared, each with the position of its label.
        self._ends = [(at, *path) for at, x in labels for path in _paths(x)]
        self._ways = [self._of_same_name, self._of_same_marker]
        if len(self._ends) * len(known) <= _MAX_PAIRS:
            self._ways.append(self._of_nearest_end)

    def lead(self, label: Label) -> _Led:
        for way, positions in enumerate(self._ways):
            if found := positions(label):
                return _Led(min(found) if len(found) == 1 else None, way)
        return _Led(None, len(self._ways))

    def _of_same_name(self, label: Label) -> set[int]:
        return {at for name in label.names for at in self._by_name.get(name, ())}

    def _of_same_marker(self, label: Label) -> set[int]:
        return self._by_path.get(_state_labels.path_of(label), set())

    def _of_nearest_end(self, label: Label) -> set[int]:
        near: dict[int, int] = {}
        for is_name, words in _paths(label):
            for at, is_other_name, others in self._ends:
                # Two labels that have names, and none in common, are of two layers,
                # even if the one's name ends as the other's.
                if label.names and self._known[at].names:
                    continue
                short, long = sorted((words, others), key=len)
                if is_name != is_other_name and long[-len(short) :] == short:
                    extra = len(long) - len(short)
                    near[at] = min(near.get(at, extra), extra)
        return {at for at, extra in near.items() if extra == min(near.values())}


def _grouped(pairs: Iterable[tuple[Any, int]]) -> dict[Any, set[int]]:
    out: dict[Any, set[int]] = {}
    for key, at in pairs:
        if key is not None:
            out.setdefault(key, set()).add(at)
    return out


def _paths(label: Label) -> list[tuple[bool, tuple[str, ...]]]:
    """The names of a label, and the path of its marker; and whether each is a name."""
    out = [(True, _state_labels.words_of(name)) for name in label.names]
    if path := _state_labels.path_of(label):
        out.append((False, path))
    return out


def show_label(label: Label) -> str:
    """A label for people."""
    return ",".join(sorted(label.names)) or ".".join(_state_labels.path_of(label) or ())


def _check_positions(
    state: str, wanted: set[int], looks: Looks, labelled: bool
) -> None:
    """**Raises:** `RuntimeError` if entries that go by their positions could be others:
    because two look alike, or because they are not at the same positions."""
    twins = _twins(looks)
    if not twins and (not looks or wanted == looks.keys()):
        return
    if twins:
        why = f"{_some(state, twins)} look alike"
    else:
        why = f"{len(looks)} were saved, and `like` has {len(wanted)}"
    if labelled:
        advice = "Pass a `like` that has the model of the State as well."
    else:
        advice = (
            "They were saved without what says it. Put them in place by hand: "
            "`ec.open(path)` has them in the order of the save, and "
            "`state.set(index, value)` sets one."
        )
    raise RuntimeError(
        f"{_shown(state)} has entries of which nothing says what they belong to but "
        f"their order, which may have changed: {why}. Nothing was loaded. {advice}"
    )
