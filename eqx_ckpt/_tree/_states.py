"""Entries of an eqx.nn.State, which is flattened by position: their labels say which
StateIndex each belongs to."""

import collections
import itertools as it
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _names, _template
from .._format._leaves import Leaves
from . import _flatten, _leaf, _node, _register
from ._flatten import Flat
from ._node import Node


class Entry(NamedTuple):
    """One entry of a State: the name of the State, its position, and its label.

    Labels say which StateIndex an entry belongs to: `=` and its marker, without the
    name of the class, when `eqx.nn.make_with_state` made it; else `@` and the dotted
    names of the StateIndex, with commas between; None when neither is known.
    """

    state: str
    position: int
    label: str | None


# The labels of the entries of one State, by their positions; and what each looks like,
# by its leaves: their names below it, shapes and kinds. Entries that look alike can be
# exchanged unseen.
Labels = dict[int, str | None]
Looks = dict[int, set[tuple]]


def state_entries(tree: PyTree, flat: Flat, source: str) -> dict[int, Entry]:
    """The entry of a State that each leaf belongs to, by the number of the leaf."""
    find = lambda: _state_entries(tree, flat.paths, source)
    return flat.once(("entries", source), find)


def _state_entries(
    tree: PyTree, paths: Sequence[tuple], source: str
) -> dict[int, Entry]:
    if jtu.FlattenedIndexKey not in {*map(type, it.chain.from_iterable(paths))}:
        return {}
    states, indices = _walk(tree, source)
    labels = {path: _labels(x, indices) for path, x in states.items()}
    out = {}
    for number, path in enumerate(paths):
        for cut in range(len(path)):
            if path[:cut] in labels:
                position = path[cut].key
                name = _flatten.module_name(path[:cut], source)
                out[number] = Entry(name, position, labels[path[:cut]][position])
                break
    return out


def _walk(
    tree: PyTree, source: str
) -> tuple[dict[tuple, eqx.nn.State | Node], dict[Any, list[str]]]:
    """The States in a tree by key path, and the names of the StateIndex of each
    marker."""

    def stop(x: Any) -> bool:
        is_node = isinstance(x, Node) and bool(_node.body_of(x).spec().labels)
        return is_node or isinstance(x, (eqx.nn.State, eqx.nn.StateIndex))

    states: dict[tuple, eqx.nn.State | Node] = {}
    indices: dict[Any, list[str]] = {}
    for path, x in jtu.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if isinstance(x, eqx.nn.StateIndex):
            name = _names.name_of(path, source)[0]
            indices.setdefault(x.marker, []).append(name)
        elif isinstance(x, (eqx.nn.State, Node)):
            states[path] = x
    return states, indices


def _labels(state: eqx.nn.State | Node, indices: dict[Any, list[str]]) -> Labels:
    """The label of each entry of a State, by its position."""
    if isinstance(state, Node):
        spec = _node.body_of(state).spec()
        return {int(key): label for (_, key), label in zip(spec.keys, spec.labels)}
    markers = state.tree_flatten()[1]
    return {i: _label(marker, indices) for i, marker in enumerate(markers)}


def index_names(tree: PyTree, source: str = "") -> dict[str, list[str]]:
    """The names, below `source`, of the StateIndex that each label stands for."""
    _, indices = _walk(tree, source)
    return {str(_label(marker, indices)): names for marker, names in indices.items()}


def _label(marker: Any, indices: dict[Any, list[str]]) -> str | None:
    if isinstance(marker, str):
        return "=" + re.sub(r"^\w+", "", marker)
    names = indices.get(marker)
    return "@" + ",".join(sorted(names)) if names else None


def stored_entries(
    leaves: Leaves, state: str, places: Iterable[int]
) -> tuple[Labels, Looks]:
    """The entries of the State named `state`, whose leaves are at these places."""
    labels: Labels = {}
    looks: Looks = {}
    for place in places:
        position, _, rest = _names.below(leaves.names[place], state).partition(".")
        if position.isdecimal():
            t = leaves.templates[leaves.template[place]]
            kind = t.kind if t.kind in ("key", "str", "bytes") else _number(t.dtype)
            labels[int(position)] = leaves.markers.get(place)
            looks.setdefault(int(position), set()).add((rest, t.logical_shape, kind))
    return labels, looks


def _number(dtype: str) -> str:
    return "int" if dtype == "int" else _template.number_type(_template.dtype_of(dtype))


