"""Pairs of groups of layers, one of each side: which fit, and which fit best.

The saved side is the `old` one, and the wanted side the `new` one. A `Bucket` has the
groups that may stand for each other at all, and makes a `GroupPair` of each two that
fit. The best pair is taken first. How good the others are depends on the pairs that
were taken before: `FoundPairs`.
"""

import collections
import functools as ft
import itertools as it
from collections.abc import Sequence
from typing import NamedTuple

from . import _layers, _leaf_kinds, _words
from ._layers import LayerGroup, LayerSide, NamedLayer, NameNumber


# By how much the best has to be better than the second.
_MARGIN = 0.05
# Subtracted from the score of a pair if its weights are transposed, and those of all
# pairs of such names that fit in one way only are not, or the other way round.
_UNUSUAL_WAY = 0.2
# Added to it, times the share of layers beside the two that are pairs.
_NEIGHBOURS = 0.15


class LayerPair(NamedTuple):
    """A layer of each side, where the two stand for each other."""

    old: NamedLayer
    new: NamedLayer


class WordPair(NamedTuple):
    """Words in the names of an old group, and words in those of a new one."""

    old: set[str]
    new: set[str]


class GroupPair(NamedTuple):
    """Two groups that fit each other.

    - `layers`: the layers of both that stand for each other, first for first.
    - `likeness`: of their names, from 0 to 1.
    - `ways`: the adapters by any of which all of their weights fit; "" is none.
    - `is_clear`: it is clear what their numbers count, and neither or both of the
        groups are norms of an attention.
    - `is_same`: their names are the same, but for numbers.
    - `lacked`: the words of each that the other lacks.
    - `telling`: those of `lacked` that tell a group from others of its side.
    - `is_alone`: neither fits any other group.
    - `shares_words`: their names have words in common, or say too little to differ.
    """

    layers: list[LayerPair]
    likeness: float
    ways: frozenset[str]
    is_clear: bool
    is_same: bool
    lacked: WordPair
    telling: WordPair = WordPair(set(), set())
    is_alone: bool = False
    shares_words: bool = False

    @property
    def first(self) -> LayerPair:
        """The first layers, which say where the groups are."""
        return self.layers[0]


class FoundPairs:
    """The pairs that were found, and what they tell of the groups that are left."""

    def __init__(self) -> None:
        self.pairs: list[GroupPair] = []
        # By the names that weights have: the ways in which they fit.
        self.usual_ways: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
        # How many pairs of layers have their old layer below a node, their new layer
        # below one, and both below two.
        self._below_old: collections.Counter[str] = collections.Counter()
        self._below_new: collections.Counter[str] = collections.Counter()
        self._below_both: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, pair: GroupPair) -> None:
        self.pairs.append(pair)
        # Layers of several blocks have the same nodes above them, and count once.
        for old_nodes, new_nodes in {
            (tuple(_layers.nodes_above(old)), tuple(_layers.nodes_above(new)))
            for old, new in pair.layers
        }:
            self._below_old.update(old_nodes)
            self._below_new.update(new_nodes)
            self._below_both.update(it.product(old_nodes, new_nodes))
        if len(pair.ways) == 1 and len(pair.first.old.main.shape) > 1:
            self.usual_ways[_layers.weight_names(pair.first)].update(pair.ways)

    def share_below(self, old: str, new: str) -> float:
        """The share of the pairs below either of two nodes that are below both."""
        both = self._below_both[old, new]
        either = self._below_old[old] + self._below_new[new] - both
        return both / either if both else 0.0

    def is_elsewhere(self, old: NamedLayer, new: NamedLayer, is_taken: bool) -> bool:
        """Whether layers beside the old one and layers beside the new one are in pairs,
        and none of them with each other. `is_taken`: the two are a pair themselves,
        which does not count."""
        own = 1 if is_taken else 0
        olds = [x for x in _layers.nodes_above(old) if self._below_old[x] > own]
        news = [x for x in _layers.nodes_above(new) if self._below_new[x] > own]
        if not olds or not news:
            return False
        beside = [(olds[-1], x) for x in _parts_of_block(news)]
        beside += [(x, news[-1]) for x in _parts_of_block(olds)]
        return all(self._below_both[nodes] <= own for nodes in beside)


