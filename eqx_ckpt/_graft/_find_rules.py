"""Finds few rename rules that take saved names to wanted ones, and checks them on all
names.

Some saved names have to become others, and some have to stay. None of the rest may
become a wanted one. Rules are tried on samples of the names; those are chosen that
rename the most; and they are put in an order in which none undoes another.
"""

import enum
import graphlib
import itertools as it
from collections.abc import Collection, Iterator, Mapping, Set
from typing import NamedTuple

from .._rename import _rename
from . import _name_rule
from ._name_rule import NameRule, UNMARK


# The most names on which rules are tried while they are looked for.
_MAX_SAMPLES = 500
# The most of these trials, of one rule on one name, for general rules and for others:
# less than half a second for each.
_MAX_TRIALS = 2**18
# The most trials of the rules that were found, on all saved names: as long.
_MAX_CHECK_TRIALS = 2**20


def find_rules(
    pairs: Mapping[str, str], saved: Collection[str], wanted: Collection[str]
) -> list[NameRule]:
    """Rules that rename the first name of each pair to the second, and no other saved
    name to a wanted one. Empty if all stay, none are found, or there are too many."""
    # A saved name that has to make way for a wanted one goes below a new node.
    tops = {name.partition(".")[0] for name in (*saved, *wanted)}
    names = (f"old{i or ''}" for i in it.count())
    node = next(name for name in names if name not in tops)
    taken = {*pairs.values()} - pairs.keys()
    moves = {**pairs, **{x: f"{node}.{x}" for x in saved if x in taken}}
    stay = {x for x, y in moves.items() if x == y}
    moves = {x: y for x, y in moves.items() if x != y}
    task = _RenameTask(moves, stay, saved, {*wanted})
    for rules in task.few_rules():
        if used := task.checked(rules):
            return used
    return task.checked(task.single_rules())


class _Verdict(enum.Enum):
    """A judgement of what a name has become, by one rule or by all."""

    GOOD = "as it ought to be, or of no interest"
    WRONG = "not as it ought to be: rules that come first may mend that"
    HARM = "what no other rule mends"


class _Effect(NamedTuple):
    """The names that a rule changes, by whether that is good or wrong."""

    good: set[str]
    wrong: set[str]

    def rank(self, left: set[str]) -> tuple[int, int]:
        """Higher for a rule that renames more of the names that are left; of equal
        ones, for that which renames fewer names wrongly."""
        return len(self.good & left), -len(self.wrong)


