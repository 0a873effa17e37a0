"""The planned read: small leaves in runs, large ones in slabs, all verified."""

import bisect
import collections
import concurrent.futures as cf
import dataclasses
import functools as ft
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import xxhash

from . import _arrays, _chunks, _index, _layout, _root, _store, _view
from ._chunks import Grid
from ._index import Index, Record, Template
from ._root import Root
from ._target import Conversion
from ._view import View


# Leaves of one chunk up to this many bytes are read in runs, where they lie together.
_SMALL = 1 << 16
_RUN, _GAP = 8 * 2**20, 4096
# Large leaves are read in parts of about this many bytes, so that some are verified
# while others arrive; together they are at most so many, unless the caller says so.
_PART, _BUDGET = 16 * 2**20, 256 * 2**20
# Unverified views up to this size are read to the byte, where their bytes are in a run.
_RANGES = 64 * 2**20


# In what parts leaves are read that are one run of bytes, where a view wants some.
_CUT = 4 * 2**20


class Foreign(NamedTuple):
    """What a checkpoint of another format is read from.

    Each leaf is one run of bytes in one of `files`, which are in `directory`; or what
    `specs` has for its place: see `open_specs`. `stamp` gives what was `stamped` until
    something is replaced. With `digests`, the place of those in the first file, it is
    one of ours in there, with chunks.
    """

    directory: Root
    files: list[str]
    stamp: Callable[[], str]
    stamped: str
    specs: dict[int, Any]
    digests: tuple[int, int] | None = None


