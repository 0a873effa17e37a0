"""The adapters that are public. `__init__.py` says what one is."""

import dataclasses
import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _template
from .._kernel._load._lazy import LazyArray
from .._kernel._runtime import _arguments
from . import _deferred, _layouts


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """`apply(saved, like)`; `many` says which of the two, if any, is always a list.

    `own`: it is a function of the user's, which may read.
    """

    text: str
    apply: Callable[[Any, Any], Any]
    many: str | None = None  # "saved" or "like".
    own: bool = False
    # What undoes it, if anything does.
    undo: Callable[[], "Adapter"] | None = None
    # Where nothing does: of what it gave, an array of as many axes as it was given.
    before: Callable[[LazyArray], LazyArray] | None = None

    def __call__(self, saved: object, like: PyTree) -> Any:
        return self.apply(saved, like)

    def __repr__(self) -> str:
        return self.text


def cast() -> Adapter:
    """To the dtype of the model's leaf: floats to floats, and ints to ints that hold
    every value.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://cast", jnp.ones(2))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.cast())
        >>> ec.graft(jnp.zeros(2, jnp.bfloat16), "memory://cast", [pair])[0]
        Array([1, 1], dtype=bfloat16)

        ```
    """
    return Adapter("cast()", lambda saved, like: saved.astype(like.dtype))


@_arguments.checked()
def transpose(*axes: int) -> Adapter:
    """The axes in another order, as of `numpy.transpose`; reversed by default.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://transpose", jnp.ones((2, 3)))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.transpose())
        >>> ec.graft(jnp.zeros((3, 2)), "memory://transpose", [pair])[0].shape
        (3, 2)

        ```
    """
    text = f"transpose({', '.join(map(str, axes))})"
    undo = lambda: transpose(*np.argsort([axis % len(axes) for axis in axes]).tolist())
    apply = lambda saved, like: saved.transpose(*axes)
    return Adapter(text, apply, undo=undo)


@_arguments.checked()
def take(index: int | slice, axis: int = 0) -> Adapter:
    """One index or a slice along an axis: one member of an ensemble that was made by
    `eqx.filter_vmap`, one layer of a scanned stack, some rows.

    **Arguments:**

    - `index`: an integer, which drops the axis, or a slice.
    - `axis`: which axis.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://take", jnp.arange(6.).reshape(3, 2))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.take(1))
        >>> ec.graft(jnp.zeros(2), "memory://take", [pair])[0]
        Array([2., 3.], dtype=float32)

        ```
    """

    def apply(saved: LazyArray, like: PyTree) -> LazyArray:
        return _deferred.take_along(saved, axis, index)

    def before(made: LazyArray) -> LazyArray:
        at = _deferred.axis_of(len(made.shape) + 1, axis)
        return made[(*[slice(None)] * at, None)]

    text = f"take({index}, axis={axis})"
    return Adapter(text, apply, before=None if isinstance(index, slice) else before)


@_arguments.checked()
def concatenate(axis: int = 0) -> Adapter:
    """Several nodes of the checkpoint as one of the model: separate projections to a
    fused one. The checkpoint's side of the pair gives the list.

    **Arguments:**

    - `axis`: along which axis.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> saved = {"q": jnp.ones((2, 3)), "k": jnp.zeros((2, 3))}
        >>> ec.tree_serialise_leaves("memory://qk", saved)
        >>> pair = (lambda m: m, lambda c: [c.q, c.k], ec.adapters.concatenate())
        >>> ec.graft(jnp.zeros((4, 3)), "memory://qk", [pair])[0].shape
        (4, 3)

        ```
    """
    text = f"concatenate(axis={axis})"
    apply = lambda saved, like: _deferred.concatenate(saved, axis)
    return Adapter(text, apply, "saved", undo=lambda: split(axis))


