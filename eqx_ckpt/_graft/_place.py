"""The value of a leaf of the model, or of those that an adapter makes together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format._template import Template
from .._load._deferred import Later
from .._load._lazy import LazyArray
from .._tree import _leaf, _show, _target
from .._tree._show import Problems
from .._tree._target import Target
from ..adapters import Adapter
from ._matching import Job
from ._sides import Model, Saved, Stored, target_of


class Placed(NamedTuple):
    """A leaf of the model, and its new value: a lazy leaf, a `Later`, or an array."""

    number: int
    made: Any
    target: Target
    saved: tuple[str, ...]
    status: str  # "loaded", "cast" or "adapted".
    how: str
    adapters: tuple[Adapter | None, ...]


# ---- One leaf, or those that an adapter makes together.


def place(job: Job, model: Model, cast: bool, problems: Problems) -> list[Placed]:
    likes = [model.flat.leaves[n] for n in job.numbers]
    targets = [target_of(model, n)._replace(cast=cast) for n in job.numbers]
    names = [model.names[n] for n in job.numbers]
    adapters = [a for x in job.saved for a in x.adapters]
    adapters += [] if job.adapter is None else [job.adapter]
    how = ", ".join(dict.fromkeys(map(repr, adapters)))
    try:
        if adapters:
            for x in job.saved:
                _check_array(x.lazy)
        results = _adapted(job, likes)
    except RuntimeError:
        raise  # Of a read: damage is damage.
    except Exception as e:
        said = f"{e}" if isinstance(e, (ValueError, TypeError)) else f"{e!r}"
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        text = f"{job.label}, `{how}`: {said}; saved {_all(job.saved)}"
        problems.add("adapter", shown, text)
        return []
    wanted = map(_Wanted, job.numbers, names, targets)
    placed = [_fit(x, made, job, how, problems) for x, made in zip(wanted, results)]
    return [x for x in placed if x is not None]


def _adapted(job: Job, likes: list[Any]) -> Sequence[Any]:
    """The results of the adapters, one for each of the model's leaves."""
    given: list[Any] = []
    for x in job.saved:
        made: Any = x.lazy
        for adapter in x.adapters:
            made = adapter(made, likes[0])
        given.append(made)
    adapter = job.adapter
    if adapter is None:
        return given
    saved = given if adapter.many == "saved" or len(given) > 1 else given[0]
    if adapter.many != "like" and len(likes) == 1:
        return [adapter(saved, likes[0])]
    out = adapter(saved, likes)
    if not isinstance(out, (list, tuple)) or len(out) != len(likes):
        raise ValueError(f"it must give a list of {len(likes)} arrays")
    return out


def _check_array(lazy: LazyArray) -> None:
    kind = lazy._record.template.kind
    if kind in ("key", "str", "bytes"):
        raise TypeError(f"does not take a {kind}")


def _all(saved: Sequence[Saved]) -> str:
    return ", ".join(dict.fromkeys(_shown(x.lazy) for x in saved))


def _shown(made: Any) -> str:
    if isinstance(made, LazyArray):
        if made._view is None:
            return _leaf.show(made._record.template)
    return _show.short_array(np.dtype(made.dtype).name, made.shape)


class _Wanted(NamedTuple):
    """A leaf of the model."""

    number: int
    name: str
    target: Target


