"""Finds the fewest rename rules that map saved names to wanted ones, and checks them on
all names."""

import graphlib
import itertools as it
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from .._rename import _rename


# A name that has to make way goes below `_ASIDE`. One between two rules begins with
# `_BETWEEN`.
_ASIDE, _BETWEEN = "old", "~"
# Names that are tried while rules are looked for; and how often a rule is tried on one,
# to find rules, and to see whether they are right. Each takes less than half a second.
_MAX_SAMPLES = 500
_MAX_LOOKS, _MAX_TRIALS = 2**18, 2**20


class NameRule(NamedTuple):
    """A rule of `ec.rename`: a regex, and the replacement of its matches."""

    pattern: str
    replacement: str


class Effect(NamedTuple):
    """The names that a rule renames rightly, and those that it renames wrongly."""

    right: set[str]
    wrong: set[str]


def lines(some: Iterable[NameRule], adapters: Mapping[str, str]) -> list[str]:
    """The rules as Python; and those that apply adapters, which are given by the new
    name of the leaf."""
    rows = [f"    ({_raw(old)}, {_raw(new)})," for old, new in some]
    hows = ((_rule([x], [x], 0, True).pattern, how) for x, how in adapters.items())
    for name, how in dict.fromkeys(hows):
        rows.append(f"    ({_raw(name)}, ec.adapters.{how}),")
    return ["ec.rename([", *rows, "])"] if rows else []


def _raw(text: str) -> str:
    is_plain = text.isprintable() and '"' not in text and text[-1:] != "\\"
    if not is_plain:
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'


def rules(
    moves: Mapping[str, str], saved: Collection[str], wanted: Collection[str]
) -> list[NameRule]:
    """Rules that rename each name in `moves` to its new name, and no other saved name
    to a wanted one. Empty if too many rules would be needed to try them."""
    taken = set(moves.values())
    aside = (x for x in saved if x in taken and x not in moves)
    moves = {**moves, **{x: f"{_ASIDE}.{x}" for x in aside}}
    for some in (_find_few(moves, saved, wanted), _one_by_one(moves)):
        are_few = len(some) * len(saved) <= _MAX_TRIALS
        if are_few and _is_right(some, moves, saved, wanted):
            return some
    return []


def _is_right(
    some: list[NameRule],
    moves: Mapping[str, str],
    saved: Collection[str],
    wanted: Collection[str],
) -> bool:
    used: set[int] = set()
    how = _rename.rename(some)
    new = {x: _rename.apply(how, x, used, "suggest").name for x in saved}
    return (
        len(used) == len(some)
        and len(set(new.values())) == len(new)
        and all(new[x] == y for x, y in moves.items())
        and all(x == y or x in moves or y not in wanted for x, y in new.items())
    )


def _one_by_one(moves: Mapping[str, str]) -> list[NameRule]:
    """A rule for each name. None takes what another has made, which is marked."""
    changed = {x: y for x, y in moves.items() if x != y}
    out = [_rule([x], [_BETWEEN + y], 0) for x, y in changed.items()]
    return [*out, NameRule("^" + _BETWEEN, "")] if out else []


def _find_few(
    moves: Mapping[str, str], saved: Collection[str], wanted: Collection[str]
) -> list[NameRule]:
    """The rules that rename the most names each, until all are renamed; general ones
    first. Empty if there are too many to try."""
    samples = _samples(moves, saved)
    left = {x for x in samples if moves.get(x, x) != x}
    some: dict[NameRule, Effect] = {}
    for is_general in (True, False):
        names = sorted(left.difference(*(effect.right for effect in some.values())))
        ways = dict.fromkeys(r for x in names for r in _ways(x, moves[x], is_general))
        if len(ways) * len(samples) > _MAX_LOOKS:
            return []
        for rule in ways:
            effect = _effect(rule, samples, moves, wanted)
            if effect is not None:
                some.setdefault(rule, effect)
    chosen: dict[NameRule, Effect] = {}
    while left and some:
        rank = lambda x: (len(some[x].right & left), -len(some[x].wrong))
        best = max(some, key=rank)
        right, wrong = some[best]
        if not right & left:
            break
        chosen[best] = Effect(right & left, wrong)
        left -= right
    return _ordered(chosen, moves)