@_arguments.checked()
def split(axis: int = 0) -> Adapter:
    """One node of the checkpoint as several of the model, whose leaves say how much
    each one gets: a fused projection to separate ones. The model's side of the pair
    gives the list, and all of the saved array has to be used.

    **Arguments:**

    - `axis`: along which axis.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://fused", {"qk": jnp.ones((4, 3))})
        >>> model = {"q": jnp.zeros((2, 3)), "k": jnp.zeros((2, 3))}
        >>> pair = (lambda m: [m["q"], m["k"]], "qk", ec.adapters.split())
        >>> ec.graft(model, "memory://fused", [pair])[0]["k"].shape
        (2, 3)

        ```
    """

    def apply(saved: LazyArray, likes: Sequence[Any]) -> list[LazyArray]:
        at = _deferred.axis_of(len(saved.shape), axis)
        sizes = [like.shape[at] if len(like.shape) > at else 0 for like in likes]
        if sum(sizes) != saved.shape[at]:
            raise ValueError(
                f"the model's leaves have {' + '.join(map(str, sizes))} along axis "
                f"{axis}, and the saved one {saved.shape[at]}"
            )
        ends = it.pairwise([0, *it.accumulate(sizes)])
        return [_deferred.take_along(saved, axis, slice(*x)) for x in ends]

    text = f"split(axis={axis})"
    return Adapter(text, apply, "like", undo=lambda: concatenate(axis))


@_arguments.checked()
def stack(axis: int = 0) -> Adapter:
    """Several nodes of the checkpoint, such as the layers of a list, as one node of
    stacked leaves, as `eqx.filter_vmap` makes for `jax.lax.scan`.

    The checkpoint's side of the pair is the sequence, or a slice of it:
    `lambda c: c.layers[:6]`. The keys of a dict are in the order of texts, `layer_10`
    before `layer_2`, which is an error. List its values by number: `lambda c:
    [c.layers[f"layer_{i}"] for i in range(12)]`.

    **Arguments:**

    - `axis`: the new axis.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://layers", [jnp.ones(3), jnp.zeros(3)])
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.stack())
        >>> ec.graft(jnp.zeros((2, 3)), "memory://layers", [pair])[0].shape
        (2, 3)

        ```
    """
    text = f"stack(axis={axis})"
    apply = lambda saved, like: _deferred.stack(saved, axis)
    return Adapter(text, apply, "saved", undo=lambda: unstack(axis=axis))


def _are_numbers(x: object) -> bool:
    items = x.tolist() if isinstance(x, (np.ndarray, jax.Array)) else x
    return isinstance(items, Sequence) and all(
        # A mask says something else.
        isinstance(i, (int, np.integer)) and not isinstance(i, bool)
        for i in items
    )


_ONLY = _arguments.Rule("a list of numbers of nodes, such as `[0, 2]`", _are_numbers)


@_arguments.checked(only=_arguments.optional(_ONLY))
def unstack(only: Sequence[int] | None = None, axis: int = 0) -> Adapter:
    """One node of stacked leaves as several nodes of the model, such as a list of
    layers: the inverse of [`stack`][].

    **Arguments:**

    - `only`: which ones, in the order of the model's; all of them by default.
    - `axis`: the axis that they are stacked along.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://stacked", jnp.arange(6.).reshape(3, 2))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.unstack(only=[0, 2]))
        >>> ec.graft([jnp.zeros(2), jnp.zeros(2)], "memory://stacked", [pair])[0]
        [Array([0., 1.], dtype=float32), Array([4., 5.], dtype=float32)]

        ```
    """

    def apply(saved: LazyArray, likes: Sequence[Any]) -> list[LazyArray]:
        at = _deferred.axis_of(len(saved.shape), axis)
        which = range(saved.shape[at]) if only is None else only
        if len(which) != len(likes):
            raise ValueError(
                f"the model has {len(likes)} nodes for {len(which)} "
                f"{'that are stacked' if only is None else 'in `only`'}"
                + (": say which with `only`" if only is None else "")
            )
        return [_deferred.take_along(saved, axis, int(i)) for i in which]

    shown = "" if only is None else f"only={list(only)}, "
    # Of some of them only, nothing says what the others were.
    undo = (lambda: stack(axis)) if only is None else None
    return Adapter(f"unstack({shown}axis={axis})", apply, "like", undo=undo)


