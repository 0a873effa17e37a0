"""The leaves of one side by layer, and groups of layers whose names differ only in
numbers. The layer of a leaf is the node whose weight or bias it is.
"""

import collections
import itertools as it
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._kernel._format import _names
from . import _words
from ._leaf_kinds import LeafKind


_roles = """
    weight kernel scale gamma w embedding embeddings, bias beta b offset,
    mean running_mean moving_mean, var running_var moving_var variance moving_variance
"""
# What a leaf is of its layer, by the last part of its name.
_ROLES = {x: y for y, *some in map(str.split, _roles.split(",")) for x in [y, *some]}


class NameNumber(NamedTuple):
    """A number in a name: which of how many it is where it stands, itself, and the
    first, if all between are there."""

    rank: int
    count: int
    value: int
    start: int | None


class NamedLayer(NamedTuple):
    """The `leaves` of one node, by their roles, such as "bias". `main` is the kind of
    its weight, with its axes in order of their lengths. Its name has these numbers, the
    `values`, between these texts."""

    name: str
    leaves: dict[str, str]
    main: LeafKind
    texts: tuple[str, ...]
    values: tuple[int, ...]


class GroupMember(NamedTuple):
    """A layer of a group, and all numbers of its name."""

    numbers: tuple[NameNumber, ...]
    layer: NamedLayer


class LayerGroup:
    """Layers that differ only in some of the numbers in their names: in those that are
    `folded`, and not in those that are `fixed`."""

    def __init__(self, texts: tuple[str, ...], fixed: tuple[int | None, ...], top: int):
        shown = ["*" if x is None else str(x) for x in fixed]
        self.form = "".join(x for y in zip(texts, [*shown, ""]) for x in y)
        self._texts, self._top = texts, top
        self.words = {*_words.words(plain(self.form))}
        self.is_copy = not _words.COPIES.isdisjoint(self.words)
        self.folded = [i for i, x in enumerate(fixed) if x is None]
        self.fixed = [i for i, x in enumerate(fixed) if x is not None]
        self.members: list[GroupMember] = []

    def place(self, at: int) -> tuple[int, bool]:
        """Which of the numbers one is, but for those that all names begin with; and
        whether it is that of the layer itself, and not of a node above."""
        return at - self._top, "." not in self._texts[at + 1]

    def folded_numbers(self) -> list[tuple[NameNumber, ...]]:
        """The numbers of each layer that are folded."""
        return [tuple(numbers[i] for i in self.folded) for numbers, _ in self.members]


class LayerSide:
    """The leaves of one side, by layer."""

    def __init__(self, kinds: Mapping[str, LeafKind]):
        self.kinds = kinds
        nodes: dict[str, dict[str, str]] = {}
        for name in kinds:
            node, role = _node_and_role(name)
            if role in nodes.get(node, {}):
                node, role = name, "weight"
            nodes.setdefault(node, {})[role] = name
        self.layers: list[NamedLayer] = []
        # By all before a number: the numbers that are there.
        found: dict[str, set[int]] = collections.defaultdict(set)
        for node, leaves in nodes.items():
            texts, values = _split(_counted(node, nodes))
            main = leaves.get("weight") or leaves[min(leaves)]
            what, shape = kinds[main]
            key = LeafKind(what, tuple(sorted(x for x in shape if x != 1)))
            self.layers.append(NamedLayer(node, leaves, key, texts, values))
            for i, value in enumerate(values):
                found[_before(texts, values, i)].add(value)
        self._places = {before: _places(some) for before, some in found.items()}
        # Texts before a number that varies.
        self._varying = {
            layer.texts[: i + 1]
            for layer in self.layers
            for i in range(len(layer.values))
            if len(found[_before(layer.texts, layer.values, i)]) > 1
        }
        # How many numbers all names begin with.
        heads = [[*zip(x.texts, x.values)] for x in self.layers]
        self._top = len(os.path.commonprefix(heads))
        counts = collections.Counter(
            word for x in self.layers for word in {*_words.words(plain(x.name))}
        )
        self.words = {*counts}
        # The words that most names have, which tell little.
        self.common_words = {
            x for x, n in counts.items() if 4 * n > 3 * len(self.layers)
        }

    def is_in_block(self, layer: NamedLayer) -> bool:
        """Whether a node above has a number, as blocks have."""
        return any(
            "." in layer.texts[i + 1] and not _words.words(_owner(layer.texts[i]))
            for i in range(self._top, len(layer.values))
        )

    def groups(self, left: Iterable[NamedLayer], level: int) -> list[LayerGroup]:
        """Groups of layers: with all numbers that vary folded; with those along which
        all have one shape; with the first alone, that of the blocks."""
        by_texts: dict[tuple[str, ...], list[NamedLayer]] = {}
        for layer in left:
            by_texts.setdefault(layer.texts, []).append(layer)
        out: dict[Any, LayerGroup] = {}
        for texts, layers in by_texts.items():
            slots = range(len(texts) - 1)
            some = [i for i in slots if texts[: i + 1] in self._varying]
            if level == 1:
                some = [i for i in some if _is_same_along(layers, i)]
            elif level == 2:
                some = some[:1]
            for layer in layers:
                fixed = tuple(None if i in some else layer.values[i] for i in slots)
                if (texts, fixed) not in out:
                    out[texts, fixed] = LayerGroup(texts, fixed, self._top)
                member = GroupMember(self._numbers(layer), layer)
                out[texts, fixed].members.append(member)
        return [*out.values()]

    def _numbers(self, layer: NamedLayer) -> tuple[NameNumber, ...]:
        return tuple(
            self._places[_before(layer.texts, layer.values, i)][value]
            for i, value in enumerate(layer.values)
        )


