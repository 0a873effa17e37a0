"""An error for nodes that are in the order of texts: `layer_0`, `layer_1`, `layer_10`,
..., as dicts of JAX are. Whoever lists their values means 0, 1, 2, ..."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from . import _nested
from ._nested import Nested


_SIDES = "model", "checkpoint"


class _Numbered(NamedTuple):
    """Names that differ only in a number: what is before it, what is after it, and the
    numbers of each."""

    before: str
    after: str
    numbers: list[str]

    @property
    def in_text_order(self) -> bool:
        values = [int(x) for x in self.numbers]
        return self.numbers == sorted(self.numbers) and values != sorted(values)


def check_nodes(
    label: str,
    groups: Sequence[tuple[Nested, Nested]],
    code_of: Callable[[str], str | None],
) -> None:
    """Checks the order of nodes, on both sides of a pair: of those in one list, of
    which an adapter makes one leaf, or the other way round; and of those that the pair
    pairs one by one. `code_of` gives the code of a node of the model.

    **Raises:** `ValueError` for a list of nodes in the order of texts; and for nodes in
    that order that are paired one by one with nodes of other numbers. Names that differ
    in more than one number are not checked.
    """
    for group in groups:
        for side, nodes in zip(_SIDES, group):
            for names in _lists(nodes):
                found = _numbered(names)
                if found is not None and found.in_text_order:
                    raise _error(label, side, found, names, code_of)
    sides = [[_first(group[i]) for group in groups] for i in range(len(_SIDES))]
    ours, theirs = map(_numbered, sides)
    if ours is None or theirs is None or ours.numbers == theirs.numbers:
        return
    for side, names, found in zip(_SIDES, sides, (ours, theirs)):
        if found.in_text_order:
            raise _error(label, side, found, names, code_of)


def _lists(nodes: Nested) -> Iterator[list[str]]:
    """For each list the names of its items; a list among these has that of its first
    node."""
    if isinstance(nodes, list):
        yield [_first(x) for x in nodes]
        for x in nodes:
            yield from _lists(x)


def _first(nodes: Nested) -> str:
    return _nested.flat(nodes)[0].name


def _numbered(names: Sequence[str]) -> _Numbered | None:
    """None unless they differ in one number alone."""
    parts = [re.split("([0-9]+)", x) for x in names]
    if len({len(x) for x in parts}) != 1:
        return None
    places = [i for i, some in enumerate(zip(*parts)) if len(set(some)) > 1]
    if len(places) != 1 or places[0] % 2 == 0:
        return None
    (at,) = places
    first = parts[0]
    numbers = [x[at] for x in parts]
    return _Numbered("".join(first[:at]), "".join(first[at + 1 :]), numbers)


def _error(
    label: str,
    side: str,
    found: _Numbered,
    names: Sequence[str],
    code_of: Callable[[str], str | None],
) -> ValueError:
    before, after, numbers = found
    form = f'f"{before}{{i}}{after}"'
    if side == "model":
        # The key of the node, and what is around it in the code.
        last, end = before.rpartition(".")[2], after.partition(".")[0]
        key = f"{last}{numbers[0]}{end}"
        head, is_key, tail = (code_of(names[0]) or "").rpartition(f"['{key}']")
        form = f'{head}[f"{last}{{i}}{end}"]{tail}' if is_key else ""
    values = sorted(map(int, numbers))
    whole = values == [*range(len(values))]
    loop = f"for i in {f'range({len(values)})' if whole else values}"
    shown = ", ".join(f"`{x}`" for x in names[:4]) + (", ..." if names[4:] else "")
    return ValueError(
        f"`{label}` puts {shown} of the {side} in this order, which is that of texts, "
        "as dicts of JAX have it. Sort them by number"
        + (f": `[{form} {loop}]`." if form else ".")
    )
