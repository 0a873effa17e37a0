"""Finds few rename rules that take saved names to wanted ones, and checks them on all
names.

`moves` are the names to be renamed, and what each becomes. Of the other saved names,
none may become a wanted one. Rules are tried on samples of the names; those are chosen
that rename the most; and they are put in an order in which none undoes another.
"""

import graphlib
import itertools as it
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from .._rename import _rename


# A saved name that has to make way for a wanted one goes below this node.
_ASIDE = "old"
# A name begins with it that a rule has made, and that later rules are not to change.
_MADE = "~"
# Names that are tried while rules are looked for; and how often a rule is tried on one,
# to find rules, and to see whether they are right. Each takes less than half a second.
_MAX_SAMPLES = 500
_MAX_LOOKS, _MAX_CHECKS = 2**18, 2**20


class NameRule(NamedTuple):
    """A rule of `ec.rename`: a regex, and the replacement of its matches."""

    pattern: str
    replacement: str


class Effect(NamedTuple):
    """The names that a rule renames rightly, and those that it renames wrongly."""

    right: set[str]
    wrong: set[str]


def lines(found: Iterable[NameRule], adapters: Mapping[str, str]) -> list[str]:
    """The rules as Python; and those that apply adapters, which are given by the new
    name of the leaf."""
    rows = [f"    ({_raw(old)}, {_raw(new)})," for old, new in found]
    # Leaves whose names differ only in numbers have one pattern, and one row.
    patterns = (
        (_rule([x], [x], same=0, is_general=True).pattern, y)
        for x, y in adapters.items()
    )
    for pattern, adapter in dict.fromkeys(patterns):
        rows.append(f"    ({_raw(pattern)}, ec.adapters.{adapter}),")
    return ["ec.rename([", *rows, "])"] if rows else []


def _raw(text: str) -> str:
    """A text as Python, raw if that is shorter to read."""
    is_plain = text.isprintable() and '"' not in text and text[-1:] != "\\"
    if not is_plain:
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'


def rules(
    moves: Mapping[str, str], saved: Collection[str], wanted: Collection[str]
) -> list[NameRule]:
    """Rules that rename each name in `moves` to its new name, and no other saved name
    to a wanted one. Empty if none are found, or if there are too many to try."""
    taken = set(moves.values())
    aside = (x for x in saved if x in taken and x not in moves)
    task = _Task({**moves, **{x: f"{_ASIDE}.{x}" for x in aside}}, saved, wanted)
    for found in (task.find_few(), _one_by_one(task.moves)):
        are_few = len(found) * len(saved) <= _MAX_CHECKS
        if are_few and task.is_done_by(found):
            return found
    return []


class _Task(NamedTuple):
    """The names to be renamed, and what each becomes; all names that are saved; and
    those that are wanted, none of which another name may become."""

    moves: Mapping[str, str]
    saved: Collection[str]
    wanted: Collection[str]

    def is_done_by(self, found: list[NameRule]) -> bool:
        """Whether rules do it, each of them something, and no harm."""
        used: set[int] = set()
        rename = _rename.rename(found)
        new = {x: _rename.apply(rename, x, used, "suggest").name for x in self.saved}
        return (
            len(used) == len(found)
            and len(set(new.values())) == len(new)
            and all(new[x] == y for x, y in self.moves.items())
            and all(
                x == y or x in self.moves or y not in self.wanted
                for x, y in new.items()
            )
        )

    def find_few(self) -> list[NameRule]:
        """The rules that rename the most names each, until all are renamed; of equal
        ones the most general first. Empty if there are too many to try."""
        samples = self._samples()
        left = {x for x in samples if self.moves.get(x, x) != x}
        effects = self._effects(left, samples)
        chosen: dict[NameRule, Effect] = {}
        while left and effects:
            rank = lambda x: (len(effects[x].right & left), -len(effects[x].wrong))
            best = max(effects, key=rank)
            right, wrong = effects[best]
            if not right & left:
                break
            chosen[best] = Effect(right & left, wrong)
            left -= right
        return _ordered(chosen, self.moves)

    def _samples(self) -> list[str]:
        """Names that the rules must be right for. One is enough of several that differ
        only in numbers which stay."""
        out: dict[object, str] = {}
        for name in self.saved:
            new = self.moves.get(name, "")
            olds, news = _numbered(name), _numbered(new)
            stay = not new or olds[1::2] == news[1::2]
            texts = tuple(olds[::2]), tuple(news[::2])
            out.setdefault(texts if stay else name, name)
        return [*it.islice(out.values(), _MAX_SAMPLES)]

    def _effects(self, names: set[str], samples: list[str]) -> dict[NameRule, Effect]:
        """The rules that may be chosen, each of which renames one of the names or more.
        Empty if there are too many to try."""
        effects: dict[NameRule, Effect] = {}
        for is_general in (True, False):
            # The others are tried for the names that no general rule renames.
            rest = sorted(names.difference(*(x.right for x in effects.values())))
            ways = (r for x in rest for r in _ways(x, self.moves[x], is_general))
            tried = dict.fromkeys(ways)
            if len(tried) * len(samples) > _MAX_LOOKS:
                return {}
            for rule in tried:
                effect = self._effect(rule, samples)
                if effect is not None:
                    effects.setdefault(rule, effect)
        return effects

    def _effect(self, rule: NameRule, samples: list[str]) -> Effect | None:
        """The effect of a rule, or None if no other rule can mend what it does."""
        moves, right, wrong = self.moves, set(), set()
        pattern = re.compile(rule.pattern)
        for name in samples:
            new = pattern.sub(rule.replacement, name)
            if new == name:
                continue
            if name not in moves:
                if new in self.wanted:
                    return None
            elif moves[name] == name:  # It is to stay.
                return None
            elif moves[name] == new:
                right.add(name)
            else:
                wrong.add(name)
        return Effect(right, wrong)


