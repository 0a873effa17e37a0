"""The leaves of a tree or a checkpoint by name, and their elements block by block."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._kernel._format import _grid, _template
from .._kernel._format._leaves import Region
from .._kernel._format._record import TreeRecord
from .._kernel._format._template import Template
from .._kernel._load import _checkpoint, _lazy
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._load._load_options import LoadOptions
from .._kernel._runtime import _progress
from .._kernel._tree import (
    _filters,
    _flatten,
    _host_copy,
    _leaf,
    _register,
    _states,
    _target,
)
from .._kernel._tree._flatten import Flat
from .._kernel._tree._target import Target


# The memory that a call takes by default; how much it reads at a time, and at least.
_MAX_BYTES = 2**28
_ROOM, _LEAST = 2**26, 2**18


class Leaf(NamedTuple):
    """A leaf of a tree: what is stored of it, and the value or the lazy leaf. Leaves of
    one `identity` are one array."""

    name: str
    template: Template
    value: Any
    identity: Any

    @property
    def is_array(self) -> bool:
        return self.template.kind in _template.ARRAY_KINDS


class Side(NamedTuple):
    """A tree that is compared with another: its leaves and all else that it has.

    `texts` are str of a tree in memory: configuration, unless the other tree has a leaf
    of that name.
    """

    shown: str
    flat: Flat
    leaves: dict[str, Leaf]
    texts: dict[str, Leaf]
    states: Mapping[str, _states.Labels]  # The labels of the entries of each State.
    record: TreeRecord
    metadata: tuple[Any, ...]  # That of a checkpoint. A tree has none.


def look(x: object) -> Side:
    """A path, an open checkpoint or a tree, of which no array is read.

    **Raises:** `ValueError` or `TypeError` that names a leaf that has no value, or two
    leaves of one name.
    """
    shown, metadata, tree, saved = "a tree", (), x, None
    if isinstance(x, (str, os.PathLike, Checkpoint)):
        ckpt = _checkpoint.open(x)
        shown, metadata, tree = f"`{ckpt.path}`", (ckpt.metadata,), ckpt.tree
        saved = _checkpoint.source_of(ckpt).index.leaves
    flat = _flatten.flatten(tree, None)
    names, chosen = flat.names(), list(map(_filters.by_default, flat.leaves))
    leaves: dict[str, Leaf] = {}
    texts: dict[str, Leaf] = {}
    # By the ids of what a lazy leaf is stored as and read as, which are kept here.
    alike: dict[tuple[int, int], tuple[Template, Template, Target]] = {}
    for name, value, is_stored in zip(names, flat.leaves, chosen):
        if not is_stored and not isinstance(value, (str, bytes)):
            continue
        if name in leaves or name in texts:
            raise ValueError(f"Two leaves of {shown} are called `{name}`.")
        (leaves if is_stored else texts)[name] = _leaf_of(name, value, alike)
    record, states = flat.record(chosen), _states.states_of(flat)
    if saved is not None and saved.tree is not None:
        record, states = saved.tree, saved.tree.states()
    return Side(shown, flat, leaves, texts, states, record, metadata)


def _leaf_of(
    name: str,
    value: object,
    alike: dict[tuple[int, int], tuple[Template, Template, Target]],
) -> Leaf:
    if isinstance(value, LazyArray):
        plain = _without(value, "registered", "python")
        body = _lazy.body_of(plain)
        t, target = body.template, body.target
        key = id(t), id(target)
        if key not in alike:
            alike[key] = template_of(plain), t, target
        template = alike[key][0]
        identity = _lazy.body_of(_without(plain, "sharding")).identity
        return Leaf(name, template, plain, identity)
    try:
        stored = _register.to_leaf(value)
        if isinstance(stored, LazyArray):
            return _leaf_of(name, stored, alike)
        template = _leaf.template_of(stored)
    except (TypeError, ValueError) as e:
        raise type(e)(f"Leaf `{name}`: {e}") from e
    if isinstance(stored, jax.Array) and not stored.is_fully_addressable:
        raise ValueError(
            f"Leaf `{name}`: other processes have parts of it. Save it, and open what "
            "was saved."
        )
    return Leaf(name, template, stored, id(value))


# ---- Lazy leaves.


def _without(lazy: LazyArray, *fields: str) -> LazyArray:
    """A lazy array without these fields of its target."""
    target = _lazy.body_of(lazy).target
    rest = {x: None for x in fields if getattr(target, x) is not None}
    return _lazy.retargeted(lazy, target._replace(**rest)) if rest else lazy


def template_of(lazy: LazyArray) -> Template:
    """The template that a lazy leaf would be stored with, as it is read."""
    body = _lazy.body_of(lazy)
    t, target = body.template, body.target
    if target.kind not in _template.ARRAY_KINDS:
        if target.kind in ("key", "str", "bytes") or t.dtype == "int":
            return _target.as_read(t, target)
        dtype = _template.SCALAR_KINDS[target.kind]
        return Template(t.keys, target.kind, dtype, (), dtype, ())
    made = _leaf.array_template("numpy", target.shape, target.dtype, None, False)
    chunk = t.chunk if (made.shape, made.stored) == (t.shape, t.stored) else ()
    return made._replace(kind=target.kind, weak=target.weak, chunk=chunk)


def digests_of(leaf: Leaf) -> Callable[[], bytes] | None:
    """Digests of a stored array that is read as it is, without a view or a cast."""
    lazy, template = leaf.value, leaf.template
    stored = _lazy.stored_leaf(lazy) if isinstance(lazy, LazyArray) else None
    if stored is None or stored.view is not None:
        return None
    source, t = stored.source, stored.template
    same = (template.dtype, template.shape) == (t.dtype, t.shape)
    if not same or not source.has_digests:
        return None
    return lambda: source.digests_of(stored.record, range(t.chunk_count))


# ---- Reading.


def stream(
    what: str,
    rows: Sequence[Sequence[Leaf]],
    reading: LoadOptions,
    is_wanted: Callable[[int], bool] = lambda number: True,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """The elements of rows of leaves: for each row its number and a region of each of
    its leaves, the same one, as it is stored; then the next region, in row-major order.
    `what` is said by the progress bar.

    The leaves of a row are of one shape, if there are several of over a block. A row
    that is not wanted any more is not read further.
    """
    budget = _MAX_BYTES if reading.max_bytes is None else reading.max_bytes
    room = max(_LEAST, min(budget // 2, _ROOM))
    reading = reading._replace(max_bytes=budget // 4)
    total = sum(leaf.template.nbytes for row in rows for leaf in row)
    group: list[tuple[int, Region | None]] = []
    size = 0
    values = (leaf.value for row in rows for leaf in row)
    lazies = [value for value in values if isinstance(value, LazyArray)]
    bar = _progress.bar(what, total, len(rows), reading.progress)
    with bar as advance, _lazy.keeping(lazies):
        for number, row in enumerate(rows):
            for region, nbytes in _pieces(row, room):
                if group and size + nbytes > room:
                    yield from _read_rows(rows, group, reading)
                    advance(size, 0)
                    group, size = [], 0
                if not is_wanted(number):
                    break
                group.append((number, region))
                size += nbytes
            advance(0, 1)
        yield from _read_rows(rows, group, reading)
        advance(size, 0)


def _pieces(row: Sequence[Leaf], room: int) -> Iterator[tuple[Region | None, int]]:
    """The regions of each of the leaves of a row, and their bytes; None: all of it."""
    nbytes = sum(leaf.template.nbytes for leaf in row)
    # Keys, str and bytes have no parts that are read.
    if nbytes <= room or not all(leaf.is_array for leaf in row):
        yield None, nbytes
        return
    shape = row[0].template.shape
    itemsize = sum(leaf.template.itemsize for leaf in row)
    grains = [_grain(leaf) for leaf in row]
    block = blocks(shape, max(grains, key=math.prod), room // itemsize)
    for index in _grid.indices(shape, block):
        region = _grid.region(shape, block, index)
        yield region, math.prod(s.stop - s.start for s in region) * itemsize


def _grain(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the least that is read of a leaf: one of its chunks, or an element
    where it has none."""
    t, value = leaf.template, leaf.value
    stored = _lazy.stored_leaf(value) if isinstance(value, LazyArray) else None
    is_chunked = stored is not None and bool(stored.chunk and t.chunk)
    return t.chunk if is_chunked else (1,) * len(t.shape)


