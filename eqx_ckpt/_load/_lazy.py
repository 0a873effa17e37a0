"""`LazyArray`: the abstract value of a stored leaf, which can be read on purpose."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TYPE_CHECKING

import jax
import numpy as np

from .. import _rooms
from .._format import _template, _view
from .._format._leaves import Record, Unreadable
from .._format._template import Template
from .._format._view import View
from .._runtime import _arguments, _elsewhere
from .._runtime._processes import Processes
from .._storage import _arrays, _context
from .._storage._backend import Backend
from .._tree import _leaf, _target
from .._tree._target import Target
from . import _fetch, _kept, _open, _source, _wording
from ._fetch import LeafRead, ReadPlan
from ._load_options import LoadOptions
from ._source import Source


class LazyArray(jax.ShapeDtypeStruct):
    """A leaf of a checkpoint that has been opened and not read.

    It is a `jax.ShapeDtypeStruct`: `jax.eval_shape`, `jax.jit(...).lower`, `tree_map`,
    `eqx.tree_at` and `eqx.tree_pprint` take it as the abstract leaf that it is. It is
    read by `.read()`, `np.asarray`, `jnp.asarray` and `materialise`, and by nothing
    else: arithmetic on it, or a jitted call, is an error.

    Indexing as in NumPy (integers, slices, `...`, `None`, and an index array or a mask
    along one axis), `.T`, `.transpose` and `.astype` give lazy views, which read the
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

    __slots__ = ("_source", "_record", "_view", "_target")

    _source: Source
    _record: Record
    _view: View | None
    _target: Target

    def __init__(
        self, source: Source, record: Record, view: View | None, target: Target
    ):
        template = record.template
        if target.kind in ("jax", "numpy", "generic"):
            shape, dtype = target.shape, target.dtype
        elif target.kind == "key":
            assert target.impl is not None
            shape, dtype = target.shape, _leaf.key_dtype(target.impl)
        elif target.kind in ("str", "bytes"):
            shape, dtype = template.shape, np.dtype(np.uint8)
        else:
            shape, dtype = (), _leaf.abstract_dtype(template)
        super().__init__(shape, dtype, sharding=target.sharding, weak_type=target.weak)
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_record", record)
        object.__setattr__(self, "_view", view)
        object.__setattr__(self, "_target", target)

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def _template(self) -> Template:
        return self._record.template

    @property
    def _is_readable(self) -> bool:
        return self._unreadable is None

    @property
    def _unreadable(self) -> str | None:
        """The kind of a leaf that cannot be read, and the reason; None if it can be."""
        part = self._record.part
        if not isinstance(part, Unreadable):
            return None
        return f"{part.what} (unreadable): {part.why}"

    def _check_whole(self) -> None:
        """**Raises:** `ValueError` if it is not all there."""
        if self._record.part is not None:
            raise _wording.error(self._record)

    def _again(self, view: View | None, target: Target) -> "LazyArray":
        """The same array, as another view of it."""
        return LazyArray(self._source, self._record, view, target)

    @property
    def store(self) -> Any:
        """The `tensorstore.TensorStore` of the stored array, with the view's indexing.

        Where TensorStore lacks the dtype, and for keys, str and bytes, this is the
        array of their bytes or words: see FORMAT.md.
        """
        store = self._source.array(self._record)
        if self._view is not None:
            view = self._view
            store = _arrays.view(store, view.slices(), view.arrays)
            store = _arrays.transposed(store, view.order)
        template = self._record.template
        dtype = self._target.dtype
        if template.stored == template.dtype and dtype is not None:
            if dtype.name != template.stored and dtype.name in _template.STORED:
                store = _arrays.cast(store, dtype)
        return store

    @property
    def url(self) -> str:
        """The URL of the stored array, without the view's indexing.

        **Raises:** `ValueError` for a format that TensorStore has no URLs for.
        """
        source = self._source
        if not source.is_own or not source.directory.has_driver():
            raise ValueError(
                f"TensorStore has no URL for an array in `{source.root}`. Use `.store`."
            )
        return _arrays.array_url(source.root, source.database, source.key(self._record))

    @_arguments.checked()
    def read(self, *, verify: bool = True) -> Any:
        """Reads the leaf: a jax.Array, or what was saved if that was something else.

        **Arguments:**

        - `verify`: whether to check the digests of the chunks that are touched.

        **Raises:** `RuntimeError` if bytes are missing or are not those that were
        saved, or the checkpoint was replaced or deleted since it was opened.
        """
        return fetch([self], verify)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self._is_readable:
            raise _wording.error(self._record)
        if self._target.kind in ("key", "str", "bytes"):
            raise TypeError(
                f"The leaf `{self.name}` is a {self._target.kind}, which NumPy has no "
                "array of. Use `.read()`."
            )
        if copy is False:
            raise ValueError(f"Reading the leaf `{self.name}` makes a new array.")
        # Python's ints have any size.
        is_int = self._template.dtype == "int"
        out = fetch([on_host(self, np.object_ if is_int else None)], True)[0]
        return out if dtype is None else out.astype(dtype)

    def __getitem__(self, key: Any) -> "LazyArray":
        self._check_whole()
        return self._viewed((self._view or _view.whole(self._template.shape)).take(key))

    @property
    def T(self) -> "LazyArray":
        return self.transpose()

    def transpose(self, *axes: Any) -> "LazyArray":
        """A view with its axes in another order, as in NumPy; reversed by default."""
        self._check_whole()
        view = self._view or _view.whole(self._template.shape)
        if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
            axes = tuple(axes[0])
        return self._viewed(view.transpose(axes or None))

    def _viewed(self, view: View) -> "LazyArray":
        target = self._target._replace(codec=None)
        if target.kind in ("key", "str", "bytes"):
            raise TypeError(
                f"The leaf `{self.name}` is a {target.kind}: read it to index it."
            )
        if target.shape != view.shape:
            target = target._replace(shape=view.shape, sharding=None)
        return self._again(view, target)

    def astype(self, dtype: Any) -> "LazyArray":
        """A view whose numbers are cast as they are read: floats to floats, and ints
        to ints. What does not hold every value is a `RuntimeError`."""
        wanted = np.dtype(dtype)
        if self._target.kind not in _template.ARRAY_KINDS:
            raise TypeError(f"The leaf `{self.name}` is not an array.")
        target = self._target._replace(dtype=wanted, weak=False, cast=True, codec=None)
        problem = _target.misfit(self._template._replace(shape=target.shape), target)
        if problem is not None:
            raise TypeError(
                f"The leaf `{self.name}` is {_leaf.show(self._template)}, and "
                f"is not cast to {wanted}: floats become floats, ints ints."
            )
        return self._again(self._view, target)

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
        return out._again(out._view, target)

    @property
    def _chunk(self) -> tuple[int, ...]:
        """The shape of the chunks, or blocks, that are read whole; () for none."""
        is_contiguous = self._source.is_contiguous(self._record)
        return () if is_contiguous else self._template.chunk

    @property
    def _chunk_size(self) -> int:
        """The number of elements that are read together, whichever are wanted."""
        return math.prod(self._chunk)

    @property
    def _stored(self) -> "list[LazyArray]":
        """The stored arrays that it is, or is computed of."""
        return [self]

    @property
    def _sources(self) -> tuple[Source, ...]:
        """The checkpoints that it is read from."""
        found = {id(x._source): x._source for x in self._stored}
        return tuple(found.values())

    @property
    def _key(self) -> Any:
        """Equal for lazies that are one array when they are read, and for no others."""
        index, place = self._source.index, self._record.place
        place = index.leaves.aliases.get(place, place)
        own = self._source.root.url, index.save, place
        return own, self._view, self._target

    @staticmethod
    def _fetch_all(
        wanted: Sequence[Any], verify: bool, max_bytes: int | None
    ) -> list[Any]:
        """Reads leaves that are not simply stored, if this is such a kind."""
        raise NotImplementedError

    # Two leaves of one shape must never pass for one: `filter_jit` would compile the
    # weights of the first into a call with the second.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    __array_ufunc__ = None

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"The leaf `{self.name}` has not been read. Use `.read()` or "
            "`ec.materialise`; or `ec.lazy`, which computes with it as it is read."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _elsewhere.unknown_attribute(self, "LazyArray", name)

    __bool__ = __int__ = __float__ = __complex__ = __index__ = _refuse
    __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = __round__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

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
        return f"LazyArray({self.name}: {self._shown()})"

    def _shown(self) -> str:
        if self._is_readable:
            return _target.show_target(self._target)
        return _wording.show(self._record)

    __str__ = __repr__

    def __copy__(self) -> "LazyArray":
        return self

    def __deepcopy__(self, memo: Any) -> "LazyArray":
        return self

    def __reduce__(self) -> Any:
        source = self._source
        _source.check_pickles(source)
        args = (source.root, source.index.save, self.name, self._view, self._target)
        return _unpickle, args


