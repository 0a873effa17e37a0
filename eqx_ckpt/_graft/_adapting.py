"""The value of a leaf of the model, or of those that an adapter makes together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._functions._computed import Formula
from .._kernel._format._leaves import Leaves
from .._kernel._format._template import Template
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import _folding, _leaf, _orders, _target
from .._kernel._tree._folding import Problems
from .._kernel._tree._target import Target
from .._rename._rename import Rename
from ..adapters import _deferred, Adapter
from . import _nested
from ._matching import Job
from ._nested import Nested
from ._pairs import PairStep
from ._sides import Model


class Placed(NamedTuple):
    """A leaf of the model. `made` is what it is made of: a lazy array, a `Formula` that
    adapters have deferred, or an array of NumPy."""

    number: int
    made: Any
    target: Target
    status: str  # "loaded", "cast" or "adapted".
    job: Job
    # Which of the arrays that its adapters have made together.
    position: int

    def how(self, saved: Leaves) -> str:
        """How it was made of what was saved, for the report; "" if it was loaded."""
        if self.status == "loaded":
            return ""
        sources, target = self.job.sources, self.target
        template = saved.record(saved.leaf_indices[sources[0]]).template
        if self.status == "cast":
            return f"{template.dtype} to {target.dtype}"
        count = f"{len(sources)} of " if len(sources) > 1 else ""
        what = f"{count}{_folding.show(template)} to {_target.show_target(target)}"
        return f"{self.job.how or 'a view'}, of {what}"


# ---- One leaf, or those that an adapter makes together.


def place(job: Job, model: Model, cast: bool, problems: Problems) -> list[Placed]:
    """Applies the adapters of a job to its saved leaves, and gives the leaves of the
    model that it makes. What does not fit the model is among the problems instead."""
    targets = [model.target(n)._replace(cast=cast) for n in job.all_numbers]
    try:
        for x in job.all_saved if job.adapters else ():
            kind = _lazy.body_of(x).template.kind
            if kind in ("key", "str", "bytes"):
                raise TypeError(f"does not take a {kind}")
        likes = _nested.mapped(model.flat.leaves.__getitem__, job.numbers)
        results = _nested.flat(_apply(job.steps, job.saved, likes, job.of_rules))
    except RuntimeError:
        raise  # Of a read: damage is damage.
    except Exception as e:
        said = f"{e}" if isinstance(e, (ValueError, TypeError)) else f"{e!r}"
        names = [model.names[n] for n in job.all_numbers]
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        text = f"{job.label}, `{job.how}`: {said}; saved {_show_all(job.all_saved)}"
        problems.add("adapter", shown, text)
        return []
    placed = [
        _check_fit(job, position, made, target, model.names[number], problems)
        for position, (number, made, target) in enumerate(
            zip(job.all_numbers, results, targets)
        )
    ]
    return [x for x in placed if x is not None]


def _apply(
    steps: Sequence[PairStep],
    value: Nested,
    likes: Nested,
    of_rules: Sequence[tuple[Adapter, ...]],
) -> Nested:
    """The value that the steps make, for leaves of the model like these.

    `of_rules`: the adapters that the rules of a rename have, for each of the values;
    once those are not as many any more, for all of them those of the first."""
    if not steps:
        made, count = len(_nested.flat(value)), len(_nested.flat(likes))
        if made != count:
            raise ValueError(f"it gives {made} arrays, and the model has {count}")
        return value
    step, *rest = steps
    if isinstance(step, Rename):
        values = _nested.flat(value)
        if len(values) != len(of_rules):
            if len({*of_rules}) > 1:
                raise ValueError(
                    "the rename has other adapters for some of these leaves than for "
                    "others, and they are one array by then: put it first"
                )
            of_rules = [of_rules[0]] * len(values)
        made = [
            _apply_rules(adapters, x, rest, value, likes)
            for x, adapters in zip(values, of_rules)
        ]
        value = _nested.filled(value, iter(made))
    elif step.many == "like":
        before = [_before(rest, value, like, of_rules[0]) for like in likes]
        some = _items(step(value, before), likes)
        return [_apply(rest, x, like, of_rules) for x, like in zip(some, likes)]
    elif step.many == "saved":
        value = _innermost(step, value, _nested.flat(likes)[0])
    elif _makes_one_of_the_other(step, rest, value, likes):
        value = step(value, likes)
        if isinstance(likes, list):
            value = _items(value, likes)
    else:
        like = _like(step, rest, value, likes, of_rules[0])
        value = _nested.mapped(lambda x: step(x, like), value)
    return _apply(rest, value, likes, of_rules)


def _apply_rules(
    adapters: Sequence[Adapter],
    x: Any,
    rest: Sequence[PairStep],
    value: Nested,
    likes: Nested,
) -> Any:
    """A leaf by the adapters that the rules of a rename have for it. `rest`: the steps
    after the rename."""
    for number, adapter in enumerate(adapters, 1):
        later = [*adapters[number:], *rest]
        x = adapter(x, _like(adapter, later, value, likes, ()))
    return x


def _makes_one_of_the_other(
    step: Adapter, rest: Sequence[PairStep], value: Nested, likes: Nested
) -> bool:
    """Whether a function of the user's has to make one leaf of several, or several of
    one, as no other adapter does."""
    others = any(isinstance(x, Adapter) and x.many for x in rest)
    return (
        step.own and isinstance(value, list) != isinstance(likes, list) and not others
    )


class _Like(NamedTuple):
    """What an adapter of ours is told of a leaf of the model, before later steps."""

    shape: tuple[int, ...]
    dtype: Any


def _like(
    step: Adapter,
    rest: Sequence[PairStep],
    value: Nested,
    likes: Nested,
    of_rules: Sequence[Adapter],
) -> Any:
    """The leaf of the model that a step makes, as it is before the `rest` of the steps,
    as far as these can be undone. A function of the user's is given the leaf itself."""
    first = _nested.flat(likes)[0]
    if step.own or not rest or not hasattr(first, "dtype"):
        return first
    try:
        before = _nested.flat(_before(rest, value, likes, of_rules))[0]
    except (ValueError, TypeError, AttributeError):
        return first
    return _Like(tuple(before.shape), first.dtype)


