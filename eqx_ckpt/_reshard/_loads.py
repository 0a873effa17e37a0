"""Loads in which each process reads a share of an array, and the devices do the rest:
`reshard=`."""

import collections
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._kernel._format import _template, _text
from .._kernel._limits import limits
from .._kernel._load import _read_leaves
from .._kernel._load._load_options import LoadOptions
from .._kernel._load._read_leaves import ReadPlan
from .._kernel._load._reads import LeafRead
from .._kernel._load._source import Source
from .._kernel._runtime import _log, _processes
from .._kernel._runtime._batching import batched
from .._kernel._runtime._processes import Processes
from .._kernel._tree import _from_host, _guards, _leaf
from . import _moves
from ._moves import ArrayMove


# A move may be worth it if without it the array would be read more often than this, all
# processes together.
_MIN_READS = 1.1
# Assumed for "auto": bytes a second that a device sends and receives, on a CPU and
# elsewhere; seconds to compile the programs of arrays of one shape, and seconds that
# each array takes, whatever its size.
_CPU_BYTES_PER_SECOND, _DEVICE_BYTES_PER_SECOND = 0.4e9, 5e9
_COMPILE_SECONDS, _ARRAY_SECONDS = 0.3, 2e-4
# So many small arrays of one kind are moved by one program.
_MAX_JOINED = 32
# The bytes of a batch that one process reads, unless the caller says otherwise.
_BATCH_BYTES = 256 * 2**20


def plan(source: Source, wants: Sequence[LeafRead], options: LoadOptions) -> ReadPlan:
    """The plan of a load with `reshard`: which leaves are moved, in which batches; and
    why others are not, though many processes read the same parts of them."""
    out, stay = list(wants), {}
    for i, want in enumerate(wants):
        found = _move(source, want)
        if isinstance(found, ArrayMove):
            out[i] = want._replace(move=found)
        elif found:
            stay[want.record.name] = found
    if options.reshard == "auto":
        _keep_worthy(out, stay)
    budget = _BATCH_BYTES if options.max_bytes is None else options.max_bytes
    batches = list(_batches(source, out, budget))
    return ReadPlan(
        source,
        lambda processes: _load(source, out, batches, options, processes),
        _digest(out, batches) if batches else "",
        lambda: _log_moves(str(source.root), out, stay, options),
    )


def _digest(wants: list[LeafRead], batches: list[list[int]]) -> str:
    """A text that is the same in all processes that will make the same moves."""
    numbers = [i for batch in batches for i in batch]
    moves = [(wants[i].record.name, str(wants[i].move)) for i in numbers]
    text = repr([list(map(len, batches)), moves])
    return hashlib.sha256(text.encode()).hexdigest()


def _move(source: Source, want: LeafRead) -> ArrayMove | str:
    """The move of a leaf; or else why it has none, if that is to be said."""
    record, view, target, _ = want
    t, sharding = record.template, target.sharding
    if sharding is None or sharding.num_devices == 1 or view is not None:
        return ""
    if target.kind not in ("jax", "key"):
        return ""
    if 0 in t.shape or not target.shape or record.part is not None:
        return ""
    is_local = _leaf.is_local(sharding)
    if not isinstance(sharding, NamedSharding):
        return "" if is_local else f"its sharding is a `{type(sharding).__name__}`"
    if target.registered is not None:
        return "" if is_local else "it is of a registered type"
    if not _moves.is_default_memory(sharding):
        return f"it goes into `{sharding.memory_kind}` memory"
    if target.dtype is not None and _template.bits(target.dtype) < 4:
        return f"devices cannot be relied on to move {target.dtype}"
    found = _moves.move(sharding, t.shape, source.template_as_read(record).chunk)
    if found is None:
        return "it cannot be cut into a part for each process"
    route = found.route
    if is_local:
        # The others do not move arrays that this process has alone.
        return "" if route.is_short or _processes.count() > 1 else found
    if route.processes < _processes.count():
        return "its sharding leaves out some of the processes"
    if route.read < route.wanted:
        return found
    is_more = route.wanted > _MIN_READS * math.prod(t.shape)
    return "its chunks cannot be dealt out to processes" if is_more else ""


def _keep_worthy(wants: list[LeafRead], stay: dict[str, str]) -> None:
    """Takes back the moves that are not worth it: these leaves are only read."""
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    for i, want in enumerate(wants):
        if want.move is not None:
            t = want.record.template
            alike[want.move, t.shape, t.itemsize].append(i)
    for (move, shape, itemsize), numbers in alike.items():
        route, size = move.route, math.prod(shape)
        devices, count = move.mesh.devices.flat, route.processes
        nbytes = (route.wanted - route.read) / count * itemsize * len(numbers)
        saved = nbytes / limits.read_bytes_per_second
        rate = (
            _CPU_BYTES_PER_SECOND
            if devices[0].platform == "cpu"
            else _DEVICE_BYTES_PER_SECOND
        )
        # Into how many parts the array is cut as it is read, and as it is wanted.
        parts = [route.digits.count(sum(x, ())) for x in (route.first, route.target)]
        local = len(devices) / count
        moved = local * sum(size / n for n in parts) * itemsize * len(numbers) / rate
        spent = moved + _COMPILE_SECONDS + _ARRAY_SECONDS * len(numbers)
        if route.wanted > _MIN_READS * size and saved > spent:
            continue
        for i in numbers:
            wants[i] = wants[i]._replace(move=None)
            if route.wanted > _MIN_READS * size:
                stay[wants[i].record.name] = "reading it takes less time"


