"""Pairs of groups of layers, one of each side: which fit, and which fit best.

Groups are sorted into `Bucket`s of those that may stand for each other at all. Which
pair of a bucket is the best depends on the pairs that were found before: `FoundPairs`.
"""

import collections
import functools as ft
import itertools as it
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _layers, _leaf_kinds, _words
from ._layers import LayerGroup, LayerSide, NamedLayer, NameNumber
from ._leaf_kinds import LeafKind


# By how much the best has to be better than the second.
_MARGIN = 0.05
# Subtracted from the score of a pair if its weights are transposed, and most others are
# not, or the other way round.
_USUAL = 0.2
# Added to it, times the share of layers beside the two that are pairs.
_BESIDE = 0.15


class GroupPair(NamedTuple):
    """Groups that fit each other: layers of both, the likeness of their names, and the
    ways in which their weights fit. `is_clear`: it is clear what their numbers count.
    `is_same`: so are their names, but for numbers. `is_alone`: neither fits any other.

    `lacked` are the words of each that the other lacks, and `telling` those of them
    that tell it from other groups of its side. `shares_words`: they have some in
    common, as far as these say anything.
    """

    layers: list[tuple[NamedLayer, NamedLayer]]
    likeness: float
    ways: frozenset[str]
    is_clear: bool
    is_same: bool
    lacked: tuple[set[str], set[str]]
    telling: tuple[set[str], set[str]] = (set(), set())
    is_alone: bool = False
    shares_words: bool = False

    @property
    def first(self) -> tuple[NamedLayer, NamedLayer]:
        """The first layers, which say where the groups are."""
        return self.layers[0]


class FoundPairs:
    """The pairs that were found, and what they tell of the groups that are left."""

    def __init__(self) -> None:
        self.pairs: list[GroupPair] = []
        # By the names that weights have: the ways in which they fit.
        self.usual_ways: dict[Any, set[str]] = collections.defaultdict(set)
        # Pairs of layers below each node, and below each two.
        self._below: collections.Counter[Any] = collections.Counter()

    def add(self, pair: GroupPair) -> None:
        self.pairs.append(pair)
        for left, right in {
            tuple(tuple(_layers.nodes_above(x)) for x in both) for both in pair.layers
        }:
            self._below.update([*((0, x) for x in left), *((1, x) for x in right)])
            self._below.update(it.product(left, right))
        if len(pair.ways) == 1 and len(pair.first[0].main.shape) > 1:
            self.usual_ways[_layers.weight_names(pair.first)].update(pair.ways)

    def share_below(self, a: str, b: str) -> float:
        """The share of the layers below either of two nodes that are in both."""
        both = self._below[a, b]
        return both / (self._below[0, a] + self._below[1, b] - both) if both else 0.0

    def is_elsewhere(self, old: NamedLayer, new: NamedLayer, own: int) -> bool:
        """Whether other layers beside the one and beside the other stand for some, and
        none of them for each other. `own`: how often the two themselves are counted."""
        above = [_layers.nodes_above(x) for x in (old, new)]
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
            parts = [x for x in others if len(x) > len(_layers.block_of(x))]
            parts = parts or others[-1:]
            both = ((node, x) if i == 0 else (x, node) for x in parts)
            if any(self._below[x] > own for x in both):
                return False
        return True