def _before(
    steps: Sequence[PairStep],
    saved: Nested,
    like: Nested,
    of_rules: Sequence[Adapter],
) -> Any:
    """An array of the shape of a leaf before these steps: that it has to have
    where an adapter makes several of one by the shapes of those. `saved` is what the
    steps are applied to."""

    def empty(x: Any) -> LazyArray:
        return _deferred.later([], lambda _: np.zeros(0), np.shape(x), np.uint8)

    value = _nested.mapped(empty, like)
    for step in reversed(steps):
        adapters = of_rules if isinstance(step, Rename) else [step]
        for adapter in reversed(adapters):
            undo = adapter.undo and adapter.undo()
            if undo and undo.many == "saved":
                value = _innermost(undo, value, like)
            elif undo and undo.many == "like":  # Of the outermost list that is left.
                value = undo(value, [value] * len(saved))[0]
                saved = saved[0]
            elif undo:
                value = _nested.mapped(lambda x, undo=undo: undo(x, x), value)
            elif adapter.before:
                value = _nested.mapped(adapter.before, value)
    return value


def _innermost(step: Adapter, value: Nested, like: PyTree) -> Nested:
    """A nest of which a step has made one value of each innermost list."""
    if _nested.depth(value) > 1:
        return [_innermost(step, x, like) for x in value]
    return step(value, like)


def _items(out: object, likes: list[Any]) -> list[Any]:
    """**Raises:** `ValueError` unless an adapter gave one item for each leaf."""
    if not isinstance(out, (list, tuple)) or len(out) != len(likes):
        raise ValueError(f"it must give a list of {len(likes)} arrays")
    return list(out)


def _show_all(saved: Sequence[LazyArray]) -> str:
    return ", ".join(dict.fromkeys(map(_show, saved)))


def _show(lazy: LazyArray) -> str:
    body = _lazy.body_of(lazy)
    if body.view is None:
        return _folding.show(body.template)
    return _folding.short_array(np.dtype(lazy.dtype).name, lazy.shape)


