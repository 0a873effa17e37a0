"""The planned read: small leaves in runs, large ones in slabs, all verified."""

import collections
import concurrent.futures as cf
import dataclasses
import functools as ft
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from . import _chunks, _index, _layout, _store, _view
from ._index import Index, Record
from ._store import Root
from ._view import View


# Leaves of one chunk up to this many bytes are read in runs, where they lie together.
_SMALL = 1 << 16
_RUN, _GAP = 8 * 2**20, 4096
# Large leaves are read in slabs of about this many bytes, so that digests are computed
# while the next ones arrive; at most so many of them at a time.
_SLAB, _IN_FLIGHT = 16 * 2**20, 64
# Unverified views up to this size are read to the byte, where their bytes are in a run.
_RANGES = 64 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A save that was opened: all that is read goes through one of these."""

    root: Root
    index: Index

    @ft.cached_property
    def _arrays(self) -> dict[int, Any]:
        return {}

    @property
    def database(self) -> str | None:
        return f"d/{self.index.save}" if self.index.layout == "ocdbt" else None

    def key(self, record: Record) -> str:
        """The leaf's directory, in the database or at the root."""
        if self.database is None:
            return _layout.directory(record.name)
        return record.name

    def array(self, record: Record) -> Any:
        """The leaf's TensorStore, opened once and without a read."""
        array = self._arrays.get(record.place)
        if array is None:
            try:
                self.check(record)
            except ValueError as e:
                raise self.lost(str(e)) from e
            place = self.place(record)
            (array,) = _store.open_arrays(
                self.root, self.database, self.index.files, [place]
            )
            self._arrays[record.place] = array
        return array

    def place(self, record: Record, rows: range | None = None) -> _store.Place:
        """Where the chunks lie that have any of the `rows` of a leaf (None: of all)."""
        if self.database is None:
            return _store.Place(record.template, self.key(record))
        chunks = self.index.chunks(record, rows)
        return _store.Place(record.template, "", list(chunks))

    def check(self, record: Record, rows: range | None = None) -> None:
        """**Raises:** `ValueError` unless there are files as large as the index says.

        So no memory is allocated for what is not there.
        """
        t = record.template
        if self.database is not None:
            for first, stop, file, offset in self.index.segments(record):
                key = f"{self.database}/{self.index.files[file]}"
                _store.check_range(self.root, key, offset + (stop - first) * t.full)
        elif self.root.local is not None:
            for index in _chunks.indices(t.shape, t.chunk, rows):
                key = f"{self.key(record)}/{_chunks.key(index)}"
                found = _store.check_range(self.root, key, t.full)
                if found is not None and found.st_size != t.full:
                    raise ValueError(f"`{key}` is not a chunk of it")

    @ft.cached_property
    def digests(self) -> bytes:
        key = f"{self.database}/digests" if self.database else "eqx_ckpt.digests"
        try:
            size = 16 * self.index.block_count
            value = _store.read_file(self.root, key, limit=size)
        except ValueError as e:
            raise self.lost(f"its file of digests is damaged ({e})") from e
        if value is None:
            raise self.lost("its file of digests is missing")
        if len(value.data) != size or _index.digest(value.data) != self.index.digests:
            raise self.lost("its file of digests is damaged")
        return value.data

    def is_current(self) -> bool:
        """Whether the path still holds the save that was opened."""
        head = f'{{"format":"{_index.FORMAT}","save":"{self.index.save}"'.encode()
        value = _store.read_file(self.root, _store.INDEX, len(head))
        return value is not None and value.data == head

    def lost(self, why: str) -> RuntimeError:
        try:
            current = self.is_current()
        except Exception:
            current = False
        if not current:
            why = (
                "it was replaced or deleted after it was opened. Open it again: what "
                "was opened is never mixed with what came after"
            )
        return RuntimeError(f"The checkpoint at `{self.root}` cannot be read: {why}.")


class Request(NamedTuple):
    record: Record
    view: View | None = None