class _RenameTask(NamedTuple):
    """What has to become of saved names, and which have to stay; all that are saved;
    and the wanted names, none of which any other saved one may become."""

    moves: Mapping[str, str]
    stay: Set[str]
    saved: Collection[str]
    wanted: Set[str]

    def _verdict(self, name: str, new: str) -> _Verdict:
        if name in self.moves:
            return _Verdict.GOOD if new == self.moves[name] else _Verdict.WRONG
        is_harm = new != name and (name in self.stay or new in self.wanted)
        return _Verdict.HARM if is_harm else _Verdict.GOOD

    def checked(self, rules: list[NameRule]) -> list[NameRule]:
        """The rules, but those that change no name. Empty unless they make all `moves`,
        no two names become one, and no other saved name becomes a wanted one."""
        if len(rules) * len(self.saved) > _MAX_CHECK_TRIALS:
            return []
        used: set[int] = set()  # The numbers of rules, which `apply` adds.
        how, label = _rename.rename(rules), "suggest"
        new = {x: _rename.apply(how, x, used, label).name for x in self.saved}
        is_good = all(self._verdict(*x) is _Verdict.GOOD for x in new.items())
        if not is_good or len({*new.values()}) < len(new):
            return []
        return [rule for number, rule in enumerate(rules) if number in used]

    def single_rules(self) -> list[NameRule]:
        """A rule for each name that changes. None changes a name that another makes."""
        rules = [_name_rule.make_rule(*x).marked() for x in self.moves.items()]
        return [*rules, UNMARK] if rules else []

    def few_rules(self) -> Iterator[list[NameRule]]:
        """Takes the best rule again and again, until all samples are renamed or no rule
        renames another; with the rules for all names (`^`), and without. The results
        may be incomplete: the caller checks them. An empty list if there were too many
        rules to try."""
        samples = self._samples()
        names = {x for x in samples if x in self.moves}
        effects = self._effects(names, samples)
        others = {x: y for x, y in effects.items() if x.pattern != "^"}
        for some in (effects, others) if len(others) < len(effects) else (effects,):
            left, chosen = {*names}, dict[NameRule, _Effect]()
            while left and some:
                best = max(some, key=lambda rule: some[rule].rank(left))
                good, wrong = some[best]
                if not good & left:
                    break
                chosen[best] = _Effect(good & left, wrong)
                left -= good
            yield _ordered(chosen, self.moves)

    def _samples(self) -> list[str]:
        """Names on which rules are tried. One is enough of several that differ only in
        numbers which stay."""
        out: dict[object, str] = {}
        for name in self.saved:
            new = self.moves.get(name, name)
            olds, news = (
                _name_rule.split_at_numbers(name),
                _name_rule.split_at_numbers(new),
            )
            texts = tuple(olds[::2]), tuple(news[::2]), name in self.stay
            out.setdefault(texts if olds[1::2] == news[1::2] else name, name)
        return [*it.islice(out.values(), _MAX_SAMPLES)]

    def _effects(self, names: set[str], samples: list[str]) -> dict[NameRule, _Effect]:
        """The rules that may be chosen, each of which renames one of the names or more.
        Empty if there are too many to try."""
        effects: dict[NameRule, _Effect] = {}
        for is_general in (True, False):
            # The others are tried for the names that no general rule renames.
            rest = sorted(names.difference(*(x.good for x in effects.values())))
            pairs = [(name, self.moves[name]) for name in rest]
            rules = (_name_rule.rules_for(*pair, is_general) for pair in pairs)
            tried = dict.fromkeys(it.chain.from_iterable(rules))
            if len(tried) * len(samples) > _MAX_TRIALS:
                return {}
            for rule in tried:
                effect = self._effect(rule, samples)
                if effect is not None:
                    effects.setdefault(rule, effect)
        return effects

    def _effect(self, rule: NameRule, samples: list[str]) -> _Effect | None:
        """The effect of a rule; None if it does harm."""
        effect = _Effect(set(), set())
        for name in samples:
            new = rule.apply(name)
            if new == name:
                continue
            verdict = self._verdict(name, new)
            if verdict is _Verdict.HARM:
                return None
            some = effect.good if verdict is _Verdict.GOOD else effect.wrong
            some.add(name)
        return effect


def _ordered(
    chosen: Mapping[NameRule, _Effect], moves: Mapping[str, str]
) -> list[NameRule]:
    """The rules in an order in which none undoes what another does: after the rules
    whose names they would take, and after those that would change again what they make.

    In a circle, as of names that are exchanged, some rules mark the names that they
    make: of the other rules only one for all names (`^`) changes these, and it comes
    before. Empty if that does not help.
    """
    # Their effects are good for names in `moves` only.
    takes_from: dict[NameRule, list[NameRule]] = {}
    undone_by: dict[NameRule, list[NameRule]] = {}
    for rule, (good, wrong) in chosen.items():
        others = [x for x in chosen if x != rule]
        made = [moves[name] for name in good]
        takes_from[rule] = [x for x in others if chosen[x].good & wrong]
        undone_by[rule] = [x for x in others if any(x.apply(y) != y for y in made)]
    marked: set[NameRule] = set()
    for _ in range(len(chosen) + 1):  # In each turn one more is marked.
        before = {
            rule: takes_from[rule]
            + [x for x in undone_by[rule] if rule not in marked or x.pattern == "^"]
            for rule in chosen
        }
        try:
            order = graphlib.TopologicalSorter(before).static_order()
            out = [rule.marked() if rule in marked else rule for rule in order]
            return [*out, UNMARK] if marked else out
        except graphlib.CycleError as e:
            unmarked = [x for x in chosen if x in e.args[1] and x not in marked]
            if not unmarked:
                break
            marked.add(unmarked[0])
    return []