class Unreadable(RuntimeError):
    """What was saved is damaged or gone, whatever was asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A save that was opened: all that is read goes through one of these."""

    root: Root
    index: Index
    foreign: Foreign | None = None

    def has_spec(self, record: Record) -> bool:
        """Whether a leaf is an array that TensorStore has to read."""
        return self.foreign is not None and record.place in self.foreign.specs

    def is_run(self, record: Record) -> bool:
        """Whether a leaf is one run of bytes, in no chunks."""
        if self.foreign is None or self.foreign.digests is not None:
            return False
        return record.place not in self.foreign.specs

    @property
    def has_digests(self) -> bool:
        return self.foreign is None or self.foreign.digests is not None

    @property
    def directory(self) -> Root:
        """What the keys of files are below of."""
        return self.root if self.foreign is None else self.foreign.directory

    @ft.cached_property
    def files(self) -> list[str] | None:
        """The keys of the data files; None: each leaf has a directory of its own."""
        if self.foreign is not None:
            return self.foreign.files
        if self.database is None:
            return None
        return [f"{self.database}/{file}" for file in self.index.files]

    @ft.cached_property
    def _opened(self) -> dict[int, Any]:
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
        array = self._opened.get(record.place)
        if array is None:
            try:
                self.check(record)
            except ValueError as e:
                raise self.lost(str(e)) from e
            if self.has_spec(record):
                (array,) = self.open([(record, ())])
            else:
                places = [self._place(record)]
                (array,) = _arrays.open_arrays(self.directory, self.files, places)
            self._opened[record.place] = array
        return array

    def open(self, wanted: Sequence[tuple[Record, Sequence[int]]]) -> list[Any]:
        """What `_arrays.start_read` reads some chunks of each of these leaves from."""
        if self.foreign is None or self.has_digests:
            places = [self._place(*one) for one in wanted]
            return _arrays.open_arrays(self.directory, self.files, places)
        directory, files, _, _, specs, _ = self.foreign
        those = [specs[r.place] for r, _ in wanted if r.place in specs]
        opened = iter(_arrays.open_specs(directory, those))
        return [
            next(opened)
            if self.has_spec(r)
            else _arrays.Run(directory, files[r.file], r.offset, r.template.shape)
            for r, _ in wanted
        ]

    def cut(self, record: Record) -> Template:
        """The template of a leaf, with the chunks that it is read in."""
        t = record.template
        if not self.is_run(record):
            return t
        return t._replace(chunk=_chunks.choose(t.shape, t.itemsize, _CUT))

    def _place(
        self, record: Record, numbers: Sequence[int] | None = None
    ) -> _arrays.Place:
        """Where chunks of a leaf lie (None: all of them)."""
        if self.files is None:
            return _arrays.Place(record.template, self.key(record))
        keys = _grid(record.template).keys
        locate = self.index.locate
        if numbers is None:
            numbers = range(len(keys))
        chunks = [(keys[n], *locate(record, n)) for n in numbers]
        return _arrays.Place(record.template, "", chunks)

    def check(self, record: Record, numbers: Sequence[int] | None = None) -> None:
        """**Raises:** `ValueError` unless the files hold all that the index says.

        That is, of the chunks of these `numbers`, in their order (None: of all).

        So no memory is allocated for what is not there. In an object store it would
        take as long as to read it, which says so too.
        """
        if self.has_spec(record):
            # How many bytes they have is known when they are decoded.
            self._check_blosc(record, () if numbers is None else numbers)
            return
        t = record.template
        is_decoded = t.codec is not None or self.files is None
        if is_decoded and t.full > _arrays.largest_chunk():
            raise ValueError(f"its chunks have {t.full} bytes, more than this machine")
        if self.root.local is None:
            return
        if numbers is None or self.is_run(record):
            numbers = range(t.chunk_count)
        if self.files is not None:
            for first, stop, file, offset in self.index.segments(record):
                last = bisect.bisect_left(numbers, stop) - 1
                if last < 0 or numbers[last] < first:
                    continue  # None of them is here.
                end = offset + self.index.extent(record, first, numbers[last] + 1)
                _store.check_range(self.directory, self.files[file], end)
        elif self.root.local is not None:
            size = t.full if t.codec is None else _index.least_encoded(t.full)
            keys = _grid(t).keys
            for n in numbers:
                key = f"{self.key(record)}/{keys[n]}"
                found = _store.check_range(self.root, key, size)
                most = size if t.codec is None else _index.most_encoded(t.full)
                if found is not None and found.st_size > most:
                    raise ValueError(f"`{key}` is not a chunk of it")

    def _check_blosc(self, record: Record, numbers: Sequence[int]) -> None:
        assert self.foreign is not None
        spec = self.foreign.specs[record.place]
        metadata = spec["metadata"] if isinstance(spec, dict) else {}
        if (metadata.get("compressor") or {}).get("id") != "blosc":
            return
        size = math.prod(metadata["chunks"]) * record.template.itemsize
        grid = _grid(record.template)
        for n in numbers:
            # As Zarr v2 has it: without the `c/` of v3.
            place = grid.keys[n].partition("/")[2] or "0"
            chunk = place.replace("/", metadata["dimension_separator"])
            key = f"{spec['kvstore']['key']}/{chunk}"
            _store.check_blosc(self.directory, key, size)

    @ft.cached_property
    def digests(self) -> bytes:
        data, size = None, 0
        try:
            size = 16 * self.index.block_count
            data = self._read_digests(size)
        except ValueError as e:
            raise self.lost(f"its file of digests is damaged ({e})") from e
        except FileNotFoundError:
            pass
        if data is None:
            raise self.lost("its file of digests is missing")
        if len(data) != size or _index.digest(data) != self.index.digests:
            raise self.lost("its file of digests is damaged")
        return data

    def _read_digests(self, size: int) -> bytes | None:
        if self.foreign is None:
            key = f"{self.database}/digests" if self.database else "eqx_ckpt.digests"
            value = _store.read_file(self.root, key, stop=size, limit=size)
            return None if value is None else value.data
        assert self.foreign.digests is not None
        into = np.empty(size, np.uint8)
        start, _ = self.foreign.digests
        key = self.foreign.files[0]
        return into[: _store.read_into(self.directory, key, start, into)].tobytes()

    def is_current(self) -> bool:
        """Whether the path still holds the save that was opened."""
        if self.foreign is not None:
            return self.foreign.stamp() == self.foreign.stamped
        head = f'{{"format":"{_index.FORMAT}","save":"{self.index.save}"'.encode()
        value = _store.read_file(self.root, _root.INDEX, len(head))
        return value is not None and value.data == head

    def lost(self, why: str) -> "Unreadable":
        try:
            current = self.is_current()
        except Exception as e:
            current = isinstance(e, ConnectionError)  # That is another matter.
        if not current:
            why = (
                "it was replaced or deleted after it was opened. Open it again: what "
                "was opened is never mixed with what came after"
            )
        return Unreadable(f"The checkpoint at `{self.root}` cannot be read: {why}.")


def _grid(t: Template) -> Grid:
    return _chunks.lay(t.shape, t.chunk, t.itemsize)


