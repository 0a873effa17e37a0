"""An error for nodes that are in the order of texts: `layer_0`, `layer_1`, `layer_10`,
..., as dicts of JAX are. Whoever lists their values means 0, 1, 2, ..."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .._kernel._format import _names
from . import _nested
from ._nested import Nested


_SIDES = "model", "checkpoint"


class _Numbered(NamedTuple):
    """Names that differ only in numbers. `parts` has each name, cut at its numbers, and
    `places` says which of the parts are the numbers that differ."""

    names: Sequence[str]
    parts: list[list[str]]
    places: list[int]

    @property
    def order(self) -> list[int]:
        """The places of the names in `names`, by their numbers."""
        numbers = lambda i: [int(self.parts[i][at]) for at in self.places]
        return sorted(range(len(self.parts)), key=numbers)

    @property
    def is_in_text_order(self) -> bool:
        """Whether they are sorted as texts, as JAX sorts the keys of dicts, and not by
        their numbers: `10_a` is before `1_a`, as `0` is before `_`."""
        texts = [name.split(".") for name in self.names]
        is_by_number = self.order == [*range(len(texts))]
        return texts == sorted(texts) and not is_by_number


def check_nodes(
    label: str,
    groups: Sequence[tuple[Nested, Nested]],
    code_of: Callable[[str], str | None],
) -> None:
    """Checks the order of the nodes of a pair, which errors call `label`, on both
    sides. The order counts in two places: in a list of which an adapter makes one leaf,
    or which it makes of one; and among the `groups`, whose nodes are paired one by one.
    `code_of` gives the code of a node of the model.

    **Raises:** `ValueError` for a list of nodes in the order of texts; and for nodes in
    that order that are paired with nodes in another one. Names that differ in more than
    numbers are not checked.
    """
    for group in groups:
        for side, nodes in zip(_SIDES, group):
            for names in _lists(nodes):
                found = _numbered(names)
                if found is not None and found.is_in_text_order:
                    raise _error(label, side, found, code_of)
    sides = [[_first_name(group[i]) for group in groups] for i in range(len(_SIDES))]
    ours, theirs = map(_numbered, sides)
    # One side may count from 0 and the other from 1.
    if ours is None or theirs is None or ours.order == theirs.order:
        return
    for side, found in zip(_SIDES, (ours, theirs)):
        if found.is_in_text_order:
            raise _error(label, side, found, code_of)


def _lists(nodes: Nested) -> Iterator[list[str]]:
    """The names of the items, if the nodes are a list, and those of each list in it. An
    item that is a list has the name of its first node."""
    if isinstance(nodes, list):
        yield [_first_name(x) for x in nodes]
        for x in nodes:
            yield from _lists(x)


def _first_name(nodes: Nested) -> str:
    return _nested.flat(nodes)[0].name


def _numbered(names: Sequence[str]) -> _Numbered | None:
    """The names, cut at their numbers; None if they differ in anything else, or not at
    all."""
    parts = [_names.NUMBERS.split(x) for x in names]
    if len({len(x) for x in parts}) != 1:
        return None
    places = [i for i, some in enumerate(zip(*parts)) if len(set(some)) > 1]
    are_numbers = places and all(at % 2 for at in places)
    return _Numbered(names, parts, places) if are_numbers else None


def _error(
    label: str, side: str, found: _Numbered, code_of: Callable[[str], str | None]
) -> ValueError:
    names, form = found.names, _code(side, found, code_of)
    values = sorted(int(parts[found.places[0]]) for parts in found.parts)
    is_range = values == [*range(len(values))]
    loop = f"for i in {f'range({len(values)})' if is_range else values}"
    shown = ", ".join(f"`{x}`" for x in names[:4]) + (", ..." if names[4:] else "")
    return ValueError(
        f"`{label}` puts {shown} of the {side} in this order, which is that of texts, "
        "as dicts of JAX have it. Sort them by number"
        + (f": `[{form} {loop}]`." if form else ".")
    )


def _code(side: str, found: _Numbered, code_of: Callable[[str], str | None]) -> str:
    """The code of one node, with `i` for its number; "" if it is not known, or if the
    names have several numbers, or some with zeros before them."""
    (at, *more), first = found.places, found.parts[0]
    numbers = [parts[at] for parts in found.parts]
    before, after = "".join(first[:at]), "".join(first[at + 1 :])
    is_plain = all(x == str(int(x)) for x in numbers) and not {*"{}"} & {
        *before,
        *after,
    }
    if more or not is_plain:
        return ""
    if side != "model":
        return f'f"{before}{{i}}{after}"'
    # The key of the node, and what is around it in the code.
    last, end = before.rpartition(".")[2], after.partition(".")[0]
    key = f"{last}{first[at]}{end}"
    head, found_key, tail = (code_of(found.names[0]) or "").rpartition(f"['{key}']")
    return f'{head}[f"{last}{{i}}{end}"]{tail}' if found_key else ""
