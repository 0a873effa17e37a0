"""A save that was opened: where its leaves lie, and whether they are all there."""

import bisect
import dataclasses
import functools as ft
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import DamagedError, ReplacedError
from .._format import _files, _grid, _index, _template, _text
from .._format._functions import StoredFunction
from .._format._grid import Grid
from .._format._index import Index, SavedState
from .._format._leaves import Record
from .._format._ocdbt import Database
from .._format._template import Template
from .._storage import _arrays, _store
from .._storage._arrays import ForeignArray
from .._storage._backend import Backend
from . import _partial
from ._pages import Digests


# In what parts leaves are read that are one run of bytes, where a view wants some.
_CUT = 4 * 2**20
# And in how many of them at most.
_MANY = 2**12


class Foreign(NamedTuple):
    """The place that a checkpoint of another format is read from.

    Each leaf is one run of bytes in one of `files`, which are in `directory`; or what
    `stored` has for its place, in directories or in a `database`; or is there already.
    `stamp`, of the directory, gives what was `stamped` until something is replaced.
    With `digests`, the place of those in the first file, it is one of ours in there,
    with chunks; `place` says there where one of its other files lies. The elements of
    leaves that `strides` has lie so many elements apart along each axis.
    """

    directory: Backend
    files: list[str]
    stamp: Callable[[Backend], str]
    stamped: str
    stored: dict[int, ForeignArray | np.ndarray]
    digests: tuple[int, int] | None = None
    database: Database | None = None
    strides: Mapping[int, tuple[int, ...]] = {}
    place: Callable[[str], tuple[int, int]] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A save that was opened: all that is read goes through one of these."""

    root: Backend
    index: Index
    foreign: Foreign | None = None

    def is_stored(self, record: Record) -> bool:
        """Whether a leaf is an array that TensorStore has to read."""
        return self.foreign is not None and record.place in self.foreign.stored

    def is_run(self, record: Record) -> bool:
        """Whether a leaf is one run of bytes, in no chunks."""
        return not self.has_digests and not self.is_stored(record)

    def strides(self, record: Record) -> tuple[int, ...] | None:
        """How many elements apart those of a leaf lie along each axis, if they do."""
        return None if self.foreign is None else self.foreign.strides.get(record.place)

    @property
    def is_archive(self) -> bool:
        """Whether it is one of ours, in one file."""
        return self.foreign is not None and self.foreign.digests is not None

    @property
    def has_digests(self) -> bool:
        return self.foreign is None or self.is_archive

    @property
    def directory(self) -> Backend:
        """The directory that the keys of files are relative to."""
        return self.root if self.foreign is None else self.foreign.directory

    @ft.cached_property
    def files(self) -> list[str] | None:
        """The keys of the data files; None: each leaf has a directory of its own."""
        if self.foreign is not None:
            return self.foreign.files
        if self.database is None:
            return None
        return [f"{self.database}/{file}" for file in self.index.placement.files]

    @ft.cached_property
    def _opened(self) -> dict[int, Any]:
        return {}

    @property
    def database(self) -> str | None:
        return f"d/{self.index.save}" if self.index.layout == "ocdbt" else None

    def key(self, record: Record) -> str:
        """The leaf's directory, in the database or at the root."""
        if self.database is None:
            return _files.directory(record.name)
        return record.name

    def array(self, record: Record) -> Any:
        """The leaf's TensorStore, opened once and without a read."""
        array = self._opened.get(record.place)
        if array is None:
            _partial.check_readable(record)
            self.check_current()
            try:
                self.check(record)
            except ValueError as e:
                raise self.lost(str(e)) from e
            if self.is_stored(record):
                (array,) = self.open([(record, range(record.template.chunk_count))])
            else:
                places = [self._place(record)]
                # It may live for longer than this, and a descriptor with it.
                directory = self.directory.unpinned()
                strides = self.strides(record)
                if strides and self.files:
                    where = directory, self.files, places[0]
                    array = _arrays.open_strided(*where, strides)
                else:
                    (array,) = _arrays.open_arrays(directory, self.files, places)
            self._opened[record.place] = array
        return array

    def open(self, wanted: Sequence[tuple[Record, Sequence[int]]]) -> list[Any]:
        """The stores that some chunks of these leaves are read from."""
        if self.foreign is None or self.has_digests:
            places = [self._place(*one) for one in wanted]
            return _arrays.open_arrays(self.directory, self.files, places)
        directory, files, stored = self.foreign[0], self.foreign[1], self.foreign.stored
        at = self.index.start
        those = [(stored[r.place], n) for r, n in wanted if r.place in stored]
        opened = iter(_arrays.open_stored(directory, those, self.foreign.database))
        return [
            next(opened)
            if self.is_stored(r)
            else _arrays.StridedArray(
                directory,
                files[at(r.place)[0]],
                at(r.place)[1],
                self.foreign.strides[r.place],
            )
            for r, _ in wanted
        ]

    def cut(self, record: Record) -> Template:
        """The template of a leaf, with the chunks that it is read in."""
        t = record.template
        if not self.is_run(record):
            return t
        return t._replace(chunk=_cut(t, self.strides(record)))

    def _place(
        self, record: Record, numbers: Sequence[int] | None = None
    ) -> _arrays.ArrayPlace:
        """Where chunks of a leaf lie (None: all of them)."""
        if self.files is None:
            return _arrays.ArrayPlace(record.template, self.key(record))
        keys = grid_of(record.template).keys
        locate = self.index.locate
        if numbers is None:
            numbers = range(len(keys))
        chunks = [(keys[n], *locate(record, n)) for n in numbers]
        return _arrays.ArrayPlace(record.template, "", chunks)

    def where(self, record: Record, number: int) -> tuple[str, int, int | None]:
        """The bytes of a chunk: the key of their file, from, to (None: its end)."""
        if self.files is not None:
            file, start, length = self.index.locate(record, number)
            return self.files[file], start, start + length
        t = record.template
        key = f"{self.key(record)}/{grid_of(t).keys[number]}"
        return key, 0, t.full if t.codec is None else self.directory.size(key)

    def check(self, record: Record, numbers: Sequence[int] | None = None) -> None:
        """**Raises:** `ValueError` unless the files hold all that the index says.

        That is, of the chunks of these `numbers`, in their order (None: of all).

        So no memory is allocated for what is not there. In an object store it would
        take as long as to read it, which says so too.
        """
        if self.is_stored(record):
            self._check_stored(record, numbers)
            return
        t = record.template
        is_decoded = t.codec is not None or self.files is None
        if is_decoded and t.full > _arrays.largest_chunk():
            raise ValueError(f"its chunks have {t.full} bytes, more than this machine")
        if self.root.is_far:
            return
        strides = self.strides(record)
        if strides and self.files:
            file, start, _ = self.index.locate(record, 0)
            stop = start + _grid.span(t.shape, strides) * t.itemsize
            self.directory.check_range(self.files[file], stop)
            return
        if numbers is None or self.is_run(record):
            numbers = range(t.chunk_count)
        if self.files is not None:
            at = 0
            while at < len(numbers):
                first, stop, file, offset = self.index.segment(record, numbers[at])
                at = bisect.bisect_left(numbers, stop, at)
                end = offset + self.index.extent(record, first, numbers[at - 1] + 1)
                self.directory.check_range(self.files[file], end)
        else:
            size = t.full if t.codec is None else _template.least_encoded(t.full)
            keys = grid_of(t).keys
            for n in numbers:
                key = f"{self.key(record)}/{keys[n]}"
                found = self.root.check_range(key, size)
                most = size if t.codec is None else _template.most_encoded(t.full)
                if found is not None and found > most:
                    raise ValueError(f"`{key}` is not a chunk of it")

    def _check_stored(self, record: Record, numbers: Sequence[int] | None) -> None:
        assert self.foreign is not None
        stored = self.foreign.stored[record.place]
        if isinstance(stored, ForeignArray):
            count = record.template.chunk_count
            stored.check(range(count) if numbers is None else numbers)

    @property
    def digests_key(self) -> str:
        return f"{self.database}/digests" if self.database else _files.DIGESTS

    @ft.cached_property
    def digests(self) -> Digests:
        """**Raises:** `DamagedError` for what cannot be."""
        try:
            pages = self.index.pages
        except ValueError as e:
            raise self.lost(str(e)) from e
        # A cycle of references would keep files open for longer than anybody has them.
        own = weakref.proxy(self)
        start = ft.partial(_start_digests, own)
        twice = ft.partial(_store.look_twice, self.root)
        lost = lambda why: own.lost(why)
        return Digests(pages, self.index.digests, start, twice, lost)

    def digests_of(self, record: Record, chunks: range) -> bytes:
        """The digests of some chunks of a leaf that follow each other."""
        index, t, out = self.index, record.template, b""
        while chunks:
            start, stop = chunks.start, chunks.stop
            if self.database is not None:
                # What is one run of chunks is in one page.
                stop = min(stop, index.segment(record, start).stop)
            first = index.chunk_digest(record, start)
            count = t.block_of(stop) - t.block_of(start)
            out += self.digests.rows(first, first + count)
            chunks = range(stop, chunks.stop)
        return out

    def is_current(self) -> bool:
        """Whether the path still holds the save that was opened."""
        return self._is_still_in(self.directory.unpinned())

    def _is_still_in(self, directory: Backend) -> bool:
        def look() -> bool:
            if self.foreign is not None:
                return self.foreign.stamp(directory) == self.foreign.stamped
            head = f'{{"format":"{_index.FORMAT}","save":"{self.index.save}"'.encode()
            value = directory.read(_files.INDEX, len(head))
            return value is not None and value.data == head

        return _store.look_twice(self.root, look, bool)

    def check_current(self) -> None:
        """**Raises:** `ReplacedError` for a file that is open and no more at its path.
        What is in a directory shows by itself that it is gone."""
        is_open = self.directory.unpinned() is not self.directory
        if is_open and not self.is_current():
            raise self.lost("")

    def is_unchanged(self) -> bool:
        """Whether what is read now is what was opened: in a directory of its own it can
        only be gone, and an open file stays what it is, unless it is written to."""
        is_apart = self.foreign is None and self.database is not None
        return is_apart or self._is_still_in(self.directory)

    def lost(self, why: str) -> RuntimeError:
        """The error of what cannot be read: that it was replaced, or `why`.

        **Raises:** `OSError` where nobody can tell which.
        """
        try:
            current = self.is_current()
        except ValueError:
            current = False
        if not current:
            return ReplacedError(
                f"The checkpoint at `{self.root}` cannot be read: it was replaced or "
                "deleted after it was opened. Open it again: what was opened is never "
                "mixed with what came after."
            )
        why = _text.escape(why)
        return DamagedError(f"The checkpoint at `{self.root}` cannot be read: {why}.")