class Request(NamedTuple):
    """A stored array, or views of it, each of which becomes an array of its own.

    `conversion` is for what is read in parts; what is small comes as it is stored.
    """

    record: Record
    views: tuple[View, ...] | None = None
    conversion: Conversion | None = None


class Result(NamedTuple):
    """`owned`: the memory is the caller's alone, and may be written to."""

    arrays: list[np.ndarray]
    owned: bool
    converted: bool


def read(
    source: Source,
    requests: Sequence[Request],
    verify: bool,
    done: Callable[[int, Result], None],
    max_bytes: int | None = None,
) -> None:
    """Reads stored arrays, or views of them, each byte once, and calls `done` with the
    number of the request for each that has arrived, in the thread of the caller.

    **Raises:** `RuntimeError` that names every leaf whose bytes are missing or are not
    those that were saved.
    """
    budget = _BUDGET if max_bytes is None else max_bytes
    verify = verify and source.has_digests
    small: list[int] = []
    large: list[int] = []
    # From an object store, what is one block is read in runs too.
    is_far = source.root.local is None
    for i, (record, views, _) in enumerate(requests):
        t = record.template
        most = _chunks.BLOCK if is_far and (verify or views is None) else _SMALL
        is_small = t.chunk == t.shape and t.nbytes <= most and t.codec is None
        if is_small and not source.has_spec(record):
            small.append(i)
        elif 0 in t.shape or (views and all(0 in view.shape for view in views)):
            shapes = [t.shape] if views is None else [view.shape for view in views]
            dtype = _index.dtype_of(t.stored)
            done(i, Result([np.empty(s, dtype) for s in shapes], True, False))
        else:
            large.append(i)
    problems: dict[str, str] = {}
    digests = source.digests if verify and (small or large) else None
    if small:
        _read_small(source, requests, small, digests, budget, done, problems)
    if large:
        _Large(source, digests, budget, problems).read(requests, large, done)
    if problems:
        raise _damaged(source, problems)
    # Only a save in a directory of its own is never replaced by other bytes.
    is_fixed = source.foreign is None and source.database is not None
    if not is_fixed and not source.is_current():
        raise source.lost("")


def _damaged(source: Source, problems: dict[str, str]) -> Unreadable:
    error = source.lost("")
    if "replaced or deleted" in str(error):
        return error
    lines = [f"  {name}: {why}" for name, why in problems.items()]
    if len(lines) > 20:
        lines = [*lines[:20], f"  ... and {len(lines) - 20} more leaves"]
    return Unreadable(
        f"The checkpoint at `{source.root}` is damaged, and nothing of it was loaded:\n"
        + "\n".join(lines)
        + "\nLoad another checkpoint, or leave these leaves out with `where`."
    )


def _reason(root: Root, error: Exception) -> str:
    """What is wrong with what could not be read.

    **Raises:** `ConnectionError` if it is not that, but the store that does not answer.
    """
    error = _root.explain(root, error)
    if isinstance(error, ConnectionError):
        raise error
    text = str(error)
    if any(word in text for word in ("NOT_FOUND", "is missing", "OUT_OF_RANGE")):
        return "a chunk of it is missing"
    if "FAILED_PRECONDITION" in text:
        return "a chunk of it is missing or damaged"
    return f"it cannot be read ({text.splitlines()[0]})"


class _Run(NamedTuple):
    """Leaves that lie together in a file, as `(request, offset)`."""

    key: str
    start: int
    stop: int
    members: list[tuple[int, int]]


def _runs(source: Source, requests: Sequence[Request], which: list[int]) -> list[_Run]:
    if source.files is None:
        places = [
            (f"{source.key(r)}/{_chunks.key((0,) * len(r.template.shape))}", 0, i)
            for i, r in ((i, requests[i].record) for i in which)
        ]
    else:
        places = []
        for i in which:
            record = requests[i].record
            places.append((source.files[record.file], record.offset, i))
        places.sort()
    runs: list[_Run] = []
    last, start, stop, members = "", 0, 0, []
    for key, offset, i in places:
        end = offset + requests[i].record.template.nbytes
        if key == last and offset - stop <= _GAP and end - start <= _RUN:
            members.append((i, offset))
            stop = max(stop, end)
            continue
        if members:
            runs.append(_Run(last, start, stop, members))
        last, start, stop, members = key, offset, end, [(i, offset)]
    return [*runs, _Run(last, start, stop, members)]