def stored_names(
    saved: Leaves,
    entries: dict[int, Entry],
    names: Sequence[str],
    state_there: Callable[[str], str],
    labels_there: Callable[[Labels, Labels], Labels],
) -> dict[int, str | None]:
    """The name under which each leaf of an entry of a State is stored; None if the
    State there has no such entry.

    Entries have positions as names, but match by their StateIndex. `state_there` gives
    the name of a State in the checkpoint, and `labels_there` the labels that its
    entries have there, by those that are stored.
    """
    by_state: dict[str, Labels] = {}
    for entry in entries.values():
        by_state.setdefault(entry.state, {})[entry.position] = entry.label
    moves = {}
    for state, labels in by_state.items():
        there = state_there(state)
        below = there + "." if there else ""
        places = [p for name, p in saved.places.items() if name.startswith(below)]
        known, looks = stored_entries(saved, there, places)
        labels = labels_there(labels, known)
        moves[state] = below, match_entries(there, labels, known, looks)
    out: dict[int, str | None] = {}
    for number, entry in entries.items():
        below, positions = moves[entry.state]
        rest = _names.below(names[number], entry.state).partition(".")[2]
        to = positions[entry.position]
        name = f"{below}{to}.{rest}" if rest else f"{below}{to}"
        out[number] = None if to is None else name
    return out


def check_order(entries: dict[int, Entry], flat: Flat, numbers: Iterable[int]) -> None:
    """**Raises:** `ValueError` if only the order tells what some entries belong to, and
    it could change unseen. `numbers` are those of the leaves that are stored."""
    states: dict[str, Looks] = {}
    for number in numbers:
        entry = entries.get(number)
        if entry is not None and entry.label is None:
            leaf = _register.to_leaf(flat.leaves[number])
            kind = type(leaf).__name__
            if hasattr(leaf, "dtype"):
                is_key = _leaf.is_key(leaf)
                kind = "key" if is_key else _template.number_type(np.dtype(leaf.dtype))
            rest = _names.name_of(flat.paths[number])[0]
            rest = _names.below(rest, entry.state).partition(".")[2]
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
    or None.

    If one of the two has no labels at all, only the order is left. A State has none if
    it comes without its model, and its markers are objects.

    **Raises:** `RuntimeError` if that could have changed unseen.
    """
    known = {label: at for at, label in saved.items() if label is not None}
    words = {label: _words(label) for label in known}
    # Labels are data from a file, and comparing all of them takes so many steps.
    few = len(wanted) * len(known) <= _MAX_PAIRS
    if not known or not any(wanted.values()):
        _check_positions(state, set(wanted), looks, bool(known))
        return {position: position for position in wanted}
    rest = {at: looks[at] for at, x in saved.items() if x is None}
    alone = {position for position, label in wanted.items() if label is None}
    if alone and rest:
        _check_positions(state, alone, rest, False)
    out = {}
    for position, label in wanted.items():
        if label is None:
            out[position] = position if position in rest else None
        elif label in known:
            out[position] = known[label]
        else:
            own = _words(label)
            near = [
                (_extra(own, words[x], label[0] != x[0]), known[x])
                for x in known
                if few
            ]
            near = sorted((n, place) for n, place in near if n is not None)
            is_one = near and [n for n, _ in near].count(near[0][0]) == 1
            out[position] = near[0][1] if is_one else None
    count = collections.Counter(out.values())
    return {key: None if count[place] > 1 else place for key, place in out.items()}


def _check_positions(
    state: str, wanted: set[int], looks: Looks, labelled: bool
) -> None:
    """**Raises:** `RuntimeError` if entries that go by their positions could be others:
    because two look alike, or because there are not as many on both sides."""
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


_MAX_PAIRS = 2**20


def _extra(
    one: list[list[str]], two: list[list[str]], of_two_kinds: bool
) -> int | None:
    """None if two labels are of two indices; else by how many words they differ.

    An index may have several names, and one that fits is enough. Its marker is a path
    from the model, so it is the end of a name, which is a path from the top of a tree.
    """
    for a in one:
        for b in two:
            short, long = sorted((a, b), key=len)
            if a == b or (of_two_kinds and long[-len(short) :] == short):
                return len(long) - len(short)
    return None


def _words(label: str) -> list[list[str]]:
    if label[0] == "=":
        return [re.findall(r"\w+", label)]
    return [name.split(".") for name in label[1:].split(",")]
