"""A warning of leaves whose shapes fit two orders in which libraries store such layers,
where nothing says which it is."""

import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx

from .._kernel._format import _view
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import _orders
from ._adapting import Placed
from ._matching import Job, Matching


# The adapters that order the axes of a layer. Others take its arrays as they are.
_TURNS = "transpose", "channels_first", "channels_last", "conv_transpose"


def warn(matching: Matching, placed: Sequence[Placed]) -> None:
    rows: dict[str, list[tuple[str, str]]] = {}
    turned = {
        _form(name) for x in placed if _is_turned(matching, x) for name in x.job.sources
    }
    for x in placed:
        how = _needed_adapter(matching, x, turned)
        if how is not None:
            name = matching.model.names[x.number]
            rows.setdefault(how, []).append((name, f"of `{x.job.sources[0]}`"))
    advice = (
        "Say it with an adapter in their pair: the one that is named, or `lambda "
        "saved, like: saved` for as it is."
    )
    _orders.warn_of_unknown_orders(rows, advice)


def _form(source: str) -> str:
    """The part of a name that leaves of one model have in common: what is before the
    number of a block, and the word for the weight."""
    source = _orders.unboxed(source)
    return f"{re.split('[0-9]', source)[0]} {source.rpartition('.')[2]}"


def _is_turned(matching: Matching, x: Placed) -> bool:
    """Whether a leaf is the weight of a dense layer that an adapter turns."""
    names = set(map(_name, x.job.adapters))
    is_dense = isinstance(_layer(matching, x.number), eqx.nn.Linear)
    return is_dense and not names.isdisjoint(("transpose", "channels_first"))


def _name(adapter: object) -> str:
    return repr(adapter).partition("(")[0]


def _needed_adapter(matching: Matching, x: Placed, turned: set[str]) -> str | None:
    """The adapter that a leaf may need, as a sentence says it; None if its adapters say
    the order of its axes, or its shape does. `turned` has the forms of names whose
    weights are transposed."""
    job, source = x.job, x.job.sources[0]
    layer = _layer(matching, x.number)
    own_axes = _orders.rank(layer)
    if not own_axes or _is_ordered(job, own_axes):
        return None
    is_kernel = _orders.is_kernel(source)
    node = source.rpartition(".")[0]
    if node in matching.stored.saved.node_names and not is_kernel:
        return None  # Of a Module that was saved as one.
    shape = x.target.shape
    if isinstance(layer, eqx.nn.ConvTranspose):
        is_square = len(shape) >= own_axes and shape[-own_axes] == shape[1 - own_axes]
        return "PyTorch's need `ec.adapters.conv_transpose()`" if is_square else None
    others = [a for a in map(_name, job.adapters) if a not in _TURNS]
    place = f" after `{others[-1]}()`" if others else ""
    how = _orders.adapter_if_square(layer, shape)
    if how is None and others:  # Such as squares that are put together.
        how = _orders.adapter_if_square(layer, job.all_saved[0].shape)
        place = f" before `{others[0]}()`"
    if how is None:
        return None
    if is_kernel:
        return _orders.kernel_advice(how) + place
    if isinstance(layer, eqx.nn.Linear) and _form(source) in turned:
        how = "transpose()" if how == "channels_first()" else how
        return f"others beside it were turned, by `ec.adapters.{how}`{place}"
    return None


def _is_ordered(job: Job, own_axes: int) -> bool:
    """Whether an adapter or a view says the order of the axes of a layer, whose weight
    has so many of its own."""
    if any(map(_is_turned_view, job.all_saved)):
        return True
    rank = len(job.all_saved[0].shape)
    for adapter in job.adapters:
        name = _name(adapter)
        if name.startswith("channels") and rank != own_axes:
            continue  # Of layers that are stacked, it takes others for the channels.
        if adapter.own or name in _TURNS:
            return True
        rank = own_axes if name == "take" else rank
        rank += {"stack": 1, "unstack": -1}.get(name, 0)
    return False


def _is_turned_view(saved: LazyArray) -> bool:
    view = _lazy.body_of(saved).view
    axes = [x for x in view.axes if x not in (None, _view.EMPTY)] if view else []
    stored = [x[0] if isinstance(x, tuple) else x for x in axes]
    return stored != sorted(stored)


def _layer(matching: Matching, number: int) -> Any:
    """The Module whose weight a leaf is."""
    path = matching.model.flat.paths[number]
    return _orders.layer_of(matching.model.tree, path)
