"""Leaves, differences and runs as plots of matplotlib, by the habits of that field."""

import functools as ft
import math
from typing import Any

import numpy as np

from .._edit import _sample
from .._edit._difference import Diff
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from .._kernel._run import _manager
from .._kernel._run._manager import CheckpointManager
from .._show import _curves


# Of a report, so many leaves; of metrics, so many.
_BARS, _MOST_CURVES = 30, 10


def plot(x: LazyArray | Diff | CheckpointManager, ax: Any = None) -> Any:
    """Draws into axes, those that are current by default, and returns them."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise ImportError(
            "Plots are drawn with matplotlib, which is not installed. Install it with "
            "`pip install 'eqx_ckpt[plot]'`."
        ) from e
    ax = plt.gca() if ax is None else ax
    _draw(x, ax)
    return ax


@ft.singledispatch
def _draw(x: object, ax: Any) -> None:
    raise NotImplementedError(type(x))


@_draw.register
def _leaf(x: LazyArray, ax: Any) -> None:
    """Draws one axis as a line, two as a picture, else a histogram, like xarray."""
    is_large = math.prod(x.shape) * x.dtype.itemsize > _sample.WHOLE
    leaf = _lazy.stored_leaf(x)
    is_sampled = is_large and leaf is not None and leaf.view is None
    sample = _sample.read_sample(x) if is_sampled else _sample.Sample(np.asarray(x))
    values = _sample.floats(sample.value)
    if values is None or not values.size:
        raise ValueError(f"The leaf `{x.name}` has no numbers to plot.")
    title = x.name + " (a sample)" * bool(sample.said)
    ax.set_title(title)
    if values.ndim == 1 and not sample.said:
        ax.plot(values)
        ax.set(xlabel="index", ylabel="value")
    elif values.ndim == 2:
        finite = values[np.isfinite(values)]
        lo, hi = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        reach = max(-lo, hi)
        colours: dict[str, Any] = {"cmap": "viridis"}
        if lo < 0 < hi:
            colours = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach}
        image = ax.imshow(values, aspect="auto", interpolation="nearest", **colours)
        ax.figure.colorbar(image, ax=ax)
        ax.set(xlabel="column", ylabel="row")
    else:
        ax.hist(values[np.isfinite(values)].ravel(), bins=64)
        ax.set(xlabel="value", ylabel="count")


@_draw.register
def _difference(x: Diff, ax: Any) -> None:
    known = {n: c.relative for n, c in x.changed.items() if c.relative is not None}
    if x.changed and not known:
        raise ValueError(
            "The differences of these leaves are not known. Pass `values=True` to "
            "`diff`."
        )
    order = sorted(
        known, key=lambda n: -math.inf if math.isnan(known[n]) else -known[n]
    )
    names = order[:_BARS]
    ax.barh(range(len(names)), [known[name] for name in names])
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    more = f", the largest {_BARS} of {len(known)}" * (len(known) > _BARS)
    ax.set(xlabel="relative difference (L2)", title=f"{x.a} and {x.b}{more}")


@_draw.register
def _run(x: CheckpointManager, ax: Any) -> None:
    curves = _curves.curves(_curves.lines(x.history())[:1])
    for name, lines in list(curves.items())[:_MOST_CURVES]:
        ax.plot(*zip(*lines[0]), marker=".", label=name)
    if curves:
        ax.legend()
    ax.set(xlabel="step", title=str(_manager.steps_of(x).root))
