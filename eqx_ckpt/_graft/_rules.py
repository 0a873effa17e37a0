"""Finds few rename rules that take saved names to wanted ones, and checks them on all
names.

`moves` says what becomes of saved names, some of which stay as they are. None of the
other saved names may become a wanted one. Rules are tried on samples of the names;
those are chosen that rename the most; and they are put in an order in which none undoes
another.
"""

import graphlib
import itertools as it
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from .._kernel._format import _names
from .._rename import _rename


# A saved name that has to make way for a wanted one goes below this node.
_ASIDE = "old"
# The most names on which rules are tried while they are looked for.
_MAX_SAMPLES = 500
# The most of these trials, of one rule on one name, for general rules and for others:
# less than half a second for each.
_MAX_LOOKS = 2**18
# The most trials of the rules that were found, on all saved names: as long.
_MAX_CHECKS = 2**20


class NameRule(NamedTuple):
    """A rule of `ec.rename`: a regex, and the replacement of its matches."""

    pattern: str
    replacement: str

    def apply(self, name: str) -> str:
        return re.sub(self.pattern, self.replacement, name)

    def marking(self) -> "NameRule":
        """This rule, but it marks the names that it makes: no other rule finds them but
        one for all names (`^`), and `is_done_by` refuses what that spoils."""
        return self._replace(replacement=_MARK + self.replacement)


# What a marked name begins with, and the last of the rules, if some mark names.
_MARK = "~"
_UNMARK = NameRule(f"^{_MARK}", "")


def rules(
    moves: Mapping[str, str], saved: Collection[str], wanted: Collection[str]
) -> list[NameRule]:
    """Rules that rename each name in `moves` to its new name, and no other saved name
    to a wanted one. Empty if all stay, none are found, or there are too many to try."""
    taken = set(moves.values())
    aside = (x for x in saved if x in taken and x not in moves)
    task = _Task({**moves, **{x: f"{_ASIDE}.{x}" for x in aside}}, saved, {*wanted})
    for found in (task.find_few(), _one_by_one(task.moves)):
        are_few = len(found) * len(saved) <= _MAX_CHECKS
        if are_few and task.is_done_by(found):
            return found
    return []


class _Effect(NamedTuple):
    """The names that a rule renames rightly, and those that it renames wrongly."""

    right: set[str]
    wrong: set[str]

    def rank(self, left: set[str]) -> tuple[int, int]:
        """Higher for a rule that renames more of the names that are left; of equal
        ones, for that which renames fewer names wrongly."""
        return len(self.right & left), -len(self.wrong)


class _Task(NamedTuple):
    """What becomes of names, some of which stay; all names that are saved; and those
    that are wanted, none of which another name may become."""

    moves: Mapping[str, str]
    saved: Collection[str]
    wanted: Collection[str]

    def is_done_by(self, found: list[NameRule]) -> bool:
        """Whether rules do it, each of them something, and no harm."""
        used: set[int] = set()  # The numbers of rules, which `apply` adds.
        how, label = _rename.rename(found), "suggest"
        new = {x: _rename.apply(how, x, used, label).name for x in self.saved}
        others = {y for x, y in new.items() if x != y and x not in self.moves}
        return (
            len(used) == len(found)
            and len(set(new.values())) == len(new)
            and all(new[x] == y for x, y in self.moves.items())
            and others.isdisjoint(self.wanted)
        )

    def find_few(self) -> list[NameRule]:
        """The rules of the highest ranks, one by one, until all names are renamed, or
        no rule renames one more: `is_done_by` decides. Empty if they are too many."""
        samples = self._samples()
        left = {x for x in samples if self.moves.get(x, x) != x}
        effects = self._effects(left, samples)
        chosen: dict[NameRule, _Effect] = {}
        while left and effects:
            best = max(effects, key=lambda rule: effects[rule].rank(left))
            right, wrong = effects[best]
            if not right & left:
                break
            chosen[best] = _Effect(right & left, wrong)
            left -= right
        return _ordered(chosen, self.moves)

    def _samples(self) -> list[str]:
        """Names that the rules must be right for. One is enough of several that differ
        only in numbers which stay."""
        out: dict[object, str] = {}
        for name in self.saved:
            new = self.moves.get(name, "")
            olds, news = _numbered(name), _numbered(new)
            numbers_stay = not new or olds[1::2] == news[1::2]
            texts = tuple(olds[::2]), tuple(news[::2])
            out.setdefault(texts if numbers_stay else name, name)
        return [*it.islice(out.values(), _MAX_SAMPLES)]

    def _effects(self, names: set[str], samples: list[str]) -> dict[NameRule, _Effect]:
        """The rules that may be chosen, each of which renames one of the names or more.
        Empty if there are too many to try."""
        effects: dict[NameRule, _Effect] = {}
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

    def _effect(self, rule: NameRule, samples: list[str]) -> _Effect | None:
        """The effect of a rule, or None if no other rule can mend what it does."""
        moves, right, wrong = self.moves, set(), set()
        for name in samples:
            new = rule.apply(name)
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
        return _Effect(right, wrong)