class Read(NamedTuple):
    """`owned`: the memory is the caller's alone, and may be written to."""

    array: np.ndarray
    owned: bool


def read(source: Source, requests: Sequence[Request], verify: bool) -> list[Read]:
    """Reads stored arrays, or views of them, each byte once.

    **Raises:** `RuntimeError` that names every leaf whose bytes are missing or are not
    those that were saved.
    """
    out: list[Read | None] = [None] * len(requests)
    small: list[int] = []
    large: list[int] = []
    for i, (record, view) in enumerate(requests):
        t = record.template
        if 0 in (t.shape if view is None else view.shape):
            shape = t.shape if view is None else view.shape
            out[i] = Read(np.empty(shape, _index.dtype_of(t.stored)), True)
        elif t.chunk == t.shape and t.nbytes <= _SMALL:
            small.append(i)
        else:
            large.append(i)
    problems: dict[str, str] = {}
    digests = source.digests if verify and (small or large) else None
    if small:
        _read_small(source, requests, small, digests, out, problems)
    if large:
        _read_large(source, requests, large, digests, out, problems)
    if problems:
        raise _damaged(source, problems)
    if source.database is None and not source.is_current():
        raise source.lost("")
    return out  # pyright: ignore[reportReturnType]


def _damaged(source: Source, problems: dict[str, str]) -> RuntimeError:
    error = source.lost("")
    if "replaced or deleted" in str(error):
        return error
    lines = [f"  {name}: {why}" for name, why in problems.items()]
    if len(lines) > 20:
        lines = [*lines[:20], f"  ... and {len(lines) - 20} more leaves"]
    return RuntimeError(
        f"The checkpoint at `{source.root}` is damaged, and nothing of it was loaded:\n"
        + "\n".join(lines)
        + "\nLoad another checkpoint, or leave these leaves out with `where`."
    )


def _reason(error: Exception) -> str:
    text = str(error)
    lost = ("NOT_FOUND", "is missing", "FAILED_PRECONDITION", "OUT_OF_RANGE")
    if any(word in text for word in lost):
        return "a chunk of it is missing"
    return f"it cannot be read ({text.splitlines()[0]})"


def _read_small(
    source: Source,
    requests: Sequence[Request],
    which: list[int],
    digests: bytes | None,
    out: list[Read | None],
    problems: dict[str, str],
) -> None:
    rows = [0] * len(which)
    if digests is not None:
        first_block = source.index.first_block
        rows = [first_block(requests[i].record.place) for i in which]
    row_of = dict(zip(which, rows))
    if source.database is None:
        places = [
            (i, f"{source.key(r)}/{_chunks.key((0,) * len(r.template.shape))}", 0)
            for i, r in ((i, requests[i].record) for i in which)
        ]
    else:
        files = [f"{source.database}/{file}" for file in source.index.files]
        places = [
            (i, files[requests[i].record.file], requests[i].record.offset)
            for i in which
        ]
        places.sort(key=lambda place: place[1:])
    runs: list[tuple[str, int, int, list[tuple[int, int]]]] = []
    for i, key, offset in places:
        end = offset + requests[i].record.template.nbytes
        if runs:
            last, start, stop, members = runs[-1]
            if last == key and offset - stop <= _GAP and end - start <= _RUN:
                members.append((i, offset))
                runs[-1] = (key, start, max(stop, end), members)
                continue
        runs.append((key, offset, end, [(i, offset)]))
    futures = [
        _store.start_read_range(source.root, key, start, stop)
        for key, start, stop, _ in runs
    ]
    for (_, start, stop, members), future in zip(runs, futures):
        why = ""
        data = b""
        try:
            data = future.result().value
            if len(data) != stop - start:
                why = "a chunk of it is missing"
        except Exception as e:
            why = _reason(e)
        memory = memoryview(data)
        for i, offset in members:
            record, view = requests[i]
            t = record.template
            at = offset - start
            row = 16 * row_of[i]
            # A small leaf is one block.
            if not why and not (
                digests is None
                or digests[row : row + 16]
                == xxhash.xxh3_128_digest(memory[at : at + t.nbytes])
            ):
                problems[record.name] = "its bytes are not those that were saved"
            elif why:
                problems[record.name] = why
            else:
                dtype = _index.dtype_of(t.stored)
                array = np.frombuffer(data, dtype, math.prod(t.shape), at)
                array = array.reshape(t.shape)
                out[i] = Read(array if view is None else view.apply(array), False)


