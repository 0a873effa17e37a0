"""A guess at which of the saved leaves are which of those wanted, by names and shapes.

Names with their numbers folded are a group: `layers.*.attn.q`. Groups whose leaves have
the same shapes may stand for each other, and the words in their names say which do.
Where these leave a choice, nothing is chosen.
"""

import collections
import functools as ft
import itertools as it
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from .._format import _template
from .._format._template import Template
from .._tree._target import Target


# Groups, and pairs of them that are compared with each other. Of more nothing is said.
_MAX_GROUPS, _MAX_PAIRS = 2**14, 2**13
# By how much the best has to be better than the second.
_MARGIN = 0.01

_words = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_norms = re.compile("layer_?norm|rms_?norm", re.IGNORECASE)
# Words for one thing, as libraries have them.
_groups = """
    weight kernel scale gamma w, bias beta b, norm ln, linear fc dense, final f,
    layer layers block blocks h, embedding emb embed embedder embeddings, query q wq,
    key k wk, value v wv, output o wo, mlp ff ffn feed forward, token wte word tok,
    position wpe
"""
_SYNONYMS = {x: y for y, *some in map(str.split, _groups.split(",")) for x in some}
# Whose leaves are copies of those of a model.
_COPIES = set("opt optim optimizer optimiser mu nu momentum ema average".split())

_ORDER = set("pre post input before after".split())

# Folded names, each with the names in the order of their numbers.
Groups = dict[str, list[str]]


# What a leaf is: the type of its numbers, or another kind; and its shape.
Kind = tuple[str, tuple[int, ...]]


# Names of both sides among which a choice is left.
Unclear = list[tuple[list[str], list[str]]]


def alike(
    saved: Mapping[str, Kind], wanted: Mapping[str, Kind]
) -> tuple[dict[str, str], list[str], Unclear]:
    """Pairs leaves by name: those of one kind; and of the rest those that the other
    way round are of one.

    **Returns:** names of saved leaves, each with that of the one wanted for which it
    stands; those of them that have to be transposed; and what is unclear.
    """
    # A node with another leaf of one name is perhaps not that node.
    odd = {_node(x) for x in saved.keys() & wanted.keys() if saved[x] != wanted[x]}
    out = {
        x: x
        for x, kind in saved.items()
        if wanted.get(x) == kind and _node(x) not in odd - {""}
    }
    unclear = _match(saved, wanted, out, odd - {""})
    for name in _torn(out):
        if len(saved[name][1]) == 2:
            del out[name]
    turn = lambda kinds: {x: (a, tuple(sorted(b))) for x, (a, b) in kinds.items()}
    if any(len(kind[1]) == 2 for x, kind in saved.items() if x not in out):
        unclear = _match(turn(saved), turn(wanted), out, set())
    turned = [x for x, y in out.items() if saved[x] != wanted[y]]
    return out, turned, unclear


def _match(
    saved: Mapping[str, Kind],
    wanted: Mapping[str, Kind],
    out: dict[str, str],
    odd: set[str],
) -> Unclear:
    """Adds the pairs that it finds, and returns what is unclear."""
    unclear: Unclear = []
    tried: set[str] = set()
    # With all numbers folded; with the first of each name, that of the layer; as it is.
    for most in (9, 1, 0):
        skipped = odd if most else ()
        old, new = (
            {x: y for x, y in side.items() if x not in done and _node(x) not in skipped}
            for side, done in ((saved, out), (wanted, {*out.values()}))
        )
        forms = {_form(x, most) for x in it.chain(old, new)}
        if forms != tried and len(forms) <= _MAX_GROUPS:
            found, unclear = _Matching(old, new, out, most).find()
            out |= found
        tried = forms
    return unclear


def _torn(names: Mapping[str, str]) -> list[str]:
    """Leaves of nodes whose leaves go to several by the names that they have there."""
    nodes: dict[Any, set[str]] = collections.defaultdict(set)
    keys = {}
    for x, y in names.items():
        a, b = _form(x, 9), _form(y, 9)
        if _tokens(a.rpartition(".")[2]) == _tokens(b.rpartition(".")[2]):
            keys[x] = (0, _node(a)), (1, _node(b))
            nodes[keys[x][0]].add(_node(b))
            nodes[keys[x][1]].add(_node(a))
    return [x for x, both in keys.items() if any(len(nodes[key]) > 1 for key in both)]


