"""Nodes and leaves in lists, which may be in lists."""

from collections.abc import Callable, Iterator
from typing import Any


Nested = Any  # One thing, or a list of nested ones.


def flat(x: Nested) -> list[Any]:
    """The things in it, in their order."""
    return [y for part in x for y in flat(part)] if isinstance(x, list) else [x]


def filled(x: Nested, values: Iterator[Any]) -> Nested:
    """The lists of `x`, with other things in them."""
    if isinstance(x, list):
        return [filled(part, values) for part in x]
    return next(values)


def mapped(fn: Callable[[Any], Any], x: Nested) -> Nested:
    return filled(x, map(fn, flat(x)))


def depth(x: Nested) -> int:
    """The number of lists that each thing is in.

    **Raises:** `ValueError` if that is not the same of all.
    """
    if not isinstance(x, list):
        return 0
    depths = set(map(depth, x))
    if len(depths) > 1:
        raise ValueError("some are in more lists than others")
    return 1 + max(depths, default=0)


def zipped(a: Nested, b: Nested, count: int) -> list[tuple[Nested, Nested]]:
    """The pairs of what is at the same place of both, `count` lists deep.

    **Raises:** `ValueError` if the lists have not as many items.
    """
    if count == 0:
        return [(a, b)]
    return [x for u, v in zip(a, b, strict=True) for x in zipped(u, v, count - 1)]
