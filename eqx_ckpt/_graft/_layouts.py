"""A warning of leaves whose shapes fit although libraries store such layers in several
ways, of which nobody has said one."""

import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._runtime import _log, _processes
from .._kernel._tree import _folding
from ._adapting import Placed
from ._matching import Matching


# The names that are listed.
_MOST = 8


def warn(matching: Matching, placed: Sequence[Placed]) -> None:
    rows: dict[str, list[tuple[str, str]]] = {}
    turned = {
        _form(name) for x in placed if _is_turned(matching, x) for name in x.job.sources
    }
    for x in placed:
        how = _other(matching, x, turned)
        if how is not None:
            name = matching.model.names[x.number]
            rows.setdefault(how, []).append((name, f"of `{x.job.sources[0]}`"))
    if not rows or not _processes.leads():
        return
    lines = ["The shapes of these leaves fit, and do not say how they are stored:"]
    for how, some in rows.items():
        listed = _folding.fold_rows(some)
        lines += [f"  {name}  {text}: {how}" for name, text in listed[:_MOST]]
    lines.append(
        "  Say it with an adapter in their pair: the one that is named, or `lambda "
        "saved, like: saved` for as it is. See docs/layouts.md."
    )
    _log.warn("\n".join(lines))


def _form(source: str) -> str:
    """The part of a name that leaves of one model have in common: what is before the
    number of a block, and the word for the weight."""
    return f"{re.split('[0-9]', source)[0]} {source.rpartition('.')[2]}"


def _is_turned(matching: Matching, x: Placed) -> bool:
    """Whether a leaf is the weight of a dense layer that an adapter turns."""
    names = {repr(how).partition("(")[0] for how in x.job.adapters}
    is_dense = isinstance(_layer(matching, x.number), eqx.nn.Linear)
    return is_dense and not names.isdisjoint(("transpose", "channels_first"))


def _other(matching: Matching, x: Placed, turned: set[str]) -> str | None:
    """The adapter that a leaf may need which is loaded as it is. `turned` has the forms
    of names whose weights are transposed."""
    made = x.made
    is_whole = isinstance(made, LazyArray) and _lazy.body_of(made).view is None
    if not is_whole or x.job.adapters:
        return None
    layer = _layer(matching, x.number)
    shape = tuple(made.shape)
    source = x.job.sources[0]
    node, _, last = source.rpartition(".")
    if layer is None or node in matching.stored.saved.node_names:
        return None  # Of a Module that was saved as one.
    if isinstance(layer, eqx.nn.ConvTranspose) and len(shape) > 2:
        if shape[0] == shape[1]:
            return "PyTorch's need `ec.adapters.conv_transpose()`"
    elif isinstance(layer, (eqx.nn.Linear, eqx.nn.Conv)) and last in ("kernel", "w"):
        if len(shape) > 1 and shape == (*shape[:-3:-1], *shape[:-2]):
            return (
                "kernels of flax, Keras and Haiku need `ec.adapters.channels_first()`"
            )
    elif isinstance(layer, eqx.nn.Linear) and _form(source) in turned:
        if len(shape) == 2 and shape[0] == shape[1]:
            return "others beside it were turned, by `ec.adapters.transpose()`"
    return None


def _layer(matching: Matching, number: int) -> Any:
    """The Module whose weight a leaf is."""
    path = matching.model.flat.paths[number]
    if not path or getattr(path[-1], "name", None) != "weight":
        return None
    node = matching.model.tree
    for key in path[:-1]:
        if isinstance(key, jtu.GetAttrKey):
            node = getattr(node, key.name)
        elif isinstance(key, jtu.SequenceKey):
            node = node[key.idx]
        elif isinstance(key, jtu.DictKey):
            node = node[key.key]
        else:
            return None
    return node
