"""`Diff`: in what two checkpoints or trees differ. Data, and a report to look at."""

import dataclasses
import itertools as it
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._kernel import _rooms
from .._kernel._format import _text
from .._kernel._tree import _folding
from .._show import _html


class Change(NamedTuple):
    """A leaf that both have, and that is not the same.

    `what` has those of `"kind"`, `"shape"`, `"dtype"` and `"value"` that differ. `a`
    and `b` are what the leaf is in each, such as `f32[3]`. `largest` is the largest
    absolute difference of two elements, and `relative` the L2 norm of the differences
    over that of the finite elements of `a`. Both are None if they were not asked for,
    or the two are not numbers of one shape, or are integers of over 64 bits.
    """

    what: tuple[str, ...]
    a: str
    b: str
    largest: float | None = None
    relative: float | None = None


@dataclasses.dataclass(frozen=True)
class Diff:
    """Result of [`diff`][]. It is false if there is no difference, and prints as a
    report, folded by layer.

    **Attributes:**

    - `a`, `b`: what was compared: the path of each checkpoint, or `a tree`.
    - `added`, `removed`: the leaves that only `b` has, and those that only `a` has: a
        mapping from names to what they are, such as `f32[3]`.
    - `changed`: a mapping from names of leaves to their changes. `what` has those of
        `"kind"`, `"shape"`, `"dtype"` and `"value"` that differ. `a` and `b` are what
        the leaf is in each. `largest` and `relative` are there with `values=True`.
    - `static`: a mapping from names of static fields to their two values, as text.
    - `metadata`: a mapping from dotted keys to the two values there, as text.
    - `same`: how many leaves are the same.
    """

    a: str
    b: str
    added: Mapping[str, str]
    removed: Mapping[str, str]
    changed: Mapping[str, Change]
    static: Mapping[str, tuple[str, str]]
    metadata: Mapping[str, tuple[str, str]]
    same: int

    def __bool__(self) -> bool:
        parts = self.added, self.removed, self.changed, self.static, self.metadata
        return any(map(bool, parts))

    def _counts(self) -> str:
        rows = {"added": self.added, "removed": self.removed, "changed": self.changed}
        some = [f"{len(x)} {what}" for what, x in rows.items() if x]
        return ", ".join([*some, f"{self.same} the same"])

    def _rows(self) -> dict[str, list[tuple[str, str]]]:
        return {
            "added": list(self.added.items()),
            "removed": list(self.removed.items()),
            "changed": [(name, _line(x)) for name, x in self.changed.items()],
            "static": [(name, _pair(*x)) for name, x in self.static.items()],
            "metadata": [(name, _pair(*x)) for name, x in self.metadata.items()],
        }

    def plot(self, ax: Any = None) -> Any:
        """Draws how far each leaf that has changed is from what it was, as bars, with
        matplotlib (`eqx_ckpt[plot]`). The differences are those of `values=True`.

        **Arguments:**

        - `ax`: the axes to draw into; those that are current by default.

        **Returns:** the axes.

        **Raises:** `ValueError` if the differences are not known.
        """
        return _rooms.plot(self, ax)

    def _repr_html_(self) -> str:
        rows = self._rows()
        # One row for each leaf has its own differences, and folds with none.
        for number, (name, change) in enumerate(self.changed.items()):
            rows["changed"][number] = name, _line(change) + self._sizes([name])
        parts = [_html.section(title, rows[kind]) for kind, title in _titles.items()]
        return _html.card(f"Diff of {self.a} and {self.b}", self._counts(), *parts)

    def __repr__(self) -> str:
        head = f"Diff of {self.a} and {self.b}: {self._counts()}"

        def sizes(kind: str, name: str, text: str) -> str:
            some = it.islice(_folding.unfold(name), len(self.changed))
            return self._sizes(some) if kind == "changed" else ""

        lines = _folding.sections(self._rows(), _titles, sizes)
        return _text.message([head, *lines])

    def _sizes(self, names: Iterable[str]) -> str:
        """The greatest of the differences of some leaves, which are shown in a line."""
        found = [self.changed[name] for name in names if name in self.changed]
        largest = [x.largest for x in found if x.largest is not None]
        relative = [x.relative for x in found if x.relative is not None]
        if not largest or not relative:
            return ""
        # A NaN is the greatest.
        return f"  (largest {np.max(largest):.3g}, relative {np.max(relative):.3g})"


_titles = {
    "added": "added",
    "removed": "removed",
    "changed": "changed",
    "static": "static fields",
    "metadata": "metadata",
}


def _line(change: Change) -> str:
    if change.a == change.b:
        return f"{change.a}: {', '.join(change.what)}"
    return f"{_pair(change.a, change.b)}: {', '.join(change.what)}"


def _pair(a: str, b: str) -> str:
    return f"{a} -> {b}"
