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
# Subtracted from the score of a pair if its weights would have to be transposed, though
# no others of such names had to be, or the other way round.
_UNUSUAL_WAY = 0.2
# Added to it, times the share of layers beside the two that are pairs.
_NEIGHBOURS = 0.15

# Of each layer of a group, the numbers in its name that are folded.
_Rows = Sequence[Sequence[NameNumber]]


class LayerPair(NamedTuple):
    """A layer of each side, where the two stand for each other."""

    old: NamedLayer
    new: NamedLayer


class WordPair(NamedTuple):
    """Words in the names of an old group, and words in those of a new one."""

    old: set[str]
    new: set[str]


class GroupPair(NamedTuple):
    """Two groups whose leaves fit, and whose names do not say that they are opposites.

    - `layers`: the layers of both that stand for each other.
    - `are_aligned`: it is clear what their numbers count. If it is not, `layers` are
        only the first of each, which may not stand for each other.
    - `ways`: the adapters by any of which all of their weights fit; "" is none.
    - `likeness`: of their names, from 0 to 1.
    - `lacked`: the words of each that the other lacks.
    """

    layers: list[LayerPair]
    are_aligned: bool
    ways: frozenset[str]
    likeness: float
    lacked: WordPair

    @property
    def first(self) -> LayerPair:
        """The first layers, which say where the groups are."""
        return self.layers[0]


class _RatedPair(NamedTuple):
    """Two groups that may stand for each other, and what says how well they do.

    - `telling`: those of the lacked words that tell a group from others of its side.
    - `is_alone`: neither fits any other group.
    - `is_same`: their names are the same, but for numbers.
    - `shares_words`: their names have words in common, or say too little to differ.
    - `is_other_norm`: only one of them is a norm of an attention.
    """

    pair: GroupPair
    telling: WordPair
    is_alone: bool
    is_same: bool
    shares_words: bool
    is_other_norm: bool