def _read_small(
    source: Source,
    requests: Sequence[Request],
    which: list[int],
    digests: bytes | None,
    budget: int,
    done: Callable[[int, Result], None],
    problems: dict[str, str],
) -> None:
    first_block = source.index.first_block
    digest = xxhash.xxh3_128_digest
    waiting: collections.deque[tuple[_Run, Any]] = collections.deque()
    size = 0
    runs = iter(_runs(source, requests, which))
    while True:
        # Some runs are on their way while the one before them is looked at.
        for run in runs:
            args = run.key, run.start, run.stop
            waiting.append((run, _store.start_read_range(source.directory, *args)))
            size += run.stop - run.start
            if size + _RUN > budget:
                break
        if not waiting:
            return
        (_, start, stop, members), future = waiting.popleft()
        size -= stop - start
        why = ""
        data = b""
        try:
            data = future.result().value
            if len(data) != stop - start:
                why = "a chunk of it is missing"
        except Exception as e:
            why = _reason(source.root, e)
        memory = memoryview(data)
        for i, offset in members:
            record, views, _ = requests[i]
            t = record.template
            at = offset - start
            if why:
                problems[record.name] = why
                continue
            if digests is not None:
                # A small leaf is one block.
                row = 16 * first_block(record.place)
                if digests[row : row + 16] != digest(memory[at : at + t.nbytes]):
                    problems[record.name] = "its bytes are not those that were saved"
                    continue
            dtype = _index.dtype_of(t.stored)
            array = np.frombuffer(data, dtype, math.prod(t.shape), at).reshape(t.shape)
            arrays = [array] if views is None else [v.apply(array) for v in views]
            done(i, Result(arrays, False, False))


class _Room:
    """Memory that a number of reads share: one waits until there is enough for it."""

    def __init__(self, size: int):
        self._size = size
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._used == 0 or self._used + size <= self._size
            )
            self._used += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify()


