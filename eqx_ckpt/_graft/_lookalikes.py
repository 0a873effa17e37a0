"""Leaves of both sides that are in no pair, and could stand for each other. To take
them for new ones and old ones would be to throw away weights that fit.

Leaves of the model go by their numbers in it, and saved leaves by their leaf indices.
"""

import itertools as it
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .._kernel._format import _text
from .._kernel._tree import _folding, _nearest, _target
from . import _alike, _leaf_kinds
from ._leaf_kinds import LeafKind
from ._sides import Model, StoredSide


# Rows that are listed, and names in each: people would not read more.
_MAX_ROWS, _MAX_NAMES = 8, 3
# Rows that are made into text, and saved leaves of each; and pairs of shapes that are
# compared.
_MAX_LISTED, _MAX_SHAPES = 64, 2**17


class Suggestion(NamedTuple):
    """Lines to show, and the leaves of both sides that they are about."""

    lines: list[str]
    numbers: set[int]
    leaf_indices: set[int]


class LookalikeRow(NamedTuple):
    """A leaf of the model, the saved leaves any of which it could be, and the adapters
    that it would take."""

    number: int
    leaf_indices: list[int]
    adapters: list[str]


def find(model: Model, stored: StoredSide, new: set[int], old: set[int]) -> Suggestion:
    """Leaves of both sides that could stand for each other: of the same shape, or of
    one that an adapter makes of the other. `new` are the leaves of the model that are
    in no pair, and `old` the saved ones."""
    theirs = _arrays_by_kind(stored.kind, old - _copies(stored, old))
    ours = _arrays_by_kind(model.kind, new)
    rows = _tied_rows(model, stored, new, old)
    some_old = {i for row in rows for i in row.leaf_indices}
    both = it.islice(it.product(ours.items(), theirs.items()), _MAX_SHAPES)
    for (wanted, numbers), (saved, leaf_indices) in both:
        if wanted.what != saved.what:
            continue
        counts = len(leaf_indices), len(numbers)
        adapters = _adapters_between(saved.shape, wanted.shape, *counts)
        if adapters is not None:
            rows += [LookalikeRow(n, leaf_indices, adapters) for n in numbers]
            some_old.update(leaf_indices)
    some_new = {row.number for row in rows}
    return Suggestion(_lines(model, stored, rows), some_new, some_old)


def _copies(stored: StoredSide, old: set[int]) -> set[int]:
    """Leaves with the name of one that is in use, after a beginning of their own. It
    says that they are the state of an optimiser, or an average."""
    names = stored.saved.names
    shape = lambda x: (
        stored.saved.record(x, is_name_checked=True).template.logical_shape
    )
    used = {(name, shape(x)) for x, name in enumerate(names) if x not in old}
    tops = {name.partition(".")[0] for name, _ in used}
    # All of it may be in one node, whose copy is called otherwise.
    if len(tops) == 1:
        used |= {(name.partition(".")[2], size) for name, size in used}
    out = set()
    for leaf_index in old:
        parts = names[leaf_index].split(".")
        tails = (
            ".".join(parts[i:])
            for i in range(1, len(parts))
            if _alike.is_copy(".".join(parts[:i]))
        )
        if any((tail, shape(leaf_index)) in used for tail in tails):
            out.add(leaf_index)
    return out


def _arrays_by_kind(
    kind_of: Callable[[int], LeafKind], leaves: Iterable[int]
) -> dict[LeafKind, list[int]]:
    """Arrays of numbers among some leaves, by their kinds, if they have axes."""
    out: dict[LeafKind, list[int]] = {}
    for leaf in sorted(leaves):
        kind = kind_of(leaf)
        if kind.shape and kind.what != "key":
            out.setdefault(kind, []).append(leaf)
    return out


def _tied_rows(
    model: Model, stored: StoredSide, new: set[int], old: set[int]
) -> list[LookalikeRow]:
    """New leaves that may be tied to saved ones which are in pairs already."""
    rows = []
    numbers = {model.names[n]: n for n in sorted(new)}
    kinds = {name: model.kind(n) for name, n in numbers.items()}
    saved = {name: stored.kind(i) for i, name in enumerate(stored.saved.names)}
    for name, origin in _alike.tied_heads(saved, kinds).items():
        leaf_index = stored.saved.leaf_indices[origin]
        if leaf_index not in old:
            is_same = saved[origin].shape == kinds[name].shape
            adapters = [] if is_same else ["transpose()"]
            rows.append(LookalikeRow(numbers[name], [leaf_index], adapters))
    return rows


def _adapters_between(
    saved: tuple[int, ...], wanted: tuple[int, ...], saved_count: int, wanted_count: int
) -> list[str] | None:
    """The adapters that make leaves of the wanted shape of saved ones, if there are at
    most so many leaves of each side; None if nothing does."""
    if saved == wanted:
        return []
    if sorted(x for x in saved if x != 1) == sorted(x for x in wanted if x != 1):
        return [_leaf_kinds.turn(saved, wanted)]
    # Leaves are joined or split, and not both: one of the counts of the rest is 0.
    if len(wanted) - len(saved) == 1 and 1 < wanted[0] <= saved_count:
        rest = _adapters_between(saved, wanted[1:], saved_count // wanted[0], 0)
        return None if rest is None else [*rest, "stack()"]
    if len(saved) - len(wanted) == 1 and 1 < saved[0] <= wanted_count:
        rest = _adapters_between(saved[1:], wanted, 0, wanted_count // saved[0])
        return None if rest is None else ["unstack()", *rest]
    differ = [i for i, (a, b) in enumerate(zip(saved, wanted)) if a != b]
    if len(saved) != len(wanted) or len(differ) != 1 or 0 in (*saved, *wanted):
        return None
    (axis,) = differ
    small, large = sorted((saved[axis], wanted[axis]))
    is_split = saved[axis] == large
    count = wanted_count if is_split else saved_count
    if large % small or large // small > count:
        return None
    return [f"{'split' if is_split else 'concatenate'}({axis or ''})"]


def _lines(model: Model, stored: StoredSide, rows: Iterable[LookalikeRow]) -> list[str]:
    texts = []
    for number, leaf_indices, adapters in it.islice(rows, _MAX_LISTED):
        name = model.names[number]
        saved = _folding.fold(stored.saved.names[i] for i in leaf_indices[:_MAX_LISTED])
        near = sorted(saved, key=lambda x: -_nearest.ratio(name, x))[:_MAX_NAMES]
        more = ", ..." if len(saved) > _MAX_NAMES else ""
        shown = ", ".join(f"`{x}`" for x in near) + more
        template = stored.saved.record(leaf_indices[0], is_name_checked=True).template
        target = model.target(number)
        by = f" by `{', '.join(adapters)}`" if adapters else ""
        if len(target.shape) == 2 and len({*target.shape}) == 1:
            by += ", transposed or not"
        what = f"{_target.show_target(target)}, of {_folding.show(template)}"
        texts.append((name, f"{what}{by}: {shown}"))
    lines = [f"    {name}  {text}" for name, text in _folding.fold_rows(texts)]
    if not lines:
        return []
    return [
        "  In no code to paste, as these would fit. Write pairs of those that are the "
        "same weights, and put the others into `fresh` and `drop`:",
        *_text.first(lines, _MAX_ROWS, "    "),
    ]