def _start_digests(source: Source, start: int, stop: int) -> Callable[[], bytes | None]:
    """Asks for bytes of the file of digests. Returns what waits for them."""
    if source.foreign is not None or not source.root.is_far:
        return ft.partial(_read_digests, source, start, stop)
    coming = source.root.start_read(source.digests_key, start, stop)

    def arrived() -> bytes | None:
        got = _store.read_answer(source.root, source.digests_key, coming)
        return got.value if got.state == "value" else None

    return arrived


def _read_digests(source: Source, start: int, stop: int) -> bytes | None:
    if source.foreign is not None:
        assert source.foreign.digests is not None
        into = np.empty(stop - start, np.uint8)
        key, base = source.foreign.files[0], source.foreign.digests[0]
        return into[: source.directory.read_into(key, base + start, into)].tobytes()
    if (start, stop) == (0, 16 * source.index.pages[-1]):
        value = source.root.read(source.digests_key, stop=stop, limit=stop)
        return None if value is None else value.data
    coming = source.root.start_read(source.digests_key, start, stop)
    return _store.read_answer(source.root, source.digests_key, coming).value


def check_pickles(source: Source) -> None:
    """**Raises:** `TypeError` if it cannot be opened again by its path alone."""
    if source.index.layout == "eqx":
        raise TypeError(
            f"What was opened at `{source.root}` cannot be pickled: the leaves of a "
            "`.eqx` file have no names, so it is opened with the `like` that they "
            "belong to. Open it where it is needed."
        )