def on_host(lazy: LazyArray, dtype: Any = None) -> LazyArray:
    """The same leaf, to be read as a NumPy array: of its dtype, or of another one."""
    return lazy._again(lazy._view, host_target(lazy, dtype))


def host_target(lazy: LazyArray, dtype: Any = None) -> Target:
    wanted = np.dtype(lazy.dtype if dtype is None else dtype)
    return _target.host_target(wanted, lazy.shape, lazy._target.cast)


def _unpickle(
    root: Backend, save: str, name: str, view: View | None, target: Target
) -> LazyArray:
    source = _open.reopen(root, save)
    leaves = source.index.leaves
    return LazyArray(source, leaves.record(leaves.places[name]), view, target)


def lazy_of(source: Source, record: Record, target: Target | None = None) -> LazyArray:
    if target is None:
        target = _target.own_target(record.whole)
    return LazyArray(source, record, None, target)


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
    if as_numpy:
        lazies = [x if type(x) is LazyArray else on_host(x) for x in lazies]
    return read(lazies, planned, options, Processes())


def plans(
    lazies: Sequence[LazyArray], options: LoadOptions, as_numpy: bool = False
) -> list[tuple[list[int], ReadPlan]]:
    """A planned read of each checkpoint for the leaves that are not computed, and their
    numbers."""
    out: dict[int, tuple[Source, list[int], list[LeafRead]]] = {}
    for i, lazy in enumerate(lazies):
        if type(lazy) is LazyArray:
            source = lazy._source
            _, numbers, wanted = out.setdefault(id(source), (source, [], []))
            numbers.append(i)
            target = host_target(lazy) if as_numpy else lazy._target
            wanted.append(LeafRead(lazy._record, lazy._view, target))
    return [(n, _fetch.plan(source, w, options)) for source, n, w in out.values()]


def read(
    lazies: Sequence[LazyArray],
    planned: Sequence[tuple[list[int], ReadPlan]],
    options: LoadOptions,
    processes: Processes,
) -> list[Any]:
    """Reads lazy leaves as it is planned, and those that are computed."""
    out: list[Any] = [None] * len(lazies)
    computed = [i for i, lazy in enumerate(lazies) if type(lazy) is not LazyArray]
    if computed:
        wanted = [lazies[i] for i in computed]
        with _kept.keeping(wanted):
            values = wanted[0]._fetch_all(wanted, options.verify, options.max_bytes)
        for i, value in zip(computed, values):
            out[i] = value
    for numbers, plan in planned:
        plan.source.check_current()
        for i, value in zip(numbers, plan.load(processes)):
            out[i] = value
    return out
