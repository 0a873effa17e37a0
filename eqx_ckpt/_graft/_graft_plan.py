"""The plan of a graft: which leaf is made of what, and one error for all that is wrong.
All of it is made and checked before an array is read."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._kernel._format import _names, _text
from .._kernel._format._template import Template
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import _compare, _folding, _register, _target
from .._kernel._tree._compare import Comparison, Static
from .._kernel._tree._folding import Problems
from . import _adapting, _nested, _pairs, _suggest
from ._adapting import Placed
from ._matching import Job, Matching
from ._report import StaticDifference
from ._sides import leaf_index_of, Model, SideNode, StoredSide


class GraftPlan(NamedTuple):
    """The plan of a graft. The matching says which leaves are fresh and dropped, and
    `placed` has those that are made. `tied` maps leaves that are one object in the
    model to the first of them, which alone is read."""

    matching: Matching
    placed: list[Placed]
    tied: dict[int, int]
    differences: list[StaticDifference]


def plan(
    model: Model,
    stored: StoredSide,
    pairs: Sequence[Any],
    *,
    fresh: object,
    drop: object,
    scalars: str,
    static: Static,
    cast: bool,
    can_init: bool,
    read_scalars: Callable[[Sequence[LazyArray]], list[Any]],
) -> GraftPlan:
    """Plans a graft from its arguments. `can_init`: it has an `init`.

    **Raises:** one `RuntimeError` that lists all that is wrong, `ValueError` or
    `TypeError` for a pair, a `fresh` or a `drop` that picks no nodes.
    """
    matching = _match(model, stored, pairs, fresh, drop)
    problems = matching.problems
    placed: list[Placed] = []
    for job in matching.jobs:
        if not job.own:
            placed += _adapting.place(job, model, cast, problems)
    differences = _compare_statics(matching, static)
    if scalars == "load":
        placed += _load_scalars(matching)
    if not can_init:
        _find_abstract(matching)
    _raise_problems(matching, *matching.undeclared())
    if matching.scalars:
        differences += _compare_scalars(matching, scalars, read_scalars)
    _raise_problems(matching)
    # Functions of the user's come last, when all that is known without them is right:
    # they may read.
    for job in matching.jobs:
        if job.own:
            placed += _adapting.place(job, model, cast, problems)
    _raise_problems(matching)
    return GraftPlan(matching, placed, _adapting.tied(model, placed), differences)


def _match(
    model: Model, stored: StoredSide, pairs: Sequence[Any], fresh: object, drop: object
) -> Matching:
    parsed = [
        _pairs.parse(given, f"pairs[{i}]", model, stored)
        for i, given in enumerate(pairs)
    ]
    new = [] if fresh is None else _nested.flat(model.nodes(fresh, "fresh"))
    out = [] if drop is None else _whole(_nested.flat(stored.nodes(drop, "drop")))
    matching = Matching(model, stored, parsed)
    matching.fresh = {n: a.name for a in new for n in a.leaves.values()}
    matching.dropped = {
        leaf_index_of(x): b.name for b in out for x in b.leaves.values()
    }
    matching.find_jobs()
    return matching


def _whole(dropped: list[SideNode]) -> list[SideNode]:
    """**Raises:** `ValueError` for a view of a leaf: nobody would have spoken of the
    rest of it."""
    for node in dropped:
        for lazy in node.leaves.values():
            if not _lazy.is_as_stored(lazy):
                raise ValueError(
                    f"`drop` returned a view of the leaf `{lazy.name}`, and a leaf is "
                    "dropped as a whole. One that a pair takes a part of is not to be "
                    "dropped."
                )
    return dropped


def _find_abstract(matching: Matching) -> None:
    model = matching.model
    for number in sorted(matching.fresh):
        leaf = model.flat.leaves[number]
        if type(leaf) is not LazyArray and isinstance(leaf, jax.ShapeDtypeStruct):
            text = _target.show_target(_target.target_of(leaf))
            matching.problems.add("abstract", model.names[number], text)


# ---- Static values of the nodes that stand for each other.


def _compare_statics(matching: Matching, static: Static) -> list[StaticDifference]:
    """The static values that differ between Modules that stand for each other, and need
    not be the same: the others are problems."""
    saved, here = matching.stored.saved.tree, matching.model.record
    what = f"checkpoint at `{matching.stored.ckpt.path}`"
    passes = _compare.passing(static, lambda: [(saved, ""), (here, "")], what)
    out = []
    if saved is None:
        return out
    both = Comparison(saved, here)
    pairs = [*dict.fromkeys(_node_pairs(matching, here.node_names()))]
    counts = collections.Counter(name for name, _ in pairs)
    changed = _DifferingValues()
    for name, source in pairs:
        # Of a part that is new, not all that holds it is the same.
        new = any(n in matching.fresh for n in matching.model.below.get(name, []))
        new |= any(p in matching.dropped for p in matching.stored.below.get(source, []))
        for x in both.of_nodes(source, name, passes):
            if new or x.may_differ:
                out.append(StaticDifference(x.name, x.saved, x.here))
            else:
                origin = x.stored if counts[name] > 1 else None
                changed.add(x.name, x.saved, x.here, origin)
    changed.report(matching.problems, "static")
    return out


class _DifferingValues:
    """Values that differ. Of a node that several saved ones make, it says which."""

    def __init__(self) -> None:
        self._origins: dict[tuple[str, str, str], list[str]] = {}

    def add(self, name: str, saved: str, here: str, origin: str | None) -> None:
        found = self._origins.setdefault((name, saved, here), [])
        found += [] if origin is None else [origin]

    def report(self, problems: Problems, kind: str) -> None:
        for (name, saved, here), origins in self._origins.items():
            places = _folding.some(_folding.fold(origins))
            saved += f" as {places}" if origins else ""
            problems.add(kind, name, f"saved {saved}, the model has {here}")


def _node_pairs(matching: Matching, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names: a node of the model, and the saved node that it stands for."""
    own = {*names}
    below = _names.by_prefix(names)
    for pair in matching.pairs:
        if pair.renamed:
            continue
        for left, right in (
            (a, b) for g in pair.groups for a in g.lefts for b in g.rights
        ):
            some = [names[number] for number in below.get(left.name, [])]
            moved = matching.moved_names(some, left, right)
            for place, name in enumerate(some):
                rest = _names.below(name, left.name) if name else ""
                there = moved.get(place, _names.joined(right.name, rest))
                if there is not None and not matching.is_elsewhere(name, pair.label):
                    yield name, there
    roots = {
        pair.label: _names.within(node.name for node in pair.lefts)
        for pair in matching.pairs
        if pair.renamed
    }
    for job in matching.jobs:
        if job.label not in roots:
            continue
        root = roots[job.label]
        for number in job.all_numbers:
            for saved in job.all_saved:
                here = matching.model.names[number]
                there = matching.moved.get(number, here)
                ends = _names.node_pairs(there, saved.name)
                for depth, (_, origin) in enumerate(ends, 1):
                    name = ".".join(_names.parts(here)[:-depth])
                    if root(name) is None:
                        break
                    if name in own:
                        yield name, origin