def _parts_of_block(nodes: list[str]) -> list[str]:
    """Those of the nodes above a layer that are parts of its block, and not the block
    itself; if none is, the nearest node."""
    parts = [x for x in nodes if len(x) > len(_layers.block_of(x))]
    return parts or nodes[-1:]


class Bucket:
    """Groups of both sides that may stand for each other: their weights have the same
    types, and axes of the same lengths in any order."""

    def __init__(
        self,
        old: list[LayerGroup],
        new: list[LayerGroup],
        saved: LayerSide,
        wanted: LayerSide,
    ):
        self._saved, self._wanted = saved, wanted
        fitting = {
            (i, j): pair
            for (i, a), (j, b) in it.product(enumerate(old), enumerate(new))
            if (pair := self._fitted(a, b)) is not None
        }
        old_counts = collections.Counter(i for i, _ in fitting)
        new_counts = collections.Counter(j for _, j in fitting)
        old_words, new_words = _distinct_words(old), _distinct_words(new)
        # The pairs that are left, by the numbers of their groups in `old` and `new`.
        self._pairs: dict[tuple[int, int], GroupPair] = {}
        for (i, j), pair in fitting.items():
            is_alone = old_counts[i] == new_counts[j] == 1
            if not self._may_stand(old[i], new[j], pair, is_alone):
                continue
            distinct = WordPair(old_words[i], new_words[j])
            are_told = any(old_words), any(new_words)
            self._pairs[i, j] = pair._replace(
                telling=_telling_words(pair.lacked, distinct, *are_told),
                is_alone=is_alone,
                shares_words=self._share_words(old[i], new[j], pair),
            )

    def _fitted(self, old: LayerGroup, new: LayerGroup) -> GroupPair | None:
        """The pair of two groups, if their leaves and their names fit."""
        if len(old.folded) != len(new.folded):
            return None
        aligned = _aligned(old, new)
        # Where it is not clear which layers go together, the first say whether any fit.
        layers = aligned or [LayerPair(old.members[0].layer, new.members[0].layer)]
        ways = self._common_ways(layers)
        if not ways:
            return None
        likeness, lacked = _compare_words(old.form, new.form)
        if _words.are_opposites(*lacked):
            return None
        is_same = _form_without_numbers(old) == _form_without_numbers(new)
        # Words that one group lacks, and others of its side have. If one of them is
        # "attention", only one of two norms is that of an attention.
        elsewhere = lacked.old & self._wanted.words | lacked.new & self._saved.words
        is_other_norm = "norm" in old.words & new.words and "attention" in elsewhere
        is_clear = bool(aligned) and not is_other_norm
        return GroupPair(layers, likeness, ways, is_clear, is_same, lacked)

    def _may_stand(
        self, old: LayerGroup, new: LayerGroup, pair: GroupPair, is_alone: bool
    ) -> bool:
        """Whether two groups that fit may stand for each other, by where they are."""
        if not is_alone and _are_of_others(old, new):
            return False
        is_in_block = self._saved.is_in_block(pair.first.old)
        return is_in_block == self._wanted.is_in_block(pair.first.new)

    def _common_ways(self, layers: Sequence[LayerPair]) -> frozenset[str]:
        """The ways in which the weights of all of these layers fit; none if other
        leaves do not."""
        saved, wanted = self._saved.kinds, self._wanted.kinds
        ways: set[str] | None = None  # None: no weight that may be transposed was seen.
        for old, new in layers:
            both = [x for x in old.leaves if x in new.leaves]
            if not both or ("weight" in old.leaves) != ("weight" in new.leaves):
                return frozenset()
            for role in both:
                a, b = old.leaves[role], new.leaves[role]
                fits = _leaf_kinds.fits(a, saved[a], b, wanted[b])
                if not fits:
                    return frozenset()
                if role == "weight" and len(saved[a].shape) > 1:
                    ways = {*fits} if ways is None else ways & {*fits}
        return frozenset([""] if ways is None else ways)

    def _share_words(self, old: LayerGroup, new: LayerGroup, pair: GroupPair) -> bool:
        """Whether names have words in common that tell something, or too few words to
        differ."""
        shared = old.words & new.words
        if all(pair.lacked):
            # Where each has words that the other lacks, such words tell little.
            common = self._saved.common_words & self._wanted.common_words
            shared = shared - _words.KINDS - common
        have_none = not old.words and not new.words
        is_last_same = _last_word(old.form) == _last_word(new.form)
        # Words that are short for others are in common too, as "attn" for "attention".
        are_all_alike = pair.likeness > 0 and not any(pair.lacked)
        return bool(shared) or have_none or is_last_same or are_all_alike

    def take_best(self, found: FoundPairs) -> GroupPair | None:
        """Takes out the pair with the highest score of those that are clear, and with
        it all other pairs of its groups. None if no pair is clear."""
        scores = {
            numbers: score
            for numbers, pair in self._pairs.items()
            if (score := _score(pair, found)) is not None
        }
        old_scores: dict[int, list[float]] = collections.defaultdict(list)
        new_scores: dict[int, list[float]] = collections.defaultdict(list)
        for (i, j), score in scores.items():
            old_scores[i].append(score)
            new_scores[j].append(score)
        clear = [
            (i, j)
            for (i, j), score in scores.items()
            if _is_clear(self._pairs[i, j], found)
            and _has_no_rival(score, old_scores[i])
            and _has_no_rival(score, new_scores[j])
        ]
        if not clear:
            return None
        best = max(clear, key=scores.__getitem__)
        pair, (old, new) = self._pairs[best], best
        self._pairs = {
            (i, j): x for (i, j), x in self._pairs.items() if i != old and j != new
        }
        return pair


