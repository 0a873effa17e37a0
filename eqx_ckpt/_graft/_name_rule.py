"""A rule that takes one name to another, and names that are like it."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._kernel._format import _names


# What a marked name begins with.
_MARK = "~"


class NameRule(NamedTuple):
    """A rule of `ec.rename`: a regex, and the replacement of its matches."""

    pattern: str
    replacement: str

    def apply(self, name: str) -> str:
        return re.sub(self.pattern, self.replacement, name)

    def marked(self) -> "NameRule":
        """This rule, but it marks the names that it makes: of other rules only one for
        all names (`^`) finds these. `UNMARK` comes last, and takes the marks away."""
        return self._replace(replacement=_MARK + self.replacement)


UNMARK = NameRule(f"^{_MARK}", "")


def rules_for(old: str, new: str, is_general: bool) -> Iterator[NameRule]:
    """Rules that take one name to another: those for a node that it is in, from the top
    on, and last the one for all of the name."""
    for old_node, new_node in reversed([*_names.node_pairs(old, new)]):
        yield make_rule(old_node, new_node, is_general, is_node=True)
    yield make_rule(old, new, is_general)


def make_rule(
    old: str, new: str, is_general: bool = False, is_node: bool = False
) -> NameRule:
    """The rule that takes the name `old` to `new`, or the names below a node of that
    name to names below the other; "" is the top. Where both names have the same number,
    a general rule matches any number, and keeps it."""
    if is_node and not old:
        return NameRule("^", f"{new}.")
    end = r"\." if is_node else "$"
    if is_node and new:  # What goes to the top has no dot there.
        new += "."
    pattern, replacement = split_at_numbers(old), split_at_numbers(new)
    groups = _common_numbers(pattern, replacement) if is_general else []
    pattern[::2] = map(re.escape, pattern[::2])
    for group, (i, j) in enumerate(groups, 1):
        pattern[i], replacement[j] = r"(\d+)", rf"\{group}"
    return NameRule(f"^{''.join(pattern)}{end}", "".join(replacement))


def split_at_numbers(name: str) -> list[str]:
    """A name, split at its numbers: texts at even places, and numbers at odd ones."""
    # A number is between dots, underscores and ends.
    return re.split(r"(?<![^._])([0-9]+)(?![^._])", name)


def _common_numbers(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """The places of the numbers that two split names have, in one order, in both. Of
    `layers.3.w` and `blocks.3.w` that is place 1 in the one and 1 in the other."""
    out = []
    start = 0
    for place in range(1, len(new), 2):
        if new[place] in old[start:]:
            found = old.index(new[place], start)
            out.append((found, place))
            start = found + 1
    return out
