"""A save that was opened: where its leaves lie, and whether they are all there."""

import bisect
import dataclasses
import functools as ft
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from .._errors import DamagedError, MissingError, ReplacedError
from .._format import _files, _grid, _index, _layouts, _template, _text
from .._format._grid import Grid
from .._format._index import Index
from .._format._leaves import LeafRecord
from .._format._template import Template
from .._storage import _arrays, _store
from .._storage._backend import Backend
from . import _published, _wording
from ._digest_file import DigestFile


class FirstChunks(NamedTuple):
    """Where the first chunk of each of some leaves is: in `starts` the number of a file
    among the `keys`, and the offset there."""

    keys: Sequence[str]
    starts: list[tuple[int, int]]


class FileRange(NamedTuple):
    """Bytes of the file of a key; to its end if `stop` is None."""

    key: str
    start: int
    stop: int | None


class _KeyedSegment(NamedTuple):
    """A `Segment` of a leaf, with the key of its file."""

    first: int
    stop: int
    key: str
    offset: int


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A save that was opened: all that is read goes through one of these. `root` is its
    path. The keys of its files are relative to `directory`, which is mostly the same;
    of a save in one file, it is where that file is, which is kept open if it is local
    (`Backend.pinned`).

    Each kind has a class. `DatabaseSource` and `ZarrSource` are ours in a directory of
    their own, one for each layout; rooms around the kernel have those in one file, and
    of other formats. Leaves lie as chunks in the data files of the index, unless a
    class says otherwise.
    """

    root: Backend
    index: Index
    directory: Backend
    # The keys of the data files; none if each leaf has a directory of its own.
    files: list[str]
    # The TensorStores of leaves that were opened, by their indices.
    _opened: dict[int, Any] = dataclasses.field(default_factory=dict, init=False)
    # What keeps chunks that several reads share, as long as those are made.
    chunk_caches: dict[Any, None] = dataclasses.field(default_factory=dict, init=False)

    # ---- What a kind says of itself.

    # Whether its leaves lie in chunks that have digests.
    has_digests: ClassVar[bool] = True
    # Whether it is one of ours, in a directory of its own.
    is_ours: ClassVar[bool] = True

    @property
    def database(self) -> str | None:
        """The key below which the database of its chunks is; None if it has none."""
        return None

    @property
    def digests_key(self) -> str:
        """The key of the file of digests, if it has some."""
        return _layouts.digests(self.index.layout, self.index.save)

    def key(self, record: LeafRecord) -> str:
        """The leaf's directory, in the database or at the root."""
        raise NotImplementedError

    def is_in(self, directory: Backend) -> bool:
        """Whether a directory still holds the save, in one look."""
        head = _index.head_of(self.index.save)
        try:
            value = directory.read(_files.INDEX, len(head))
        except MissingError:
            return False  # It is shorter.
        return value is not None and value.data == head

    def is_unchanged(self) -> bool:
        """Whether what is read now is what was opened: an open file stays what it is,
        unless it is written to."""
        return self._is_still_in(self.directory)

    def array_index(self, record: LeafRecord) -> int:
        """The index of the first leaf that is one array with this one."""
        return self.index.leaves.aliases.get(record.leaf_index, record.leaf_index)

    def is_contiguous(self, record: LeafRecord) -> bool:
        """Whether a leaf is one run of bytes, in no chunks. Its elements may be
        scattered in it."""
        return False

    def head_of(self, record: LeafRecord, most: int) -> bytes:
        """The first bytes of a leaf, at most so many, as they are stored."""
        raise NotImplementedError

    def is_scattered(self, record: LeafRecord) -> bool:
        """Whether the elements of a leaf are not in the order of the bytes of files."""
        return False

    # ---- Leaves that TensorStore opens.

    def array(self, record: LeafRecord) -> Any:
        """The leaf's TensorStore, opened once and without a read.

        **Raises:** `ReplacedError` if its path has another save by now: it reads what
        is there.
        """
        self.check_current()
        if not self.is_unchanged():
            raise self.error_for("")
        array = self._opened.get(record.leaf_index)
        if array is None:
            _wording.check_readable(record)
            if not self.directory.has_driver():
                raise ValueError(
                    f"TensorStore has no driver for `{self.root}`. Use `.read`."
                )
            if why := _template.lacks_codec(record.template):
                raise ValueError(
                    f"TensorStore cannot decode `{record.name}` of `{self.root}`: "
                    f"{why}. Use `.read`."
                )
            try:
                self.check(record, range(record.template.chunk_count))
            except ValueError as e:
                raise self.error_for(str(e)) from e
            wanted = [(record, range(record.template.chunk_count))]
            # It may live for longer than this, and a descriptor with it.
            (array,) = self.open(wanted, self.directory.unpinned())
            self._opened[record.leaf_index] = array
        return array

    def spec(self, record: LeafRecord) -> dict[str, Any]:
        """TensorStore's spec of a leaf, as others may open it.

        **Raises:** `ValueError` where TensorStore cannot, or has no files for it.
        """
        self._check_open_to_others(record, "spec", self._without_spec(record))
        # A chunk that is missing must not read as zeros.
        how = {"fill_missing_data_reads": False}
        return {"driver": "zarr3", "kvstore": self._kvstore(record), **how}

    def url(self, record: LeafRecord) -> str:
        """TensorStore's URL of a leaf. **Raises:** as `spec`."""
        inside = "" if self.is_ours else "it is in one file with others"
        self._check_open_to_others(record, "URL", self._without_spec(record) or inside)
        return _arrays.array_url(self.root, self.database, self.key(record))

    def _check_open_to_others(self, record: LeafRecord, what: str, why: str) -> None:
        _wording.check_readable(record)
        if why:
            raise ValueError(
                f"TensorStore has no {what} for `{record.name}` of `{self.root}`: "
                f"{why}. Use `.store`, or `.read`."
            )

    def _without_spec(self, record: LeafRecord) -> str:
        """Why TensorStore cannot open a leaf by itself; "" if it can."""
        if self.root.url.startswith("memory://"):
            return "its store is in the memory of eqx_ckpt"
        if not self.directory.has_driver():
            return f"TensorStore has no driver for `{self.root}`"
        return _layouts.unopened_by_others(self.index.layout, [record.template])

    def _kvstore(self, record: LeafRecord) -> dict[str, Any]:
        return self.spec_of(self.key(record))

    def spec_of(self, key: str) -> dict[str, Any]:
        """TensorStore's spec of a directory of the save."""
        return self.directory.unpinned().spec(key)

    def open(
        self,
        wanted: Sequence[tuple[LeafRecord, Sequence[int]]],
        unpinned: Backend | None = None,
    ) -> list[Any]:
        """The stores that some chunks of these leaves are read from; `unpinned` is the
        directory for those that outlive a read."""
        places = []
        for record, numbers in wanted:
            keys = grid_of(record.template).keys
            locate = self.index.extents.locate
            chunks = [(keys[n], *locate(record, n)) for n in numbers]
            places.append((record.template, chunks))
        return _arrays.open_arrays(unpinned or self.directory, self.files, places)

    def template_as_read(self, record: LeafRecord) -> Template:
        """The template of a leaf, with the chunks that it is read in."""
        return record.template

    # ---- Where bytes are.

    def starts(self, records: Sequence[LeafRecord]) -> FirstChunks:
        places = map(operator.attrgetter("leaf_index"), records)
        return FirstChunks(self.files, self.index.extents.starts(places))

    def chunk_range(self, record: LeafRecord, number: int) -> FileRange:
        """Where the bytes of a chunk are."""
        file, start, length = self.index.extents.locate(record, number)
        return FileRange(self.files[file], start, start + length)

    def ranges(
        self, record: LeafRecord, spans: Iterable[tuple[int, int]]
    ) -> list[tuple[str, int, int]]:
        """Where spans of the bytes of a leaf, each `[start, stop)`, lie in files. The
        chunks of the leaf, one after the other, are its bytes."""
        out: list[tuple[str, int, int]] = []
        full, key, low, high, at = record.template.full, "", 0, 0, 0
        for start, stop in spans:
            while start < stop:
                if not low <= start < high:
                    first, last, key, offset = self._segment(record, start // full)
                    low, high, at = first * full, last * full, offset
                end = min(stop, high)
                out.append((key, at + start - low, at + end - low))
                start = end
        return out

    def _segment(self, record: LeafRecord, number: int) -> _KeyedSegment:
        """The run of chunks that a chunk is in."""
        first, stop, file, offset = self.index.extents.segment(record, number)
        return _KeyedSegment(first, stop, self.files[file], offset)

    def check(self, record: LeafRecord, numbers: Sequence[int]) -> None:
        """**Raises:** `ValueError` unless the files hold all that the index says of the
        chunks of these `numbers`, which ascend; `MemoryError` if one of them is more
        than this process can decode.

        So no memory is allocated for what is not there. In an object store it would
        take as long as to read it, which says so too.
        """
        at, extents = 0, self.index.extents
        while at < len(numbers) and not self.root.is_remote:
            first, stop, file, offset = extents.segment(record, numbers[at])
            at = bisect.bisect_left(numbers, stop, at)
            end = offset + extents.nbytes(record, first, numbers[at - 1] + 1)
            self.directory.check_range(self.files[file], end)
        if record.template.codec is not None:
            _check_memory(record)

    # ---- Digests, and files beside the data.

    @ft.cached_property
    def digests(self) -> DigestFile:
        """**Raises:** `DamagedError` for what cannot be."""
        try:
            # A cycle of references would keep files open for longer than anybody has
            # them.
            return DigestFile(weakref.proxy(self))
        except ValueError as e:
            raise self.error_for(str(e)) from e

    def digests_of(self, record: LeafRecord, chunks: range) -> bytes:
        """The digests of some chunks of a leaf that follow each other."""
        extents, t, out = self.index.extents, record.template, b""
        while chunks:
            # What is one run of chunks is in one page.
            start = chunks.start
            stop = min(chunks.stop, extents.segment(record, start).stop)
            first = extents.digest_of(record, start)
            count = t.block_of(stop) - t.block_of(start)
            out += self.digests.rows(first, first + count)
            chunks = range(stop, chunks.stop)
        return out

    def read_beside(self, key: str, start: int, stop: int, size: int) -> bytes | None:
        """Some bytes of a file of `size` bytes; None where there is none."""
        if (start, stop) == (0, size):
            value = self.root.read(key, stop=size, limit=size)
            return None if value is None else value.data
        reading = self.root.start_read(key, start, stop)
        got = _store.read_answer(self.root, key, reading)
        return got.value if got.state == "value" else None

    def read_other(self, key: str, limit: int) -> bytes | None:
        """A file for other readers, as a whole; None where there is none.

        **Raises:** `ValueError` if it is longer than `limit`.
        """
        value = self.root.read(key, limit=limit)
        return None if value is None else value.data

    # ---- Whether it is still there.

    def is_current(self) -> bool:
        """Whether the path still holds the save that was opened."""
        return self._is_still_in(self.directory.unpinned())

    def _is_still_in(self, directory: Backend) -> bool:
        return _store.look_twice(self.root, ft.partial(self.is_in, directory), bool)

    def check_current(self) -> None:
        """**Raises:** `ReplacedError` for a file that is open and no more at its path.
        What is in a directory shows by itself that it is gone."""
        is_open = self.directory.unpinned() is not self.directory
        if is_open and not self.is_current():
            raise self.error_for("")

    def error_for(self, why: str) -> RuntimeError:
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


class DatabaseSource(Source):
    """A save of ours, of layout `"ocdbt"`: its files are below the key of a database,
    which no other save uses."""

    @property
    def database(self) -> str:
        return f"d/{self.index.save}"

    def key(self, record: LeafRecord) -> str:
        return record.name

    def is_unchanged(self) -> bool:
        return True  # Its files can only be gone.

    def _without_spec(self, record: LeafRecord) -> str:
        is_in = f"{self.database}/manifest.ocdbt" in self.index.others
        why = "" if is_in else "it has too many chunks for a database"
        return super()._without_spec(record) or why

    def _kvstore(self, record: LeafRecord) -> dict[str, Any]:
        base = self.spec_of(self.database)
        return {"driver": "ocdbt", "base": base, "path": f"{record.name}/"}


class ZarrSource(Source):
    """A save of ours, of layout `"zarr"`: each leaf has a directory of its own, and
    each chunk a file, under names that other saves use too."""

    def key(self, record: LeafRecord) -> str:
        return _files.directory(record.name)

    def open(
        self,
        wanted: Sequence[tuple[LeafRecord, Sequence[int]]],
        unpinned: Backend | None = None,
    ) -> list[Any]:
        places = [(record.template, self.key(record)) for record, _ in wanted]
        return _arrays.open_arrays(unpinned or self.directory, None, places)

    def starts(self, records: Sequence[LeafRecord]) -> FirstChunks:
        templates = {id(record.template): record.template for record in records}
        first = {x: _grid.key((0,) * len(t.shape)) for x, t in templates.items()}
        files = [f"{self.key(r)}/{first[id(r.template)]}" for r in records]
        return FirstChunks(files, [(number, 0) for number in range(len(records))])

    def chunk_range(self, record: LeafRecord, number: int) -> FileRange:
        t, key = record.template, self._chunk_key(record, number)
        size = t.full if t.codec is None else self.directory.size(key)
        return FileRange(key, 0, size)

    def _segment(self, record: LeafRecord, number: int) -> _KeyedSegment:
        return _KeyedSegment(number, number + 1, self._chunk_key(record, number), 0)

    def _chunk_key(self, record: LeafRecord, number: int) -> str:
        return f"{self.key(record)}/{grid_of(record.template).keys[number]}"

    def check(self, record: LeafRecord, numbers: Sequence[int]) -> None:
        t = record.template
        size = t.full if t.codec is None else _template.least_encoded(t.full)
        most = size if t.codec is None else _template.most_encoded(t.full)
        for number in () if self.root.is_remote else numbers:
            key = self._chunk_key(record, number)
            found = self.root.check_range(key, size)
            if found is not None and found > most:
                raise ValueError(f"`{key}` is not a chunk of it")
        _check_memory(record)


def ours_at(root: Backend) -> Source | None:
    """The save of ours that a directory holds. **Raises:** as `read_index`."""
    published = _published.read_index(root, _index.decode)
    if published is None:
        return None
    index = published.content
    if index.layout == "zarr":
        return ZarrSource(root, index, root, [])
    files = [f"d/{index.save}/{file}" for file in index.files]
    return DatabaseSource(root, index, root, files)


def _check_memory(record: LeafRecord) -> None:
    """**Raises:** `MemoryError` for chunks that no memory holds decoded."""
    has, most = record.template.full, _arrays.largest_chunk()
    if has > most:
        raise MemoryError(
            f"A chunk of leaf `{record.name}` has {has} bytes. The most that this "
            f"process can decode is {most}, half of its memory. Load it where there is "
            "more."
        )


def check_pickles(source: Source) -> None:
    """**Raises:** `TypeError` if it cannot be opened again by its path alone."""
    if source.index.layout == "eqx":
        raise TypeError(
            f"What was opened at `{source.root}` cannot be pickled: the leaves of a "
            "`.eqx` file have no names, so it is opened with the `like` that they "
            "belong to. Open it where it is needed."
        )


def grid_of(t: Template) -> Grid:
    return _grid.lay(t.shape, t.chunk, t.itemsize)
