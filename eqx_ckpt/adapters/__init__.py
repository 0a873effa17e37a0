"""Adapters: what a pair of [`graft`][] does to its leaves on their way into the model.

An adapter is any function `(saved, like) -> array`, where `saved` is a [`LazyArray`][]
and `like` the leaf of the model. It is called for each array of the pair. If it gives a
view of `saved`, that is read with everything else; so all it costs is the bytes of the
view: `lambda saved, like: saved[:, None, None]` adds two axes. Either side of the pair
may be a list of several nodes, where the other is one node. Then it gets a list of
their leaves as `saved`, or as `like` and gives a list. Lists may be in lists.

The functions here make adapters. They read nothing: what they give is lazy. In a list
they are applied one after the other: `[concatenate(), stack(), cast()]` makes one array
of the lists `[[x.q, x.k, x.v] for x in c.layers]`. `concatenate` and `stack` take the
innermost lists of the checkpoint's side, and `unstack` and `split` the outermost of the
model's: `[unstack(), split()]` is the way back. [`inverse`][] finds it.

From `channels_first` to `gates` they are for layers that libraries store in different
ways, often in one shape: see docs/layouts.md.
"""

from ._adapters import (
    Adapter,
    cast,
    channels_first,
    channels_last,
    concatenate,
    conv_transpose,
    gates,
    interpolate,
    qkv_blocks,
    qkv_interleaved,
    rotary_halves,
    rotary_pairs,
    rows,
    split,
    stack,
    take,
    transpose,
    unit_axes,
    unstack,
)


__all__ = [
    "Adapter",
    "cast",
    "channels_first",
    "channels_last",
    "concatenate",
    "conv_transpose",
    "gates",
    "interpolate",
    "qkv_blocks",
    "qkv_interleaved",
    "rotary_halves",
    "rotary_pairs",
    "rows",
    "split",
    "stack",
    "take",
    "transpose",
    "unit_axes",
    "unstack",
]


def __dir__() -> list[str]:
    return __all__