def _check_fit(
    job: Job,
    position: int,
    made: object,
    target: Target,
    name: str,
    problems: Problems,
) -> Placed | None:
    """A leaf of the model with what was made for it; None, and a problem, if that is
    not of the kind, shape and dtype that the model has."""
    if isinstance(made, LazyArray) and _lazy.body_of(made).target.cast:
        if made.dtype == target.dtype:
            target = target._replace(cast=True)
        else:  # To another dtype first: its numbers are those of that one.
            same = lambda arrays: arrays[0]
            made = _deferred.later([made], same, made.shape, made.dtype)
    made = _deferred.flattened(made)
    try:
        _check_source(made, job)
        template = _template_of(made)
    except (ValueError, TypeError) as e:
        text = f"{job.label}: `{job.how}` gave a leaf that is none: {e}"
        problems.add("adapter", name, text)
        return None
    misfit = _target.misfit(template, target)
    if misfit is not None:
        (what, hint), text = misfit, f"saved {_show_all(job.all_saved)}"
        if any(made is x for x in job.all_saved):
            hint = hint or _hint(template.shape, target.shape, what)
        else:
            text += f", made {_folding.show(template)} by {job.how or 'the view'}"
        text += f", the model has {_target.show_target(target)}"
        problems.add(what, name, text + (f"  ({hint})" if hint else ""))
        return None
    status = "adapted"
    if isinstance(made, LazyArray) and _lazy.body_of(made).view is None:
        same = target.dtype is None or template.dtype == target.dtype.name
        status = "loaded" if same or template.kind == "key" else "cast"
    number = job.all_numbers[position]
    return Placed(number, made, target, status, job, position)


def _check_source(made: object, job: Job) -> None:
    known = _lazy.known_leaf(job.all_saved[0]).source
    for part in map(_lazy.known_leaf, _deferred.parts_of(made)):
        if part.source is not known:
            raise ValueError(
                f"`{part.name}` is of another checkpoint, `{part.source.root}`. Read "
                "it in the function, or graft twice."
            )


def _template_of(made: object) -> Template:
    """**Raises:** `ValueError` or `TypeError` for what is no leaf."""
    if isinstance(made, Formula):
        return _leaf.template_of(np.broadcast_to(np.zeros((), made.dtype), made.shape))
    if not isinstance(made, LazyArray):
        return _leaf.template_of(made)
    body = _lazy.body_of(made)
    t = body.template
    return t if body.view is None else t._replace(shape=made.shape)


def _hint(saved: tuple[int, ...], wanted: tuple[int, ...], what: str) -> str:
    if what != "shape":
        return ""
    adapter = _orders.adapter_between(saved, wanted)
    if adapter is not None:
        return f"`ec.adapters.{adapter}` loads it"
    if len(saved) == len(wanted) and saved[1:] == wanted[1:]:
        return "`ec.adapters.rows(fill)` takes fewer rows, or more"
    return ""


# ---- Leaves that are one object in the model.


def tied(model: Model, placed: Sequence[Placed]) -> dict[int, int]:
    """From each leaf that is one object with an earlier one, and made of the same, to
    that one."""
    first: dict[Any, int] = {}
    again: dict[int, int] = {}
    for x in placed:
        leaf = model.flat.leaves[x.number]
        if _leaf.is_shared(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            origin = first.setdefault((id(leaf), _origin(x)), x.number)
            if origin != x.number:
                again[x.number] = origin
    return again


def _origin(placed: Placed | None) -> Any:
    """Equal for two leaves that are made of the same bytes in the same way."""
    if placed is None:
        return None
    made = placed.made
    if not isinstance(made, LazyArray | Formula):
        return id(made)
    parts = _deferred.parts_of(made)
    leaves = [(_lazy.known_leaf(x), x.dtype) for x in parts]
    origins = [(x.array_index, x.view, dtype, x.target.kind) for x, dtype in leaves]
    # Two adapters may be shown alike, and one makes several arrays of the same bytes.
    adapters = tuple(map(id, placed.job.adapters))
    position = placed.position if isinstance(made, Formula) else 0
    return adapters, position, *origins