def channels_first() -> Adapter:
    """Kernels whose channels are the last axes, as in flax, Haiku and Keras: of a
    convolution `[height, width, in, out]` to `[out, in, height, width]`, with any
    number of axes; of a dense layer `[in, out]` to `[out, in]`. A bias stays as it is.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://hwio", jnp.ones((3, 3, 4, 8)))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.channels_first())
        >>> ec.graft(jnp.zeros((8, 4, 3, 3)), "memory://hwio", [pair])[0].shape
        (8, 4, 3, 3)

        ```
    """
    apply = lambda saved, like: _layouts.moved(saved, True)
    return Adapter("channels_first()", apply, undo=channels_last)


def channels_last() -> Adapter:
    """The inverse of [`channels_first`][]: `[out, in, height, width]` to `[height,
    width, in, out]`.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://oihw", jnp.ones((8, 4, 3, 3)))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.channels_last())
        >>> ec.graft(jnp.zeros((3, 3, 4, 8)), "memory://oihw", [pair])[0].shape
        (3, 3, 4, 8)

        ```
    """
    apply = lambda saved, like: _layouts.moved(saved, False)
    return Adapter("channels_last()", apply, undo=channels_first)


def unit_axes() -> Adapter:
    """The axes of one element that the model's leaf has: the bias of a convolution is
    `[n]` in most libraries, and `[n, 1, 1]` in Equinox. It is its own inverse.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://bias", jnp.ones(8))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.unit_axes())
        >>> ec.graft(jnp.zeros((8, 1, 1)), "memory://bias", [pair])[0].shape
        (8, 1, 1)

        ```
    """
    return Adapter("unit_axes()", _layouts.with_axes_of, undo=unit_axes)


@_arguments.checked(groups=_arguments.integer(1))
def conv_transpose(groups: int = 1) -> Adapter:
    """The weight of a transposed convolution of PyTorch as `eqx.nn.ConvTranspose` has
    it: inputs and outputs are exchanged, and the kernel is turned round. With as many
    channels in as out the shape is the same either way. A bias stays as it is. It is
    its own inverse.

    **Arguments:**

    - `groups`: as the layer has them.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://up", jnp.ones((4, 8, 3, 3)))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.conv_transpose())
        >>> ec.graft(jnp.zeros((8, 4, 3, 3)), "memory://up", [pair])[0].shape
        (8, 4, 3, 3)

        ```
    """
    shown = f"conv_transpose({f'groups={groups}' if groups > 1 else ''})"
    apply = lambda saved, like: _layouts.conv_transpose(saved, groups)
    return Adapter(shown, apply, undo=lambda: conv_transpose(groups))


_HEADS = _arguments.integer(1)
_KV_HEADS = _arguments.optional(_HEADS)


@_arguments.checked(heads=_HEADS, kv_heads=_KV_HEADS)
def qkv_blocks(heads: int, kv_heads: int | None = None, axis: int = 0) -> Adapter:
    """A fused projection in which each head has its query, its key and its value by
    turns. It becomes one of all queries, then all keys, then all values. GPT-NeoX,
    BLOOM and Megatron have the first. [`split`][] may come after it. It is for the
    weight and the bias.

    **Arguments:**

    - `heads`: how many heads of queries there are.
    - `kv_heads`: how many of keys and values, if fewer: each has its queries before it,
        as in Falcon and InternLM2.
    - `axis`: along which axis they are: 1 for a weight `[in, out]`.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://heads", jnp.arange(6.))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.qkv_blocks(heads=2))
        >>> ec.graft(jnp.zeros(6), "memory://heads", [pair])[0]
        Array([0., 3., 1., 4., 2., 5.], dtype=float32)

        ```
    """
    return _qkv(False, heads, kv_heads, axis)


