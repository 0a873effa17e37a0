"""The index of a checkpoint: what is stored, under which names, where. See FORMAT.md.

Nothing of it is believed before it has been checked: see `_leaves`.
"""

import bisect
import dataclasses
import functools as ft
import importlib.metadata
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._errors import DamagedError
from .._version import __version__
from . import (
    _blosc,
    _columns,
    _files,
    _functions,
    _grid,
    _json,
    _leaves,
    _packed,
    _placement,
    _template,
)
from ._functions import StoredFunction
from ._leaves import Leaves, Record
from ._packed import Laid, Packed
from ._placement import Placement
from ._schema import DIGEST, field, ID, NUMBER


FORMAT = "eqx_ckpt"
# The versions that are read, and the first release that reads each.
READERS = {1: "0.1.0", 2: "0.2.0"}


class Segment(NamedTuple):
    """Chunks `[first, stop)` of a leaf lie side by side from `offset` of a file on."""

    first: int
    stop: int
    file: int
    offset: int


class SavedState(NamedTuple):
    """A file with the own state of a process: its bytes, and their digest."""

    nbytes: int
    digest: str


class Saved(NamedTuple):
    """How a checkpoint was saved: when, in seconds since 1970; by how many processes;
    and the leaves that were spread over devices, counted by how they were."""

    time: int
    processes: int
    shardings: dict[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """A parsed index: what the tree is, and where it lies. `digests` has that of each
    page of the file of digests; `others` those of the files that other readers use;
    `own` those of the processes' own states, in their order."""

    save: str
    layout: str
    metadata: Any
    leaves: Leaves
    placement: Placement | Packed
    digests: str = ""
    others: dict[str, str] = dataclasses.field(default_factory=dict)
    writer: dict[str, str] = dataclasses.field(default_factory=dict)
    saved: Saved | None = None
    functions: dict[str, StoredFunction] = dataclasses.field(default_factory=dict)
    own: list[SavedState] = dataclasses.field(default_factory=list)

    @ft.cached_property
    def _laid(self) -> Laid | None:
        if not isinstance(self.placement, Packed):
            return None
        try:
            return _packed.lay(self.placement, self.leaves)
        except ValueError as e:
            raise DamagedError(str(e)) from e

    @ft.cached_property
    def _segments(self) -> dict[int, list[Segment]]:
        return {}

    def check_leaves(self) -> None:
        """**Raises:** `ValueError` unless all leaves can be read, as far as the columns
        tell, and those that functions use are arrays."""
        for template in self.leaves.templates:
            _template.check_template(template)
        for function in self.functions.values():
            for record in map(self.leaves.record, function.leaves):
                if record.template.kind not in ("jax", "key"):
                    raise ValueError(
                        f"a function uses {record.name!r}, no array of JAX"
                    )

    def _origin(self, place: int) -> int:
        return self.leaves.aliases.get(place, place)

    def start(self, place: int) -> tuple[int, int]:
        """The file and the offset of the first chunk of a leaf."""
        if isinstance(self.placement, Placement):
            return self.placement.file[place], self.placement.offset[place]
        assert self._laid is not None
        return self._laid.start(self._origin(place))

    def segments(self, record: Record) -> list[Segment]:
        """Where the chunks of a leaf lie (`layout="ocdbt"`), in their order."""
        origin, count = self._origin(record.place), record.template.chunk_count
        if isinstance(self.placement, Packed):
            laid = self._laid
            assert laid is not None
            own = laid.runs(origin)
            columns = laid.first[own], laid.file[own], laid.offset[own]
            return _segments_of(list(zip(*(c.tolist() for c in columns))), count)
        rest = self.placement.rest.get(origin)
        if rest is None:
            return [Segment(0, count, *self.start(origin))]
        if origin not in self._segments:
            starts = [(0, *self.start(origin)), *rest]
            self._segments[origin] = _segments_of(starts, count)
        return self._segments[origin]

    def segment(self, record: Record, number: int) -> Segment:
        """The one of them that a chunk is in."""
        laid = self._laid
        if laid is None:
            segments = self.segments(record)
            return segments[bisect.bisect(segments, number, key=lambda s: s.first) - 1]
        origin = self._origin(record.place)
        row = laid.find(origin, number)
        stop = laid.stop(origin, row, record.template.chunk_count)
        at = laid.file.item(row), laid.offset.item(row)
        return Segment(laid.first.item(row), stop, *at)

    def extent(self, record: Record, first: int, stop: int) -> int:
        """The bytes of chunks `[first, stop)` of a leaf, which are in one segment."""
        if record.template.codec is None:
            return (stop - first) * record.template.full
        origin = self._origin(record.place)
        if isinstance(self.placement, Placement):
            starts = self.placement.ends[origin]
            return starts[stop] - starts[first]
        assert self._laid is not None
        return self._laid.extent(self._laid.find(origin, first), first, stop)

    def locate(self, record: Record, number: int) -> tuple[int, int, int]:
        """Where a chunk lies (`layout="ocdbt"`): its file, offset and length."""
        found = self.segment(record, number)
        start = found.offset + self.extent(record, found.first, number)
        return found.file, start, self.extent(record, number, number + 1)

    @ft.cached_property
    def _first_digests(self) -> list[int]:
        leaves = self.leaves
        counts = [0] * len(leaves.templates)
        for number in set(leaves.template):
            t = leaves.templates[number]
            _template.check_template(t)
            counts[number] = _grid.block_counts(t.shape, t.chunk, t.itemsize)
        per_leaf = np.asarray(counts, np.int64)[np.asarray(leaves.template, np.int64)]
        per_leaf[list(leaves.aliases)] = 0
        if per_leaf.sum(dtype=float) > _template.MAX_BYTES:
            raise ValueError("the leaves are of an impossible size")
        return [0, *np.cumsum(per_leaf).tolist()]

    @property
    def pages(self) -> list[int]:
        """The number of the first digest of each page of the file of digests, and how
        many there are."""
        if self._laid is not None:
            return self._laid.pages
        return [0, self._first_digests[-1]]

    def first_digest(self, place: int) -> int:
        """The number of the first digest of a leaf in the file of digests."""
        origin = self._origin(place)
        if self._laid is not None:
            return self._laid.first_digest(origin)
        return self._first_digests[origin]

    def chunk_digest(self, record: Record, number: int) -> int:
        """The number of the first digest of a chunk in the file of digests."""
        t, laid = record.template, self._laid
        if laid is None:
            return self.first_digest(record.place) + t.block_of(number)
        row = laid.find(self._origin(record.place), number)
        before = t.block_of(laid.first.item(row))
        return laid.row.item(row) + t.block_of(number) - before


def _segments_of(starts: list[tuple[int, int, int]], count: int) -> list[Segment]:
    stops = [first for first, _, _ in starts[1:]] + [count]
    return [Segment(first, stop, *at) for (first, *at), stop in zip(starts, stops)]


def digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


_tail = b',"digest":"'


def sealed(text: bytes) -> bytes:
    """An object of JSON, given without its end, and the digest that ends it.

    **Raises:** `ValueError` for more than is read.
    """
    data = text + _tail + digest(text).encode() + b'"}'
    _json.check_cost(data)
    return data


@ft.cache
def versions() -> dict[str, str]:
    """The versions of the packages that wrote a checkpoint."""
    out = {"eqx_ckpt": __version__}
    for package in ("jax", "equinox", "tensorstore", "numpy"):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "unknown"
    return out


def encode(index: Index) -> bytes:
    """The bytes of `eqx_ckpt.json`."""
    leaves, placement, statics = index.leaves, index.placement, index.leaves.statics
    functions = _functions.encode(index.functions)
    version = _version(index)
    structure = leaves.structure
    body = {
        "format": FORMAT,
        "save": index.save,
        "version": version,
        "reader": READERS[version],
        "writer": index.writer,
        "layout": index.layout,
        "metadata": index.metadata,
        "templates": [list(t) for t in leaves.templates],
        **_columns_of(leaves, placement),
        "aliases": sorted(leaves.aliases.items()),
        "markers": sorted(leaves.markers.items()),
        "statics": statics.values,
        "static": statics.of,
        **_leaves.encode_parts(leaves.parts),
        **({} if statics.encoded is None else {"encoded": statics.encoded}),
        **({} if structure is None else {"structure": structure._asdict()}),
        "digests": index.digests,
        "others": index.others,
        **({} if index.saved is None else {"saved": index.saved._asdict()}),
        **({"functions": functions} if functions else {}),
        **({"own": index.own} if index.own else {}),
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return sealed(text)


def _columns_of(leaves: Leaves, placement: Placement | Packed) -> dict[str, Any]:
    """What an index has an entry of for each leaf."""
    if isinstance(placement, Packed):
        columns = {**_leaves.encode(leaves), **_packed.encode(placement)}
        return {"files": placement.files, "columns": columns}
    return {
        "names": leaves.names,
        "template": leaves.template,
        "files": placement.files,
        "file": placement.file,
        "offset": placement.offset,
        "splits": placement.splits,
        "sizes": sorted(placement.sizes.items()),
    }


def _version(index: Index) -> int:
    """The lowest version of the format that has all of it."""
    has_codec = any(t.codec in _blosc.CODECS for t in index.leaves.templates)
    is_packed = isinstance(index.placement, Packed)
    return 2 if has_codec or is_packed or index.leaves.parts else 1


# The first fields: what is needed to say that a format is too new to be read.
_head = re.compile(
    rb'\{"format":"eqx_ckpt","save":"[^"]*","version":([0-9]{1,9}),"reader":"([^"]*)"'
)


def decode(data: bytes) -> Index:
    """The inverse of `encode`. Nothing is parsed before the digest has been checked.

    **Raises:** `ValueError` when `data` is not an index that this release reads.
    """
    head = _head.match(data)
    if head is not None:
        _check_version(int(head[1]), head[2].decode("ascii", "replace"))
    if not data.startswith(f'{{"format":"{FORMAT}"'.encode()):
        raise ValueError("the index is not one of eqx_ckpt")
    check_digest(data)
    value = _columns.parse(data)
    _check_version(value.get("version"), value.get("reader"))
    index = _typed(value)
    if index.layout == "ocdbt" and isinstance(index.placement, Placement):
        _check_places(index, index.placement)
    return index


class Outline(NamedTuple):
    """What the files of a checkpoint are called: its layout, and the names of leaves
    that have directories of their own."""

    layout: str
    names: Sequence[str] = ()


# Its first fields, up to the layout.
_start = re.compile(_head.pattern + rb',"writer":\{[^{}]*\},"layout":"ocdbt",')


def outline(data: bytes) -> Outline:
    """The outline of what `decode` gives. Where leaves have no directories, nothing of
    an index is parsed that is not damaged.

    **Raises:** as `decode`.
    """
    start = _start.match(data)
    if start is None:
        index = decode(data)
        return Outline(index.layout, index.leaves.names)
    _check_version(int(start[1]), start[2].decode("ascii", "replace"))
    check_digest(data)
    return Outline("ocdbt")


def check_digest(data: bytes) -> None:
    """**Raises:** `ValueError` for what is too long to be parsed, or is damaged."""
    _json.check_length(data)
    body, tail = memoryview(data)[:-45], data[-45:]
    if tail != _tail + digest(body).encode() + b'"}':
        raise DamagedError("the index is damaged: its digest is not that of its bytes")


class Newer(ValueError):
    """An index of a format that a later release reads."""


def _check_version(version: Any, reader: Any) -> None:
    if type(version) is not int or version < 0:
        raise ValueError("the index has no format version")
    newest = max(READERS)
    if version > newest:
        raise Newer(
            f"it is written in format {version}, and this release, "
            f"{versions()['eqx_ckpt']}, reads formats up to {newest}. Install what "
            f"reads it: `pip install 'eqx_ckpt>={_release(reader)}'`"
        )


def _release(value: Any) -> str:
    # It goes into a command that people will run.
    good = isinstance(value, str) and re.fullmatch(r"[0-9][0-9a-z.]{0,30}", value)
    return value if good else "?"


def _typed(value: dict[str, Any]) -> Index:
    layout = field(value, "layout", str)
    _json.check_metadata(value.get("metadata"))
    if layout not in ("ocdbt", "zarr"):
        raise ValueError(f"the index has the unknown layout {layout!r}")
    leaves = _leaves.parse(value)
    placement = _placement.parse(value, leaves, layout)
    digests = field(value, "digests", re.compile(f"({DIGEST.pattern})*"))
    pages = len(placement.files) if isinstance(placement, Packed) else 1
    if len(digests) != 32 * pages:
        raise ValueError("the index lacks the digests of pages")
    save = field(value, "save", str)
    if not is_save_id(save):
        raise ValueError("the index has a malformed save id")
    others = field(value, "others", {...: DIGEST})
    own = {f"d/{save}/tree", f"d/{save}/manifest.ocdbt"}
    if not others.keys() <= _files.OTHERS | own:
        raise ValueError("the index names files that are not of this format")
    return Index(
        save,
        layout,
        value.get("metadata"),
        leaves,
        placement,
        digests,
        others,
        field(value, "writer", {...: str}),
        _saved(field(value, "saved", {...: Any})) if "saved" in value else None,
        _functions.parse(value.get("functions", {}), len(leaves.names)),
        [SavedState(*row) for row in field(value, "own", [(NUMBER, DIGEST)])]
        if "own" in value
        else [],
    )


def _saved(value: dict[str, Any]) -> Saved:
    # Later times are no dates.
    time, processes = field(value, "time", _TIME), field(value, "processes", _TIME)
    return Saved(time, processes, field(value, "shardings", {...: NUMBER}))


_TIME = range(2**37)


def _check_places(index: Index, placement: Placement) -> None:
    """**Raises:** `ValueError` unless every chunk has a place of its own in the files.

    So the leaves cannot be larger than the files are.
    """
    leaves = index.leaves
    full = []
    for template in leaves.templates:
        try:
            _template.check_template(template)
            full.append(template.chunk_count * template.full)
        except ValueError:
            full.append(0)  # It is refused when it is touched.
    try:
        number, file, start = (
            np.asarray(column, np.int64)
            for column in (leaves.template, placement.file, placement.offset)
        )
    except OverflowError:
        raise ValueError("the index has a place that cannot be") from None
    bad = (file < 0) | (file >= len(placement.files))
    bad |= (start < 0) | (start >= _template.MAX_BYTES)
    if bad.any():
        name = leaves.names[int(bad.argmax())]
        raise ValueError(f"leaf {name!r} has no place in the files")
    size = np.asarray(full, np.int64)[number]
    size[list(leaves.aliases)] = 0
    _check_sizes(leaves, placement, size)
    # Those that lie in one place, and then the others.
    rows: list[tuple[int, int, int]] = []
    for leaf in {*placement.rest, *placement.sizes}:
        if not size[leaf]:
            raise ValueError("the index has a malformed split")
        record = leaves.record(leaf, known=True)
        for segment in index.segments(record):
            if segment.first >= segment.stop:
                raise ValueError("the index has a malformed split")
            nbytes = index.extent(record, segment.first, segment.stop)
            rows.append((segment.file, segment.offset, nbytes))
        size[leaf] = 0
    taken = size > 0
    more = np.asarray(rows, np.int64).reshape(-1, 3).T
    file, start, size = (
        np.concatenate([one[taken], other])
        for one, other in zip((file, start, size), more)
    )
    order = np.lexsort((start, file))
    file, start, stop = file[order], start[order], (start + size)[order]
    if ((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).any():
        raise ValueError("the index has two chunks at one place in the files")


def _check_sizes(leaves: Leaves, placement: Placement, size: np.ndarray) -> None:
    """**Raises:** `ValueError` unless just the compressed leaves have `sizes`."""
    sizes = placement.sizes
    codecs = np.asarray([t.codec is not None for t in leaves.templates], bool)
    wanted = codecs[np.asarray(leaves.template, np.int64)] & (size > 0)
    if set(np.flatnonzero(wanted).tolist()) != sizes.keys():
        raise ValueError("the index lacks the sizes of compressed chunks")
    for leaf, some in sizes.items():
        t = leaves.templates[leaves.template[leaf]]
        if (
            len(some) != t.chunk_count
            or max(some) > _template.most_encoded(t.full)
            or min(some) < _template.least_encoded(t.full)
        ):
            raise ValueError("the index has impossible sizes of chunks")


def is_save_id(text: str) -> bool:
    return ID.fullmatch(text) is not None
