"""A leaf to look at: all of it, of a large one a sample, or a slice."""

import math
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np

from .._kernel._format import _grid, _text
from .._kernel._load import _lazy
from .._kernel._load._lazy import LazyArray
from . import _elements


# A leaf of more bytes is read by a sample of about so many, in so many places.
WHOLE, _SAMPLE, _PLACES = 2**26, 2**25, 64


class Sample(NamedTuple):
    """A leaf as it was read: an array, or the value of what is none. `said` is a
    sentence, where that is not all of the leaf."""

    value: Any
    said: str = ""
    size: int = 0


def read_sample(lazy: LazyArray, like: LazyArray | None = None) -> Sample:
    """The leaf; of a large one elements of chunks that are spread over it, or over
    another leaf of its shape, which it is compared with.

    **Raises:** what reading raises.
    """
    template = _lazy.body_of(lazy).template
    kind, nbytes = template.kind, template.nbytes
    size = math.prod(lazy.shape)
    if kind in ("str", "bytes", "key") or template.dtype == "int":
        if nbytes > WHOLE:
            return Sample(None, f"It has {_text.size(nbytes)}, and was not read.")
        value = lazy.read()
        is_key = kind == "key"
        return Sample(np.asarray(jr.key_data(value)) if is_key else value, size=size)
    if nbytes <= WHOLE:
        return Sample(np.asarray(lazy), size=size)
    parts = [lazy[region] for region in _spread(lazy if like is None else like)]
    if not parts:
        return Sample(None, f"A chunk of it is over {_text.size(WHOLE)}.")
    found = _lazy.fetch(parts, True, as_numpy=True)
    value = np.concatenate([np.asarray(x).reshape(-1) for x in found])
    share = f"{value.nbytes / nbytes:.2%}"
    return Sample(
        value,
        f"A sample: {share} of its {_text.size(nbytes)}, read in {len(parts)} places "
        "that are spread evenly. Counts and the norm are estimates.",
        size,
    )


def _spread(lazy: LazyArray) -> list[tuple[slice, ...]]:
    """Regions of whole chunks, evenly over a leaf; none if its chunks are huge."""
    shape, itemsize = lazy.shape, lazy.dtype.itemsize
    body = _lazy.body_of(lazy)
    grain = (1,) * len(shape) if body.chunk_size == 1 else body.template.chunk
    if math.prod(grain) * itemsize > WHOLE:
        return []
    block = _elements.blocks(shape, grain, _SAMPLE // _PLACES // itemsize)
    grid = _grid.grid(shape, block)
    count = max(1, min(_PLACES, _SAMPLE // (math.prod(block) * itemsize)))
    flat = np.unique(np.linspace(0, math.prod(grid) - 1, count).astype(np.int64))
    places = zip(*np.unravel_index(flat, grid))
    return [_grid.region(shape, block, tuple(map(int, place))) for place in places]


def floats(value: object) -> np.ndarray | None:
    """Numbers as floats, complex ones by their absolute value; None if it has none."""
    if isinstance(value, (str, bytes)) or value is None:
        return None
    array = np.asarray(value)
    if array.dtype == object:
        return None
    if array.dtype.kind == "c":
        return np.asarray(np.abs(array))
    is_small = array.dtype.itemsize < 4 or array.dtype == np.float32
    try:
        return array.astype(np.float32 if is_small else np.float64)
    except (TypeError, ValueError):
        return None


def parse_index(text: str) -> tuple[int | slice, ...]:
    """A slice, as NumPy writes it.

    **Raises:** `ValueError` if it is not integers and slices.
    """
    out: list[int | slice] = []
    for part in filter(None, (x.strip() for x in text.split(","))):
        ends = [int(x) if x.strip() else None for x in part.split(":")]
        if len(ends) > 3:
            raise ValueError(f"`{part}` is no slice.")
        out.append(ends[0] if len(ends) == 1 and ends[0] is not None else slice(*ends))
    return tuple(out)