def kind(x: Template | Target) -> Kind:
    """Kind that a leaf shares with each that may stand for it."""
    if isinstance(x, Target):
        dtype, shape = x.dtype, x.shape
    else:
        is_array = x.kind in _template.ARRAY_KINDS
        dtype = _template.dtype_of(x.dtype) if is_array else None
        shape = x.logical_shape
    what = x.kind if dtype is None else f"array of {_template.number_type(dtype)}"
    return what, shape


def is_square(kind: Kind) -> bool:
    """Whether nobody can tell a leaf of a kind from one that is transposed."""
    return len(kind[1]) == 2 and kind[1][0] == kind[1][1]


def numbered(name: str) -> list[str]:
    """A name, split at its numbers: texts and numbers by turns."""
    return re.split(r"(?<![^._])([0-9]+)(?![^._])", name)


def _classes(leaves: Mapping[str, Kind], most: int) -> dict[Hashable, Groups]:
    """Groups of names, with so many of their numbers folded, by what their leaves
    are."""
    groups: dict[str, dict[tuple[int, ...], str]] = collections.defaultdict(dict)
    for name in leaves:
        numbers = tuple(map(int, numbered(name)[1::2][:most]))
        groups[_form(name, most)][numbers] = name
    out: dict[Hashable, Groups] = collections.defaultdict(dict)
    for form, names in groups.items():
        columns = [sorted(set(column)) for column in zip(*names)]
        ranks = [{x: i for i, x in enumerate(column)} for column in columns]
        kinds = frozenset(
            (tuple(r[x] for r, x in zip(ranks, row) if len(r) > 1), leaves[name])
            for row, name in names.items()
        )
        parts = form.split("*")
        fixed = [str(c[0]) if len(c) == 1 else "*" for c in columns]
        form = "".join(x for pair in zip(parts, [*fixed, ""]) for x in pair)
        is_copy = not _COPIES.isdisjoint(_tokens(form))
        out[is_copy, kinds][form] = [names[row] for row in sorted(names)]
    return out


@ft.lru_cache(2**16)
def _tokens(form: str) -> tuple[str, ...]:
    words = _words.findall(_norms.sub("norm", form))
    return tuple(_SYNONYMS.get(x, x) for x in map(str.lower, words))


@ft.lru_cache(2**16)
def _likeness(a: str, b: str) -> float:
    """1 of the same words; less if the one is short for the other."""
    if a == b:
        return 1.0
    short, long = sorted((a, b), key=len)
    if len(short) < 2 or short[0] != long[0] or not (short + long).isalpha():
        return 0.0
    rest = iter(long)
    return 0.8 if all(x in rest for x in short) else 0.0


@ft.lru_cache(2**16)
def _compared(
    a: str, b: str, ignored: frozenset[str]
) -> tuple[float, set[str], set[str]]:
    """The likeness of the words of two forms, and the words that the other lacks."""
    left, right = (
        collections.Counter(y for y in _tokens(x) if y not in ignored) for x in (a, b)
    )
    total = left.total() + right.total()
    pairs = ((_likeness(x, y), x, y) for x in left for y in right)
    common = 0.0
    for likeness, x, y in sorted((p for p in pairs if p[0]), key=lambda p: -p[0]):
        count = min(left[x], right[y])
        common += 2 * likeness * count
        left[x] -= count
        right[y] -= count
    return common / total if total else 0.0, set(+left), set(+right)