def _spans(record: Record, view: View | None) -> list[tuple[int, int, int]] | None:
    """The parts of chunks that hold a view whose elements follow each other."""
    t = record.template
    if view is None:
        return None
    run = _view.run(view.picks, t.shape)
    if run is None or len(run) * t.itemsize > _RANGES:
        return None
    spans = _chunks.spans(t.shape, t.chunk, run.start, run.stop)
    return None if spans is None else list(spans)


def _read_run(
    source: Source,
    record: Record,
    view: View,
    spans: list[tuple[int, int, int]],
    problems: dict[str, str],
) -> Read:
    """Reads exactly the bytes of a view, out of the files: for unverified reads."""
    t = record.template
    counts = _chunks.grid(t.shape, t.chunk)
    ranges: list[list[Any]] = []
    for number, first, count in spans:
        if source.database is None:
            index = [int(n) for n in np.unravel_index(number, counts)]
            key, start = f"{source.key(record)}/{_chunks.key(index)}", 0
        else:
            file, start = source.index.place_of_chunk(record, number)
            key = f"{source.database}/{file}"
        start += first * t.itemsize
        stop = start + count * t.itemsize
        if ranges and ranges[-1][0] == key and ranges[-1][2] == start:
            ranges[-1][2] = stop
        else:
            ranges.append([key, start, stop])
    into = _store.aligned(view.picked, t.stored)
    data = into.reshape(-1).view(np.uint8)
    futures = [_store.start_read_range(source.root, *r) for r in ranges]
    at = 0
    for (_, start, stop), future in zip(ranges, futures):
        try:
            value = future.result().value
            if len(value) != stop - start:
                problems[record.name] = "a chunk of it is missing"
                break
            data[at : at + len(value)] = np.frombuffer(value, np.uint8)
            at += len(value)
        except Exception as e:
            problems[record.name] = _reason(e)
            break
    return Read(view.arrange(into), True)


class _Slab(NamedTuple):
    """Rows `[start, stop)` of a stored array, as whole chunks along the first axis.

    They are read into `into`; `keep` then takes what is wanted, where that is not all.
    """

    record: Record
    start: int
    stop: int
    into: np.ndarray
    keep: Callable[[np.ndarray], None] | None


def _open_large(
    source: Source,
    requests: Sequence[Request],
    which: list[int],
    digests: bytes | None,
    problems: dict[str, str],
) -> dict[int, Any]:
    """Opens the arrays of large leaves, whose files are known to hold them then."""
    places = {}
    for i in which:
        record, view = requests[i]
        rows = None
        if view is not None:
            if digests is None and _spans(record, view) is not None:
                continue  # Its bytes are read out of the files.
            pick = view.picks[0]
            rows = range(pick, pick + 1) if isinstance(pick, int) else pick
            rows = range(min(rows), max(rows) + 1)
        try:
            source.check(record, rows)
            places[i] = source.place(record, rows)
        except Exception as e:
            problems[record.name] = _reason(e)
    opened = _store.open_arrays(
        source.root, source.database, source.index.files, list(places.values())
    )
    return dict(zip(places, opened))


