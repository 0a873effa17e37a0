"""The orders in which libraries store the axes of a weight: the adapter from one to
ours, and a warning where a shape fits two of them and nothing says which it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._format import _text
from .._runtime import _log, _processes
from . import _folding


# What flax adds to the name of an array that it has in a variable or in a box.
_BOXES = ".value", ".raw_value"
# The last parts of names of weights that are `[..., in, out]`.
_KERNELS = "kernel", "w"
# At most so many rows are listed for each adapter.
_MOST = 8


def unboxed(name: str) -> str:
    """The name of a leaf as if it was not in a variable of flax."""
    for end in _BOXES:
        name = name.removesuffix(end)
    return name


def is_kernel(name: str) -> bool:
    return unboxed(name).rpartition(".")[2] in _KERNELS


def layer_of(tree: Any, path: Sequence[Any]) -> Any:
    """The node of a tree whose weight the leaf at a path is; None if it is none."""
    if not path or getattr(path[-1], "name", None) != "weight":
        return None
    for key in path[:-1]:
        if isinstance(key, jtu.GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, jtu.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jtu.DictKey):
            tree = tree[key.key]
        else:
            return None
    return tree


def rank(layer: Any) -> int:
    """The number of axes of the weight of one layer, without those along which layers
    are stacked; 0 for all but the layers of Equinox whose weights libraries store in
    several orders."""
    if isinstance(layer, eqx.nn.Linear):
        return 2
    is_conv = isinstance(layer, (eqx.nn.Conv, eqx.nn.ConvTranspose))
    return layer.num_spatial_dims + 2 if is_conv else 0


def _channels_first(axes: Sequence[int]) -> tuple[int, ...]:
    """`[..., in, out]` as `[out, in, ...]`."""
    return (*axes[:-3:-1], *axes[:-2])


def adapter_if_square(layer: Any, shape: Sequence[int]) -> str | None:
    """The adapter that moves the channels of a weight from the end to the front, if
    that leaves its shape as it is: then the shape does not tell whether it is needed.
    None if not."""
    own_axes = rank(layer)
    first = len(shape) - own_axes  # The axes before are those of stacked layers.
    own = tuple(shape[max(first, 0) :])
    if not own_axes or first < 0 or own != _channels_first(own):
        return None
    if not first:
        return "channels_first()"
    axes = tuple(range(len(shape)))
    order = *axes[:first], *_channels_first(axes[first:])
    return f"transpose({', '.join(map(str, order))})"


def adapter_between(saved: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
    """The adapter that makes a leaf of the one shape one of the other, as libraries
    store these: it moves the channels, or only axes of one element differ. None if
    neither is so."""
    some, others = ([n for n in shape if n != 1] for shape in (saved, wanted))
    is_moved = len(saved) > 1 and wanted == _channels_first(saved)
    # If only axes of one element have moved, `unit_axes` is enough. Of a 1 x 1 kernel
    # with as many channels in as out both would fit, and the channels move.
    if is_moved and (some != others or len(some) > 1):
        return "transpose()" if len(saved) == 2 else "channels_first()"
    return "unit_axes()" if some == others else None


def kernel_advice(adapter: str) -> str:
    """The advice for a kernel that needs this adapter."""
    return f"kernels of flax, Keras and Haiku need `ec.adapters.{adapter}`"


def warn_of_unknown_orders(
    rows: Mapping[str, Sequence[tuple[str, str]]], advice: str
) -> None:
    """Warns of leaves whose order nothing says, if there are any. `rows`: by what
    leaves may need, the name of each and a text on where it is from."""
    if not rows or not _processes.leads():
        return
    lines = ["The shapes of these leaves fit, and do not say how they are stored:"]
    for need, leaves in rows.items():
        listed = [f"  {x}  {text}: {need}" for x, text in _folding.fold_rows(leaves)]
        lines += _text.first(listed, _MOST)
    _log.warn("\n".join([*lines, f"  {advice} See docs/layouts.md."]))
