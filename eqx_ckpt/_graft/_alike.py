"""A guess at which of the saved leaves are which of those wanted, by names and shapes.

Leaves are compared layer by layer: a weight goes with its bias. Layers whose names
differ only in numbers are a group, and the numbers of both sides are counted before
they are compared: from 0, from 1, or with other things between. Groups stand for each
other if their leaves fit, if their names share words, and if no other group does as
well. Where these leave a choice, nothing is chosen.

A `LayerSide` has the layers of one side, and makes groups of them (`_layers`).
`_LayerMatching` sorts the groups of both into `Bucket`s of what may stand for each
other at all (`_group_pairs`). It takes the best pair of each until none is clear any
more. It does that three times, with other groups each time: see `LayerSide.groups`.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._kernel._format import _names
from .._kernel._tree import _orders
from . import _layers, _leaf_kinds, _words
from ._group_pairs import Bucket, FoundPairs, GroupPair, LayerPair
from ._layers import LayerGroup, LayerSide, NamedLayer
from ._leaf_kinds import LeafKind


# Pairs of groups that are compared with each other. More are not compared.
_MAX_PAIRS = 2**15


class Unclear(NamedTuple):
    """Names of both sides among which a choice is left."""

    saved: list[str]
    wanted: list[str]


class LeafPairs(NamedTuple):
    """Pairs of saved and wanted leaves, by name.

    - `names`: the wanted leaf of each saved one.
    - `adapters`: of wanted leaves that need an adapter, its code.
    - `squares`: wanted leaves whose shapes do not say whether they are transposed.
    - `unclear`: leaves among which a choice is left.
    """

    names: dict[str, str]
    adapters: dict[str, str]
    squares: list[str]
    unclear: list[Unclear]


class _AlikePair(NamedTuple):
    """Leaves that stand for each other, by name, and the adapters by any of which they
    fit; "" is none."""

    old: str
    new: str
    ways: list[str]


# Groups of both sides that may stand for each other at all.
_Groups = tuple[list[LayerGroup], list[LayerGroup]]


def pair_leaves(
    saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]
) -> LeafPairs:
    """Pairs leaves by name: those that fit, as they are or by an adapter."""
    old, new = map(_plain_names, (saved, wanted))
    sides = zip((saved, wanted), (old, new))
    kinds = [{short: side[full] for short, full in x.items()} for side, x in sides]
    matching = _LayerMatching(*map(LayerSide, kinds))
    left: list[_Groups] = []
    for level in range(3):
        left = matching.groups(level)
        matching.take_all(left)
    found = matching.found(left)
    pairs = LeafPairs(
        {old[x]: new[y] for x, y in found.names.items()},
        {new[x]: how for x, how in found.adapters.items()},
        [new[x] for x in found.squares],
        [Unclear([old[x] for x in a], [new[x] for x in b]) for a, b in found.unclear],
    )
    return _without_rivals(pairs, saved, wanted)


def _without_rivals(
    pairs: LeafPairs, saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]
) -> LeafPairs:
    """The pairs but those of wanted leaves that a saved one in no pair has the name of,
    below the nodes that all leaves of pairs are in, and the kind: either may be it."""
    old, new = map(_names.common_node, (pairs.names, pairs.names.values()))
    left = {
        _names.below(x, old): x
        for x in saved.keys() - pairs.names.keys()
        if _names.is_under(x, old)
    }
    is_clear = lambda y: saved.get(left.get(_names.below(y, new), "")) != wanted[y]
    unclear = [
        Unclear([x, left[_names.below(y, new)]], [y])
        for x, y in pairs.names.items()
        if not is_clear(y)
    ]
    return LeafPairs(
        {x: y for x, y in pairs.names.items() if is_clear(y)},
        {y: how for y, how in pairs.adapters.items() if is_clear(y)},
        [y for y in pairs.squares if is_clear(y)],
        [*pairs.unclear, *unclear],
    )


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """The full names by their short forms, which are compared.

    A leaf of a variable of flax loses the `.value` of that, unless other leaves are in
    the same node. The numbers of a tuple at the top, as of a model and its state,
    become underscores if no two of its items have leaves of the same name."""
    below = _names.by_prefix([*names])
    tops: dict[str, set[str]] = {}
    for name in names:
        top, _, rest = name.partition(".")
        tops.setdefault(top, set()).add(_layers.without_numbers(rest))
    kinds = collections.Counter(x for rests in tops.values() for x in rests)
    is_mixed = len(tops) > 1 and max(kinds.values(), default=0) == 1
    marks = {top: "_" * i for i, top in enumerate(tops, 1)}  # They have no words.
    out = {}
    for name in names:
        short = _orders.unboxed(name)
        short = name if len(below.get(short, ())) > 1 else short
        top, dot, rest = short.partition(".")
        if is_mixed and _names.number_of(top) is not None:
            short = marks[top] + dot + rest
        out[short] = name
    return out


class _LayerMatching:
    """The layers of both sides, and those that stand for each other so far."""

    def __init__(self, old: LayerSide, new: LayerSide):
        self._sides = old, new
        self._pairs = FoundPairs()
        # The names of the layers in pairs.
        self._done: tuple[set[str], set[str]] = set(), set()

    def groups(self, level: int) -> list[_Groups]:
        """The layers that are in no pair, in groups of this level: see
        `LayerSide.groups`. Groups that may stand for each other are together."""
        by_kinds: dict[Any, _Groups] = {}
        for i, (side, done) in enumerate(zip(self._sides, self._done)):
            layers = (x for x in side.layers if x.name not in done)
            for group in side.groups(layers, level):
                kinds = frozenset(layer.main for _, layer in group.members)
                key = group.is_copy, kinds
                by_kinds.setdefault(key, ([], []))[i].append(group)
        return [both for both in by_kinds.values() if all(both)]

    def take_all(self, groups: Sequence[_Groups]) -> None:
        """Takes the best pair of groups of each bucket, in turns, until none is clear.
        Their layers are in no later group."""
        buckets = self._buckets(groups)
        has_found = True
        while has_found:
            has_found = False
            for bucket in buckets:
                pair = bucket.take_best(self._pairs)
                if pair is not None:
                    has_found = True
                    self._pairs.add(pair)
                    for done, layers in zip(self._done, zip(*pair.layers)):
                        done.update(layer.name for layer in layers)

    def _buckets(self, groups: Sequence[_Groups]) -> list[Bucket]:
        """The buckets of groups, as long as they have no more than `_MAX_PAIRS`."""
        left = _MAX_PAIRS
        buckets = []
        for old, new in groups:
            count = len(old) * len(new)
            if count <= left:
                left -= count
                buckets.append(Bucket(old, new, *self._sides))
        return buckets

    def found(self, left: Sequence[_Groups]) -> LeafPairs:
        """The leaves of all pairs, and those among which a choice is left: of pairs
        that later ones speak against, and of the groups that are `left`."""
        out = LeafPairs({}, {}, [], [])
        for pair in self._pairs.pairs:
            if self._pairs.is_elsewhere(*pair.first, own=1):
                out.unclear.append(Unclear(*map(_names_of, zip(*pair.layers))))
            else:
                self._add_leaves(pair, out)
        for both in left:
            layers = list(map(_layers_left, both, self._done))
            if all(layers):
                out.unclear.append(Unclear(*map(_names_of, layers)))
        return out

    def _add_leaves(self, pair: GroupPair, out: LeafPairs) -> None:
        """Adds the leaves of a pair of groups."""
        for layers in pair.layers:
            weights = _layers.weight_names(layers)
            usual = self._pairs.usual_ways[weights]
            # Squares are as they are where all others of that name are.
            stays_as_it_is = weights[0] == weights[1] and not usual - {""}
            for old, new, ways in self._leaf_pairs(layers, pair.ways):
                out.names[old] = new
                if ways[0]:
                    out.adapters[new] = ways[0]
                if len(ways) > 1 and not stays_as_it_is:
                    out.squares.append(new)

    def _leaf_pairs(
        self, layers: LayerPair, usable: frozenset[str]
    ) -> Iterator[_AlikePair]:
        """Leaves of two layers that stand for each other. A weight has all ways that
        are `usable` for all of its group, if there are any; other leaves have one."""
        saved, wanted = (side.kinds for side in self._sides)
        for role, old in layers.old.leaves.items():
            new = layers.new.leaves.get(role)
            if new is None:
                continue
            ways = _leaf_kinds.fits(old, saved[old], new, wanted[new])
            if role == "weight" and len(saved[old].shape) > 1:
                ways = [x for x in ways if x in usable] or ways
            else:
                ways = ways[:1]
            if ways:
                yield _AlikePair(old, new, ways)


def _layers_left(groups: list[LayerGroup], done: set[str]) -> list[NamedLayer]:
    layers = (layer for group in groups for _, layer in group.members)
    return [layer for layer in layers if layer.name not in done]


def _names_of(layers: Iterable[NamedLayer]) -> list[str]:
    """The names of the leaves of some layers, of each that of its weight first."""
    return [name for x in layers for name in _layers.weight_first(x)]


# ---- By names alone.


def may_be_same(a: str, b: str, is_certain: bool = False) -> bool:
    """Whether two names may be of one thing: by their words, or if they have none.
    `is_certain`: not if only one of them has any, or more numbers than the other."""
    some, others = ({*_words.words(x)} for x in (a, b))
    have_words = some or others if is_certain else some and others
    are_strangers = have_words and some.isdisjoint(others)
    are_opposites = _words.are_opposites(some - others, others - some)
    is_other_one = is_certain and len(_names.NUMBERS.findall(a)) > len(
        _names.NUMBERS.findall(b)
    )
    return not are_strangers and not are_opposites and not is_other_one


def is_copy(name: str) -> bool:
    """Whether a name says that it is of a copy, such as an average of weights."""
    return not _words.COPIES.isdisjoint(_words.words(name))


def tied_heads(
    saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]
) -> dict[str, str]:
    """Wanted weights of heads, and the saved embedding that each may be tied to:
    libraries do not save a head that is."""
    tables = {
        kind: name
        for name, kind in saved.items()
        if len(kind.shape) == 2 and {"embedding", "token"} & {*_words.words(name)}
    }
    out = {}
    for name, (what, shape) in wanted.items():
        turned = tables.get(LeafKind(what, shape[::-1]))
        origin = tables.get(LeafKind(what, shape)) or turned
        if origin and _words.HEADS & {*_words.words(name)}:
            out[name] = origin
    return out