def _read_large(
    source: Source,
    requests: Sequence[Request],
    which: list[int],
    digests: bytes | None,
    out: list[Read | None],
    problems: dict[str, str],
) -> None:
    pending: collections.deque[tuple[str, Any, Callable[[], bool]]] = (
        collections.deque()
    )
    checks: list[tuple[str, cf.Future[bool]]] = []

    def finish(pool: cf.ThreadPoolExecutor) -> None:
        name, future, check = pending.popleft()
        try:
            future.result()
        except Exception as e:
            problems.setdefault(name, _reason(e))
            return
        checks.append((name, pool.submit(check)))

    arrays = _open_large(source, requests, which, digests, problems)
    with cf.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for i in which:
            record, view = requests[i]
            if record.name in problems:
                continue
            t = record.template
            spans = _spans(record, view) if digests is None else None
            if spans is not None and view is not None:
                out[i] = _read_run(source, record, view, spans, problems)
            elif view is not None and digests is None:
                into = _store.aligned(view.picked, t.stored)
                future = _store.start_read(arrays[i], into, view.slices())
                pending.append((record.name, future, lambda: True))
                out[i] = Read(view.arrange(into), True)
            else:
                result, slabs = _slabs(record, view)
                out[i] = Read(result, True)
                for slab in slabs:
                    if len(pending) >= _IN_FLIGHT:
                        finish(pool)
                    rows = (slice(slab.start, slab.stop),)
                    future = _store.start_read(arrays[i], slab.into, rows)
                    row = source.index.first_block(record.place) if digests else 0
                    check = ft.partial(_check, slab, digests, row)
                    pending.append((record.name, future, check))
        while pending:
            finish(pool)
        for name, check in checks:
            if not check.result():
                problems.setdefault(name, "its bytes are not those that were saved")


def _slabs(record: Record, view: View | None) -> tuple[np.ndarray, Iterator[_Slab]]:
    t = record.template
    step = t.chunk[0]
    row = math.prod(t.shape[1:]) * t.itemsize
    step *= max(1, _SLAB // max(1, step * row))
    starts = range(0, t.shape[0], step)
    if view is None:
        result = _store.aligned(t.shape, t.stored)

        def direct() -> Iterator[_Slab]:
            for start in starts:
                stop = min(start + step, t.shape[0])
                yield _Slab(record, start, stop, result[start:stop], None)

        return result, direct()
    pick = view.picks[0]
    rows = range(pick, pick + 1) if isinstance(pick, int) else pick
    low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1])
    rest = view.slices()[1:]
    kept = view.picked[isinstance(pick, range) :]
    parts = _store.aligned([len(rows), *kept], t.stored)

    def staged() -> Iterator[_Slab]:
        # Whole chunks: a digest can only be checked of all of its bytes.
        small = t.chunk[0]
        for start in range(low - low % small, high + 1, step):
            stop = min(start + step, t.shape[0], high - high % small + small)
            at = [(n, r - start) for n, r in enumerate(rows) if start <= r < stop]
            if not at:
                continue
            into = _store.aligned([stop - start, *t.shape[1:]], t.stored)
            to, fro = map(list, zip(*at))

            def keep(slab: np.ndarray, to: list = to, fro: list = fro) -> None:
                parts[to] = slab[(slice(None), *rest)][fro]

            yield _Slab(record, start, stop, into, keep)

    # With `...`, as one element alone would be a copy.
    result = parts[0, ...] if isinstance(pick, int) else parts
    return view.arrange(result), staged()


def _check(slab: _Slab, digests: bytes | None, row: int) -> bool:
    """Verifies the chunks of a slab that has arrived, and takes what is wanted."""
    t = slab.record.template
    if digests is not None:
        shape = (slab.stop - slab.start, *t.shape[1:])
        full = (min(t.chunk[0], t.shape[0]), *t.chunk[1:])
        per_row = _chunks.block_counts((full[0], *t.shape[1:]), t.chunk, t.itemsize)
        row += (slab.start // t.chunk[0]) * per_row
        for index in _chunks.indices(shape, t.chunk):
            region = _chunks.region(shape, t.chunk, index)
            data = _layout.chunk_bytes(slab.into, region)
            for digest in _layout.block_digests(data):
                if digests[16 * row : 16 * row + 16] != digest:
                    return False
                row += 1
    if slab.keep is not None:
        slab.keep(slab.into)
    return True
