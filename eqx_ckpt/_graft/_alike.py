"""Leaves of both sides that are in no pair, and could stand for each other.

To take them for new ones and old ones would be to throw away weights that fit.
"""

import itertools as it
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._format import _template
from .._tree import _leaf, _nearest, _show, _target
from ._sides import Model, Stored, target_of


class Alike(NamedTuple):
    """The leaves of the model, those of the checkpoint that fit, and lines that list
    them."""

    numbers: set[int]
    places: set[int]
    lines: list[str]


# Rows that are listed, and names in each; what is looked at for them; and how many
# pairs of shapes are.
_ROWS, _NAMES, _MOST = 8, 3, 64
_MAX_PAIRS = 2**17

Shape = tuple[int, ...]


def find(model: Model, stored: Stored, new: set[int], old: set[int]) -> Alike:
    """Those of the leaves `new` and `old` that could stand for each other: of the same
    shape, or of one that an adapter makes of the other."""
    copies = _copies(stored, old)
    theirs: dict[tuple[Shape, str], list[int]] = {}
    for place in sorted(old - copies):
        t = stored.saved.record(place, known=True).template
        if t.logical_shape and t.kind not in ("key", "str", "bytes"):
            key = t.logical_shape, _template.number_type(_template.dtype_of(t.dtype))
            theirs.setdefault(key, []).append(place)
    ours: dict[tuple[Shape, str], list[int]] = {}
    for number in sorted(new):
        target = target_of(model, number)
        if target.shape and target.dtype is not None:
            key = target.shape, _template.number_type(target.dtype)
            ours.setdefault(key, []).append(number)
    out = Alike(set(), set(), [])
    rows = []
    both = it.islice(it.product(ours.items(), theirs.items()), _MAX_PAIRS)
    for ((shape, kind), numbers), ((other, saved_kind), places) in both:
        how = None
        if kind == saved_kind:
            how = _how(other, len(places), shape, len(numbers))
        if how is not None:
            out.numbers.update(numbers)
            out.places.update(places)
            rows += [(n, places, how) for n in numbers]
    out.lines.extend(_lines(model, stored, rows))
    return out


def _copies(stored: Stored, old: set[int]) -> set[int]:
    """Leaves that are called as one that is in use, but for the beginning: what an
    optimiser keeps of it, or an average."""
    names = stored.saved.names
    shape = lambda x: stored.saved.record(x, known=True).template.logical_shape
    used = {(name, shape(x)) for x, name in enumerate(names) if x not in old}
    tops = {name.partition(".")[0] for name, _ in used}
    if (
        len(tops) == 1
    ):  # All of it is in one node, and its copy may be called otherwise.
        used |= {(name.partition(".")[2], x) for name, x in used}
    out = set()
    for place in old:
        parts = names[place].split(".")
        tails = (".".join(parts[i:]) for i in range(1, len(parts)))
        if any((tail, shape(place)) in used for tail in tails):
            out.add(place)
    return out


def _how(
    saved: Sequence[int], count: int, wanted: Sequence[int], here: int
) -> list[str] | None:
    """The adapters that make a leaf of the one shape of those of the other, of which
    there are so many; None if nothing does."""
    if saved == wanted:
        return []
    if len(saved) > 1 and saved == wanted[::-1]:
        return ["transpose()"]
    if len(wanted) - len(saved) == 1 and 1 < wanted[0] <= count:
        rest = _how(saved, count // wanted[0], wanted[1:], 0)
        return None if rest is None else [*rest, "stack()"]
    if len(saved) - len(wanted) == 1 and 1 < saved[0] <= here:
        rest = _how(saved[1:], 0, wanted, here // saved[0])
        return None if rest is None else ["unstack()", *rest]
    differ = [i for i, (a, b) in enumerate(zip(saved, wanted)) if a != b]
    if len(saved) == len(wanted) and len(differ) == 1 and 0 not in (*saved, *wanted):
        (axis,) = differ
        small, large = sorted((saved[axis], wanted[axis]))
        name, many = ("split", here) if saved[axis] == large else ("concatenate", count)
        if large % small == 0 and large // small <= many:
            return [f"{name}({axis or ''})"]
    return None


def _lines(
    model: Model, stored: Stored, rows: Iterable[tuple[int, list[int], list[str]]]
) -> list[str]:
    texts = []
    for number, places, how in rows:
        name = model.names[number]
        saved = _show.fold(stored.saved.names[p] for p in places[:_MOST])
        near = sorted(saved, key=lambda x: -_nearest.ratio(name, x))[:_NAMES]
        more = ", ..." if len(saved) > _NAMES else ""
        shown = ", ".join(f"`{x}`" for x in near) + more
        template = stored.saved.record(places[0], known=True).template
        target = _target.show_target(target_of(model, number))
        by = f" by `{', '.join(how)}`" if how else ""
        texts.append((name, f"{target}, of {_leaf.show(template)}{by}: {shown}"))
        if len(texts) == _MOST:
            break
    lines = [f"    {name}  {text}" for name, text in _show.fold_rows(texts)]
    if not lines:
        return []
    return [
        "  In no code to paste, as these would fit. Write pairs of those that are the "
        "same weights, and put the others into `fresh` and `drop`:",
        *lines[:_ROWS],
        *(["    ... and more"] if len(lines) > _ROWS else []),
    ]
