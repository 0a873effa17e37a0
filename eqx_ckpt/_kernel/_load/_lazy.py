"""`LazyArray`: the abstract value of a stored leaf, which can be read on purpose."""

import itertools as it
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TYPE_CHECKING

import numpy as np

from .. import _rooms
from .._format import _template, _view
from .._format._leaves import LeafRecord
from .._format._view import View
from .._runtime import _arguments, _elsewhere, _handlers
from .._runtime._processes import Processes
from .._storage import _context
from .._tree import _folding, _leaf, _select, _target
from .._tree._target import Target
from . import _kept, _read_leaves, _wording
from ._leaf_body import LeafBody, StoredLeaf
from ._load_options import LoadOptions
from ._read_leaves import ReadPlan
from ._reads import LeafRead
from ._source import Source


class LazyArray(_target.Unread):
    """A leaf of a checkpoint that has been opened and not read.

    It is a `jax.ShapeDtypeStruct`: `jax.eval_shape`, `jax.jit(...).lower`, `tree_map`,
    `eqx.tree_at` and `eqx.tree_pprint` take it as the abstract leaf that it is. It is
    read by `.read()`, `np.asarray`, `jnp.asarray` and `materialise`, and by nothing
    else: arithmetic on it, a jitted call, or another function of `jax.numpy` that needs
    its numbers, is a `TypeError`. A number that does not fit into a dtype is a
    `RuntimeError`, as where `jnp.asarray` narrows to 32 bits.

    Indexing as in NumPy (integers, slices, `...`, `None`, and an index array or a mask
    along one axis), `.T`, `.transpose` and `.astype` give lazy views. They read the
    chunks that they touch.

    **Attributes:** `shape`, `dtype`, `sharding`, `weak_type` as of a
    `jax.ShapeDtypeStruct`; `name`, its dotted name; `store`, its
    `tensorstore.TensorStore`; `url`, a URL that `tensorstore.open` takes.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://lazy", jnp.arange(12.).reshape(3, 4))
        >>> w = ec.open("memory://lazy").tree
        >>> w
        LazyArray(%root: f32[3,4])
        >>> w[1:, 2].read()
        Array([ 6., 10.], dtype=float32)
        >>> w[[2, 0, 2], 0].read()
        Array([8., 0., 8.], dtype=float32)

        ```
    """

    __slots__ = ("_body",)

    _body: LeafBody

    def __init__(self, body: LeafBody):
        target = body.target
        if target.kind in ("jax", "numpy", "generic"):
            shape, dtype = target.shape, target.dtype
        elif target.kind == "key":
            assert target.impl is not None
            shape, dtype = target.shape, _leaf.key_dtype(target.impl)
        elif target.kind in ("str", "bytes"):
            shape, dtype = body.template.shape, np.dtype(np.uint8)
        else:
            shape, dtype = (), _leaf.abstract_dtype(body.template)
        super().__init__(shape, dtype, sharding=target.sharding, weak_type=target.weak)
        object.__setattr__(self, "_body", body)

    @property
    def name(self) -> str:
        return self._body.name

    @property
    def _target(self) -> Target:
        return self._body.target

    @property
    @_handlers.pass_through
    def store(self) -> Any:
        """The `tensorstore.TensorStore` of the stored array, with the view's indexing.

        Where TensorStore lacks the dtype, and for keys, str and bytes, this is the
        array of their bytes or words: see FORMAT.md.

        A TensorStore that you hold reads what is at the path by then: also another
        checkpoint, once this one was replaced.

        **Raises:** `ValueError` for an array that [`lazy`][] computes, or that was cast
        twice, and where TensorStore has no driver for the store. `RuntimeError` if the
        checkpoint was replaced or deleted since it was opened.
        """
        return self._body.store()

    @property
    def url(self) -> str:
        """The URL of the stored array, without the view's indexing.

        **Raises:** `ValueError` for an array that [`lazy`][] computes, or that was cast
        twice, for one in a zip, and where [`Checkpoint.spec`][] has none.
        """
        return self._body.url()

    @_arguments.checked()
    def read(self, *, verify: bool = True) -> Any:
        """Reads the leaf: a jax.Array, or what was saved if that was something else.

        **Arguments:**

        - `verify`: whether to check the digests of the chunks that are touched.

        **Raises:** `RuntimeError` if bytes are missing or are not those that were
        saved, or the checkpoint was replaced or deleted since it was opened.
        """
        return fetch([self], verify)[0]

    @_handlers.pass_through
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        body = self._body
        if body.unreadable is not None:
            body.check_whole()
        if self._target.kind in ("key", "str", "bytes"):
            raise TypeError(
                f"The leaf `{self.name}` is a {self._target.kind}, which NumPy has no "
                "array of. Use `.read()`."
            )
        if copy is False:
            raise ValueError(f"Reading the leaf `{self.name}` makes a new array.")
        # Python's ints have any size.
        is_int = body.template.dtype == "int"
        out = fetch([on_host(self, np.object_ if is_int else None)], True)[0]
        return out if dtype is None else self._cast(out, np.dtype(dtype))

    def _cast(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Its numbers in a dtype that NumPy is asked for, or JAX: `jnp.asarray` asks
        for 32 bits unless x64 is enabled.

        **Raises:** `RuntimeError` for ints that the dtype does not have, and for finite
        numbers that would become infinite.
        """
        saved = np.dtype(np.int64) if array.dtype.hasobject else array.dtype
        if _template.number_type(saved) != _template.number_type(dtype):
            return array.astype(dtype)
        try:
            return _leaf.cast(array, dtype)
        except _leaf.UnheldError as e:
            what = f"the leaf `{self.name}`"
            raise _read_leaves.lost_error(what, {self.name: str(e)}) from e

    def __getitem__(self, key: Any) -> "LazyArray":
        return self._viewed(self._own_view().take(key))

    @property
    def T(self) -> "LazyArray":
        return self.transpose()

    def transpose(self, *axes: Any) -> "LazyArray":
        """A view with its axes in another order, as in NumPy; reversed by default."""
        view = self._own_view()
        if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
            axes = tuple(axes[0])
        return self._viewed(view.transpose(axes or None))

    def _own_view(self) -> View:
        """**Raises:** `ValueError` for a leaf that is not all there."""
        self._body.check_whole()
        return self._body.view or _view.whole(self._body.template.shape)

    def _viewed(self, view: View) -> "LazyArray":
        target, shape = self._target, view.shape
        if target.kind in ("key", "str", "bytes"):
            raise TypeError(
                f"The leaf `{self.name}` is a {target.kind}: read it to index it."
            )
        sharding = target.sharding if target.shape == shape else None
        target = target._replace(registered=None, shape=shape, sharding=sharding)
        return _changed(self, view, target)

    def astype(self, dtype: Any) -> "LazyArray":
        """A view whose numbers are cast as they are read: floats to floats, and ints
        to ints. What does not hold every value is a `RuntimeError`. A cast of a cast
        rounds twice, as in NumPy."""
        wanted = np.dtype(dtype)
        if self._target.kind not in _template.ARRAY_KINDS:
            raise TypeError(f"The leaf `{self.name}` is not an array.")
        target = self._target._replace(
            dtype=wanted, weak=False, cast=True, registered=None
        )
        template = self._body.template
        problem = _target.misfit(template._replace(shape=target.shape), target)
        if problem is not None:
            raise TypeError(
                f"The leaf `{self.name}` is {_folding.show(template)}, and "
                f"is not cast to {wanted}: floats become floats, ints ints."
            )
        is_exact = np.can_cast(_leaf.saved_dtype(template), self.dtype, "safe")
        lazy = self if is_exact or wanted == self.dtype else _rooms.as_read(self)
        return retargeted(lazy, target)

    def update(self, **kwargs: Any) -> "LazyArray":
        """Changes fields like `jax.ShapeDtypeStruct.update`, but not the shape. The
        result is lazy."""
        out = self
        if "dtype" in kwargs and kwargs["dtype"] != self.dtype:
            out = out.astype(kwargs["dtype"])
        target = out._target
        for field, name in (("sharding", "sharding"), ("weak", "weak_type")):
            if name in kwargs:
                target = target._replace(**{field: kwargs[name]})
        if tuple(kwargs.get("shape", self.shape)) != self.shape:
            raise ValueError(f"The leaf `{self.name}` has shape {self.shape}.")
        if set(kwargs) - {"shape", "dtype", "sharding", "weak_type"}:
            raise TypeError(f"unknown fields in {sorted(kwargs)}")
        return retargeted(out, target)

    # Two leaves of one shape must never pass for one: `filter_jit` would compile the
    # weights of the first into a call with the second.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    # It has no `__jax_array__`: half of the functions of `jax.numpy` would read it
    # without being told to, and the others refuse it all the same.
    __array_ufunc__ = None

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"The leaf `{self.name}` has not been read. Use `.read()` or "
            "`ec.materialise`; or `ec.lazy`, which computes with it as it is read."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _elsewhere.unknown_attribute(self, "LazyArray", name)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    @_handlers.pass_through
    def plot(self, ax: Any = None) -> Any:
        """Reads the leaf and draws it with matplotlib (`eqx_ckpt[plot]`).

        One axis is a line, two are a picture, and all else is a histogram. A leaf of
        over 64 MiB is drawn as a histogram of a sample.

        **Arguments:**

        - `ax`: the axes to draw into; those that are current by default.

        **Returns:** the axes.

        **Raises:** `ValueError` or `TypeError` if it has no numbers; and as `read`.

        !!! example

            ```python
            >>> import eqx_ckpt as ec, jax.numpy as jnp
            >>> ec.tree_serialise_leaves("memory://plot", {"w": jnp.ones((3, 4))})
            >>> ec.open("memory://plot")["w"].plot().get_title()
            'w'

            ```
        """
        return _rooms.plot(self, ax)

    def _repr_html_(self) -> str:
        return _rooms.html(self)

    def __repr__(self) -> str:
        return f"LazyArray({self.name}: {shown(self)})"

    __str__ = __repr__

    def __copy__(self) -> "LazyArray":
        return self

    def __deepcopy__(self, memo: Any) -> "LazyArray":
        return self

    def __reduce__(self) -> Any:
        return LazyArray, (self._body,)


for _operator in _select.OPERATORS:
    if f"__{_operator}__" not in vars(LazyArray):
        setattr(LazyArray, f"__{_operator}__", LazyArray._refuse)


def body_of(lazy: LazyArray) -> LeafBody:
    """The content of a lazy array, which rooms ask instead of it."""
    return lazy._body


def stored_leaf(lazy: LazyArray) -> StoredLeaf | None:
    """The leaf of a checkpoint that a lazy array is; None for what is computed."""
    body = lazy._body
    return body if isinstance(body, StoredLeaf) else None


def known_leaf(lazy: LazyArray) -> StoredLeaf:
    """The `stored_leaf` of a lazy array that is known not to be computed."""
    body = lazy._body
    assert isinstance(body, StoredLeaf)
    return body


def is_as_stored(lazy: LazyArray) -> bool:
    """Whether a lazy array is a leaf as its checkpoint has it: no slice, no cast."""
    leaf = stored_leaf(lazy)
    if leaf is None or leaf.view is not None:
        return False
    return leaf.target == _target.own_target(leaf.record.whole)


def stored_in(lazies: Iterable[LazyArray]) -> Iterator[StoredLeaf]:
    """The leaves of checkpoints that lazy arrays are, or are computed of."""
    return it.chain.from_iterable(x._body.stored for x in lazies)


def sources_of(lazies: Iterable[LazyArray]) -> list[Source]:
    """The checkpoints that lazy arrays are read from, each once."""
    return list({id(x.source): x.source for x in stored_in(lazies)}.values())


def shown(lazy: LazyArray) -> str:
    """The kind, dtype and shape of a lazy array, for people."""
    body = lazy._body
    if body.unreadable is None:
        return _target.show_target(body.target)
    return _wording.show(known_leaf(lazy).record)


def _changed(lazy: LazyArray, view: View | None, target: Target) -> LazyArray:
    return LazyArray(lazy._body.changed(view, target))


def retargeted(lazy: LazyArray, target: Target) -> LazyArray:
    """The same array and view, read as another target."""
    return _changed(lazy, lazy._body.view, target)


def on_host(lazy: LazyArray, dtype: Any = None) -> LazyArray:
    """The same leaf, to be read as a NumPy array: of its dtype, or of another one."""
    return retargeted(lazy, host_target(lazy, dtype))


def host_target(lazy: LazyArray, dtype: Any = None) -> Target:
    wanted = np.dtype(lazy.dtype if dtype is None else dtype)
    return _target.host_target(wanted, lazy.shape, lazy._target.cast)


def lazy_of(
    source: Source, record: LeafRecord, target: Target | None = None
) -> LazyArray:
    if target is None:
        target = _target.own_target(record.whole)
    return LazyArray(StoredLeaf(source, record, None, target))


def fetch(
    lazies: Sequence[LazyArray],
    verify: bool,
    max_bytes: int | None = None,
    as_numpy: bool = False,
) -> list[Any]:
    """Reads lazy leaves of any checkpoints, in this process alone: one planned read of
    each checkpoint. `as_numpy`: all of them into NumPy arrays."""
    _context.check_fork()
    options = LoadOptions(verify=verify, max_bytes=max_bytes, processes="own")
    planned = plans(lazies, options, as_numpy)
    return read(lazies, planned, options, Processes(), as_numpy)


def plans(
    lazies: Sequence[LazyArray], options: LoadOptions, as_numpy: bool = False
) -> list[tuple[list[int], ReadPlan]]:
    """One planned read for each checkpoint, with the places in `lazies` of the leaves
    that it reads. A computed array has none."""
    out: dict[int, tuple[Source, list[int], list[LeafRead]]] = {}
    for i, lazy in enumerate(lazies):
        if (leaf := stored_leaf(lazy)) is not None:
            source = leaf.source
            _, numbers, wanted = out.setdefault(id(source), (source, [], []))
            numbers.append(i)
            wanted.append(leaf.read_as(host_target(lazy) if as_numpy else None))
    return [(n, _read_leaves.plan(source, w, options)) for source, n, w in out.values()]


def read(
    lazies: Sequence[LazyArray],
    planned: Sequence[tuple[list[int], ReadPlan]],
    options: LoadOptions,
    processes: Processes,
    as_numpy: bool = False,
) -> list[Any]:
    """Reads lazy leaves as it is planned, and those that are computed."""
    out: list[Any] = [None] * len(lazies)
    computed = [i for i, lazy in enumerate(lazies) if not stored_leaf(lazy)]
    if computed:
        wanted = [lazies[i]._body for i in computed]
        if as_numpy:
            targets = [host_target(lazies[i]) for i in computed]
            wanted = [x.changed(x.view, t) for x, t in zip(wanted, targets)]
        with keeping(lazies[i] for i in computed):
            # One class has all that are computed, and reads them together.
            values = wanted[0].read_all(wanted, options.verify, options.max_bytes)
        for i, value in zip(computed, values):
            out[i] = value
    for numbers, plan in planned:
        plan.source.check_current()
        for i, value in zip(numbers, plan.run(processes)):
            out[i] = value
    return out


def keeping(lazies: Iterable[LazyArray]) -> AbstractContextManager[None]:
    """Around reads of lazy arrays, each on its own: chunks that they share are read
    once."""
    return _kept.keeping(stored_in(lazies))