# ---- Scores.


def _score(pair: GroupPair, found: FoundPairs) -> float | None:
    """Rates how well two groups fit; None if only their shapes do."""
    if not pair.shares_words:
        if not pair.likeness or not _share_below_words(pair, pair.lacked, found):
            return None
    score = pair.likeness + (1 if pair.is_same else 0)
    # The nearest node above each; "" for the top.
    old, new = (["", *_layers.nodes_above(x)][-1] for x in pair.first)
    score += _NEIGHBOURS * found.share_below(old, new)
    usual = found.usual_ways[_layers.weight_names(pair.first)]
    if len(usual) == 1 and not usual & pair.ways:
        score -= _UNUSUAL_WAY
    return score


def _has_no_rival(score: float, of_group: list[float]) -> bool:
    """Whether, of the scores of all pairs of a group, only this one is near it."""
    return sum(x > score - _MARGIN for x in of_group) == 1


def _is_clear(pair: GroupPair, found: FoundPairs) -> bool:
    """Whether nothing says of two groups that they are of other things."""
    if not pair.is_clear:
        return False
    is_apart = all(pair.telling) and not pair.is_alone
    if is_apart and not _share_below_words(pair, pair.telling, found):
        return False
    return not found.is_elsewhere(*pair.first, is_taken=False)


def _share_below_words(pair: GroupPair, words: WordPair, found: FoundPairs) -> float:
    """The share of pairs below the nodes whose names have these words."""
    old = _layers.node_with(pair.first.old, words.old)
    return found.share_below(old, _layers.node_with(pair.first.new, words.new))


# ---- Numbers.


