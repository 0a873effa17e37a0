"""The nearest of many names, for the hints in errors."""

import collections
import difflib
import re
from collections.abc import Iterable


# The most that is done for all the hints of one error. A name has some tens of pairs of
# letters; what lies beyond is not found.
_MAX_PAIRS = 2**20
# Of a name the last letters are compared, and of the candidates the best.
_LETTERS, _CANDIDATES = 160, 8

_digits = re.compile("[0-9]+")


class NameIndex:
    """Names by the pairs of letters that are in them. Those that differ only in their
    numbers, as the names of layers do, are one form."""

    def __init__(self, names: Iterable[str]):
        self._names = dict.fromkeys(names)
        # The first name of each form.
        self._forms: dict[str, str] = {}
        for name in self._names:
            self._forms.setdefault(_digits.sub("#", name), name)
        self._index: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}
        left = _MAX_PAIRS
        for form in self._forms:
            pairs = _pairs(form)
            left -= len(pairs)
            if left < 0:
                break
            self._counts[form] = len(pairs)
            for pair in pairs:
                self._index.setdefault(pair, []).append(form)
        self._left = _MAX_PAIRS
        self._found: dict[tuple[str, float], list[str]] = {}

    def nearest(self, name: str, most: int = 1, cutoff: float = 0.5) -> list[str]:
        """The names that are the most alike, the best first; none if none is."""
        form = _digits.sub("#", name)
        if (form, cutoff) not in self._found:
            self._found[form, cutoff] = self._near(form, cutoff)
        return [self._like(x, name) for x in self._found[form, cutoff][:most]]

    def _near(self, form: str, cutoff: float) -> list[str]:
        own = _pairs(form)
        common: collections.Counter[str] = collections.Counter()
        # The rarest first: what many names have in common says little of any.
        for pair in sorted(own, key=lambda x: len(self._index.get(x, ()))):
            some = self._index.get(pair, [])
            self._left -= len(some)
            if self._left < 0:
                break
            common.update(some)
        share = {x: n / (len(own) + self._counts[x]) for x, n in common.items()}
        some = sorted(share, key=lambda x: -share[x])[:_CANDIDATES]
        ratios = {x: ratio(form, x) for x in some}
        return sorted(
            (x for x in some if ratios[x] >= cutoff), key=lambda x: -ratios[x]
        )

    def _like(self, found: str, name: str) -> str:
        """A name of a form: one with the numbers of `name`, if there is one, or else
        the first."""
        first = self._forms[found]
        own, others = _digits.findall(name), _digits.findall(first)
        count = min(len(own), len(others))
        # Most names differ near the top: `encoder.layers.1` is nearest to
        # `0.enc.layers.1`.
        below = [*others[: len(others) - count], *own[len(own) - count :]]
        above = [*own[:count], *others[count:]]
        for numbers in (below, above):
            same = re.sub("#", lambda _, left=iter(numbers): next(left, "#"), found)
            if same in self._names:
                return same
        return first


def ratio(a: str, b: str) -> float:
    """The likeness of two names, from 0 to 1."""
    return difflib.SequenceMatcher(None, a[-_LETTERS:], b[-_LETTERS:]).ratio()


def _pairs(form: str) -> set[str]:
    text = f"^{form[-_LETTERS:]}$"
    return {text[i : i + 2] for i in range(len(text) - 1)}
