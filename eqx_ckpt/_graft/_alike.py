"""A guess at which of the saved leaves are which of those wanted, by names and shapes.

Leaves are compared layer by layer: a weight goes with its bias. Layers whose names
differ only in numbers are a group, and the numbers of both sides are counted before
they are compared: from 0, from 1, or with other things between. Groups stand for each
other if their leaves fit, if their names share words, and if no other group does as
well. Where these leave a choice, nothing is chosen.

A `_Side` has the layers of one side, and makes groups of them. `_Matching` sorts the
groups of both into `_Bucket`s of what may stand for each other at all. It takes the
best pair of each until none is clear any more. It does that three times, with other
groups each time: see `_Side.groups`.
"""

import collections
import functools as ft
import itertools as it
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._kernel._format import _template
from .._kernel._format._template import Template
from .._kernel._tree._target import Target
from . import _words


# Pairs of groups that are compared with each other. Of more nothing is said.
_MAX_PAIRS = 2**15
# By how much the best has to be better than the second.
_MARGIN = 0.05
# Subtracted from the score of a pair if its weights are transposed, and most others are
# not, or the other way round.
_USUAL = 0.2
# Added to it, times the share of layers beside the two that are pairs.
_BESIDE = 0.15

_numbers = re.compile("([0-9]+)")
_roles = """
    weight kernel scale gamma w embedding embeddings, bias beta b offset,
    mean running_mean moving_mean, var running_var moving_var variance moving_variance
"""
_ROLES = {x: y for y, *some in map(str.split, _roles.split(",")) for x in [y, *some]}
# Whose arrays of two axes are `[in, out]`.
_KERNELS = "kernel"
# The names of weights that are of a layer which multiplies by them.
_WEIGHTS = {"weight", "kernel", "w"}


class LeafKind(NamedTuple):
    """The type of a leaf's numbers, or another kind of leaf; and its shape."""

    what: str
    shape: tuple[int, ...]


class Unclear(NamedTuple):
    """Names of both sides among which a choice is left."""

    saved: list[str]
    wanted: list[str]


class Alike(NamedTuple):
    """Pairs of saved and wanted leaves, by name.

    `names` maps saved to wanted leaves, and `adapters` wanted ones to the code of an
    adapter, where they need one. Of `squares` nobody knows whether they are transposed.
    """

    names: dict[str, str]
    adapters: dict[str, str]
    squares: list[str]
    unclear: list[Unclear]


def alike(saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]) -> Alike:
    """Pairs leaves by name: those that fit, as they are or by an adapter."""
    matching = _Matching(_Side(saved), _Side(wanted))
    for level in range(3):
        matching.match(level)
    return matching.found()


def kind(x: Template | Target) -> LeafKind:
    """The kind of a leaf, which each leaf has that may stand for it."""
    if isinstance(x, Target):
        dtype, shape = x.dtype, x.shape
    else:
        is_array = x.kind in _template.ARRAY_KINDS
        dtype = _template.dtype_of(x.dtype) if is_array else None
        shape = x.logical_shape
    what = x.kind if dtype is None else f"array of {_template.number_type(dtype)}"
    return LeafKind(what, shape)


def numbered(name: str) -> list[str]:
    """A name, split at its numbers: texts and numbers by turns."""
    return re.split(r"(?<![^._])([0-9]+)(?![^._])", name)


def may_be(a: str, b: str) -> bool:
    """Whether words of two names say that they are of one thing, or say nothing."""
    some, others = ({*_words.words(x)} for x in (a, b))
    shared = some & others or not some or not others
    return bool(shared) and not _words.are_opposites(some - others, others - some)


def is_copy(name: str) -> bool:
    return not _words.COPIES.isdisjoint(_words.words(name))