def _places(numbers: set[int]) -> dict[int, NameNumber]:
    """By each of the numbers that stand in one place, what it is there."""
    some, count = sorted(numbers), len(numbers)
    start = some[0] if some[-1] - some[0] == count - 1 else None
    return {x: NameNumber(rank, count, x, start) for rank, x in enumerate(some)}


def plain(name: str) -> str:
    """A name in which words on both sides of a number are not one."""
    return re.sub("[0-9*]+", ".", name)


def without_numbers(name: str) -> str:
    return _names.NUMBERS.sub("", name)


def _owner(text: str) -> str:
    """The word before a number, or the node that it counts."""
    return text.rstrip("._").rpartition(".")[2]


def _node_and_role(name: str) -> tuple[str, str]:
    """The layer that a leaf is of, and what it is there, such as its bias."""
    node, _, last = name.rpartition(".")
    if last in _ROLES:
        return node, _ROLES[last]
    head, _, tail = last.rpartition("_")
    if head and tail in ("weight", "bias"):
        return f"{node}.{head}".lstrip("."), tail
    if last == "num_batches_tracked":
        return node, last
    return name, "weight"


def _counted(node: str, nodes: Mapping[str, Any]) -> str:
    """A name with the number that Haiku leaves out, of the first of several."""
    if f"{node}_1" in nodes and f"{node}_0" not in nodes:
        return f"{node}_0"
    return node


def _split(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts of a name between its numbers, and these."""
    parts = _names.NUMBERS.split(name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _before(texts: tuple[str, ...], values: tuple[int, ...], at: int) -> str:
    """All of a name before one of its numbers."""
    pairs = zip(texts[: at + 1], [*map(str, values[:at]), ""])
    return "".join(x for pair in pairs for x in pair)


def _is_same_along(layers: list[NamedLayer], at: int) -> bool:
    """Whether layers that differ in this number alone are the same."""
    kinds: dict[Any, set[LeafKind]] = collections.defaultdict(set)
    for layer in layers:
        kinds[layer.values[:at], layer.values[at + 1 :]].add(layer.main)
    return all(len(x) == 1 for x in kinds.values())


def weight_first(layer: NamedLayer) -> list[str]:
    """The names of the leaves of a layer, that of its weight first."""
    return [layer.leaves[x] for x in sorted(layer.leaves, reverse=True)]


def weight_names(layers: tuple[NamedLayer, NamedLayer]) -> tuple[str, ...]:
    """The last parts of the names of two layers' weights; "" where there is none."""
    return tuple(x.leaves.get("weight", "").rpartition(".")[2] for x in layers)


def nodes_above(layer: NamedLayer) -> list[str]:
    """The nodes that a layer is in, of any of the blocks."""
    name = _names.NUMBERS.sub("*", layer.name, count=1)
    return [*it.accumulate(name.split(".")[:-1], "{}.{}".format)]


def block_of(node: str) -> str:
    """The node of one block, of all; without any, the topmost one."""
    parts = node.split(".")
    first = next((i for i, x in enumerate(parts) if "*" in x), 0)
    return ".".join(parts[: first + 1])


def node_with(layer: NamedLayer, words: Iterable[str]) -> str:
    """The node whose name has the last of these words."""
    parts = _names.NUMBERS.sub("*", layer.name, count=1).split(".")
    depths = [i + 1 for i, x in enumerate(parts) if {*words} & {*_words.words(x)}]
    return ".".join(parts[: max(depths, default=len(parts) - 1)])
