"""The labels of the entries of an eqx.nn.State. See FORMAT.md, "The tree".

An entry is known by the names of its StateIndices, or by the marker of Equinox.
"""

import itertools as it
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import _names


class Label(NamedTuple):
    """Identifies an entry of an eqx.nn.State, or a child without a key.

    An entry has the dotted names of its StateIndex, and as its marker the path from the
    model that Equinox has put there. The marker of a child is its attribute."""

    names: frozenset[str] = frozenset()
    marker: str | None = None


class StateNode(NamedTuple):
    """A State or a StateIndex of a tree: its name, its kind, the parts of the names of
    its children, and its encoded value, which has its markers."""

    name: str
    how: str
    parts: Sequence[str]
    value: Any


def labels_of_states(found: Iterable[StateNode]) -> dict[str, dict[int, Label]]:
    """The labels of the entries of each eqx.nn.State, by its name and by their
    positions, of all States and StateIndices of a tree. Their markers are texts of
    labels (see `label_of`), or numbers, which only say which StateIndices an entry
    has."""
    states: dict[str, dict[int, str | int]] = {}
    # By the marker of an entry, the names of the StateIndices that have it.
    names: dict[str | int, list[str]] = {}
    for name, how, parts, value in found:
        if how == "state":
            # A part of a State that was saved again may lack some.
            states[name] = dict(zip(map(int, parts), value["markers"]))
        else:
            names.setdefault(value["markers"][0], []).append(name)
    labels: dict[str | int, Label] = {}  # States share them.
    for marker in it.chain.from_iterable(x.values() for x in states.values()):
        own = label_of(marker) if type(marker) is str else Label()
        # The names that it had are no more, if its StateIndex is here.
        labels[marker] = own._replace(names=frozenset(names.get(marker, own.names)))
    # A module was moved if a name ends as another marker does, and not as its own: then
    # its marker counts for nothing.
    ends = _finder_of_ends(
        path for label in labels.values() if (path := path_of(label))
    )
    for marker, label in labels.items():
        own = path_of(label)
        paths_of = map(ends, label.names if own else ())
        if any(paths and own not in paths for paths in paths_of):
            labels[marker] = label._replace(marker=None)
    return {
        name: {position: labels[x] for position, x in markers.items()}
        for name, markers in states.items()
    }


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
        for part in reversed(words_of(name)):
            node = node.get(part)
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


def words_of(name: str) -> tuple[str, ...]:
    """A dotted name as `path_of` a marker would have it."""
    return tuple(_words.findall(_names.unquote(name)))


_words = re.compile(r"\w+")


def names_by_markers(
    labels: Iterable[Label], nodes: Iterable[str]
) -> dict[Label, list[str]]:
    """The names that the StateIndices of labels have in a tree of these nodes, where
    only their markers are known: below each node whose name ends as a marker does, but
    for its last part. If several do, it is the longest."""
    # By the path of a node, the last parts of the paths that begin with it.
    last_parts: dict[tuple[str, ...], dict[Label, str]] = {}
    for label in labels:
        path = path_of(label)
        if not label.names and path is not None and len(path) > 1:
            last_parts.setdefault(path[:-1], {})[label] = path[-1]
    out: dict[Label, list[str]] = {}
    ends = _finder_of_ends(last_parts)
    for node in nodes if last_parts else ():
        for path in ends(node)[-1:]:
            for label, part in last_parts[path].items():
                out.setdefault(label, []).append(f"{node}.{part}")
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
    return any(x[len(x) - len(path) :] == path for x in map(words_of, label.names))
