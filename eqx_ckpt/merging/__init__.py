"""Methods that merge trees leaf by leaf: averages, interpolation, and sums of what
fine-tunings have changed.

A method computes in float32, or float64 for leaves of float64, and gives the dtype of
the leaf. Those that have a base take it as the `base` of a merge, and call what a tree
differs from it there its task vector: `τ = tree - base`.

Each weight, and each other number, is one for all leaves, or each leaf has its own: by
a mapping of patterns to numbers, `{"*.attn.*": 0.7, "*": 0.3}`, of which the first that
matches counts, or by a list that is spread over the layers, `[0, 0.5, 1]`. In the place
of a number a mapping may have a list. A tuple has one of all these for each tree.
`weights` are a sequence with one for each tree, or one for all. [`Method`][
eqx_ckpt.merging.Method] says what a pattern is, and a layer. You write other methods
with it.
"""

from ._merging import (
    average,
    breadcrumbs,
    dare,
    dare_ties,
    della,
    ema,
    model_stock,
    slerp,
    task_arithmetic,
    ties,
)
from ._methods import MergedLeaf, Method


__all__ = [
    "average",
    "breadcrumbs",
    "dare",
    "dare_ties",
    "della",
    "ema",
    "MergedLeaf",
    "Method",
    "model_stock",
    "slerp",
    "task_arithmetic",
    "ties",
]


def __dir__() -> list[str]:
    return __all__