def _one_by_one(moves: Mapping[str, str]) -> list[NameRule]:
    """A rule for each name. None changes a name that another has made."""
    changed = {x: y for x, y in moves.items() if x != y}
    out = [_rule([x], [_MADE + y], same=0) for x, y in changed.items()]
    return [*out, NameRule("^" + _MADE, "")] if out else []


def _numbered(name: str) -> list[str]:
    """A name, split at its numbers: texts at even places, and numbers at odd ones."""
    return re.split(r"(?<![^._])([0-9]+)(?![^._])", name)


def _ways(old: str, new: str, is_general: bool) -> Iterator[NameRule]:
    """Rules that take one name to another: from the least of it that has to change to
    all of it. General ones have any numbers where both names have the same."""
    olds, news = old.split("."), new.split(".")
    # Of the last parts that both have, all may stay, or fewer.
    pairs = zip(reversed(olds), reversed(news))
    most = sum(1 for _ in it.takewhile(lambda pair: pair[0] == pair[1], pairs))
    for same in range(most, -1, -1):
        yield _rule(olds, news, same, is_general)


def _rule(
    olds: list[str], news: list[str], same: int, is_general: bool = False
) -> NameRule:
    """The rule that takes the one name to the other, given in parts, but for the last
    `same` parts, which stay."""
    old, new = ".".join(olds[: len(olds) - same]), ".".join(news[: len(news) - same])
    if not old and same:
        return NameRule("^", f"{new}.")
    end = r"\." if same else "$"
    if same and new:
        new += "."
    pattern, replacement = _numbered(old), _numbered(new)
    pattern[::2] = map(re.escape, pattern[::2])
    replacement[::2] = (x.replace("\\", r"\\") for x in replacement[::2])
    if is_general:
        # A number of the new name that the old one has too becomes a group.
        place = count = 0
        for i in range(1, len(replacement), 2):
            if replacement[i] in pattern[place:]:
                place = pattern.index(replacement[i], place)
                count += 1
                pattern[place], replacement[i] = r"(\d+)", rf"\{count}"
    return NameRule(f"^{''.join(pattern)}{end}", "".join(replacement))


def _ordered(
    chosen: Mapping[NameRule, Effect], moves: Mapping[str, str]
) -> list[NameRule]:
    """The rules in an order in which none undoes what another does. Where there is no
    such order, as of names that are exchanged, some rules mark the names that they
    make. Empty if that does not help."""
    rules = list(chosen)
    patterns = [re.compile(rule.pattern) for rule in rules]

    def changes(i: int, name: str) -> bool:
        return patterns[i].sub(rules[i].replacement, name) != name

    # By the number of each rule, those that have to come before it: the rules whose
    # names it would take; and, unless it marks the names that it makes, the rules that
    # would change these again.
    taken: dict[int, set[int]] = {i: set() for i in range(len(rules))}
    undoing: dict[int, set[int]] = {i: set() for i in range(len(rules))}
    effects = enumerate(chosen.values())
    for (i, (names, _)), (j, (_, wrong)) in it.permutations(effects, 2):
        if wrong & names:
            taken[j].add(i)
        if any(changes(j, moves[x]) for x in names):
            undoing[i].add(j)
    marked: set[int] = set()
    while True:
        before = {i: taken[i] if i in marked else taken[i] | undoing[i] for i in taken}
        try:
            order = [*graphlib.TopologicalSorter(before).static_order()]
            break
        except graphlib.CycleError as e:
            unmarked = set(e.args[1]) - marked  # The error has the rules of a cycle.
            if not unmarked:
                return []
            marked.add(min(unmarked))
    out = [
        rules[i]._replace(replacement=_MADE * (i in marked) + rules[i].replacement)
        for i in order
    ]
    return [*out, NameRule("^" + _MADE, "")] if marked else out