# ---- Python scalars inside of pairs.


def _load_scalars(matching: Matching) -> list[Placed]:
    model, out = matching.model, {}
    for number, lazy in matching.scalars:
        target, template = model.target(number), _lazy.body_of(lazy).template
        misfit = _target.misfit(template, target)
        if misfit is not None:
            wanted = _target.show_target(target)
            text = f"saved {_folding.show(template)}, the model has {wanted}"
            matching.problems.add(misfit.what, model.names[number], text)
        out[number] = Placed(number, lazy, target, "loaded", Job("", number, lazy), 0)
    return list(out.values())


def _compare_scalars(
    matching: Matching, what: str, read: Callable[[Sequence[LazyArray]], list[Any]]
) -> list[StaticDifference]:
    """Python scalars that differ and that the model keeps. Others that differ are
    problems: of one that is loaded, several that were saved."""
    model, problems, scalars = matching.model, matching.problems, matching.scalars
    counts = collections.Counter(x.number for x in scalars)
    if what == "load":  # One that is made of several, as by `stack`.
        scalars = [x for x in scalars if counts[x.number] > 1]
    # An array is another value without being read.
    few = [x for x in scalars if _is_one_number(_lazy.body_of(x.saved).template)]
    values = dict(zip(few, read([lazy for _, lazy in few])))
    first: dict[int, Any] = {}
    out, changed = [], _DifferingValues()
    for x in scalars:
        number, lazy = x
        kept = _register.to_leaf(model.flat.leaves[number])
        value = values.get(x, lazy)
        if what == "load":
            kept = first.setdefault(number, value)
        if x in values and _is_same_number(value, kept):
            continue
        name = model.names[number]
        template = _lazy.body_of(lazy).template
        shown = repr(value) if x in values else _folding.show(template)
        if what == "keep":
            out.append(StaticDifference(name, shown, repr(kept)))
        elif what == "load":
            text = f"saved {kept!r}, and {shown} as `{lazy.name}`"
            problems.add("several", name, text)
        else:
            origin = lazy.name if counts[number] > 1 else None
            changed.add(name, shown, repr(kept), origin)
    changed.report(problems, "scalar")
    return out


