"""The form of a save: all of it but the values.

A training loop saves one form again and again. What follows from it alone, such as
the files for other readers, is made once: by functions that are given a form and
nothing that it lacks, and remember their last few results.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from .._format._template import Template
from ._payload import PlannedLeaf


class Form(NamedTuple):
    """The leaves of a save in their order: their names, the numbers of their templates,
    and those that share the bytes of another, with its place."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    templates: tuple[Template, ...]
    aliases: tuple[tuple[int, int], ...]


def of(leaves: Sequence[PlannedLeaf]) -> Form:
    templates = {leaf.number: leaf.template for leaf in leaves}
    return Form(
        tuple([leaf.name for leaf in leaves]),
        tuple([leaf.number for leaf in leaves]),
        tuple(templates[number] for number in sorted(templates)),
        tuple((i, x.alias) for i, x in enumerate(leaves) if x.alias is not None),
    )


F = TypeVar("F", bound=Callable)


def remembered(function: F) -> F:
    """A function whose results for its last four arguments are kept: it must do nothing
    else than compute a result, which nobody changes."""
    return ft.lru_cache(maxsize=4)(function)  # pyright: ignore[reportReturnType]
