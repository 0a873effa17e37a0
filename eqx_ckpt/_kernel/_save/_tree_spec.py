"""The spec of the tree of a save: all of it but the values.

A training loop saves one form again and again. What follows from it alone, such as
the files for other readers, is made once, and kept with it.
"""

import contextlib
import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable
from typing import Any, TypeVar

from .._format import _grid
from .._format._grid import Grid
from .._format._template import Template
from .._limits import limits


@dataclasses.dataclass(frozen=True, eq=False)
class TreeSpec:
    """The leaves of a save in their order: their names, the numbers of their templates,
    and those that share the bytes of another, with its index."""

    names: tuple[str, ...]
    template_of: tuple[int, ...]
    templates: tuple[Template, ...]
    aliases: tuple[tuple[int, int], ...]

    @ft.cached_property
    def results(self) -> dict[Any, Any]:
        """Results of functions that are `remembered`."""
        return {}

    @ft.cached_property
    def is_compressed(self) -> bool:
        """Whether there are chunks that are encoded."""
        return any(template.codec is not None for template in self.templates)

    @ft.cached_property
    def counts(self) -> list[int]:
        """Numbers of leaves by template, without those that share another's bytes."""
        found = [0] * len(self.templates)
        for number in self.template_of:
            found[number] += 1
        for leaf_index, _ in self.aliases:
            found[self.template_of[leaf_index]] -= 1
        return found

    @ft.cached_property
    def chunk_count(self) -> int:
        """The chunks of the leaves, each counted once."""
        return sum(t.chunk_count * n for t, n in zip(self.templates, self.counts))

    @ft.cached_property
    def origins(self) -> list[int | None]:
        """The index of the leaf whose bytes each one shares."""
        aliases = dict(self.aliases)
        return list(map(aliases.get, range(len(self.names))))

    @property
    def has_database(self) -> bool:
        """Whether other readers can read a save in few files: of very many chunks it
        would take process 0 too long, and too much memory, to tell them."""
        return self.chunk_count <= limits.database_chunks

    @ft.cached_property
    def nbytes(self) -> int:
        """The bytes of the leaves, each counted once."""
        return sum(t.nbytes * n for t, n in zip(self.templates, self.counts))

    @ft.cached_property
    def largest_chunk(self) -> int:
        """The bytes of a chunk of the leaf that has the largest ones."""
        return max(template.full for template in self.templates)

    @ft.cached_property
    def template_grids(self) -> list[Grid]:
        """The grid of leaves of each template."""
        return [_grid.lay(t.shape, t.chunk, t.itemsize) for t in self.templates]

    @ft.cached_property
    def grids(self) -> list[Grid]:
        """The grid of each leaf."""
        return list(map(self.template_grids.__getitem__, self.template_of))

    @ft.cached_property
    def first_digests(self) -> list[int]:
        """The number of the first digest of each leaf among all digests; and at the
        end, how many digests there are."""
        counts = [grid.blocks[-1] for grid in self.grids]
        for leaf_index, _ in self.aliases:
            counts[leaf_index] = 0
        return list(it.accumulate(counts, initial=0))


F = TypeVar("F", bound=Callable)


# Results that are kept with a spec.
_MAX_RESULTS = 16


def remembered(function: F) -> F:
    """A function of a spec, whose last few results are kept with that: it must do
    nothing else than compute a result, which nobody changes."""

    @ft.wraps(function)
    def call(spec: TreeSpec, *args: Any) -> Any:
        key = function, args
        with contextlib.suppress(KeyError):  # Another thread may clear them.
            return spec.results[key]
        made = function(spec, *args)
        if len(spec.results) >= _MAX_RESULTS:
            spec.results.clear()
        spec.results[key] = made
        return made

    return call  # pyright: ignore[reportReturnType]