@_arguments.checked(heads=_HEADS, kv_heads=_KV_HEADS)
def qkv_interleaved(heads: int, kv_heads: int | None = None, axis: int = 0) -> Adapter:
    """The inverse of [`qkv_blocks`][].

    **Arguments:**

    - `heads`, `kv_heads`, `axis`: as there.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://blocks", jnp.arange(6.))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.qkv_interleaved(heads=2))
        >>> ec.graft(jnp.zeros(6), "memory://blocks", [pair])[0]
        Array([0., 2., 4., 1., 3., 5.], dtype=float32)

        ```
    """
    return _qkv(True, heads, kv_heads, axis)


def _qkv(is_back: bool, heads: int, kv_heads: int | None, axis: int) -> Adapter:
    groups = heads if kv_heads is None else kv_heads
    if heads % groups:
        raise ValueError(f"`heads={heads}` is no multiple of `kv_heads={kv_heads}`.")

    def order(saved: LazyArray) -> np.ndarray:
        rows = _layouts.rows_of(saved, heads + 2 * groups, axis, "heads")
        return _layouts.blocks(heads, groups, rows)

    name = "qkv_interleaved" if is_back else "qkv_blocks"
    given = f"heads={heads}" + (f", kv_heads={kv_heads}" if kv_heads else "")
    undo = lambda: _qkv(not is_back, heads, kv_heads, axis)
    return _reordering(name, given, order, is_back, axis, undo)


def _reordering(
    name: str,
    given: str,
    order: Callable[[LazyArray], np.ndarray],
    is_back: bool,
    axis: int,
    undo: Callable[[], Adapter],
) -> Adapter:
    """Another order of rows; `is_back`: from that order."""

    def apply(saved: LazyArray, like: PyTree) -> LazyArray:
        rows = np.argsort(order(saved)) if is_back else order(saved)
        take = lambda arrays: np.take(arrays[0], rows, axis)
        return _deferred.later([saved], take, saved.shape, saved.dtype)

    shown = given + (f", axis={axis}" if axis else "")
    return Adapter(f"{name}({shown})", apply, undo=undo)


_SIZE = _arguments.optional(_arguments.integer(2))


@_arguments.checked(heads=_HEADS, size=_SIZE)
def rotary_halves(heads: int, size: int | None = None, axis: int = 0) -> Adapter:
    """A projection to queries or keys for other rotary positions. It was made for those
    that turn pairs of neighbours (Llama as Meta has it, GPT-J). It becomes one for
    those that turn the first half with the second
    (`eqx.nn.RotaryPositionalEmbedding`, Hugging Face's Llama).

    **Arguments:**

    - `heads`: how many heads this projection has: keys may have fewer.
    - `size`: how many numbers of each head are turned, from the first; all by default.
    - `axis`: along which axis they are: 1 for a weight `[in, out]`.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://pairs", jnp.arange(4.))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.rotary_halves(heads=1))
        >>> ec.graft(jnp.zeros(4), "memory://pairs", [pair])[0]
        Array([0., 2., 1., 3.], dtype=float32)

        ```
    """
    return _rotary(False, heads, size, axis)


@_arguments.checked(heads=_HEADS, size=_SIZE)
def rotary_pairs(heads: int, size: int | None = None, axis: int = 0) -> Adapter:
    """The inverse of [`rotary_halves`][].

    **Arguments:**

    - `heads`, `size`, `axis`: as there.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://halves", jnp.arange(4.))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.rotary_pairs(heads=1))
        >>> ec.graft(jnp.zeros(4), "memory://halves", [pair])[0]
        Array([0., 2., 1., 3.], dtype=float32)

        ```
    """
    return _rotary(True, heads, size, axis)