def blocks(
    shape: tuple[int, ...], grain: tuple[int, ...], count: int
) -> tuple[int, ...]:
    """The shape of blocks of about so many elements, each of whole grains."""
    block = list(grain)
    for axis in reversed(range(len(shape))):
        times = max(1, count // math.prod(block))
        block[axis] = min(shape[axis], block[axis] * times)
        if block[axis] < shape[axis]:
            break
    return tuple(block)


def _read_rows(
    rows: Sequence[Sequence[Leaf]],
    group: list[tuple[int, Region | None]],
    reading: LoadOptions,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    parts = [(leaf, region) for number, region in group for leaf in rows[number]]
    # Arrays are read as those of NumPy, and all else as what it is.
    lazies: dict[bool, list[LazyArray]] = {True: [], False: []}
    for leaf, region in parts:
        if isinstance(leaf.value, LazyArray):
            lazy = leaf.value if region is None else leaf.value[region]
            lazies[leaf.is_array].append(lazy)
    fetched = {
        is_array: iter(_lazy.fetch(some, reading.verify, reading.max_bytes, is_array))
        for is_array, some in lazies.items()
    }
    arrays = []
    for leaf, region in parts:
        t = leaf.template
        if isinstance(leaf.value, LazyArray):
            value = next(fetched[leaf.is_array])
            if region is not None:
                t = t._replace(shape=value.shape)
            arrays.append(_host_copy.to_host(value, t))
        elif region is None:
            arrays.append(_host_copy.to_host(leaf.value, t))
        else:
            arrays += _host_copy.to_host_by_regions(leaf.value, t, [region])
    rest = iter(arrays)
    for number, _ in group:
        yield number, [next(rest) for _ in rows[number]]