class _Matching:
    """Groups of both sides that may stand for each other, by what their leaves are."""

    def __init__(
        self,
        old: Mapping[str, Kind],
        new: Mapping[str, Kind],
        known: Mapping[str, str],
        most: int,
    ):
        left, right = _classes(old, most), _classes(new, most)
        self._most = most
        self._left = _MAX_PAIRS
        self._classes = [
            (left[key], right[key], _Words(left[key], right[key]))
            for key in left
            if key in right
        ]
        # Pairs of leaves below each node, and below each two.
        self._below: collections.Counter[Any] = collections.Counter()
        for a, b in dict.fromkeys(
            (_form(a, most), _form(b, most)) for a, b in known.items()
        ):
            self._add(a, b)

    def find(self) -> tuple[dict[str, str], Unclear]:
        out: dict[str, str] = {}
        # First those of which there is one each.
        for are_single in (True, False):
            some = True
            while some:
                some = []
                for old, new, words in self._classes:
                    if words.is_single or not are_single:
                        some += [
                            (old.pop(a), new.pop(b))
                            for a, b in self._best(old, new, words)
                        ]
                for a, b in some:
                    out |= zip(a, b)
                    self._add(_form(a[0], self._most), _form(b[0], self._most))
        return out, [
            ([*it.chain(*old.values())], [*it.chain(*new.values())])
            for old, new, _ in self._classes
            if old and new
        ]

    def _best(self, old: Groups, new: Groups, words: "_Words") -> list[tuple[str, str]]:
        """The pairs that are better than all others of either."""
        if len(old) * len(new) > self._left:
            return []
        self._left -= len(old) * len(new)
        scores: dict[tuple[str, str], float] = {}
        for a, b in it.product(old, new):
            score, mine, theirs = words.compare(a, b)
            first, second = old[a][0], new[b][0]
            beside = self._beside(_depth(a), _depth(b), first, second)
            apart = bool(mine and theirs)
            if apart:
                apart = not self._beside(
                    _depth(a, mine), _depth(b, theirs), first, second
                )
            if score and not apart:
                scores[a, b] = score + beside
        rows: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
        for pair, score in scores.items():
            for key in enumerate(pair):
                rows[key].append(score)
        return [
            pair
            for pair, score in scores.items()
            if all(
                sum(x > score - _MARGIN for x in rows[key]) == 1
                for key in enumerate(pair)
            )
        ]

    def _add(self, a: str, b: str) -> None:
        left, right = (
            list(it.accumulate(x.split(".")[:-1], "{}.{}".format)) for x in (a, b)
        )
        self._below.update([*((0, x) for x in left), *((1, x) for x in right)])
        self._below.update(it.product(left, right))

    def _beside(self, i: int, j: int, a: str, b: str) -> float:
        """The share of the leaves below either of two nodes that are in both."""
        a, b = (
            ".".join(_form(x, self._most).split(".")[:n]) for x, n in ((a, i), (b, j))
        )
        both = self._below[a, b]
        return both / (self._below[0, a] + self._below[1, b] - both) if both else 0.0


class _Words:
    """The words in the names of groups whose leaves are the same."""

    def __init__(self, old: Groups, new: Groups):
        self._sizes = len(old), len(new)
        self._own = [_own(old), _own(new)]
        # Numbers tell nothing if the one side does not go on where the other ends.
        a, b = (
            {x for y in side for x in _tokens(y) if x.isdigit()} for side in (old, new)
        )
        is_counted = (a <= b or b <= a) and min(a, default="") == min(b, default="")
        self._ignored = frozenset() if is_counted else frozenset(a | b)

    @property
    def is_single(self) -> bool:
        return self._sizes == (1, 1)

    def compare(self, a: str, b: str) -> tuple[float, set[str], set[str]]:
        """The likeness of two names; and the words by which each could be another one
        than the other, and that the other lacks."""
        score, left, right = _compared(a, b, self._ignored)
        mine, theirs = self._own[0][a] & left, self._own[1][b] & right
        if theirs and self._sizes[0] == 1:
            mine = left
        if mine and self._sizes[1] == 1:
            theirs = right
        # The norm after the one part is that before the next.
        is_between = not self.is_single and (left ^ right) & _ORDER
        if is_between or {"weight", "bias"} <= left | right:
            score = 0.0
        return score, mine, theirs


def _own(forms: Iterable[str]) -> dict[str, set[str]]:
    """The words of each that not all have."""
    words = {x: {*_tokens(x)} for x in forms}
    common = set.intersection(*words.values())
    return {x: some - common for x, some in words.items()}


def _form(name: str, most: int) -> str:
    parts = numbered(name)
    parts[1::2] = ["*"] * min(most, len(parts) // 2) + parts[1::2][most:]
    return "".join(parts)


def _node(name: str) -> str:
    return name.rpartition(".")[0]


def _depth(form: str, words: Iterable[str] = ()) -> int:
    """The depth of the node that all of these words are in the name of; without any,
    of that which the leaf is in."""
    parts = form.split(".")
    depths = [i + 1 for i, part in enumerate(parts) if {*words} & {*_tokens(part)}]
    return max(depths, default=len(parts) - 1)
