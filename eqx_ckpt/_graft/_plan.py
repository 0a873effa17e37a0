"""The plan of a graft, checked to the last leaf before an array is read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._load._lazy import LazyArray
from .._tree import _target
from .._tree._static import Static
from . import _nested, _pairs, _place, _problems, _scalars, _statics
from ._matching import Matching
from ._place import Placed
from ._sides import Model, Stored


class GraftOptions(NamedTuple):
    """The keywords of `graft` that say what is done with which leaf. `can_init`: there
    is an `init`."""

    fresh: Any
    drop: Any
    scalars: str
    static: Static
    cast: bool
    can_init: bool


class GraftPlan(NamedTuple):
    """The leaves that a graft makes, keeps and drops.

    Leaves that are one object in the model are made once: `again` leads to the first.
    `fresh` (by number) and `dropped` (by place) have the names of the nodes that were
    said to be so, and `differences` rows of `(name, in the checkpoint, in the model)`
    of what differs and need not be the same.
    """

    placed: list[Placed]
    again: dict[int, int]
    fresh: dict[int, str]
    dropped: dict[int, str]
    differences: list[tuple[str, str, str]]

    @property
    def made(self) -> list[Placed]:
        """Those that are placed, one for each object of the model."""
        return [x for x in self.placed if x.number not in self.again]


def plan(
    model: Model,
    stored: Stored,
    pairs: Sequence[Any],
    options: GraftOptions,
    read_scalars: Callable[[Sequence[LazyArray]], list[Any]],
) -> GraftPlan:
    """**Raises:** one `RuntimeError` that lists all that is wrong, `ValueError` or
    `TypeError` for a pair, a `fresh` or a `drop` that picks no nodes."""
    scalars, cast = options.scalars, options.cast
    matching = _match(model, stored, pairs, options)
    problems = matching.problems
    placed: list[Placed] = []
    for job in matching.jobs:
        if not job.own:
            placed += _place.place(job, model, cast, problems)
    differences = _statics.compare(matching, options.static)
    if scalars == "load":
        placed += _scalars.load(matching.scalars, model, problems)
    if not options.can_init:
        _find_abstract(matching)
    undeclared = matching.undeclared()
    _problems.check(problems, model, stored, undeclared)
    if inside := matching.scalars:
        differences += _scalars.compare(inside, scalars, read_scalars, model, problems)
    _problems.check(problems, model, stored)
    # Functions of the user's come last, when all that is known without them is right:
    # they may read.
    for job in matching.jobs:
        if job.own:
            placed += _place.place(job, model, cast, problems)
    again = _place.tied(model, stored, placed, problems)
    _problems.check(problems, model, stored)
    fresh = {n: x for n, x in matching.fresh.items() if model.is_array(n)}
    return GraftPlan(placed, again, fresh, matching.dropped, differences)


def _match(
    model: Model, stored: Stored, pairs: Sequence[Any], options: GraftOptions
) -> Matching:
    parsed = [
        _pairs.parse(given, f"pairs[{i}]", model, stored)
        for i, given in enumerate(pairs)
    ]
    fresh, drop = options.fresh, options.drop
    new = [] if fresh is None else _nested.flat(model.nodes(fresh, "fresh"))
    out = [] if drop is None else _nested.flat(stored.nodes(drop, "drop"))
    matching = Matching(model, stored, parsed)
    matching.fresh = {n: a.name for a in new for n in a.leaves.values()}
    matching.dropped = {x.place: b.name for b in out for x in b.leaves.values()}
    matching.find()
    return matching


def _find_abstract(matching: Matching) -> None:
    model = matching.model
    for number in sorted(matching.fresh):
        leaf = model.flat.leaves[number]
        if type(leaf) is not LazyArray and isinstance(leaf, jax.ShapeDtypeStruct):
            text = _target.show_target(_target.target_of(leaf))
            matching.problems.add("abstract", model.names[number], text)