def function_key(source: Source, stored: StoredFunction) -> str:
    return f"d/{source.index.save}/{_files.function(stored.file)}"


def read_function(source: Source, name: str) -> bytes:
    """The bytes of a stored function, verified.

    **Raises:** `DamagedError`, `ReplacedError`.
    """
    stored = source.index.functions[name]
    what = f"the file of its function `{name}`"
    return _read_beside(source, function_key(source, stored), stored, what)


def own_key(source: Source, process: int) -> str:
    return f"d/{source.index.save}/{_files.own(process)}"


def read_own(source: Source, process: int) -> bytes:
    """The own state of a process, verified.

    **Raises:** `DamagedError`, `ReplacedError`.
    """
    what = f"the file of the own state of process {process}"
    stored = source.index.own[process]
    return _read_beside(source, own_key(source, process), stored, what)


def _read_beside(
    source: Source, key: str, stored: StoredFunction | SavedState, what: str
) -> bytes:
    def is_good(data: bytes | None) -> bool:
        return data is not None and _index.digest(data) == stored.digest

    try:
        read = ft.partial(_read_file, source, key, stored.nbytes)
        data = _store.look_twice(source.root, read, is_good)
    except ValueError as e:
        raise source.lost(f"{what} is damaged ({e})") from e
    if data is None:
        raise source.lost(f"{what} is missing")
    if not is_good(data):
        raise source.lost(f"{what} is damaged")
    return data


def _read_file(source: Source, key: str, nbytes: int) -> bytes | None:
    foreign = source.foreign
    if foreign is None:
        value = source.root.read(key, stop=nbytes, limit=nbytes)
        return None if value is None else value.data
    assert foreign.place is not None
    start, stop = foreign.place(key)
    if stop - start != nbytes:
        return b""
    into = np.empty(stop - start, np.uint8)
    count = foreign.directory.read_into(foreign.files[0], start, into)
    return into[:count].tobytes()


def _cut(t: Template, strides: tuple[int, ...] | None) -> _grid.Shape:
    """In what chunks a leaf is read that has none."""
    if strides is None:
        return _grid.choose(t.shape, t.itemsize, _CUT)
    target = max(_CUT, _grid.span(t.shape, strides) * t.itemsize // _MANY)
    return _grid.choose_strided(t.shape, strides, t.itemsize, target)


def grid_of(t: Template) -> Grid:
    return _grid.lay(t.shape, t.chunk, t.itemsize)