def _is_one_number(template: Template) -> bool:
    return template.kind != "key" and template.logical_shape == ()


def _is_same_number(saved: object, kept: object) -> bool:
    saved, kept = (
        x.item() if isinstance(x, (np.ndarray, jax.Array, np.generic)) else x
        for x in (saved, kept)
    )
    both_bools = isinstance(saved, bool) == isinstance(kept, bool)
    return both_bools and bool(saved == kept or (saved != saved and kept != kept))


# ---- The report of all that is wrong.


_titles = {
    "nothing": "pairs that match nothing",
    "rule": "rules of a rename that find nothing",
    "overlap": "in more than one pair: leave each leaf to one of them",
    "incomplete": "not in all of the nodes that the pair puts together",
    "kind": "of another kind",
    "shape": "of another shape: an adapter may make it fit; a new head is `fresh`, and "
    "the old one goes into `drop`",
    "dtype": "of another dtype",
    "adapter": "what an adapter cannot do (a leaf that needs none takes its own pair)",
    "scalar": "Python scalars that were saved with another value",
    "several": "Python scalars of which a pair makes one of several that differ "
    '(`scalars="keep"` takes those of the model)',
    "static": "static fields that have changed ({static}; a pair of the arrays "
    "themselves, `lambda m: m.linear.weight`, lets all pass)",
    "abstract": "`fresh`, and without a value: make them with `init=` or "
    "`load_or_init`, or graft into a model that has values",
    "model": "in the model, in no pair and not in `fresh`",
    "checkpoint": "in the checkpoint, in no pair and not in `drop`",
}


def _raise_problems(
    matching: Matching, new: Sequence[int] = (), old: Sequence[int] = ()
) -> None:
    """**Raises:** one `RuntimeError` that lists the problems, if there are any, with
    code to paste for leaves that are in no pair, of both sides."""
    stored, problems = matching.stored, matching.problems
    if not problems.rows:
        return
    lines = [
        f"The graft of `{stored.ckpt.path}` does not fit the model "
        f"({problems.count()}); nothing was loaded."
    ]
    static = _compare.how_to_pass(problems.names("static"))
    titles = {kind: x.replace("{static}", static) for kind, x in _titles.items()}
    lines += _folding.sections(problems.rows, titles)
    names = (stored.saved.names[p] for p in old)
    dotted = [name for name in names if "%2E" in name]
    if dotted:
        lines.append(
            f"  Keys of the checkpoint have dots in them (`{dotted[0]}`). Save "
            "`ec.nest(...)` of the dict, and they are nodes."
        )
    if "scalar" in problems.rows:
        lines += [
            "  To paste, one of these two (of what is in `fresh` and `drop`, neither):",
            '    scalars="load",  # the saved values',
            '    scalars="keep",  # those of the model',
        ]
    lines += _suggest.lines(matching, new, old)
    raise RuntimeError(_text.message(lines))