def _batches(
    source: Source, wants: Sequence[LeafRead], budget: int
) -> Iterator[list[int]]:
    """Leaves that are moved together: a process reads at most `budget` bytes of them,
    or one array. Leaves that share a stored array stay together: it is read once."""
    groups: dict[int, list[int]] = collections.defaultdict(list)
    shares: dict[int, int] = {}
    for i, want in enumerate(wants):
        if want.move is not None:
            leaf_index = source.array_index(want.record)
            groups[leaf_index].append(i)
            shares[leaf_index] = (
                want.record.template.nbytes // want.move.route.processes
            )
    for batch in batched(groups, shares.__getitem__, budget):
        yield [i for leaf_index in batch for i in groups[leaf_index]]


def _load(
    source: Source,
    wants: list[LeafRead],
    batches: list[list[int]],
    options: LoadOptions,
    processes: Processes,
) -> list[Any]:
    """Reads leaves, and moves the batches of them.

    No collective starts before all processes have read and verified their parts for it:
    one that has failed would leave the others waiting in there.
    """
    out: list[Any] = [None] * len(wants)
    kept = [i for i, want in enumerate(wants) if want.move is None]
    with _read_leaves.bar(source, wants, options) as advance:
        for numbers in (kept, *batches):
            some = [wants[i] for i in numbers]
            values = _read_leaves.read_leaves(source, some, options, advance)
            for i in reversed(numbers):
                out[i] = values.pop()
            if numbers is not kept:
                _move_batch(wants, numbers, out, processes)
    return out


@_guards.lifted()
def _move_batch(
    wants: list[LeafRead], numbers: list[int], out: list[Any], processes: Processes
) -> None:
    """Moves the arrays of a batch. Each process has a share of their bits."""
    programs = []
    for dtype, some in _alike(wants, numbers, out):
        move, bits = wants[some[0]].move, out[some[0]]
        if isinstance(bits, list):
            bits = move.together([out[i] for i in some])
        program = _moves.compiled(move, bits.shape, bits.dtype, dtype)
        programs.append((some, program, bits))
        for i in some:
            out[i] = None
    processes.round()
    errors: list[Exception] = []
    programs.reverse()
    while programs:
        some, program, bits = programs.pop()
        moved = program(bits)
        del bits
        processes.wait_until(lambda moved=moved: all(x.is_ready() for x in moved))
        # If one array is wrong, this process still takes part in moving the others.
        for i, array in zip(some, moved):
            try:
                out[i] = _arrived(wants[i], array)
            except Exception as e:
                errors.append(e)
    if errors:
        raise errors[0]


def _alike(
    wants: list[LeafRead], numbers: list[int], out: list[Any]
) -> Iterator[tuple[np.dtype, list[int]]]:
    """The arrays that one program moves, with the dtype that they get. Small ones of
    one kind are moved together, in powers of two: few programs are compiled."""
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for i in numbers:
        record, _, target, move = wants[i]
        first = out[i][0] if isinstance(out[i], list) else out[i]
        is_key = target.kind == "key"
        dtype = (
            first.dtype if is_key else _from_host.result_dtype(record.template, target)
        )
        groups[move, first.shape, first.dtype, dtype].append(i)
    for (*_, dtype), some in groups.items():
        count = _MAX_JOINED if isinstance(out[some[0]], list) else 1
        while some:
            while count > len(some):
                count //= 2
            yield dtype, some[:count]
            some = some[count:]


def _arrived(want: LeafRead, moved: jax.Array) -> Any:
    target = want.target
    if target.kind == "key":
        moved = jax.random.wrap_key_data(moved, impl=target.impl)
    return jax.block_until_ready(_from_host.as_weak(moved, target))


def _log_moves(
    path: str, wants: list[LeafRead], stay: dict[str, str], options: LoadOptions
) -> None:
    """Logs which leaves were not moved, and for which of those that were moved some
    chunks were read more than once."""
    level = _log.INFO if options.reshard == "devices" else _log.DEBUG
    if not _log.is_on(level):
        return
    again = {}
    for want in wants:
        if want.move is not None:
            size = math.prod(want.record.template.shape)
            if want.move.route.read > _MIN_READS * size:
                times = want.move.route.read / size
                again[want.record.name] = f"{times:.2f} times"
    for what, which in (
        ("without moving them over devices", stay),
        ("whose chunks processes have read more than once", again),
    ):
        if which:
            some = [f"`{_text.escape(n)}` ({why})" for n, why in which.items()][:5]
            more = f", and {len(which) - 5} more" if len(which) > 5 else ""
            _log.say(
                level,
                f"Loaded from `{_text.escape(path)}`, {len(which)} leaves {what}: "
                f"{', '.join(some)}{more}",
                path=path,
            )