class Bucket:
    """Groups of both sides that may stand for each other: their weights have the same
    types, and axes of the same lengths in any order. `_pairs` are those that fit, by
    their numbers on both sides."""

    def __init__(
        self,
        old: list[LayerGroup],
        new: list[LayerGroup],
        saved: LayerSide,
        wanted: LayerSide,
    ):
        self._saved, self._wanted = saved, wanted
        self._distinct = [_distinct_words(x) for x in (old, new)]
        self._pairs: dict[tuple[int, int], GroupPair] = {}
        for (i, a), (j, b) in it.product(enumerate(old), enumerate(new)):
            pair = self._fitted(a, b)
            if pair is not None:
                telling = self._telling_words(i, j, pair.lacked)
                self._pairs[i, j] = pair._replace(telling=telling)
        rows = collections.Counter(i for i, _ in self._pairs)
        columns = collections.Counter(j for _, j in self._pairs)
        for (i, j), pair in [*self._pairs.items()]:
            is_alone = rows[i] == 1 and columns[j] == 1
            if self._is_in_one_block(pair) and (
                is_alone or not _are_of_others(old[i], new[j])
            ):
                shares = self._share_words(old[i], new[j], pair)
                pair = pair._replace(is_alone=is_alone, shares_words=shares)
                self._pairs[i, j] = pair
            else:
                del self._pairs[i, j]

    def _fitted(self, a: LayerGroup, b: LayerGroup) -> GroupPair | None:
        """The pair of two groups, if their leaves and their names fit."""
        if len(a.folded) != len(b.folded):
            return None
        layers = _aligned(a, b)
        is_clear = bool(layers)
        layers = layers or [(a.members[0][1], b.members[0][1])]
        ways = _common_ways(layers, self._saved.kinds, self._wanted.kinds)
        if not ways:
            return None
        likeness, left, right = _compare_words(a.form, b.form)
        if _words.are_opposites(left, right):
            return None
        lacks = left & self._wanted.words | right & self._saved.words
        if "norm" in a.words & b.words and "attention" in lacks:
            is_clear = False  # The norm of that has the word, where any has.
        one, two = (_layers.without_numbers(x.form.replace("*", "")) for x in (a, b))
        return GroupPair(layers, likeness, ways, is_clear, one == two, (left, right))

    def _telling_words(
        self, i: int, j: int, lacked: tuple[set[str], set[str]]
    ) -> tuple[set[str], set[str]]:
        """Those of the words that the other group lacks that tell either from groups of
        its own side. Where no words tell those apart, all count, if the other has
        some."""
        (left, right), (old, new) = lacked, self._distinct
        mine, theirs = old[i] & left, new[j] & right
        if theirs and not any(old):
            mine = left
        if mine and not any(new):
            theirs = right
        return mine, theirs

    def _is_in_one_block(self, pair: GroupPair) -> bool:
        """Whether both are in blocks, or neither is."""
        old, new = pair.first
        return self._saved.is_in_block(old) == self._wanted.is_in_block(new)

    def _share_words(self, a: LayerGroup, b: LayerGroup, pair: GroupPair) -> bool:
        words = a.words & b.words
        if all(pair.lacked):
            common = self._saved.common_words & self._wanted.common_words
            words -= _words.KINDS | common
        is_empty = not a.words and not b.words
        is_last = _last_word(a.form) == _last_word(b.form)
        # Of words that are short for others, nothing is left.
        is_short = pair.likeness > 0 and not any(pair.lacked)
        return bool(words or is_empty or is_last or is_short)

    def take(self, a: int, b: int) -> GroupPair:
        """Takes the pair of two groups out, and all others of either."""
        pair = self._pairs[a, b]
        self._pairs = {x: y for x, y in self._pairs.items() if x[0] != a and x[1] != b}
        return pair

    def best(self, found: FoundPairs) -> list[tuple[int, int]]:
        """The pair with the highest score of those that are clear: in a list, which is
        empty if there is none. Any other pair of either group has a lower score."""
        scores = {
            groups: score
            for groups, pair in self._pairs.items()
            if (score := _score(pair, found)) is not None
        }
        # All scores of each group, by its side and its number there.
        rivals: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
        for groups, score in scores.items():
            for group in enumerate(groups):
                rivals[group].append(score)
        clear = [
            groups
            for groups, score in scores.items()
            if _is_clear(self._pairs[groups], found)
            and all(
                sum(x > score - _MARGIN for x in rivals[group]) == 1
                for group in enumerate(groups)
            )
        ]
        return sorted(clear, key=lambda groups: -scores[groups])[:1]


