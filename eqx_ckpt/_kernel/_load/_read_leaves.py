"""Reads stored leaves as their targets ask for them, in one planned read.

`plan` says how, and `ReadPlan.run` does it: `read_leaves`, or what moves arrays between
devices and calls it in steps. `_stored_reads` turns the leaves that are wanted into
reads of stored arrays, `_read_arrays` gives the arrays as they arrive, and a
`LeafBuilder` makes the leaves of them.
"""

import collections
import contextlib
import itertools as it
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _rooms
from .._format import _view
from .._format._view import View
from .._runtime import _processes, _progress
from .._runtime._processes import Processes
from .._runtime._progress import Advance
from .._tree import _from_host, _guards
from .._tree._from_host import Conversion, PlainLeaves
from .._tree._target import Target
from . import _kept, _partial, _read_arrays
from ._load_options import LoadOptions
from ._reads import LeafRead, ReadResult, StoredRead
from ._source import Source


class ReadPlan(NamedTuple):
    """A planned read of leaves: `run` does it, with the processes that take part, and
    `log_moves` logs the moves that were odd. `digest` is the same in all processes that
    plan the same moves."""

    source: Source
    run: Callable[[Processes], list[Any]]
    digest: str = ""
    log_moves: Callable[[], None] = lambda: None


def plan(source: Source, wanted: Sequence[LeafRead], options: LoadOptions) -> ReadPlan:
    """The plan for some leaves of a checkpoint. Each process reads what it needs,
    unless `reshard` says otherwise."""
    may_move = options.processes != "own" and options.reshard != "read"
    # "auto" has nothing to gain in one process; "devices" was asked for.
    if may_move and (options.reshard == "devices" or _processes.count() > 1):
        return _rooms.plan_reshard(source, wanted, options)

    def run(processes: Processes) -> list[Any]:
        with bar(source, wanted, options) as advance:
            return read_leaves(source, wanted, options, advance)

    return ReadPlan(source, run)


# Arrays are queued until there are so many, or until so many bytes have arrived. Then
# they are made jax arrays together.
_MAX_QUEUED, _MAX_ARRIVED_BYTES = 1024, 16 * 2**20


def read_leaves(
    source: Source,
    wanted: Sequence[LeafRead],
    options: LoadOptions,
    advance: Advance | None,
) -> list[Any]:
    """Reads leaves as their targets ask, stored arrays that are shared only once.
    `advance` is that of a bar which may count more than these.

    **Raises:** `RuntimeError` as `read_arrays`, and for values that are lost.
    """
    verify, max_bytes = options.verify, options.max_bytes
    budget = _read_arrays.BUDGET if max_bytes is None else max_bytes
    leaves = LeafBuilder(wanted, budget)
    reads = _stored_reads(source, wanted, verify)
    results = _read_arrays.read_arrays(source, reads, verify, max_bytes)
    with contextlib.closing(results):
        for one, result in results:
            leaves.add(one, result)
            del result  # It is not to live until the next ones have arrived.
            if advance is not None:
                advance(one.nbytes, 1)
    return leaves.finish("the checkpoint", source.root)


def bar(
    source: Source, wanted: Sequence[LeafRead], options: LoadOptions
) -> AbstractContextManager[Advance | None]:
    """The progress bar of a load, if it is to be shown."""
    if not options.progress:
        return contextlib.nullcontext()
    reads = _stored_reads(source, wanted, options.verify)
    nbytes = sum(one.nbytes for one in reads)
    return _progress.bar("load", nbytes, len(reads), True)


class _Needed(NamedTuple):
    """The parts of a leaf that a target needs: views (None: all of it), and the
    conversion of their numbers."""

    views: tuple[View, ...] | None
    conversion: Conversion | None


def _stored_reads(
    source: Source, wanted: Sequence[LeafRead], verify: bool
) -> list[StoredRead]:
    """The reads of a load: each stored array is read once, and of views each chunk."""
    aliases = source.index.leaves.aliases
    # By what is read, the leaves that it is for.
    shared: dict[Any, list[int]] = {}
    out = []
    for i, (leaf, needed) in enumerate(zip(wanted, _needed(wanted))):
        leaf_index = leaf.record.leaf_index
        key = aliases.get(leaf_index, leaf_index), needed
        leaves = shared.get(key)
        if leaves is None:
            shared[key] = leaves = []
            out.append(StoredRead(leaf.record, *needed, leaves))
        leaves.append(i)
    if len(out) == 1 or all(one.views is None for one in out):
        return out
    return _share_chunks(source, out, verify)