def _aligned(old: LayerGroup, new: LayerGroup) -> list[LayerPair]:
    """The layers of two groups that stand for each other, if the groups do: the first
    for the first. Nothing if numbers of the one are of other things, or if it is not
    clear what they count."""
    if list(map(old.place, old.folded)) != list(map(new.place, new.folded)):
        return []
    sides = old.numbers(old.folded), new.numbers(new.folded)
    # Layers go together by the rank of a number if it counts as many on both sides, and
    # else by its value.
    by_rank = [_counts_as_many(sides, at) for at in range(len(old.folded))]
    for at, is_rank in enumerate(by_rank):
        if not is_rank and not _begins_alike(sides, at):
            return []

    def by_numbers(group: LayerGroup) -> dict[tuple[int, ...], NamedLayer]:
        rows = zip(group.numbers(group.folded), group.members)
        return {
            tuple(x.rank if y else x.value for x, y in zip(numbers, by_rank)): layer
            for numbers, (_, layer) in rows
        }

    old_layers, new_layers = by_numbers(old), by_numbers(new)
    if all(by_rank) and old_layers.keys() != new_layers.keys():
        return []
    return [
        LayerPair(layer, new_layers[numbers])
        for numbers, layer in old_layers.items()
        if numbers in new_layers
    ]


def _counts_as_many(sides: Sequence[Sequence[Sequence[NameNumber]]], at: int) -> bool:
    """Whether one of the numbers has as many values on both sides, wherever those
    before it have the same ranks."""
    old, new = (
        {tuple(y.rank for y in x[:at]): x[at].count for x in side} for side in sides
    )
    return all(old[x] == new[x] for x in old.keys() & new.keys())


def _begins_alike(sides: Sequence[Sequence[Sequence[NameNumber]]], at: int) -> bool:
    """Whether one of the numbers begins with the same value everywhere. Otherwise its
    values say nothing."""
    starts = {x[at].start for side in sides for x in side}
    return None not in starts and len(starts) == 1


def _are_of_others(old: LayerGroup, new: LayerGroup) -> bool:
    """Whether the numbers that are not folded are of other layers, or whether it is not
    clear that they count the same things."""
    olds, news = (
        {group.place(i): group.members[0].numbers[i] for i in group.fixed}
        for group in (old, new)
    )
    if olds.keys() != news.keys():
        return all(any(x.count > 1 for x in side.values()) for side in (olds, news))
    return any(_are_apart(number, news[place]) for place, number in olds.items())


def _are_apart(old: NameNumber, new: NameNumber) -> bool:
    """Whether two numbers at one place are of different things."""
    if old.count != new.count:
        return False
    if old.count > 1:
        return old.rank != new.rank
    # A single thing may be counted from 0 or from 1.
    return old.value != new.value and {old.value, new.value} != {0, 1}


# ---- Leaves and words.


def _distinct_words(groups: list[LayerGroup]) -> list[set[str]]:
    """For each group, its words that not all groups have."""
    common = set.intersection(*(group.words for group in groups))
    return [group.words - common for group in groups]


def _telling_words(
    lacked: WordPair, distinct: WordPair, is_old_told: bool, is_new_told: bool
) -> WordPair:
    """The words that tell the two groups apart: the other group lacks them, and they
    are distinct, as not all groups of their side have them. A side that is not `told`
    has no distinct words. There all that the other group lacks tell, if the other group
    has words that do."""
    old, new = distinct.old & lacked.old, distinct.new & lacked.new
    if new and not is_old_told:
        return WordPair(lacked.old, new)
    if old and not is_new_told:
        return WordPair(old, lacked.new)
    return WordPair(old, new)


def _form_without_numbers(group: LayerGroup) -> str:
    return _layers.without_numbers(group.form.replace("*", ""))


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
    rest = iter(long)  # Each letter is looked for after the one before it.
    return 0.8 if all(x in rest for x in short) else 0.0


@ft.lru_cache(2**16)
def _compare_words(old: str, new: str) -> tuple[float, WordPair]:
    """The likeness of the words of two forms, and the words that the other lacks."""
    olds, news = (
        collections.Counter(_words.words(_layers.plain(x))) for x in (old, new)
    )
    total = olds.total() + news.total()
    pairs = ((_likeness(x, y), x, y) for x in olds for y in news)
    common = 0.0
    for likeness, x, y in sorted((p for p in pairs if p[0]), key=lambda p: -p[0]):
        count = min(olds[x], news[y])
        common += 2 * likeness * count
        olds[x] -= count
        news[y] -= count
    # `+` leaves only the words of which some are left.
    lacked = WordPair(set(+olds), set(+news))
    return common / total if total else 0.0, lacked