def _score(pair: GroupPair, found: FoundPairs) -> float | None:
    """Rates how well two groups fit; None if only their shapes do."""
    if not pair.shares_words:
        if not pair.likeness or not _share_below_words(pair, pair.lacked, found):
            return None
    score = pair.likeness + pair.is_same
    nodes = (x[-1] if x else "" for x in map(_layers.nodes_above, pair.first))
    score += _BESIDE * found.share_below(*nodes)
    usual = found.usual_ways[_layers.weight_names(pair.first)]
    if len(usual) == 1 and not usual & pair.ways:
        score -= _USUAL
    return score


def _is_clear(pair: GroupPair, found: FoundPairs) -> bool:
    """Whether nothing says of two groups that they are of other things."""
    if not pair.is_clear:
        return False
    is_apart = all(pair.telling) and not pair.is_alone
    if is_apart and not _share_below_words(pair, pair.telling, found):
        return False
    return not found.is_elsewhere(*pair.first, 0)


def _share_below_words(
    pair: GroupPair, words: tuple[set[str], set[str]], found: FoundPairs
) -> float:
    """The share of pairs below the nodes whose names have these words."""
    nodes = (_layers.node_with(x, some) for x, some in zip(pair.first, words))
    return found.share_below(*nodes)


def _aligned(a: LayerGroup, b: LayerGroup) -> list[tuple[NamedLayer, NamedLayer]]:
    """The layers of two groups that stand for each other, if the groups do: the first
    for the first. Nothing if numbers of the one are of other things, or if it is not
    clear what they count."""
    if any(a.place(i) != b.place(j) for i, j in zip(a.folded, b.folded)):
        return []
    numbers = [x.numbers(x.folded) for x in (a, b)]
    by_value = [_go_by_value(numbers, at) for at in range(len(a.folded))]
    if None in by_value:
        return []
    old, new = (
        {
            tuple(x.value if y else x.rank for x, y in zip(some, by_value)): layer
            for some, (_, layer) in zip(side, group.members)
        }
        for side, group in zip(numbers, (a, b))
    )
    if not any(by_value) and old.keys() != new.keys():
        return []
    return [(old[x], new[x]) for x in old if x in new]


def _go_by_value(numbers: list[list[tuple[NameNumber, ...]]], at: int) -> bool | None:
    """Whether layers of two groups go together by the value of one of their numbers: by
    its rank they do if it counts as many on both sides. None if it begins elsewhere on
    one of them, so that values say nothing."""
    old, new = (
        {tuple(y.rank for y in x[:at]): x[at].count for x in side} for side in numbers
    )
    if all(old[x] == new[x] for x in old.keys() & new.keys()):
        return False
    starts = {x[at].start for side in numbers for x in side}
    return None if None in starts or len(starts) > 1 else True


def _are_of_others(a: LayerGroup, b: LayerGroup) -> bool:
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


def _common_ways(
    layers: list[tuple[NamedLayer, NamedLayer]],
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
            some = _leaf_kinds.fits(a, saved[a], b, wanted[b])
            if not some:
                return frozenset()
            if role == "weight" and len(saved[a].shape) > 1:
                ways = {*some} if ways is None else ways & {*some}
                if not ways:
                    return frozenset()
    if not layers:
        return frozenset()
    return frozenset([""] if ways is None else ways)


def _distinct_words(groups: list[LayerGroup]) -> list[set[str]]:
    """For each group, its words that not all groups have."""
    words = [{*x.words} for x in groups]
    common = set.intersection(*words)
    return [some - common for some in words]


def _last_word(form: str) -> str:
    """The last part of a group's name, without numbers."""
    return _layers.without_numbers(form).rstrip("*._").rpartition(".")[2]


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
    left, right = (collections.Counter(_words.words(_layers.plain(x))) for x in (a, b))
    total = left.total() + right.total()
    pairs = ((_likeness(x, y), x, y) for x in left for y in right)
    common = 0.0
    for likeness, x, y in sorted((p for p in pairs if p[0]), key=lambda p: -p[0]):
        count = min(left[x], right[y])
        common += 2 * likeness * count
        left[x] -= count
        right[y] -= count
    return common / total if total else 0.0, set(+left), set(+right)