def _needed(wanted: Sequence[LeafRead]) -> Iterator[_Needed]:
    """For each leaf what its target needs. Most leaves are wanted as another one like
    them, and share what that needs."""
    alike: dict[tuple[int, int, int], _Needed] = {}
    for leaf in wanted:
        if leaf.view is not None or leaf.record.part is not None:
            yield _need_of(leaf)
            continue
        key = id(leaf.record.template), id(leaf.target), id(leaf.move)
        found = alike.get(key)
        if found is None:
            found = alike[key] = _need_of(leaf)
        yield found


def _share_chunks(
    source: Source, reads: list[StoredRead], verify: bool
) -> list[StoredRead]:
    """These reads, but those that share chunks joined: a chunk that is verified or
    decoded is read whole. Those that are joined have at most `BUDGET` bytes."""
    groups: dict[Any, list[StoredRead]] = collections.defaultdict(list)
    for one in reads:
        groups[source.array_index(one.record), one.conversion].append(one)
    out: list[StoredRead] = []
    for group in groups.values():
        if len(group) == 1 or not _kept.is_by_chunks(source, group[0].record, verify):
            out += group
            continue
        some: list[StoredRead] = []
        last = size = 0
        spans = [_kept.span(source, one) for one in group]
        for (low, high), one in sorted(zip(spans, group), key=lambda x: x[0]):
            if some and (low > last or size + one.nbytes > _read_arrays.BUDGET):
                out.append(_join(some))
                some, size = [], 0
            some.append(one)
            last, size = max(last, high), size + one.nbytes
        out.append(_join(some))
    return out


def _join(reads: list[StoredRead]) -> StoredRead:
    """One read with the views of all of these, of one stored array."""
    if len(reads) == 1:
        return reads[0]
    views = tuple(it.chain.from_iterable(one.all_views for one in reads))
    return reads[0]._replace(views=views, leaves=(), several=reads)


def _need_of(leaf: LeafRead) -> _Needed:
    """The parts of a leaf that its target needs: all of it, a view, or regions."""
    record, view, target, move = leaf
    views = None if view is None else (view,)
    regions = _from_host.regions(target)
    if move is not None:
        regions = move.regions()
    elif record.part is not None:
        regions = _partial.stored_regions(record, view, regions)
    if regions is not None:
        whole = view or _view.whole(record.template.shape)
        views = tuple(whole.take((*region, ...)) for region in regions)
    return _Needed(views, _from_host.conversion(record.template, target))


def lost_error(what: str, lost: Mapping[str, str]) -> RuntimeError:
    """The error for values of `what` that a conversion lost: why, by leaves."""
    lines = [f"  {name}: {why}" for name, why in lost.items()]
    return RuntimeError(
        f"Values of {what} do not survive the conversion that is asked for; "
        "nothing was loaded:\n" + "\n".join(lines) + "\nAsk for dtypes that "
        "hold them, as a `like` of `ec.skeleton` does, or read them as they "
        "were saved and cast them yourself: `astype` of JAX takes any value."
    )


