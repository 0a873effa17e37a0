"""The planned read: small leaves in runs, large ones in parts, all verified."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._errors import DamagedError, ReplacedError
from .._format import _grid, _template
from .._storage import _context, _store
from . import _partial, _parts, _requests
from ._requests import Fetched, Reading, Request, Results
from ._source import Source


# Leaves of one chunk up to this many bytes are read in runs, where they lie together.
_SMALL = 1 << 16
_RUN, _GAP = 8 * 2**20, 4096
# The memory for what is under way, unless the caller says so.
BUDGET = 256 * 2**20


def read(
    source: Source,
    requests: Sequence[Request],
    verify: bool,
    max_bytes: int | None = None,
) -> Results:
    """Reads stored arrays, or views of them, each byte once. Gives each request with
    its arrays as they arrive.

    **Raises:** at the end, `DamagedError` that names every leaf whose bytes are missing
    or are not those that were saved.
    """
    _context.check_fork()
    budget = BUDGET if max_bytes is None else max_bytes
    problems: dict[str, str] = {}
    left = {id(request): request for request in requests}
    # In a store, what is damaged or missing is what a second read finds so too.
    for _ in range(1 + source.root.is_far):
        problems.clear()
        results = _read(source, [*left.values()], verify, budget, problems)
        for request, fetched in results:
            del left[id(request)]
            yield request, fetched
        if not problems:
            break
    if problems:
        raise _damaged(source, problems)
    if not source.is_unchanged():
        raise source.lost("")


def _read(
    source: Source,
    requests: Sequence[Request],
    verify: bool,
    budget: int,
    problems: dict[str, str],
) -> Results:
    """As `read`, once. What has `problems` is not given."""
    verify = verify and source.has_digests
    small: list[Request] = []
    large: list[Request] = []
    # Leaves of one template are alike where each is one run of bytes of our own files.
    known: dict[tuple[int, bool], bool] = {}
    for request in requests:
        if request.record.part is not None:
            _partial.check_readable(request.record)
        key = id(request.record.template), request.views is None
        is_small = known.get(key)
        if is_small is None:
            is_small = _is_small(source, request, verify)
            if source.foreign is None:
                known[key] = is_small
        if is_small and request.views != ():
            small.append(request)
        elif request.is_empty:
            dtype = _template.dtype_of(request.record.template.stored)
            yield (
                request,
                Fetched([np.empty(shape, dtype) for shape in request.shapes], True),
            )
        else:
            large.append(request)
    digests = source.digests if verify and (small or large) else None
    if digests is not None:
        digests.prepare(source.root.is_far)
    reading = Reading(source, digests, budget, problems)
    if small:
        yield from _read_small(reading, small)
    if large:
        yield from _parts.read(reading, large)


def _is_small(source: Source, request: Request, verify: bool) -> bool:
    """Whether a leaf is read in a run."""
    t = request.record.template
    # From an object store, what is one block is read in runs too.
    is_far = source.root.is_far
    most = _grid.BLOCK if is_far and (verify or request.views is None) else _SMALL
    is_one = t.chunk == t.shape and t.nbytes <= most and t.codec is None
    is_apart = source.strides(request.record) is not None
    return is_one and not is_apart and not source.is_stored(request.record)


def _damaged(source: Source, problems: dict[str, str]) -> RuntimeError:
    error = source.lost("")
    if isinstance(error, ReplacedError):
        return error
    lines = [f"  {name}: {why}" for name, why in problems.items()]
    if len(lines) > 20:
        lines = [*lines[:20], f"  ... and {len(lines) - 20} more leaves"]
    return DamagedError(
        f"The checkpoint at `{source.root}` is damaged, and nothing of it was loaded:\n"
        + "\n".join(lines)
        + "\nLoad another checkpoint, or leave these leaves out with `where`."
    )


# ---- Small leaves.


class _Run(NamedTuple):
    """Leaves that lie together in a file, each with its offset there."""

    key: str
    start: int
    stop: int
    members: list[tuple[Request, int]]


def _runs(source: Source, requests: list[Request]) -> list[_Run]:
    if source.files is None:
        places = [
            (f"{source.key(r)}/{_grid.key((0,) * len(r.template.shape))}", 0, i)
            for i, r in enumerate(request.record for request in requests)
        ]
    else:
        places = []
        for i, request in enumerate(requests):
            file, offset = source.index.start(request.record.place)
            places.append((source.files[file], offset, i))
        places.sort()
    runs: list[_Run] = []
    last, start, stop, members = "", 0, 0, []
    for key, offset, i in places:
        end = offset + requests[i].record.template.nbytes
        if key == last and offset - stop <= _GAP and end - start <= _RUN:
            members.append((requests[i], offset))
            stop = max(stop, end)
            continue
        if members:
            runs.append(_Run(last, start, stop, members))
        last, start, stop, members = key, offset, end, [(requests[i], offset)]
    return [*runs, _Run(last, start, stop, members)]


def _read_small(reading: Reading, requests: list[Request]) -> Results:
    source = reading.source
    waiting: collections.deque[tuple[_Run, Any]] = collections.deque()
    size = 0
    runs = iter(_runs(source, requests))
    while True:
        # Some runs are on their way while the one before them is looked at.
        for run in runs:
            args = run.key, run.start, run.stop
            waiting.append((run, source.directory.start_read(*args)))
            size += run.stop - run.start
            if size + _RUN > reading.budget:
                break
        if not waiting:
            return
        run, future = waiting.popleft()
        size -= run.stop - run.start
        why = ""
        data = b""
        try:
            data = _store.read_answer(source.directory, run.key, future).value
            if len(data) != run.stop - run.start:
                why = _requests.MISSING
        except Exception as e:
            why = reading.explain(e)
        if why:
            reading.problems.update(
                (request.record.name, why) for request, _ in run.members
            )
        else:
            yield from _unpack(reading, run, data)


def _unpack(reading: Reading, run: _Run, data: bytes) -> Results:
    """The leaves of a run, of its bytes."""
    first_digest = reading.source.index.first_digest
    digest, digests = xxhash.xxh3_128_digest, reading.digests
    memory = memoryview(data)
    last, nbytes, dtype = None, 0, np.dtype(np.uint8)
    for request, offset in run.members:
        record, views = request.record, request.views
        t = record.template
        if t is not last:
            last, nbytes, dtype = t, t.nbytes, _template.dtype_of(t.stored)
        at = offset - run.start
        if digests is not None:
            # A small leaf is one block.
            row = first_digest(record.place)
            if digests.rows(row, row + 1) != digest(memory[at : at + nbytes]):
                reading.problems[record.name] = _requests.CHANGED
                continue
        array = np.ndarray(t.shape, dtype, memory, at)
        arrays = [array] if views is None else [v.apply(array) for v in views]
        yield request, Fetched(arrays, False)