def _one_by_one(moves: Mapping[str, str]) -> list[NameRule]:
    """A rule for each name that changes. None changes a name that another has made."""
    changed = {x: y for x, y in moves.items() if x != y}
    out = [_rule(x, y).marking() for x, y in changed.items()]
    return [*out, _UNMARK] if out else []


def _ordered(
    chosen: Mapping[NameRule, _Effect], moves: Mapping[str, str]
) -> list[NameRule]:
    """The rules in an order in which none undoes what another does: after the rules
    whose names they would take, and after those that would change again what they make.

    In a circle, as of names that are exchanged, some rules mark the names that they
    make, which no other rule changes then. Empty if that does not help.
    """
    takes_from: dict[NameRule, list[NameRule]] = {}
    undone_by: dict[NameRule, list[NameRule]] = {}
    for rule, (right, wrong) in chosen.items():
        others = [x for x in chosen if x != rule]
        made = [moves[name] for name in right]
        takes_from[rule] = [x for x in others if chosen[x].right & wrong]
        undone_by[rule] = [x for x in others if any(x.apply(y) != y for y in made)]
    marking: set[NameRule] = set()
    while True:
        before = {
            rule: takes_from[rule] + ([] if rule in marking else undone_by[rule])
            for rule in chosen
        }
        try:
            order = graphlib.TopologicalSorter(before).static_order()
            out = [rule.marking() if rule in marking else rule for rule in order]
            return [*out, _UNMARK] if marking else out
        except graphlib.CycleError as e:
            circle = e.args[1]
            unmarked = [x for x in chosen if x in circle and x not in marking]
            if not unmarked:
                return []
            marking.add(unmarked[0])


# ---- The rules for one name.


def _ways(old: str, new: str, is_general: bool) -> Iterator[NameRule]:
    """Rules that take one name to another: those for a node that it is in, from the top
    on, and last the one for all of the name."""
    for old_node, new_node in reversed([*_names.node_pairs(old, new)]):
        yield _rule(old_node, new_node, is_general, is_node=True)
    yield _rule(old, new, is_general)


def _rule(
    old: str, new: str, is_general: bool = False, is_node: bool = False
) -> NameRule:
    """The rule that takes the name `old` to `new`, or the names below a node of that
    name to names below the other; "" is the top. A general one matches any number in
    the place of each that both names have, in one order, and keeps it."""
    if is_node and not old:
        return NameRule("^", f"{new}.")
    end = r"\." if is_node else "$"
    if is_node and new:  # What goes to the top has no dot there.
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
                place += 1
    return NameRule(f"^{''.join(pattern)}{end}", "".join(replacement))


def _numbered(name: str) -> list[str]:
    """A name, split at its numbers: texts at even places, and numbers at odd ones."""
    # A number is between dots, underscores and ends.
    return re.split(r"(?<![^._])([0-9]+)(?![^._])", name)


# ---- Rules as Python.


def lines(
    found: Iterable[NameRule], adapters: Mapping[str, str], names: Iterable[str]
) -> list[str]:
    """The call of `ec.rename` with these rules, and with rules that apply adapters:
    `adapters` has the code of each, by the new name of its leaf, which is one of these
    `names`."""
    rows = [f"    ({_raw(old)}, {_raw(new)})," for old, new in found]
    # Leaves whose names differ only in numbers have one row, if they have one adapter.
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_rule(name, name, is_general=True).pattern, []).append(name)
    for pattern, some in alike.items():
        codes = {adapters.get(name) for name in some}
        of = [pattern] if len(codes) == 1 else [_rule(x, x).pattern for x in some]
        pairs = dict.fromkeys(zip(of, map(adapters.get, some)))
        rows += [f"    ({_raw(x)}, ec.adapters.{y})," for x, y in pairs if y]
    return ["ec.rename([", *rows, "])"] if rows else []


def _raw(text: str) -> str:
    """A text as Python, raw if that is shorter to read."""
    is_plain = text.isprintable() and '"' not in text and text[-1:] != "\\"
    if not is_plain:
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'