class LeafBuilder:
    """Makes leaves of arrays as these arrive. Plain leaves of JAX (see
    `PlainLeaves`) wait in a queue, and are made together. All others are made as they
    arrive.

    Arrays stay in host memory until the leaves are on their devices. So no more than
    `budget` bytes are on their way to devices, but for small leaves.
    """

    def __init__(self, wanted: Sequence[LeafRead], budget: int):
        self._out: list[Any] = [None] * len(wanted)
        self._lost: dict[str, str] = {}
        self._wanted, self._budget = wanted, budget
        targets = {id(leaf.target): leaf.target for leaf in wanted}
        # Equal targets need not be one object.
        alike: dict[Target, PlainLeaves] = {}
        self._plain: dict[int, PlainLeaves | None] = {}
        for x, target in targets.items():
            plain = _from_host.plain_leaves(target)
            self._plain[x] = plain and alike.setdefault(target, plain)
        # How many leaves wait, and the bytes that have arrived since none did.
        self._queued = self._arrived_bytes = 0
        self._most_bytes = min(_MAX_ARRIVED_BYTES, budget // 4)
        self._transfers: collections.deque[tuple[int, list[Any]]] = collections.deque()
        self._transfer_bytes = 0

    def add(self, one: StoredRead, result: ReadResult) -> None:
        """Makes or queues the leaves that a read is for."""
        arrays, owned, lost = result
        if one.several:
            rest = iter(arrays)
            for part in one.several:
                some = list(it.islice(rest, len(part.all_views)))
                self.add(part, result._replace(arrays=some))
            return
        if lost:
            self._lost |= {self._wanted[i].record.name: lost for i in one.leaves}
            return
        t, converted = one.record.template, one.conversion is not None
        # A view may keep much more memory than its own: it is copied.
        is_part = one.views is not None and not owned
        if t.stored != t.dtype and not converted:
            # As `PlainLeaves` takes them. `from_host` does it again, to no effect.
            arrays = _from_host.viewed(arrays, t)
        for place, i in enumerate(one.leaves):
            # The first leaf gets the bytes, and others that share them get copies.
            is_first = place == 0
            _, _, target, move = self._wanted[i]
            plain = self._plain[id(target)]
            # A process may have no part of a leaf.
            array = arrays[0] if arrays and move is None else None
            found = None if array is None else (array.dtype, array.shape)
            if plain is None or array is None or found != plain.dtype_and_shape:
                self._make_leaf(one, i, arrays, owned=owned and is_first)
                self._arrived_bytes += one.nbytes
            else:
                if plain.is_numpy:
                    self._out[i] = array if owned and is_first else array.copy()
                else:
                    # One that is whole and not `owned` is not aligned: JAX copies it.
                    is_copied = is_part or not is_first
                    plain.waiting.append((i, array.copy() if is_copied else array))
                    self._queued += 1
                self._arrived_bytes += array.nbytes
            # What waits may keep memory in which other leaves have come.
            if self._queued >= _MAX_QUEUED or self._arrived_bytes >= self._most_bytes:
                self._make_queued()

    def _make_leaf(
        self, one: StoredRead, i: int, arrays: list[np.ndarray], owned: bool
    ) -> None:
        """Makes a leaf that is not plain, now."""
        record, _, target, move = self._wanted[i]
        t, converted = one.record.template, one.conversion is not None
        try:
            if move is None:
                self._out[i] = _from_host.from_host(arrays, t, target, owned, converted)
            else:
                parts = _from_host.host_parts(arrays, t, target, owned, converted)
                with _guards.lifted():
                    self._out[i] = move.begin(parts)
        except (ValueError, TypeError) as e:
            self._lost[record.name] = str(e)
        self._bound_transfers(one.nbytes, [self._out[i]])

    def finish(self, what: str, place: object = None) -> list[Any]:
        """All leaves, which are of `what`, at a `place`. **Raises:** `RuntimeError` for
        values that the conversion lost."""
        self._make_queued()
        if self._lost:
            what = what if place is None else f"{what} at `{place}`"
            raise lost_error(what, self._lost)
        return self._out

    def _make_queued(self) -> None:
        """Makes the leaves that wait."""
        if self._queued:
            made: list[Any] = []
            nbytes = 0
            with _guards.lifted():
                for plain in self._plain.values():
                    if plain is not None and plain.waiting:
                        nbytes += sum(array.nbytes for _, array in plain.waiting)
                        made += plain.make(self._out)
            self._bound_transfers(nbytes, made)
        self._queued = self._arrived_bytes = 0

    def _bound_transfers(self, nbytes: int, leaves: list[Any]) -> None:
        """Waits until no more than the budget is on its way to devices, these leaves
        included."""
        # Small ones are soon on their devices.
        if nbytes < _from_host.SMALL_BYTES:
            return
        self._transfers.append((nbytes, leaves))
        self._transfer_bytes += nbytes
        while self._transfer_bytes > self._budget:
            size, leaves = self._transfers.popleft()
            jax.block_until_ready(leaves)
            self._transfer_bytes -= size