def turn(saved: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The adapter that orders the axes of the one shape as the other has them, if no
    other one does; else what one has to think about."""
    if [x for x in saved if x != 1] == [x for x in wanted if x != 1]:
        return "unit_axes()"
    leaf = lambda shape: LeafKind("", shape)
    ways = [x for x in fits("kernel", leaf(saved), "w", leaf(wanted)) if x]
    return ways[0] if len(ways) == 1 else "transpose(...)"


def tied(
    saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]
) -> dict[str, str]:
    """Weights that are wanted and are perhaps those of an embedding: of a head that is
    tied to it, which libraries do not save."""
    tables = {
        kind: name
        for name, kind in saved.items()
        if len(kind[1]) == 2 and {"embedding", "token"} & {*_words.words(name)}
    }
    out = {}
    for name, (what, shape) in wanted.items():
        turned = tables.get(LeafKind(what, shape[::-1]))
        origin = tables.get(LeafKind(what, shape)) or turned
        if origin and _words.HEADS & {*_words.words(name)}:
            out[name] = origin
    return out


# ---- How one leaf is made of another.


def fits(a: str, saved: LeafKind, b: str, wanted: LeafKind) -> list[str]:
    """The adapters each of which makes a leaf with one name of that with the other: ""
    if it is as it is. Several are the ways in which libraries store such a layer."""
    (what, old), (other, new) = saved, wanted
    if what != other:
        return []
    names = [x.rpartition(".")[2] for x in (a, b)]
    is_layer = _WEIGHTS.issuperset(names) and len(old) > 1
    if not is_layer:
        if old == new:
            return [""]
        one = [x for x in old if x != 1]
        is_one = one == [x for x in new if x != 1] and len(one) == 1
        sides = zip(names, (old, new))
        is_matrix = any(x in _WEIGHTS and len(shape) > 1 for x, shape in sides)
        is_row = is_one and not is_matrix and min(len(old), len(new)) == 1
        return ["unit_axes()"] if is_row else []
    first, last = (*old[:-3:-1], *old[:-2]), (*old[2:], *old[1::-1])
    ways = [("channels_first()", first), ("channels_last()", last)]
    if len(old) == 2:
        ways = [("transpose()", first)]
    kernels = [x == _KERNELS for x in names]
    if kernels[0] != kernels[1] and "w" not in names:
        ways = ways[:1] if kernels[0] or len(old) == 2 else ways[1:]
    else:
        ways.insert(0, ("", old))
        if names[0] == names[1] and len(old) > 2 and old == new:
            ways = ways[:1]
    return [how for how, shape in ways if shape == new]


# ---- Layers, and groups of them.


class _Number(NamedTuple):
    """A number in a name: which of how many it is where it stands, itself, and the
    first, if all between are there."""

    rank: int
    count: int
    value: int
    start: int | None


class _Layer(NamedTuple):
    """The leaves of one node, by what they are of it."""

    name: str
    leaves: dict[str, str]
    main: LeafKind
    texts: tuple[str, ...]
    values: tuple[int, ...]


class _Group:
    """Layers that differ only in some of the numbers in their names."""

    def __init__(self, texts: tuple[str, ...], fixed: tuple[int | None, ...], top: int):
        shown = ["*" if x is None else str(x) for x in fixed]
        self.form = "".join(x for y in zip(texts, [*shown, ""]) for x in y)
        self._texts, self._top = texts, top
        self.words = {*_words.words(_plain(self.form))}
        self.is_copy = not _words.COPIES.isdisjoint(self.words)
        self.folded = [i for i, x in enumerate(fixed) if x is None]
        self.fixed = [i for i, x in enumerate(fixed) if x is not None]
        self.members: list[tuple[tuple[_Number, ...], _Layer]] = []

    def place(self, at: int) -> tuple[int, bool]:
        """Which of the numbers one is, but for those that all names begin with; and
        whether it is that of the layer itself, and not of a node above."""
        return at - self._top, "." not in self._texts[at + 1]

    def numbers(self, some: list[int]) -> list[tuple[_Number, ...]]:
        return [tuple(numbers[i] for i in some) for numbers, _ in self.members]


def _plain(name: str) -> str:
    """A name in which words on both sides of a number are not one."""
    return re.sub("[0-9*]+", ".", name)


class _Side:
    """The leaves of one side, by layer."""

    def __init__(self, kinds: Mapping[str, LeafKind]):
        self.kinds = kinds
        nodes: dict[str, dict[str, str]] = {}
        for name in kinds:
            node, role = _node_and_role(name)
            if role in nodes.get(node, {}):
                node, role = name, "weight"
            nodes.setdefault(node, {})[role] = name
        self.layers: list[_Layer] = []
        # By all before a number: the numbers that are there.
        self._values: dict[str, set[int]] = collections.defaultdict(set)
        for node, leaves in nodes.items():
            texts, values = _split(_counted(node, nodes))
            main = leaves.get("weight") or leaves[min(leaves)]
            what, shape = kinds[main]
            key = LeafKind(what, tuple(sorted(x for x in shape if x != 1)))
            self.layers.append(_Layer(node, leaves, key, texts, values))
            for i, value in enumerate(values):
                self._values[_before(texts, values, i)].add(value)
        # Texts before a number that varies.
        self._varying = {
            layer.texts[: i + 1]
            for layer in self.layers
            for i in range(len(layer.values))
            if len(self._values[_before(layer.texts, layer.values, i)]) > 1
        }

        # How many numbers all names begin with.
        heads = [[*zip(x.texts, x.values)] for x in self.layers]
        self._top = len(os.path.commonprefix(heads))

        counts = collections.Counter(
            word for x in self.layers for word in {*_words.words(_plain(x.name))}
        )
        self.words = {*counts}
        # The words that most names have, which tell little.
        self.common_words = {
            x for x, n in counts.items() if 4 * n > 3 * len(self.layers)
        }

    def is_in_block(self, layer: _Layer) -> bool:
        """Whether a node above has a number, as blocks have."""
        return any(
            "." in layer.texts[i + 1] and not _words.words(_owner(layer.texts[i]))
            for i in range(self._top, len(layer.values))
        )

    def groups(self, left: Iterable[_Layer], level: int) -> list[_Group]:
        """Groups of layers: with all numbers that vary folded; with those along which
        all have one shape; with the first alone, that of the blocks."""
        left = list(left)
        by_texts: dict[tuple[str, ...], list[_Layer]] = collections.defaultdict(list)
        for layer in left:
            by_texts[layer.texts].append(layer)
        out: dict[Any, _Group] = {}
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
                    out[texts, fixed] = _Group(texts, fixed, self._top)
                out[texts, fixed].members.append((self._numbers(layer), layer))
        return [*out.values()]

    def _numbers(self, layer: _Layer) -> tuple[_Number, ...]:
        out = []
        for i, value in enumerate(layer.values):
            some = sorted(self._values[_before(layer.texts, layer.values, i)])
            dense = some == [*range(some[0], some[0] + len(some))]
            start = some[0] if dense else None
            out.append(_Number(some.index(value), len(some), value, start))
        return tuple(out)


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
    parts = _numbers.split(name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _before(texts: tuple[str, ...], values: tuple[int, ...], at: int) -> str:
    """All of a name before one of its numbers."""
    pairs = zip(texts[: at + 1], [*map(str, values[:at]), ""])
    return "".join(x for pair in pairs for x in pair)


def _is_same_along(layers: list[_Layer], at: int) -> bool:
    """Whether layers that differ in this number alone are the same."""
    kinds: dict[Any, set[LeafKind]] = collections.defaultdict(set)
    for layer in layers:
        kinds[layer.values[:at], layer.values[at + 1 :]].add(layer.main)
    return all(len(x) == 1 for x in kinds.values())


# ---- Groups of both sides.


class _Pair(NamedTuple):
    """Groups that fit each other: layers of both, the likeness of their names, and the
    ways in which their weights fit. `is_clear`: it is clear what their numbers count.
    `is_apart`: words of both tell them apart."""

    layers: list[tuple[_Layer, _Layer]]
    likeness: float
    ways: frozenset[str]
    is_clear: bool
    is_apart: bool
    is_same: bool  # Their names are, but for numbers.
    shared: bool


class _Matching:
    """The pairs of groups so far, and what they tell of the groups that are left."""

    def __init__(self, old: _Side, new: _Side):
        self._sides = old, new
        self._layers: dict[str, _Layer] = {}
        self._names: dict[str, str] = {}
        self._adapters: dict[str, str] = {}
        self._squares: dict[str, tuple[str, ...]] = {}
        self._found: list[_Pair] = []
        # By the names that weights have: the ways in which they fit.
        self.usual_ways: dict[Any, set[str]] = collections.defaultdict(set)
        self._done: tuple[set[str], set[str]] = set(), set()
        # Pairs of layers below each node, and below each two.
        self._below: collections.Counter[Any] = collections.Counter()
        self._rest: list[tuple[list[_Group], list[_Group]]] = []

    def match(self, level: int) -> None:
        """Pairs what is left, in groups of this level: see `_Side.groups`."""
        groups = [
            side.groups((x for x in side.layers if x.name not in done), level)
            for side, done in zip(self._sides, self._done)
        ]
        buckets: dict[Any, tuple[list[_Group], list[_Group]]] = {}
        for i, some in enumerate(groups):
            for group in some:
                kinds = frozenset(layer.main for _, layer in group.members)
                key = group.is_copy, kinds
                buckets.setdefault(key, ([], []))[i].append(group)
        self._rest = [both for both in buckets.values() if all(both)]
        left = _MAX_PAIRS
        compared = []
        for old, new in self._rest:
            left -= len(old) * len(new)
            if left >= 0:
                compared.append(_Bucket(old, new, *self._sides))
        again = True
        while again:
            again = False
            for bucket in compared:
                for a, b in bucket.best(self):
                    self._add(bucket, a, b)
                    again = True

    def _add(self, bucket: "_Bucket", a: int, b: int) -> None:
        """Takes two groups of a bucket for a pair: none of their layers is asked for
        again."""
        pair = bucket.take(a, b)
        self._found.append(pair)
        for layers in pair.layers:
            for done, layer in zip(self._done, layers):
                done.add(layer.name)
        for left, right in {
            tuple(tuple(_nodes_above(x)) for x in layers) for layers in pair.layers
        }:
            self._below.update([*((0, x) for x in left), *((1, x) for x in right)])
            self._below.update(it.product(left, right))
        key = _weight_names(pair.layers[0])
        if len(pair.ways) == 1 and len(pair.layers[0][0].main[1]) > 1:
            self.usual_ways[key].update(pair.ways)

    def _fit(self, old: _Layer, new: _Layer, ways: frozenset[str]) -> None:
        """Pairs the leaves of two layers, by an adapter if one needs it."""
        saved, wanted = (side.kinds for side in self._sides)
        for role, name in old.leaves.items():
            other = new.leaves.get(role)
            if other is None:
                continue
            some = fits(name, saved[name], other, wanted[other])
            if not some:
                continue
            if role == "weight" and len(saved[name][1]) > 1:
                some = [x for x in some if x in ways] or some
                if len(some) > 1:
                    self._squares[other] = _weight_names((old, new))
            self._names[name] = other
            if some[0]:
                self._adapters[other] = some[0]

    def share_below(self, a: str, b: str) -> float:
        """The share of the layers below either of two nodes that are in both."""
        both = self._below[a, b]
        return both / (self._below[0, a] + self._below[1, b] - both) if both else 0.0

    def is_elsewhere(self, old: _Layer, new: _Layer, own: int) -> bool:
        """Whether other layers beside the one and beside the other stand for some, and
        none of them for each other. `own`: how often the two themselves are counted."""
        above = [_nodes_above(x) for x in (old, new)]
        # The nearest node of each that is in a pair.
        near = [
            [x for x in nodes if self._below[i, x] > own]
            for i, nodes in enumerate(above)
        ]
        if not all(near):
            return False
        for i in range(2):
            node, others = near[i][-1], near[1 - i]
            # Not the block itself, if the other layer is in a part of it.
            parts = [x for x in others if len(x) > len(_block(x))] or others[-1:]
            both = ((node, x) if i == 0 else (x, node) for x in parts)
            if any(self._below[x] > own for x in both):
                return False
        return True

    def found(self) -> Alike:
        """The leaves of all pairs, and those among which a choice is left."""
        unclear: list[Unclear] = []
        for pair in self._found:
            if self.is_elsewhere(*pair.layers[0], 1):
                old, new = zip(*pair.layers)
                both = [
                    [y for x in side for y in _weight_first(x)] for side in (old, new)
                ]
                unclear.append(Unclear(both[0], both[1]))
                continue
            for old, new in pair.layers:
                self._fit(old, new, pair.ways)
        # Squares are as they are where all others of that name are.
        squares = [
            name
            for name, key in self._squares.items()
            if key[0] != key[1] or self.usual_ways[key] - {""}
        ]
        for old, new in self._rest:
            both = [
                [
                    name
                    for group in some
                    for _, layer in group.members
                    if layer.name not in done
                    for name in _weight_first(layer)
                ]
                for some, done in zip((old, new), self._done)
            ]
            if all(both):
                unclear.append(Unclear(both[0], both[1]))
        return Alike(self._names, self._adapters, squares, unclear)


class _Bucket:
    """Groups of both sides that may stand for each other: their weights have the same
    types, and axes of the same lengths in any order. `_pairs` are those that fit, by
    their numbers on both sides."""

    def __init__(
        self, old: list[_Group], new: list[_Group], saved: _Side, wanted: _Side
    ):
        self._old, self._new = old, new
        own = [_distinct_words(x) for x in (old, new)]
        self._pairs: dict[tuple[int, int], _Pair] = {}
        # For each pair, the words of each side that the other lacks: in `_apart` only
        # those that tell groups of that side apart, in `_left` all.
        self._apart: dict[tuple[int, int], tuple[set[str], set[str]]] = {}
        self._left: dict[tuple[int, int], tuple[set[str], set[str]]] = {}
        for (i, a), (j, b) in it.product(enumerate(old), enumerate(new)):
            if len(a.folded) != len(b.folded):
                continue
            layers = _aligned(a, b)
            is_clear = bool(layers)
            layers = layers or [(a.members[0][1], b.members[0][1])]
            ways = _ways(layers, saved.kinds, wanted.kinds)
            if not ways:
                continue
            likeness, left, right = _compare_words(a.form, b.form)
            if _words.are_opposites(left, right):
                continue
            lacks = left & wanted.words | right & saved.words
            if "norm" in a.words & b.words and "attention" in lacks:
                is_clear = False  # The norm of that has the word, where any has.
            mine, theirs = own[0][i] & left, own[1][j] & right
            if theirs and not any(own[0]):
                mine = left
            if mine and not any(own[1]):
                theirs = right
            same = [_numbers.sub("", x.form.replace("*", "")) for x in (a, b)]
            self._apart[i, j] = mine, theirs
            self._left[i, j] = left, right
            is_apart = bool(mine and theirs)
            self._pairs[i, j] = _Pair(
                layers, likeness, ways, is_clear, is_apart, same[0] == same[1], False
            )
        rows = collections.Counter(i for i, _ in self._pairs)
        columns = collections.Counter(j for _, j in self._pairs)
        # Pairs of which neither fits any other.
        self._alone = {
            (i, j) for i, j in self._pairs if rows[i] == 1 and columns[j] == 1
        }
        for (i, j), pair in [*self._pairs.items()]:
            first = pair.layers[0]
            if saved.is_in_block(first[0]) != wanted.is_in_block(first[1]):
                del self._pairs[i, j]
                continue
            words = {*old[i].words} & {*new[j].words}
            if all(self._left[i, j]):
                words -= _words.KINDS | (saved.common_words & wanted.common_words)
            empty = not old[i].words and not new[j].words
            if (i, j) not in self._alone and _are_of_others(old[i], new[j]):
                del self._pairs[i, j]
            else:
                is_last = _last_word(old[i].form) == _last_word(new[j].form)
                # Of words that are short for others, nothing is left.
                is_short = pair.likeness > 0 and not any(self._left[i, j])
                shared = bool(words or empty or is_last or is_short)
                self._pairs[i, j] = pair._replace(shared=shared)

    def take(self, a: int, b: int) -> _Pair:
        """Takes the pair of two groups out, and all others of either."""
        pair = self._pairs[a, b]
        self._pairs = {x: y for x, y in self._pairs.items() if x[0] != a and x[1] != b}
        return pair

    def best(self, matching: _Matching) -> list[tuple[int, int]]:
        """The pair with the highest score of those that are clear: in a list, which is
        empty if there is none. Any other pair of either group has a lower score."""
        share_below, usual_ways = matching.share_below, matching.usual_ways
        scores, apart = {}, {}
        for (i, j), pair in self._pairs.items():
            first = pair.layers[0]
            if not pair.shared:
                nodes = [_node_of(x, y) for x, y in zip(first, self._left[i, j])]
                if not pair.likeness or not share_below(*nodes):
                    continue
            score = pair.likeness + pair.is_same
            score += _BESIDE * share_below(
                *(x[-1] if x else "" for x in map(_nodes_above, first))
            )
            key = _weight_names(first)
            if len(usual_ways[key]) == 1 and not usual_ways[key] & pair.ways:
                score -= _USUAL
            scores[i, j] = score
            if pair.is_apart and (i, j) not in self._alone:
                nodes = [_node_of(x, y) for x, y in zip(first, self._apart[i, j])]
                apart[i, j] = not share_below(*nodes)
        rows: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
        for pair, score in scores.items():
            for key in enumerate(pair):
                rows[key].append(score)
        found = [
            pair
            for pair, score in scores.items()
            if self._pairs[pair].is_clear
            and not apart.get(pair)
            and not matching.is_elsewhere(*self._pairs[pair].layers[0], 0)
            and all(
                sum(x > score - _MARGIN for x in rows[key]) == 1
                for key in enumerate(pair)
            )
        ]
        return sorted(found, key=lambda x: -scores[x])[:1]


def _weight_first(layer: _Layer) -> list[str]:
    """The names of the leaves of a layer, that of its weight first."""
    return [layer.leaves[x] for x in sorted(layer.leaves, reverse=True)]


def _weight_names(layers: tuple[_Layer, _Layer]) -> tuple[str, ...]:
    return tuple(x.leaves.get("weight", "").rpartition(".")[2] for x in layers)


def _aligned(a: _Group, b: _Group) -> list[tuple[_Layer, _Layer]]:
    """The layers of two groups that stand for each other, if the groups do: the first
    for the first. Nothing if numbers of the one are of other things, or if it is not
    clear what they count."""
    if any(a.place(i) != b.place(j) for i, j in zip(a.folded, b.folded)):
        return []
    both = [x.numbers(x.folded) for x in (a, b)]
    by_value = []
    for at in range(len(a.folded)):
        counts = [
            {tuple(y.rank for y in x[:at]): x[at].count for x in side} for side in both
        ]
        starts = {x[at].start for side in both for x in side}
        same = all(
            counts[0][x] == counts[1][x] for x in counts[0].keys() & counts[1].keys()
        )
        if not same and (None in starts or len(starts) > 1):
            return []
        by_value.append(not same)
    keyed = [
        {
            tuple(x.value if w else x.rank for x, w in zip(numbers, by_value)): layer
            for numbers, (_, layer) in zip(side, group.members)
        }
        for side, group in zip(both, (a, b))
    ]
    if not any(by_value) and keyed[0].keys() != keyed[1].keys():
        return []
    return [(keyed[0][x], keyed[1][x]) for x in keyed[0] if x in keyed[1]]


def _are_of_others(a: _Group, b: _Group) -> bool:
    """Whether the numbers that are not folded are of other layers, or whether it is not
    clear that they count the same things."""
    both = [[(x.place(i), x.members[0][0][i]) for i in x.fixed] for x in (a, b)]
    if [place for place, _ in both[0]] != [place for place, _ in both[1]]:
        return all(any(x.count > 1 for _, x in side) for side in both)
    for (_, x), (_, y) in zip(*both):
        if x.count == y.count > 1 and x.rank != y.rank:
            return True
        is_one = x.count == y.count == 1
        if is_one and x.value != y.value and {x.value, y.value} != {0, 1}:
            return True
    return False


def _ways(
    layers: list[tuple[_Layer, _Layer]],
    saved: Mapping[str, LeafKind],
    wanted: Mapping[str, LeafKind],
) -> frozenset[str]:
    """The ways in which the weights of all of these layers fit; none if other leaves do
    not."""
    ways: set[str] | None = None
    for old, new in layers:
        both = [x for x in old.leaves if x in new.leaves]
        if not both or ("weight" in old.leaves) != ("weight" in new.leaves):
            return frozenset()
        for role in both:
            a, b = old.leaves[role], new.leaves[role]
            some = fits(a, saved[a], b, wanted[b])
            if not some:
                return frozenset()
            if role == "weight" and len(saved[a][1]) > 1:
                ways = {*some} if ways is None else ways & {*some}
                if not ways:
                    return frozenset()
    if not layers:
        return frozenset()
    return frozenset([""] if ways is None else ways)


def _distinct_words(groups: list[_Group]) -> list[set[str]]:
    """For each group, its words that not all groups have."""
    words = [{*x.words} for x in groups]
    common = set.intersection(*words)
    return [some - common for some in words]


def _last_word(form: str) -> str:
    """The last part of a group's name, without numbers."""
    return _numbers.sub("", form).rstrip("*._").rpartition(".")[2]


@ft.lru_cache(2**16)
def _likeness(a: str, b: str) -> float:
    """1 of the same words; less if the one is short for the other."""
    if a == b:
        return 1.0
    short, long = sorted((a, b), key=len)
    if len(short) < 3 or short[0] != long[0]:
        return 0.0
    rest = iter(long)
    return 0.8 if all(x in rest for x in short) else 0.0


@ft.lru_cache(2**16)
def _compare_words(a: str, b: str) -> tuple[float, set[str], set[str]]:
    """The likeness of the words of two forms, and the words that the other lacks."""
    left, right = (collections.Counter(_words.words(_plain(x))) for x in (a, b))
    total = left.total() + right.total()
    pairs = ((_likeness(x, y), x, y) for x in left for y in right)
    common = 0.0
    for likeness, x, y in sorted((p for p in pairs if p[0]), key=lambda p: -p[0]):
        count = min(left[x], right[y])
        common += 2 * likeness * count
        left[x] -= count
        right[y] -= count
    return common / total if total else 0.0, set(+left), set(+right)


def _nodes_above(layer: _Layer) -> list[str]:
    """The nodes that a layer is in, of any of the blocks."""
    name = re.sub("[0-9]+", "*", layer.name, count=1)
    return [*it.accumulate(name.split(".")[:-1], "{}.{}".format)]


def _block(node: str) -> str:
    """The node of one block, of all; without any, the topmost one."""
    parts = node.split(".")
    first = next((i for i, x in enumerate(parts) if "*" in x), 0)
    return ".".join(parts[: first + 1])


def _node_of(layer: _Layer, words: Iterable[str]) -> str:
    """The node whose name has the last of these words."""
    parts = re.sub("[0-9]+", "*", layer.name, count=1).split(".")
    depths = [i + 1 for i, x in enumerate(parts) if {*words} & {*_words.words(x)}]
    return ".".join(parts[: max(depths, default=len(parts) - 1)])