class FoundPairs:
    """The pairs that were found, and what they tell of the groups that are left."""

    def __init__(self) -> None:
        self.pairs: list[GroupPair] = []
        # The ways of those that fit in one way only, by the names of their weights.
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

    def is_elsewhere(self, old: NamedLayer, new: NamedLayer, own: int = 0) -> bool:
        """Whether layers beside the old one and layers beside the new one are in pairs,
        and none of them with each other. `own`: how many pairs do not count, as they
        are of the two themselves."""
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
    types, and, but for axes of one element, axes of the same lengths in any order; and
    both or neither are copies."""

    def __init__(
        self,
        old: list[LayerGroup],
        new: list[LayerGroup],
        old_side: LayerSide,
        new_side: LayerSide,
    ):
        self._old_side, self._new_side = old_side, new_side
        fitting = {
            (i, j): pair
            for (i, a), (j, b) in it.product(enumerate(old), enumerate(new))
            if (pair := self._paired(a, b)) is not None
        }
        old_counts = collections.Counter(i for i, _ in fitting)
        new_counts = collections.Counter(j for _, j in fitting)
        old_words, new_words = _distinct_words(old), _distinct_words(new)
        do_differ = any(old_words), any(new_words)
        # The pairs that are left, by the numbers of their groups in `old` and `new`.
        self._pairs: dict[tuple[int, int], _RatedPair] = {}
        for (i, j), pair in fitting.items():
            is_alone = old_counts[i] == new_counts[j] == 1
            if self._are_apart(old[i], new[j], pair, is_alone):
                continue
            distinct = WordPair(old_words[i], new_words[j])
            self._pairs[i, j] = _RatedPair(
                pair,
                telling=_telling_words(pair.lacked, distinct, *do_differ),
                is_alone=is_alone,
                is_same=_without_numbers(old[i]) == _without_numbers(new[j]),
                shares_words=self._share_words(old[i], new[j], pair),
                is_other_norm=self._is_other_norm(old[i], new[j], pair),
            )

    def _paired(self, old: LayerGroup, new: LayerGroup) -> GroupPair | None:
        """The pair of two groups; None if their leaves or their names do not fit."""
        if len(old.folded) != len(new.folded):
            return None
        aligned = _aligned(old, new)
        # Where it is not clear which layers go together, the first say whether any fit.
        layers = aligned or [LayerPair(old.members[0].layer, new.members[0].layer)]
        ways = self._common_ways(layers)
        likeness, lacked = _compare_words(old.form, new.form)
        if not ways or _words.are_opposites(*lacked):
            return None
        return GroupPair(layers, bool(aligned), ways, likeness, lacked)

    def _common_ways(self, layers: Sequence[LayerPair]) -> frozenset[str]:
        """The ways in which the weights of all of these layers fit; none if other
        leaves do not."""
        old_kinds, new_kinds = self._old_side.kinds, self._new_side.kinds
        of_weights: list[set[str]] = []  # Of those that may be transposed.
        for old, new in layers:
            both = [x for x in old.leaves if x in new.leaves]
            if not both or ("weight" in old.leaves) != ("weight" in new.leaves):
                return frozenset()
            for role in both:
                a, b = old.leaves[role], new.leaves[role]
                ways = _leaf_kinds.fits(a, old_kinds[a], b, new_kinds[b])
                if not ways:
                    return frozenset()
                if role == "weight" and len(old_kinds[a].shape) > 1:
                    of_weights.append({*ways})
        return frozenset(set.intersection(*of_weights) if of_weights else [""])

    def _are_apart(
        self, old: LayerGroup, new: LayerGroup, pair: GroupPair, is_alone: bool
    ) -> bool:
        """Whether two groups that fit are no pair, as they are at other places."""
        if not is_alone and _are_of_others(old, new):
            return True
        is_in_block = self._old_side.is_in_block(pair.first.old)
        return is_in_block != self._new_side.is_in_block(pair.first.new)

    def _share_words(self, old: LayerGroup, new: LayerGroup, pair: GroupPair) -> bool:
        """Whether names have words in common that tell something, or too few words to
        differ."""
        shared = old.words & new.words
        if all(pair.lacked):
            # Where each has words that the other lacks, such words tell little.
            common = self._old_side.common_words & self._new_side.common_words
            shared = shared - _words.KINDS - common
        have_none = not old.words and not new.words
        is_last_same = _last_word(old.form) == _last_word(new.form)
        # Words that are short for others are in common too, as "attn" for "attention".
        are_all_alike = pair.likeness > 0 and not any(pair.lacked)
        return bool(shared) or have_none or is_last_same or are_all_alike

    def _is_other_norm(self, old: LayerGroup, new: LayerGroup, pair: GroupPair) -> bool:
        """Whether only one of two norms is that of an attention, though both sides have
        attentions."""
        lacked = pair.lacked.old & self._new_side.words
        lacked |= pair.lacked.new & self._old_side.words
        return "norm" in old.words & new.words and "attention" in lacked

    def take_best(self, found: FoundPairs) -> GroupPair | None:
        """Takes out the pair with the highest score of those that are clear, and with
        it all other pairs of its groups. None if no pair is clear."""
        scores = {
            numbers: score
            for numbers, rated in self._pairs.items()
            if (score := _score(rated, found)) is not None
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
        pair, (old, new) = self._pairs[best].pair, best
        self._pairs = {
            (i, j): x for (i, j), x in self._pairs.items() if i != old and j != new
        }
        return pair


# ---- Scores.


def _score(rated: _RatedPair, found: FoundPairs) -> float | None:
    """Rates how well two groups fit; None if only their shapes do."""
    pair = rated.pair
    if not rated.shares_words:
        if not pair.likeness or not _share_below_words(pair, pair.lacked, found):
            return None
    score = pair.likeness + (1 if rated.is_same else 0)
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


def _is_clear(rated: _RatedPair, found: FoundPairs) -> bool:
    """Whether it is clear which layers of two groups go together, and nothing says that
    the groups are of other things."""
    pair = rated.pair
    if not pair.are_aligned or rated.is_other_norm:
        return False
    is_told_apart = all(rated.telling) and not rated.is_alone
    if is_told_apart and not _share_below_words(pair, rated.telling, found):
        return False
    return not found.is_elsewhere(*pair.first)


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
    rows = old.folded_numbers(), new.folded_numbers()
    # Layers go together by the rank of a number if it counts as many on both sides, and
    # else by its value, which says something if all values begin alike.
    by_rank = [_counts_as_many(*rows, at) for at in range(len(old.folded))]
    for at, is_rank in enumerate(by_rank):
        if not is_rank and not _begin_alike(*rows, at):
            return []
    olds, news = _by_numbers(old, by_rank), _by_numbers(new, by_rank)
    if all(by_rank) and olds.keys() != news.keys():
        return []
    return [LayerPair(olds[key], news[key]) for key in olds if key in news]


def _counts_as_many(old: _Rows, new: _Rows, at: int) -> bool:
    """Whether one of the numbers has as many values on both sides, wherever those
    before it have the same ranks."""
    olds, news = (
        {tuple(y.rank for y in x[:at]): x[at].count for x in rows}
        for rows in (old, new)
    )
    return all(olds[x] == news[x] for x in olds.keys() & news.keys())


def _begin_alike(old: _Rows, new: _Rows, at: int) -> bool:
    """Whether one of the numbers begins with the same value everywhere."""
    starts = {numbers[at].start for numbers in (*old, *new)}
    return None not in starts and len(starts) == 1


def _by_numbers(
    group: LayerGroup, by_rank: Sequence[bool]
) -> dict[tuple[int, ...], NamedLayer]:
    """The layers of a group by their folded numbers: the rank of each, or its value."""
    rows = zip(group.folded_numbers(), group.members)
    return {
        tuple(x.rank if y else x.value for x, y in zip(numbers, by_rank)): member.layer
        for numbers, member in rows
    }


def _are_of_others(old: LayerGroup, new: LayerGroup) -> bool:
    """Whether the numbers that are not folded are of other layers, or whether it is not
    clear that they count the same things."""
    # All layers of a group have the same ones.
    olds, news = (
        {group.place(i): group.members[0].numbers[i] for i in group.fixed}
        for group in (old, new)
    )
    if olds.keys() != news.keys():
        return all(any(x.count > 1 for x in side.values()) for side in (olds, news))
    return any(_are_other(number, news[place]) for place, number in olds.items())


def _are_other(old: NameNumber, new: NameNumber) -> bool:
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
    lacked: WordPair, distinct: WordPair, do_old_differ: bool, do_new_differ: bool
) -> WordPair:
    """The words that tell two groups apart: the other group lacks them, and not all
    groups of their own side have them. Where the groups of one side do not differ in
    words, as a single one, all lacked words tell there, if any tell on the other."""
    old, new = distinct.old & lacked.old, distinct.new & lacked.new
    if new and not do_old_differ:
        return WordPair(lacked.old, new)
    if old and not do_new_differ:
        return WordPair(old, lacked.new)
    return WordPair(old, new)


def _without_numbers(group: LayerGroup) -> str:
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
    """The likeness of two names, and the words of each that the other lacks. Words go
    together one by one, those first that are most alike."""
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
