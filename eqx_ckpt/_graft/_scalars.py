"""Python scalars inside of pairs."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._format._template import Template
from .._load._lazy import LazyArray
from .._tree import _leaf, _register, _target
from .._tree._show import Problems
from ._matching import Scalar
from ._place import Placed
from ._sides import Model, target_of


# ---- Python scalars inside of pairs.


def load(scalars: Sequence[Scalar], model: Model, problems: Problems) -> list[Placed]:
    out = {}
    for number, lazy in scalars:
        target, template = target_of(model, number), lazy._record.template
        misfit = _target.misfit(template, target)
        if misfit is not None:
            wanted = _target.show_target(target)
            text = f"saved {_leaf.show(template)}, the model has {wanted}"
            problems.add(misfit.what, model.names[number], text)
        out[number] = Placed(number, lazy, target, (lazy.name,), "loaded", "", ())
    return list(out.values())


def compare(
    scalars: Sequence[Scalar],
    what: str,
    read: Callable[[Sequence[LazyArray]], list[Any]],
    model: Model,
    problems: Problems,
) -> list[tuple[str, str, str]]:
    """`(name, as saved, in the model)` of those that the model keeps. Others that
    differ are problems: of one that is loaded, several that were saved."""
    if what == "load":  # One that is made of several, as by `stack`.
        counts = collections.Counter(x.number for x in scalars)
        scalars = [x for x in scalars if counts[x.number] > 1]
    # An array is another value without being read.
    few = [x for x in scalars if _is_one_number(x.lazy._record.template)]
    values = dict(zip(few, read([x.lazy for x in few])))
    first: dict[int, Any] = {}
    out = []
    for x in scalars:
        kept = _register.to_leaf(model.flat.leaves[x.number])
        value = values.get(x, x.lazy)
        if what == "load":
            kept = first.setdefault(x.number, value)
        if x in values and _is_same_number(value, kept):
            continue
        name = model.names[x.number]
        shown = repr(value) if x in values else _leaf.show(x.lazy._record.template)
        if what == "keep":
            out.append((name, shown, repr(kept)))
        elif what == "load":
            problems.add("scalar", name, f"saved {kept!r} and {shown}")
        else:
            problems.add("scalar", name, f"saved {shown}, the model has {kept!r}")
    return out


def _is_one_number(template: Template) -> bool:
    return template.kind != "key" and template.logical_shape == ()


def _is_same_number(saved: Any, kept: Any) -> bool:
    saved, kept = (
        x.item() if isinstance(x, (np.ndarray, jax.Array, np.generic)) else x
        for x in (saved, kept)
    )
    both_bools = isinstance(saved, bool) == isinstance(kept, bool)
    return both_bools and bool(saved == kept or (saved != saved and kept != kept))
