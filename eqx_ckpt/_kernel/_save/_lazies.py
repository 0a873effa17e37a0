"""Lazy leaves in a save: they are read as they are written, and verified.

What is read is what [`LazyArray.read`][] would give, in parts. What lies in the source
as it will lie in the target is known by its digests, without being read.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from .._errors import DamagedError, ReplacedError
from .._format import _grid, _index, _template
from .._format._leaves import Region
from .._format._template import Template
from .._load import _lazy, _reads
from .._load._lazy import LazyArray
from .._load._leaf_body import LeafBody, StoredLeaf
from .._load._source import Source
from .._runtime import _threads
from .._tree import _host_copy, _leaf, _target
from ._payload import PlannedLeaf


T = TypeVar("T")

# So many bytes are read at a time, as parts of a leaf, or one chunk of its source if
# that has more: some before they are asked for. Fewer if a save may take less memory.
_AHEAD = 16 * 2**20
# Leaves up to so many bytes are read together with others.
_SMALL = 1 << 16


def likeness(value: object) -> Any:
    """Equal for lazy leaves that are stored alike, so that the `LazySource` of one is
    made `like` that of another; None for any other value."""
    return _lazy.body_of(value).likeness if isinstance(value, LazyArray) else None


def lazy_source(lazy: LazyArray, dtype: np.dtype | None) -> "LazySource":
    """The value that a lazy leaf is written from. Its template has chunks only if it
    lies in its source as it will be stored. Floating arrays are cast to `dtype`.

    **Raises:** as `check_whole`.
    """
    _lazy.body_of(lazy).check_whole()
    is_array = _lazy.body_of(lazy).target.kind in _template.ARRAY_KINDS
    if is_array and dtype is not None:
        if _template.is_floating(lazy.dtype) and dtype != lazy.dtype:
            lazy = lazy.astype(dtype)
    body = _lazy.body_of(lazy)
    target = body.target
    if (leaf := _unchanged_leaf(lazy)) is not None:
        template = leaf.template._replace(codec=None)
        if leaf.is_contiguous:
            template = template._replace(chunk=())
        return LazySource(lazy, template)
    if target.kind == "key" or target.dtype is None:
        # These have no views: what they are read as is small, or as it was stored.
        template = _target.as_read(body.template, target)
        template = template._replace(chunk=(), codec=None)
    else:
        template = _leaf.array_template(
            target.kind, lazy.shape, lazy.dtype, None, bool(lazy.weak_type)
        )
    return LazySource(lazy, template, _grain(body))


def _grain(body: LeafBody) -> tuple[int, ...]:
    """The chunks in which a view is read without reading anything twice: those of the
    source, or the blocks of a computation, if all of it is there, its axes in any
    order. Else ()."""
    if (view := body.view) is None:
        return body.chunk
    is_whole = view.picks == tuple(map(range, body.template.shape))
    if not is_whole or len(view.axes) > len(view.picks):
        return ()
    chunk = body.chunk
    order = [axis for axis in view.order if axis is not None]
    return tuple(chunk[axis] for axis in order) if chunk else ()


def _unchanged_leaf(lazy: LazyArray) -> StoredLeaf | None:
    """The leaf of a checkpoint that a lazy one is, if it comes back as it is there."""
    leaf = _lazy.stored_leaf(lazy)
    if leaf is None or leaf.view is not None:
        return None
    target = leaf.target._replace(registered=None, python=None)
    own = _target.own_target(leaf.template)
    is_same = own._replace(sharding=target.sharding, cast=target.cast) == target
    return leaf if is_same else None


@dataclasses.dataclass(eq=False)
class LazySource(_host_copy.Payload):
    """A lazy leaf as the value of one that is saved, and how it is stored."""

    lazy: LazyArray
    template: Template
    # Chunks that suit it better than those of the size that is asked for.
    grain: tuple[int, ...] = ()
    verify: bool = True
    ahead: int = _AHEAD
    # The elements, if no part is read without the rest: they are in memory until each
    # has been given, to any of the threads.
    _whole: np.ndarray | None = None
    _given: int = 0

    def like(self, lazy: LazyArray) -> "LazySource":
        """Another leaf that is stored alike."""
        return LazySource(lazy, self.template, self.grain, self.verify, self.ahead)

    @property
    def key(self) -> Any:
        """Equal for leaves that are one array."""
        return _lazy.body_of(self.lazy).identity

    @property
    def account(self) -> str:
        """Equal in all processes that save the same leaf."""
        saves = [(x.root.url, x.index.save) for x in _lazy.sources_of([self.lazy])]
        return _index.digest(repr((self.lazy.name, saves, self.template)).encode())

    def read(self, regions: Iterable[tuple[slice, ...]]) -> Iterator[np.ndarray]:
        """The elements that are stored, for each of some regions, a few of which are
        read together: chunks of the source are not those of the target."""
        t, size = self.template, math.prod(self.template.shape)
        chunk_size = _lazy.body_of(self.lazy).chunk_size
        if not self._is_array or chunk_size >= size:
            for region in regions:
                lock = vars(self).setdefault("_lock", _threads.Lock())
                yield lock.run(ft.partial(self._part, region, size))
            return
        most = max(self.ahead // t.itemsize, chunk_size)
        for box, inner in _boxes(regions, most):
            lazy = _lazy.on_host(self.lazy[box])
            # A read takes more than its result: the chunks around it, and their copies.
            (value,) = _fetch([lazy], self.verify, 4 * most * t.itemsize)
            array = _host_copy.to_host(value, t)
            for region in inner:
                yield np.ascontiguousarray(array[_grid.within(region, box)])

    def _part(self, region: tuple[slice, ...], size: int) -> np.ndarray:
        if self._whole is None:
            self._whole = self._read()
        part = np.ascontiguousarray(self._whole[region])
        self._given += part.size
        if self._given >= size:
            self._whole, self._given = None, 0
        return part

    def _read(self) -> np.ndarray:
        (value,) = _fetch([self.lazy], self.verify, as_numpy=self._is_array)
        return _host_copy.to_host(value, self.template)

    @property
    def _is_array(self) -> bool:
        t = self.template
        return t.kind in _template.ARRAY_KINDS and t.dtype != "float0"

    @ft.cached_property
    def _unchanged(self) -> StoredLeaf | None:
        return _unchanged_leaf(self.lazy)

    def name_in(self, source: Source) -> str | None:
        """The name of the leaf in a save, if it is written from there as it is."""
        return _name_in(self._unchanged, source) if self._unchanged else None

    def parts_in(self, source: Source) -> set[str]:
        """The names of the leaves in a save that it is computed of."""
        if _lazy.stored_leaf(self.lazy) is not None:
            return set()
        names = {_name_in(x, source) for x in _lazy.stored_in([self.lazy])}
        return {name for name in names if name is not None}

    def digests(self, chunks: range) -> bytes | None:
        """The digests of some chunks, where those of its source are its own."""
        if (leaf := self._unchanged) is None or not leaf.source.has_digests:
            return None
        if leaf.template.chunk != self.template.chunk:
            return None
        return leaf.source.digests_of(leaf.record, chunks)


def _name_in(leaf: StoredLeaf, source: Source) -> str | None:
    """The name that a leaf has in a save, if it is of that."""
    if leaf.source.index.save != source.index.save:
        return None
    return source.index.leaves.names[leaf.array_index]


def _fetch(
    lazies: Sequence[LazyArray],
    verify: bool,
    max_bytes: int | None = None,
    as_numpy: bool = False,
) -> list[Any]:
    """Reads lazy leaves, as `_lazy.fetch`.

    **Raises:** what is wrong, with the names of the leaves. An `OSError` gets no
    number: with one it would be taken for an error of the place that is saved to.
    """
    try:
        return _lazy.fetch(lazies, verify, max_bytes, as_numpy)
    except Exception as e:
        some = ", ".join(f"`{x.name}`" for x in lazies[:3])
        which = f"The leaf {some}" if len(lazies) == 1 else f"One of the leaves {some}"
        more = f" and {len(lazies) - 3} more" if len(lazies) > 3 else ""
        if isinstance(e, (DamagedError, ReplacedError, OSError)):
            raise type(e)(f"{which}{more} cannot be saved: {e}") from e
        e.add_note(f"{which}{more} was being saved.")
        raise


# A part of so many bytes is asked for by a request, so many at a time, as in a load.
PART, _REQUESTS = 8 * 2**20, 16


def limit_reads(leaves: Sequence[PlannedLeaf], max_bytes: int) -> int:
    """Lets lazy leaves be read ahead only as far as `max_bytes` allows. Returns the
    number of parts that are read at a time: 1, unless some are in an object store. Each
    takes twice its bytes of memory."""
    for leaf in leaves:
        if isinstance(leaf.value, LazySource):
            leaf.value.ahead = max(1, min(_AHEAD, max_bytes // 8))
    sources = _lazy.sources_of(_lazies(leaves))
    is_remote = any(source.root.is_remote for source in sources)
    return max(1, min(_REQUESTS, max_bytes // (2 * PART))) if is_remote else 1


def grain_of(value: object) -> tuple[int, ...]:
    """The `grain` of a lazy leaf; () for any other value."""
    return value.grain if isinstance(value, LazySource) else ()


def whole_chunks(t: Template, grain: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """The shape of slabs of about so many bytes that a leaf is written in where no file
    has chunks. Those of a lazy leaf are whole chunks of its source, if these lie one
    after the other as the array does: each chunk is read once, and decoded alone."""
    own = t.chunk or grain
    axis = _grid.cut_axis(t.shape, own) if own else None
    if axis is None:
        return _grid.choose(t.shape, t.itemsize, nbytes)
    count = max(1, nbytes // (math.prod(own) * t.itemsize))
    length = max(1, min(t.shape[axis], own[axis] * count))
    return (*own[:axis], length, *own[axis + 1 :])


def results(jobs: Iterable[Callable[[], T]], requests: int) -> Iterator[T]:
    """The results of jobs, in their order. So many `requests` are under way at a time;
    with one, each job is done when its result is asked for."""
    if requests <= 1:
        for job in jobs:
            yield job()
        return
    # They start nothing by themselves.
    starts = (_reads.ReadJob(0, lambda job=job: job) for job in jobs)
    yield from _reads.in_order(starts, 0, requests, requests)


def places(leaves: Sequence[PlannedLeaf]) -> frozenset[str]:
    """Where the checkpoints are whose lazy leaves these are."""
    sources = _lazy.sources_of(_lazies(leaves))
    return frozenset(source.root.target() for source in sources)


def keeping(leaves: Sequence[PlannedLeaf]) -> AbstractContextManager[None]:
    """Around the writing of leaves: chunks that lazy ones share are read once."""
    return _lazy.keeping(_lazies(leaves))


def _lazies(leaves: Sequence[PlannedLeaf]) -> list[LazyArray]:
    return [leaf.value.lazy for leaf in leaves if isinstance(leaf.value, LazySource)]


def verified(leaf: PlannedLeaf, verify: bool) -> PlannedLeaf:
    """A leaf that is read with digests checked, or without."""
    if not isinstance(leaf.value, LazySource) or leaf.value.verify is verify:
        return leaf
    return leaf._replace(value=dataclasses.replace(leaf.value, verify=verify))


def _boxes(
    regions: Iterable[Region], most: int
) -> Iterator[tuple[Region, list[Region]]]:
    """Regions that follow each other, and the one region of at most so many elements
    that some of them are together."""
    box, inner = (), []
    for region in regions:
        both = _joined(box, region) if inner else region
        if both is None or (inner and _size(both) > most):
            yield box, inner
            both, inner = region, []
        box = both
        inner.append(region)
    if inner:
        yield box, inner


def _size(region: Region) -> int:
    return math.prod(s.stop - s.start for s in region)


def _joined(a: Region, b: Region) -> Region | None:
    """The region that two are together, if they are one."""
    other = [axis for axis, (s, r) in enumerate(zip(a, b)) if s != r]
    if len(other) != 1 or a[other[0]].stop != b[other[0]].start:
        return None
    return _grid.box([a, b])


def read_small(
    leaves: Sequence[PlannedLeaf], but: Set[int], max_bytes: int
) -> list[PlannedLeaf]:
    """The leaves, with the values of small lazy ones, which are read together: as many
    as fit into `max_bytes`, in their order, but none whose index is in `but`."""
    out = list(leaves)
    leaf_indices: list[int] = []
    for leaf_index, leaf in enumerate(leaves):
        is_lazy = leaf.alias is None and isinstance(leaf.value, LazySource)
        is_small = leaf.template.nbytes <= min(_SMALL, max_bytes)
        if is_lazy and is_small and leaf_index not in but:
            leaf_indices.append(leaf_index)
            max_bytes -= leaf.template.nbytes
    if not leaf_indices:
        return out
    groups: dict[tuple[bool, bool], list[int]] = {}
    for leaf_index in leaf_indices:
        value = leaves[leaf_index].value
        groups.setdefault((value.verify, value._is_array), []).append(leaf_index)
    for (verify, as_numpy), own in groups.items():
        values = [leaves[leaf_index].value.lazy for leaf_index in own]
        for leaf_index, value in zip(own, _fetch(values, verify, as_numpy=as_numpy)):
            out[leaf_index] = leaves[leaf_index]._replace(value=value)
    return out