class _Large:
    """Reads leaves in parts: runs of chunks, which threads verify as they arrive."""

    def __init__(
        self,
        source: Source,
        digests: bytes | None,
        budget: int,
        problems: dict[str, str],
    ):
        self._source = source
        self._digests = digests
        self._problems = problems
        self._room = _Room(budget)
        self._part = max(1, min(_PART, budget // 4))
        self._pool = cf.ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def read(
        self,
        requests: Sequence[Request],
        which: list[int],
        done: Callable[[int, Result], None],
    ) -> None:
        waiting: collections.deque[tuple[int, Any, list[cf.Future]]] = (
            collections.deque()
        )

        def finish() -> None:
            i, result, parts = waiting.popleft()
            for part in parts:
                part.result()
            if requests[i].record.name not in self._problems:
                done(i, result())

        numbers, arrays = self._open(requests, which)
        with self._pool:
            for i in numbers:
                start = self._start(requests[i], numbers[i], arrays.get(i))
                waiting.append((i, *start))
                while waiting and all(part.done() for part in waiting[0][2]):
                    finish()
            while waiting:
                finish()

    def _open(
        self, requests: Sequence[Request], which: list[int]
    ) -> tuple[dict[int, Sequence[int]], dict[int, Any]]:
        """The chunks that are wanted of each leaf, and the arrays that they are read
        from, all opened together. Their files are known to hold them then."""
        source = self._source
        numbers: dict[int, Sequence[int]] = {}
        wanted: dict[int, tuple[Record, Sequence[int]]] = {}
        for i in which:
            record, views, _ = requests[i]
            try:
                if self._is_exact(views, record):
                    if _spans(self._source, record, views[0]) is not None:
                        numbers[i] = ()
                        continue
                numbers[i] = _wanted(source.cut(record), views)
                source.check(record, numbers[i])
                if self._is_exact(views, record) or not self._is_direct(record):
                    wanted[i] = record, numbers[i]
            except Exception as e:
                numbers.pop(i, None)
                self._problems[record.name] = _reason(self._source.root, e)
        return numbers, dict(zip(wanted, source.open(list(wanted.values()))))

    def _is_exact(
        self, views: tuple[View, ...] | None, record: Record
    ) -> TypeGuard[tuple[View, ...]]:
        """Whether no more is read than a view, as nothing is verified."""
        if self._digests is not None or views is None or len(views) != 1:
            return False
        if not self._source.is_run(record):
            return True
        return _spans(self._source, record, views[0]) is not None

    def _start(
        self, request: Request, numbers: Sequence[int], array: Any
    ) -> tuple[Callable[[], Result], list[cf.Future[None]]]:
        """Starts to read a leaf: what gives its result, once the futures are done."""
        record, views, conversion = request
        t = self._source.cut(record)
        if self._is_exact(views, record):
            return self._start_exact(record, views[0], array)
        grid = _grid(t)
        dtype = _index.dtype_of(t.stored) if conversion is None else conversion.dtype
        if views is None:
            picks = [tuple(map(range, t.shape))]
        else:
            picks = [tuple(map(_as_range, view.picks)) for view in views]
        arrays = [_arrays.aligned(tuple(map(len, p)), dtype) for p in picks]
        futures = []
        most = max(1, self._part // grid.full)
        for run in _chunks.runs(numbers, t.shape, t.chunk, most):
            if futures and futures[0].done():
                futures[0].result()  # A store that does not answer is not asked again.
            part = _part(t, grid, run, picks, arrays, conversion)
            self._room.take(part.into.nbytes)
            reading = self._start_part(record, part, array)
            futures.append(self._pool.submit(self._finish, record, part, reading))

        def result() -> Result:
            if views is None:
                return Result(arrays, True, conversion is not None)
            shaped = [
                view.arrange(array.reshape(view.picked))
                for view, array in zip(views, arrays)
            ]
            return Result(shaped, True, conversion is not None)

        return result, futures

    def _is_direct(self, record: Record) -> bool:
        """Whether chunks are read by us, each run of them in one request: to an object
        store, TensorStore would make one for each chunk."""
        is_far = self._source.root.local is None and self._source.database is not None
        return is_far and record.template.codec is None

    def _start_part(
        self, record: Record, part: "_Part", array: Any
    ) -> Callable[[], Any]:
        """Starts to read a part: what then waits until it has arrived."""
        if not self._is_direct(record):
            return _arrays.start_read(array, part.into, part.region).result
        index, grid, t = self._source.index, _grid(record.template), record.template
        files = self._source.files
        assert files is not None
        ranges = []
        for number in part.chunks:
            file, start, length = index.locate(record, number)
            ranges.append((files[file], start, start + length))
        values = _start_ranges(self._source.directory, ranges)

        def finish() -> None:
            numbers = iter(part.chunks)
            for value in values():
                for at in range(0, len(value), grid.full):
                    chunk = np.frombuffer(
                        value, part.into.dtype, math.prod(t.chunk), at
                    )
                    region = _within(grid.regions[next(numbers)], part.region)
                    kept = tuple(slice(s.stop - s.start) for s in region)
                    part.into[region] = chunk.reshape(t.chunk)[kept]

        return finish

    def _finish(
        self, record: Record, part: "_Part", reading: Callable[[], Any]
    ) -> None:
        try:
            reading()
            if self._digests is None or self._is_good(record, part):
                for keep in part.keeps:
                    keep()
            else:
                why = "its bytes are not those that were saved"
                self._problems.setdefault(record.name, why)
        except Exception as e:
            self._problems.setdefault(record.name, _reason(self._source.root, e))
        finally:
            self._room.give(part.into.nbytes)

    def _is_good(self, record: Record, part: "_Part") -> bool:
        grid = _grid(record.template)
        first = self._source.index.first_block(record.place)
        assert self._digests is not None
        for number in part.chunks:
            region = _within(grid.regions[number], part.region)
            row = first + grid.blocks[number]
            data = _layout.as_bytes(part.into[region])
            for digest in _layout.block_digests(data):
                if self._digests[16 * row : 16 * row + 16] != digest:
                    return False
                row += 1
        return True

    def _start_exact(
        self, record: Record, view: View, array: Any
    ) -> tuple[Callable[[], Result], list[cf.Future[None]]]:
        """Starts to read a view and not more than its bytes, which are not verified."""
        into = _arrays.aligned(view.picked, _index.dtype_of(record.template.stored))
        self._room.take(into.nbytes)
        spans = _spans(self._source, record, view)

        def work() -> None:
            try:
                if spans is None:
                    _arrays.start_read(array, into, view.slices()).result()
                else:
                    _read_spans(self._source, record, spans, into)
            except Exception as e:
                self._problems.setdefault(record.name, _reason(self._source.root, e))
            finally:
                self._room.give(into.nbytes)

        result = ft.partial(Result, [view.arrange(into)], True, False)
        return result, [self._pool.submit(work)]


class _Part(NamedTuple):
    """A run of chunks, the region that they are, and the memory that it is read into.
    The `keeps` then take what is wanted, where that memory is not what was asked for.
    """

    chunks: range
    region: tuple[slice, ...]
    into: np.ndarray
    keeps: list[Callable[[], None]]


def _within(region: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(s.start - o.start, s.stop - o.start) for s, o in zip(region, outer)
    )


def _part(
    t: Template,
    grid: Grid,
    run: range,
    picks: Sequence[tuple[range, ...]],
    arrays: Sequence[np.ndarray],
    conversion: Conversion | None,
) -> _Part:
    first, last = grid.regions[run[0]], grid.regions[run[-1]]
    region = tuple(slice(a.start, b.stop) for a, b in zip(first, last))
    shape = tuple(s.stop - s.start for s in region)
    wanted = []
    for pick, array in zip(picks, arrays):
        overlaps = [_view.overlap(p, s.start, s.stop) for p, s in zip(pick, region)]
        if None not in overlaps:
            to, fro = zip(*overlaps) if overlaps else ((), ())
            wanted.append((array[(*to, ...)], fro))
    if conversion is None and len(wanted) == 1:
        into, fro = wanted[0]
        if into.shape == shape and all(s.step in (None, 1) for s in fro):
            return _Part(run, region, into, [])
    into = _arrays.aligned(shape, _index.dtype_of(t.stored))

    def keep(to: np.ndarray, fro: tuple[slice, ...]) -> None:
        part = into[(*fro, ...)]
        to[...] = part if conversion is None else conversion.convert(part)

    return _Part(run, region, into, [ft.partial(keep, *w) for w in wanted])


def _wanted(t: Template, views: tuple[View, ...] | None) -> Sequence[int]:
    """The numbers of the chunks that hold any of the views of a leaf, in order."""
    if views is None:
        return range(t.chunk_count)
    sets = [
        _chunks.touched(t.shape, t.chunk, view.picks)
        for view in views
        if 0 not in view.shape
    ]
    return list(sets[0]) if len(sets) == 1 else sorted(set().union(*sets))


def _as_range(pick: range | int) -> range:
    return range(pick, pick + 1) if isinstance(pick, int) else pick


def _spans(
    source: Source, record: Record, view: View
) -> list[tuple[int, int, int]] | None:
    """The parts of chunks that hold a view whose elements follow each other."""
    if source.has_spec(record):
        return None
    t = record.template
    run = _view.run(view.picks, t.shape)
    if t.codec is not None or run is None or len(run) * t.itemsize > _RANGES:
        return None
    spans = _chunks.spans(t.shape, t.chunk, run.start, run.stop)
    return None if spans is None else list(spans)


def _read_spans(
    source: Source,
    record: Record,
    spans: list[tuple[int, int, int]],
    into: np.ndarray,
) -> None:
    t = record.template
    ranges = []
    for number, first, count in spans:
        if source.files is None:
            key, start = f"{source.key(record)}/{_grid(t).keys[number]}", 0
        else:
            file, start, _ = source.index.locate(record, number)
            key = source.files[file]
        start += first * t.itemsize
        ranges.append((key, start, start + count * t.itemsize))
    data = into.reshape(-1).view(np.uint8)
    at = 0
    for value in _start_ranges(source.directory, ranges)():
        data[at : at + len(value)] = np.frombuffer(value, np.uint8)
        at += len(value)


def _start_ranges(
    root: Root, ranges: Sequence[tuple[str, int, int]]
) -> Callable[[], Iterator[bytes]]:
    """Starts to read ranges of files, those that follow each other as one. What it
    returns waits for them, and gives their bytes in order."""
    runs: list[tuple[str, int, int]] = []
    for key, start, stop in ranges:
        if runs and runs[-1][0] == key and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((key, start, stop))
    futures = [_store.start_read_range(root, *run) for run in runs]

    def values() -> Iterator[bytes]:
        for (_, start, stop), future in zip(runs, futures):
            value = future.result().value
            if len(value) != stop - start:
                raise OSError("a chunk is missing")
            yield value

    return values