def _rotary(is_back: bool, heads: int, size: int | None, axis: int) -> Adapter:
    def order(saved: LazyArray) -> np.ndarray:
        rows = _layouts.rows_of(saved, heads, axis, "heads")
        turned = rows if size is None else size
        if turned % 2 or turned > rows:
            raise ValueError(f"{turned} of the {rows} numbers of a head are no pairs")
        return _layouts.halves(heads, rows, turned)

    name = "rotary_pairs" if is_back else "rotary_halves"
    given = f"heads={heads}" + (f", size={size}" if size else "")
    undo = lambda: _rotary(not is_back, heads, size, axis)
    return _reordering(name, given, order, is_back, axis, undo)


_ORDER = _arguments.Rule(
    "the letters of gates, each once, such as `ifgo`",
    lambda x: isinstance(x, str),
    lambda x: len(x) == len({*x}) > 1,
)


@_arguments.checked(saved=_ORDER, wanted=_ORDER)
def gates(saved: str, wanted: str = "ifgo", axis: int = 0) -> Adapter:
    """The gates of a recurrent cell in another order. `eqx.nn.LSTMCell` has `ifgo` (the
    input, the forget gate, the cell, the output), as PyTorch and Keras have; Haiku
    `igfo`, ONNX `iofg`. `eqx.nn.GRUCell` has `rzn` (the reset, the update, the new
    state), as PyTorch has; Keras and ONNX `zrn`.

    **Arguments:**

    - `saved`: the order in the checkpoint, a letter for each gate.
    - `wanted`: the order in the model.
    - `axis`: along which axis they are: 1 for a weight `[in, out]`.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://gates", jnp.arange(4.))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.gates("igfo"))
        >>> ec.graft(jnp.zeros(4), "memory://gates", [pair])[0]
        Array([0., 2., 1., 3.], dtype=float32)

        ```
    """
    if {*saved} != {*wanted}:
        raise ValueError(f"`saved` and `wanted` name other gates: {saved}, {wanted}.")

    rows = lambda x: _layouts.rows_of(x, len(saved), axis, "gates")
    order = lambda x: _layouts.gates(saved, wanted, rows(x))
    given = f"{saved!r}, {wanted!r}"
    undo = lambda: gates(wanted, saved, axis)
    return _reordering("gates", given, order, False, axis, undo)


def rows(fill: object = None) -> Adapter:
    """Fewer rows than were saved, the first ones; or more, the new ones filled as you
    say: the embedding of another vocabulary. As many rows stay as they are.

    **Arguments:**

    - `fill`: what the new rows hold: a number; an array that broadcasts to them; or a
        function from their shape to one, such as `lambda s: 0.02 * jr.normal(key, s)`.
        Without it, more rows than were saved are an error.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://rows", jnp.ones((1, 2)))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.rows(0.0))
        >>> ec.graft(jnp.zeros((2, 2)), "memory://rows", [pair])[0]
        Array([[1., 1.],
               [0., 0.]], dtype=float32)

        ```
    """

    def apply(saved: LazyArray, like: PyTree) -> LazyArray:
        shape, wanted = tuple(saved.shape), tuple(like.shape)
        if not shape or not wanted or shape[1:] != wanted[1:]:
            return saved  # The shapes themselves are the error then.
        more = wanted[0] - shape[0]
        if more <= 0:
            return saved if more == 0 else saved[: wanted[0]]
        if fill is None:
            raise ValueError(
                f"the model has {more} rows more than were saved: say what they hold, "
                "as in `rows(0.0)`"
            )
        dtype = np.dtype(saved.dtype)
        new = (more, *wanted[1:])
        value = np.asarray(fill(new) if callable(fill) else fill)
        filled = _filled(value, dtype)
        try:
            new_rows = np.broadcast_to(filled, new)
        except ValueError:
            raise ValueError(
                f"`fill` has the shape {list(value.shape)}, for new rows of the shape "
                f"{list(new)}"
            ) from None
        return _deferred.later(
            [saved], lambda arrays: np.concatenate([arrays[0], new_rows]), wanted, dtype
        )

    shown = "" if fill is None else f"fill={_shown(fill)}"
    # Those that were added are left out again.
    return Adapter(f"rows({shown})", apply, undo=rows)


