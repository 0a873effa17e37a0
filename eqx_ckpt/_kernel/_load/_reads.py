"""Reads of leaves, of stored arrays and of their parts: what is asked of each, and what
it gives."""

import collections
import dataclasses
import itertools as it
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .._errors import MissingError
from .._format import _template, _text, _view
from .._format._leaves import LeafRecord
from .._format._view import View
from .._runtime import _machine
from .._runtime._threads import Crew, Outcome
from .._storage import _arrays, _backend, _store
from .._storage._backend import Backend
from .._tree import _leaf
from .._tree._from_host import Conversion
from .._tree._target import Target
from ._digest_file import DigestFile
from ._source import Source


T = TypeVar("T")

CHANGED = "its bytes are not those that were saved"
MISSING = "a chunk of it is missing"


class LeafRead(NamedTuple):
    """One leaf to read. `move` is an `ArrayMove` of `_reshard`, or None. The leaf is
    then read in the regions `move.regions()`, and `move.begin(parts)` sends them on."""

    record: LeafRecord
    view: View | None
    target: Target
    move: Any = None


class StoredRead(NamedTuple):
    """A stored array to read, or views of it, each into an array of its own.

    The elements of the arrays are converted by the `conversion`. `leaves` are the
    places, among the wanted leaves, of those that the arrays are for; of `several`
    reads that are made together, each has the arrays of its own views, in their order.
    """

    record: LeafRecord
    views: tuple[View, ...] | None = None
    conversion: Conversion | None = None
    leaves: Sequence[int] = ()
    several: Sequence["StoredRead"] = ()

    @property
    def all_views(self) -> tuple[View, ...]:
        if self.views is not None:
            return self.views
        return (_view.whole(self.record.template.shape),)

    @property
    def nbytes(self) -> int:
        template = self.record.template
        if self.views is None:
            return template.nbytes
        return sum(math.prod(view.shape) for view in self.views) * template.itemsize

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the arrays that it gives."""
        if self.conversion is not None:
            return self.conversion.dtype
        return _template.dtype_of(self.record.template.stored)

    def memory(self) -> list[np.ndarray]:
        """New memory for what is picked for each view: see `arranged`."""
        shapes = (tuple(map(len, view.ranges)) for view in self.all_views)
        return [_arrays.aligned(shape, self.dtype) for shape in shapes]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        if self.views is None:
            return [self.record.template.shape]
        return [view.shape for view in self.views]


class ReadResult(NamedTuple):
    """The arrays of a read.

    `owned`: the memory is the caller's alone, and may be written to. `lost`: why the
    conversion failed.
    """

    arrays: list[np.ndarray]
    owned: bool
    lost: str = ""


Results = Generator[tuple[StoredRead, ReadResult], None, None]


@dataclasses.dataclass(eq=False)
class ReadState:
    """The state of one planned read, which its threads share.

    `digests` are None if nothing is verified. `budget` is the memory for what is under
    way. `problems` gets the fault of each leaf that cannot be had.
    """

    source: Source
    digests: DigestFile | None
    budget: int
    problems: dict[str, str]
    # Of each thread, for what is read and then decoded.
    per_thread: Any = dataclasses.field(default_factory=threading.local, init=False)

    def buffer(self, size: int, most: int = 0) -> np.ndarray:
        """Memory of this thread, until it asks again, for so much at `most`: it is not
        new to the system, which would fill it with zeros."""
        buffer = getattr(self.per_thread, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self.per_thread.buffer = np.empty(max(size, most), np.uint8)
        return buffer[:size]

    def explain(self, error: Exception) -> str:
        """The fault in bytes that could not be read.

        **Raises:** the error, unless it says that they are missing or damaged.
        """
        return _text.escape(unreadable(self.source.root, error, MISSING))


@dataclasses.dataclass(slots=True)
class ReadJob(Generic[T]):
    """A part of a read, for which so many bytes are under way. `start` sends requests
    to a store, and returns `finish`. A thread calls that for the result: it waits for
    the store, or reads from a disk."""

    nbytes: int
    start: Callable[[], Callable[[], T]]


def in_order(
    jobs: Iterable[ReadJob[T]],
    budget: int,
    most: int = 2**16,
    threads: int | None = None,
    per_core: int = 1,
) -> Iterator[T]:
    """The results of jobs in their order, of which `most` are under way, with no more
    bytes than the `budget`, or one. By default there are `per_core` threads for each
    core, but at most 8, and not more than the budget has jobs for: each keeps a buffer.
    """
    jobs = iter(jobs)
    ahead = list(it.islice(jobs, 2))
    if len(ahead) < 2:  # A thread takes longer to start than it saves.
        for job in ahead:
            finish = job.start()
            yield finish()
        return
    waiting: collections.deque[tuple[int, Outcome[T]]] = collections.deque()
    used = 0
    if threads is None:
        count = budget // max(1, *(job.nbytes for job in ahead))
        threads = max(1, min(8, per_core * _machine.cores(), count))
    with Crew(threads) as crew:
        for job in it.chain(ahead, jobs):
            # One result that is there is given first, and then as many as make room:
            # after an error, such as that of a store that does not answer, nothing more
            # is asked for.
            is_done = len(waiting) > 0 and waiting[0][1].done()
            while waiting and (
                is_done or used + job.nbytes > budget or len(waiting) >= most
            ):
                size, future = waiting.popleft()
                used, is_done = used - size, False
                yield crew.result(future)
            waiting.append((job.nbytes, crew.submit(job.start())))
            used += job.nbytes
        while waiting:
            yield crew.result(waiting.popleft()[1])


def put(
    part: np.ndarray,
    array: np.ndarray,
    place: Any,
    conversion: Conversion | None,
    errors: list[ValueError],
) -> None:
    """Puts a part at its place in an array, converted. `errors` gets what is lost."""
    try:
        array[place] = part if conversion is None else conversion.convert(part)
    except ValueError as e:
        errors.append(e)


def arranged(
    views: Iterable[View], picked: Iterable[np.ndarray], errors: list[ValueError]
) -> ReadResult:
    """The result of a read from what was picked for each of its views, and from the
    errors of conversions."""
    arrays = [view.arrange(array) for view, array in zip(views, picked)]
    lost = _leaf.told(errors, sum(array.size for array in arrays))
    return ReadResult(arrays, True, lost)


def converted(
    conversion: Conversion, arrays: list[np.ndarray]
) -> tuple[list[np.ndarray], bool, str]:
    """The converted arrays, whether their memory is new, and why that failed."""
    # JAX takes these as they are, where it would copy those of NumPy.
    out = [_arrays.aligned(array.shape, conversion.dtype) for array in arrays]
    errors: list[ValueError] = []
    for array, into in zip(arrays, out):
        put(array, into, ..., conversion, errors)
    lost = _leaf.told(errors, sum(array.size for array in arrays))
    return (arrays, False, lost) if errors else (out, True, "")


def unreadable(root: Backend, error: Exception, missing: str = "it is missing") -> str:
    """The fault in bytes that could not be read.

    **Raises:** the error, unless it says that they are missing or damaged.
    """
    found = root.explain(error)
    if _backend.is_missing(found):
        return missing
    if not isinstance(found, ValueError):
        raise found from error
    return f"it cannot be read ({str(found).splitlines()[0]})"


def start_ranges(
    root: Backend, ranges: Sequence[tuple[str, int, int | None]]
) -> Callable[[], Iterator[memoryview]]:
    """Starts to read ranges of files, of which some have no end, those that follow each
    other as one. What it returns waits for them, and gives the bytes of each in order.
    """
    runs: list[list[tuple[str, int, int | None]]] = []
    for one in ranges:
        if runs and runs[-1][-1][0] == one[0] and runs[-1][-1][2] == one[1]:
            runs[-1].append(one)
        else:
            runs.append([one])
    futures = [root.start_read(*run[0][:2], run[-1][2]) for run in runs]

    def values() -> Iterator[memoryview]:
        for run, future in zip(runs, futures):
            got = _store.read_answer(root, run[0][0], future)
            if got.state == "missing":
                raise MissingError("a chunk is missing")
            value = memoryview(got.value)
            first = run[0][1]
            for _, at, stop in run:
                if stop is not None and len(value) < stop - first:
                    raise MissingError("a chunk is missing")
                yield value[at - first : None if stop is None else stop - first]

    return values