def _numbered(name: str) -> list[str]:
    """A name, split at its numbers: texts and numbers by turns."""
    return re.split(r"(?<![^._])([0-9]+)(?![^._])", name)


def _samples(moves: Mapping[str, str], saved: Collection[str]) -> list[str]:
    """Names that the rules must be right for. One is enough of several that differ only
    in numbers which stay."""
    out: dict[object, str] = {}
    for name in saved:
        new = moves.get(name, "")
        a, b = _numbered(name), _numbered(new)
        same = not new or a[1::2] == b[1::2]
        out.setdefault((*a[::2], "", *b[::2]) if same else name, name)
    return [*it.islice(out.values(), _MAX_SAMPLES)]


def _ways(old: str, new: str, is_general: bool) -> Iterator[NameRule]:
    """Rules that take one name to another: from the least of it that has to change to
    all of it. General ones have any numbers where both names have the same."""
    a, b = old.split("."), new.split(".")
    ends = it.takewhile(lambda x: x[0] == x[1], zip(reversed(a), reversed(b)))
    for same in range(sum(1 for _ in ends), -1, -1):
        yield _rule(a, b, same, is_general)


def _rule(a: list[str], b: list[str], same: int, is_general: bool = False) -> NameRule:
    """The rule for names whose last `same` parts stay."""
    head, new = (".".join(x[: len(x) - same]) for x in (a, b))
    if not head and same:
        return NameRule("^", f"{new}.")
    end = r"\." if same else "$"
    new += "." * bool(same and new)
    pattern, replacement = _numbered(head), _numbered(new)
    pattern[::2] = map(re.escape, pattern[::2])
    replacement[::2] = (x.replace("\\", r"\\") for x in replacement[::2])
    # A number of the new name that the old one has too becomes a group of the regex.
    start = count = 0
    for i in range(1, len(replacement), 2) if is_general else ():
        try:
            start = pattern.index(replacement[i], start)
        except ValueError:
            continue
        count += 1
        pattern[start], replacement[i] = r"(\d+)", rf"\{count}"
    return NameRule(f"^{''.join(pattern)}{end}", "".join(replacement))


def _effect(
    rule: NameRule,
    samples: list[str],
    moves: Mapping[str, str],
    wanted: Collection[str],
) -> Effect | None:
    """The effect of a rule, or None if no other rule can mend what it does."""
    right, wrong = set(), set()
    pattern = re.compile(rule.pattern)
    for name in samples:
        new = pattern.sub(rule.replacement, name)
        if new == name:
            continue
        if name in moves:
            if moves[name] == name:
                return None
            (right if new == moves[name] else wrong).add(name)
        elif new in wanted:
            return None
    return Effect(right, wrong)


def _ordered(
    chosen: Mapping[NameRule, Effect], moves: Mapping[str, str]
) -> list[NameRule]:
    """The rules in an order in which none undoes what another does; names that are
    exchanged go by way of others."""
    numbered = [(re.compile(old), new) for old, new in chosen]
    # `before[j]` has the rules whose names rule `j` would take. `undoing[i]` has those
    # that would change again the names that rule `i` makes: `_BETWEEN` marks these.
    undoing: dict[int, set[int]] = {i: set() for i in range(len(chosen))}
    before: dict[int, set[int]] = {i: set() for i in range(len(chosen))}
    effects = enumerate(chosen.values())
    for (i, (names, _)), (j, (_, wrong)) in it.permutations(effects, 2):
        if wrong & names:
            before[j].add(i)
        pattern, new = numbered[j]
        if any(pattern.sub(new, moves[x]) != moves[x] for x in names):
            undoing[i].add(j)
    marked: set[int] = set()
    while True:
        graph = {
            i: x | (set() if i in marked else undoing[i]) for i, x in before.items()
        }
        try:
            order = [*graphlib.TopologicalSorter(graph).static_order()]
            break
        except graphlib.CycleError as e:
            some = set(e.args[1]) - marked
            if not some:
                return []
            marked.add(min(some))
    out = []
    for i in order:
        pattern, new = numbered[i]
        out.append(NameRule(pattern.pattern, _BETWEEN * (i in marked) + new))
    return [*out, NameRule("^" + _BETWEEN, "")] if marked else out