def _filled(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """**Raises:** `ValueError` for values that the dtype does not hold."""
    is_real = dtype.kind == "c" or not np.iscomplexobj(value)
    with np.errstate(over="ignore", invalid="ignore"):
        out = (value if is_real else np.real(value)).astype(dtype)
    if _template.is_floating(dtype):
        changed = np.isfinite(value) & ~np.isfinite(out)
    else:
        changed = out != value
    if not is_real:
        changed = changed | (np.imag(value) != 0)
    if np.any(changed):
        raise ValueError(
            f"`fill` has {value[changed].flat[0]}, which {dtype}, as which the rows "
            "were saved, does not hold"
        )
    return out


def interpolate(
    method: str = "linear",
    grid: tuple[Sequence[int], Sequence[int]] | None = None,
    prefix: int = 0,
) -> Adapter:
    """Resizes an array to the model's shape, by `jax.image.resize`: embeddings of
    positions. As many positions stay as they are, bit for bit.

    **Arguments:**

    - `method`: `"linear"`, `"cubic"`, or another one of `jax.image.resize`.
    - `grid`: for positions in a plane that are stored in one axis, the shapes of the
        saved and the model's grid, such as `((14, 14), (24, 24))`.
    - `prefix`: how many rows at the start are no positions, and are copied as they are.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://positions", jnp.array([[0.0], [1.0]]))
        >>> pair = (lambda m: m, lambda c: c, ec.adapters.interpolate())
        >>> ec.graft(jnp.zeros((4, 1)), "memory://positions", [pair])[0].ravel()
        Array([0.  , 0.25, 0.75, 1.  ], dtype=float32)

        ```
    """

    def apply(saved: LazyArray, like: PyTree) -> LazyArray:
        shape, wanted = tuple(saved.shape), tuple(like.shape)
        if shape == wanted and grid is None:
            return saved
        if len(shape) != len(wanted) or not shape:
            raise ValueError("only arrays with as many axes are interpolated")
        if not jnp.issubdtype(saved.dtype, jnp.floating):
            raise ValueError("only floating arrays are interpolated")
        if jax.dtypes.canonicalize_dtype(saved.dtype) != saved.dtype:
            raise ValueError(f"JAX computes with {saved.dtype} under `jax_enable_x64`")
        old, new = (shape[0] - prefix, *shape[1:]), (wanted[0] - prefix, *wanted[1:])
        if min(old[0], new[0]) < 1:
            raise ValueError(f"`prefix={prefix}` leaves no positions")
        if grid is not None:
            for side, have, which in ((grid[0], old, "saved"), (grid[1], new, "model")):
                if math.prod(side) != have[0]:
                    raise ValueError(
                        f"`grid` gives the {which} side {'x'.join(map(str, side))} "
                        f"positions, and it has {have[0]} after `prefix={prefix}`"
                    )
            old, new = (*grid[0], *old[1:]), (*grid[1], *new[1:])
        if old == new:
            return saved
        dtype = np.dtype(saved.dtype)

        def resize(arrays: list[np.ndarray]) -> np.ndarray:
            (array,) = arrays
            rest = array[prefix:].reshape(old)
            if dtype.itemsize < 4:
                rest = rest.astype(np.float32)
            resized = np.asarray(jax.image.resize(rest, new, method))
            resized = resized.reshape(wanted[0] - prefix, *wanted[1:]).astype(dtype)
            return np.concatenate([array[:prefix], resized])

        return _deferred.later([saved], resize, wanted, dtype)

    shown = [repr(method)]
    shown += [f"grid={grid}"] if grid is not None else []
    shown += [f"prefix={prefix}"] if prefix else []
    return Adapter(f"interpolate({', '.join(shown)})", apply)


def _shown(x: object) -> str:
    if callable(x):
        return getattr(x, "__name__", "...")
    return repr(x) if isinstance(x, (bool, int, float, complex)) else "..."
