"""The kinds of leaves, and how a leaf of one kind is made of another."""

from typing import NamedTuple

from .._kernel._format import _template
from .._kernel._format._template import Template
from .._kernel._tree._target import Target


# Whose arrays of two axes are `[in, out]`.
_KERNEL = "kernel"
# The names of weights that are of a layer which multiplies by them.
_WEIGHTS = {"weight", "kernel", "w"}


class LeafKind(NamedTuple):
    """The type of a leaf's numbers, or another kind of leaf; and its shape."""

    what: str
    shape: tuple[int, ...]


def kind(x: Template | Target) -> LeafKind:
    """The kind of a leaf, which each leaf has that may stand for it."""
    if isinstance(x, Target):
        dtype, shape = x.dtype, x.shape
    else:
        is_array = x.kind in _template.ARRAY_KINDS
        dtype = _template.dtype_of(x.dtype) if is_array else None
        shape = x.logical_shape
    what = x.kind if dtype is None else f"array of {_template.number_type(dtype)}"
    return LeafKind(what, shape)


def fits(a: str, saved: LeafKind, b: str, wanted: LeafKind) -> list[str]:
    """The adapters each of which makes a leaf with one name of that with the other: ""
    if it is as it is. Several are the ways in which libraries store such a layer."""
    (what, old), (other, new) = saved, wanted
    if what != other:
        return []
    names = [x.rpartition(".")[2] for x in (a, b)]
    if not _WEIGHTS.issuperset(names) or len(old) < 2:
        return _ways_of_rows(names, old, new)
    first, last = (*old[:-3:-1], *old[:-2]), (*old[2:], *old[1::-1])
    ways = [("channels_first()", first), ("channels_last()", last)]
    if len(old) == 2:
        ways = [("transpose()", first)]
    kernels = [x == _KERNEL for x in names]
    if kernels[0] != kernels[1] and "w" not in names:
        ways = ways[:1] if kernels[0] or len(old) == 2 else ways[1:]
    else:
        ways.insert(0, ("", old))
        if names[0] == names[1] and len(old) > 2 and old == new:
            ways = ways[:1]
    return [how for how, shape in ways if shape == new]


def _ways_of_rows(
    names: list[str], old: tuple[int, ...], new: tuple[int, ...]
) -> list[str]:
    """The ways of `fits` for a leaf that no layer multiplies by, such as a bias. A row
    may have more axes, of length 1, on one side."""
    if old == new:
        return [""]
    one, other = ([n for n in shape if n != 1] for shape in (old, new))
    is_one_axis = one == other and len(one) == 1
    sides = zip(names, (old, new))
    is_matrix = any(x in _WEIGHTS and len(shape) > 1 for x, shape in sides)
    is_row = is_one_axis and not is_matrix and min(len(old), len(new)) == 1
    return ["unit_axes()"] if is_row else []


def turn(saved: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The adapter that orders the axes of the one shape as the other has them, if no
    other one does; else what one has to think about."""
    if [x for x in saved if x != 1] == [x for x in wanted if x != 1]:
        return "unit_axes()"
    leaf = lambda shape: LeafKind("", shape)
    ways = [x for x in fits("kernel", leaf(saved), "w", leaf(wanted)) if x]
    return ways[0] if len(ways) == 1 else "transpose(...)"