def _fit(
    wanted: _Wanted, made: Any, job: Job, how: str, problems: Problems
) -> Placed | None:
    """The leaf with what is made for it, if that is as the model has it."""
    number, name, target = wanted
    if isinstance(made, LazyArray) and made._target.cast:
        if made.dtype == target.dtype:
            target = target._replace(cast=True)
        else:  # To another dtype first: its numbers are those of that one.
            made = Later((made,), lambda arrays: arrays[0], made.shape, made.dtype)
    try:
        _check_source(made, job)
        template = _template_of(made)
    except (ValueError, TypeError) as e:
        problems.add(
            "adapter", name, f"{job.label}: `{how}` gave a leaf that is none: {e}"
        )
        return None
    misfit = _target.misfit(template, target)
    if misfit is not None:
        text, hint = f"saved {_all(job.saved)}", misfit.hint
        if any(made is x.lazy for x in job.saved):
            hint = hint or _hint(template.shape, target.shape, misfit.what)
        else:
            text += f", made {_leaf.show(template)} by {how or 'the view'}"
        text += f", the model has {_target.show_target(target)}"
        problems.add(misfit.what, name, text + (f"  ({hint})" if hint else ""))
        return None
    status = "adapted"
    if isinstance(made, LazyArray) and made._view is None:
        same = target.dtype is None or template.dtype == target.dtype.name
        status = "loaded" if same or template.kind == "key" else "cast"
    saved = tuple(x.lazy.name for x in job.saved)
    adapters = (job.adapter, *(a for x in job.saved for a in x.adapters))
    return Placed(number, made, target, saved, status, how or "a view", adapters)


def _check_source(made: Any, job: Job) -> None:
    parts = made.parts if isinstance(made, Later) else [made]
    for part in parts:
        if (
            isinstance(part, LazyArray)
            and part._source is not job.saved[0].lazy._source
        ):
            raise ValueError(
                f"`{part.name}` is of another checkpoint, `{part._source.root}`. Read "
                "it in the function, or graft twice."
            )


def _template_of(made: Any) -> Template:
    """**Raises:** `ValueError` or `TypeError` for what is no leaf."""
    if isinstance(made, Later):
        return _leaf.describe(np.broadcast_to(np.zeros((), made.dtype), made.shape))
    if not isinstance(made, LazyArray):
        return _leaf.describe(made)
    template = made._record.template
    return template if made._view is None else template._replace(shape=made.shape)


def _hint(saved: tuple[int, ...], wanted: tuple[int, ...], what: str) -> str:
    if what != "shape" or len(saved) != len(wanted):
        return ""
    if saved == wanted[::-1]:
        return "`ec.adapters.transpose()` turns it"
    if saved[1:] == wanted[1:]:
        return "`ec.adapters.rows(fill)` takes fewer rows, or more"
    return ""


# ---- Leaves that are one object in the model.


# ---- Leaves that are one object in the model.


def tied(
    model: Model,
    stored: Stored,
    placed: list[Placed],
    problems: Problems,
) -> dict[int, int]:
    objects: dict[int, list[int]] = {}
    for number, leaf in enumerate(model.flat.leaves):
        if _leaf.is_shared(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            objects.setdefault(id(leaf), []).append(number)
    by_number = {x.number: x for x in placed}
    again: dict[int, int] = {}
    for numbers in objects.values():
        first = by_number.get(numbers[0])
        if len(numbers) == 1:
            continue
        origins = {_origin(by_number.get(n), stored) for n in numbers}
        if len(origins) == 1:
            if first is not None:
                again.update(dict.fromkeys(numbers[1:], numbers[0]))
            continue
        for n in numbers:
            x = by_number.get(n)
            text = "fresh" if x is None else f"from {', '.join(x.saved)}"
            others = ", ".join(model.names[m] for m in numbers if m != n)
            problems.add("tied", model.names[n], f"{text}; one array with {others}")
    return again


def _origin(placed: Placed | None, stored: Stored) -> Any:
    """The same for two leaves that are made of the same bytes in the same way."""
    if placed is None:
        return None
    made = placed.made
    if not isinstance(made, (LazyArray, Later)):
        return id(made)
    parts = (made,) if isinstance(made, LazyArray) else made.parts
    aliases = stored.saved.aliases
    places = [x._record.place for x in parts]
    views = [(x._view, x.dtype, x._target.kind) for x in parts]
    # Two adapters may be shown alike.
    adapters = tuple(map(id, placed.adapters))
    return adapters, *((aliases.get(p, p), v) for p, v in zip(places, views))
