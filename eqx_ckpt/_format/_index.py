"""The index of a checkpoint: what is stored, under which names, where. See FORMAT.md.

Columns rather than an object a leaf: an index of 10,000 leaves parses in milliseconds.
What it says is data from a file, and whoever made the file may mean harm. The columns
are checked when they are read, the template and the name of a leaf when it is touched.
"""

import bisect
import dataclasses
import functools as ft
import importlib.metadata
import itertools as it
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._errors import DamagedError
from .._version import __version__
from . import _grid, _json, _names, _template
from ._template import Template


FORMAT = "eqx_ckpt"
VERSION = 1
# The first release that reads what this one writes.
READER = "0.1.0"

# Where files for other readers may lie, besides those of the save's own database.
_OTHERS = frozenset(
    "manifest.ocdbt zarr.json _METADATA _sharding _strings.json "
    "array_metadatas/process_0".split()
)


class Segment(NamedTuple):
    """Chunks `[first, stop)` of a leaf lie side by side from `offset` of a file on."""

    first: int
    stop: int
    file: int
    offset: int


class Record(NamedTuple):
    """One leaf as the index has it. `place` is its number in the columns."""

    name: str
    place: int
    template: Template
    file: int
    offset: int


class Statics(NamedTuple):
    """The static fields of Modules: `values[of[name]]` for the Module at `name`. Those
    that JSON does not hold are in the same row of `encoded`, if they were recorded."""

    values: list[dict[str, Any]]
    of: dict[str, int]
    encoded: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """A parsed index. `names[i]` has template `templates[template[i]]`, and its chunks
    lie one after the other from `offset[i]` of `files[file[i]]` on; a `(leaf, chunk,
    file, offset)` of `splits` says from which chunk on they lie elsewhere. `sizes` has
    those of the chunks of compressed leaves, `others` the digests of the files that
    other readers use."""

    save: str
    layout: str
    metadata: Any
    names: list[str]
    templates: list[Template]
    template: list[int]
    files: list[str]
    file: list[int]
    offset: list[int]
    splits: list[tuple[int, int, int, int]]
    sizes: dict[int, list[int]]
    aliases: dict[int, int]
    markers: dict[int, str]
    statics: Statics
    digests: str
    others: dict[str, str]
    writer: dict[str, str]

    @ft.cached_property
    def places(self) -> Mapping[str, int]:
        places = dict(zip(self.names, range(len(self.names))))
        if len(places) != len(self.names):
            raise ValueError("the index has two leaves of one name")
        return places

    @ft.cached_property
    def _checked(self) -> set[int]:
        return set()

    def record(self, place: int, known: bool = False) -> Record:
        """The leaf in this place of the columns, checked. `known`: but for its name,
        which is one that we have made of a key path.

        **Raises:** `ValueError` when what the index says of it cannot be.
        """
        name, number = self.names[place], self.template[place]
        template = self.templates[number]
        try:
            if number not in self._checked:
                _template.check_template(template)
                self._checked.add(number)
            if not known:
                _names.keys_of(name, template.keys)
        except ValueError as e:
            raise ValueError(
                f"The index of the checkpoint has a leaf, {_names.shorten(name)}, that "
                f"is never saved: {e}."
            ) from e
        if self.layout != "zarr":
            return Record(name, place, template, self.file[place], self.offset[place])
        return Record(name, place, template, 0, 0)

    def records(self) -> Iterator[Record]:
        return map(self.record, range(len(self.names)))

    @ft.cached_property
    def _splits(self) -> dict[int, list[tuple[int, int, int]]]:
        out: dict[int, list[tuple[int, int, int]]] = {}
        for leaf, *rest in sorted(self.splits):
            out.setdefault(leaf, []).append((rest[0], rest[1], rest[2]))
        return out

    @ft.cached_property
    def _segments(self) -> dict[int, list[Segment]]:
        return {}

    def segments(self, record: Record) -> list[Segment]:
        """Where the chunks of a leaf lie (`layout="ocdbt"`), in their order."""
        origin = self.aliases.get(record.place, record.place)
        count = record.template.chunk_count
        if origin not in self._splits:
            return [Segment(0, count, record.file, record.offset)]
        if origin not in self._segments:
            starts = [(0, record.file, record.offset), *self._splits[origin]]
            stops = [first for first, _, _ in starts[1:]] + [count]
            self._segments[origin] = [
                Segment(first, stop, *at) for (first, *at), stop in zip(starts, stops)
            ]
        return self._segments[origin]

    @ft.cached_property
    def _starts(self) -> dict[int, list[int]]:
        # Of the chunks of compressed leaves, if all of them followed each other.
        return {leaf: [0, *it.accumulate(sizes)] for leaf, sizes in self.sizes.items()}

    def extent(self, record: Record, first: int, stop: int) -> int:
        """The bytes of chunks `[first, stop)` of a leaf (`layout="ocdbt"`)."""
        if record.template.codec is None:
            return (stop - first) * record.template.full
        starts = self._starts[self.aliases.get(record.place, record.place)]
        return starts[stop] - starts[first]

    def locate(self, record: Record, number: int) -> tuple[int, int, int]:
        """Where a chunk lies (`layout="ocdbt"`): its file, offset and length."""
        segments = self.segments(record)
        found = segments[bisect.bisect(segments, number, key=lambda s: s.first) - 1]
        start = found.offset + self.extent(record, found.first, number)
        return found.file, start, self.extent(record, number, number + 1)

    @ft.cached_property
    def _first_blocks(self) -> list[int]:
        counts = [0] * len(self.templates)
        for number in set(self.template):
            t = self.templates[number]
            _template.check_template(t)
            counts[number] = _grid.block_counts(t.shape, t.chunk, t.itemsize)
        per_leaf = np.asarray(counts, np.int64)[np.asarray(self.template, np.int64)]
        per_leaf[list(self.aliases)] = 0
        if per_leaf.sum(dtype=float) > _template.MAX_BYTES:
            raise ValueError("the leaves are of an impossible size")
        return [0, *np.cumsum(per_leaf).tolist()]

    @property
    def block_count(self) -> int:
        return self._first_blocks[-1]

    def first_block(self, place: int) -> int:
        """The number of the first digest of a leaf in the file of digests."""
        return self._first_blocks[self.aliases.get(place, place)]


def digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


_tail = b',"digest":"'


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
    body = {
        "format": FORMAT,
        "save": index.save,
        "version": VERSION,
        "reader": READER,
        "writer": index.writer,
        "layout": index.layout,
        "metadata": index.metadata,
        "templates": [list(t) for t in index.templates],
        "names": index.names,
        "template": index.template,
        "files": index.files,
        "file": index.file,
        "offset": index.offset,
        "splits": index.splits,
        "sizes": sorted(index.sizes.items()),
        "aliases": sorted(index.aliases.items()),
        "markers": sorted(index.markers.items()),
        "statics": index.statics.values,
        "static": index.statics.of,
        **({} if index.statics.encoded is None else {"encoded": index.statics.encoded}),
        "digests": index.digests,
        "others": index.others,
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]
    data = text + _tail + digest(text).encode() + b'"}'
    _json.check_cost(data)
    return data


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
    _json.check_cost(data)
    body, tail = data[:-45], data[-45:]
    if tail != _tail + digest(body).encode() + b'"}':
        raise DamagedError("the index is damaged: its digest is not that of its bytes")
    value = _json.parse(data, encoding="ascii")
    _check_version(value.get("version"), value.get("reader"))
    index = _typed(value)
    if index.layout == "ocdbt":
        _check_places(index)
    return index


class Newer(ValueError):
    """An index of a format that a later release reads."""


def _check_version(version: Any, reader: Any) -> None:
    if type(version) is not int or version < 0:
        raise ValueError("the index has no format version")
    if version > VERSION:
        raise Newer(
            f"it is written in format {version}, and this release, "
            f"{versions()['eqx_ckpt']}, reads formats up to {VERSION}. Install what "
            f"reads it: `pip install 'eqx_ckpt>={_release(reader)}'`"
        )


def _release(value: Any) -> str:
    # It goes into a command that people will run.
    good = isinstance(value, str) and re.fullmatch(r"[0-9][0-9a-z.]{0,30}", value)
    return value if good else "?"


def _typed(value: dict[str, Any]) -> Index:
    def field(name: str, kind: type, item: type | None = None) -> Any:
        got: Any = value.get(name)
        if type(got) is not kind:
            raise ValueError(f"the index has no {name!r} of the right type")
        if item is not None:
            items: Any = got.values() if kind is dict else got
            if not set(map(type, items)) <= {item}:
                raise ValueError(
                    f"the index has something else than {item} in {name!r}"
                )
        return got

    names = field("names", list, str)
    layout = field("layout", str)
    if layout not in ("ocdbt", "zarr"):
        raise ValueError(f"the index has the unknown layout {layout!r}")
    templates = []
    for row in field("templates", list, list):
        if len(row) != len(Template._fields):
            raise ValueError("the index has a malformed template")
        template = Template(*row)
        if type(template.shape) is not list or type(template.chunk) is not list:
            raise ValueError("the index has a malformed template")
        templates.append(
            template._replace(shape=tuple(template.shape), chunk=tuple(template.chunk))
        )
    template = field("template", list, int)
    if template and not 0 <= min(template) <= max(template) < len(templates):
        raise ValueError("the index names a template that it does not have")
    file, offset = field("file", list, int), field("offset", list, int)
    columns = [template, file, offset] if layout == "ocdbt" else [template]
    if any(len(column) != len(names) for column in columns):
        raise ValueError("the columns of the index differ in length")
    files = field("files", list, str)
    if files != [str(number) for number in range(len(files))]:
        raise ValueError("the index names files that are not of this format")
    splits = []
    for row in field("splits", list, list):
        if (
            len(row) != 4
            or not all(type(n) is int and 0 <= n < _template.MAX_BYTES for n in row)
            or row[0] >= len(names)
            or row[2] >= len(files)
        ):
            raise ValueError("the index has a malformed split")
        splits.append(tuple(row))
    sizes: dict[int, list[int]] = {}
    for row in field("sizes", list, list):
        _check_pair(row, len(names), list)
        if not all(type(n) is int and 0 < n < _template.MAX_BYTES for n in row[1]):
            raise ValueError("the index has impossible sizes of chunks")
        sizes[row[0]] = row[1]
    aliases, markers = {}, {}
    for row in field("aliases", list, list):
        _check_pair(row, len(names), int)
        alias, origin = row
        if (
            not 0 <= origin < alias
            or alias in aliases
            or origin in aliases
            or templates[template[alias]][1:] != templates[template[origin]][1:]
            or any(column[alias] != column[origin] for column in columns[1:])
        ):
            raise ValueError("the index has an impossible alias")
        aliases[alias] = origin
    for row in field("markers", list, list):
        _check_pair(row, len(names), str)
        if row[1][:1] not in ("=", "@"):
            raise ValueError("the index has a malformed marker")
        markers[row[0]] = row[1]
    values, of = field("statics", list, dict), field("static", dict, int)
    encoded = field("encoded", list, dict) if "encoded" in value else None
    if not all(0 <= n < len(values) for n in of.values()) or (
        encoded is not None and len(encoded) != len(values)
    ):
        raise ValueError("the index names static fields that it does not have")
    save = field("save", str)
    if not is_save_id(save):
        raise ValueError("the index has a malformed save id")
    others = field("others", dict, str)
    if not others.keys() <= _OTHERS | {f"d/{save}/tree", f"d/{save}/manifest.ocdbt"}:
        raise ValueError("the index names files that are not of this format")
    return Index(
        save=save,
        layout=layout,
        metadata=value.get("metadata"),
        names=names,
        templates=templates,
        template=template,
        files=files,
        file=file,
        offset=offset,
        splits=splits,
        sizes=sizes,
        aliases=aliases,
        markers=markers,
        statics=Statics(values, of, encoded),
        digests=field("digests", str),
        others=others,
        writer=field("writer", dict, str),
    )


def _check_places(index: Index) -> None:
    """**Raises:** `ValueError` unless every chunk has a place of its own in the files.

    So the leaves cannot be larger than the files are.
    """
    full = []
    for template in index.templates:
        try:
            _template.check_template(template)
            full.append(template.chunk_count * template.full)
        except ValueError:
            full.append(0)  # It is refused when it is touched.
    try:
        number, file, start = (
            np.asarray(column, np.int64)
            for column in (index.template, index.file, index.offset)
        )
    except OverflowError:
        raise ValueError("the index has a place that cannot be") from None
    bad = (file < 0) | (file >= len(index.files))
    bad |= (start < 0) | (start >= _template.MAX_BYTES)
    if bad.any():
        name = index.names[int(bad.argmax())]
        raise ValueError(f"leaf {name!r} has no place in the files")
    size = np.asarray(full, np.int64)[number]
    size[list(index.aliases)] = 0
    _check_sizes(index, size)
    # Those that lie in one place, and then the others.
    rows: list[tuple[int, int, int]] = []
    for leaf in {*index._splits, *index.sizes}:
        if not size[leaf]:
            raise ValueError("the index has a malformed split")
        record = index.record(leaf, known=True)
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


def _check_sizes(index: Index, size: np.ndarray) -> None:
    """**Raises:** `ValueError` unless just the compressed leaves have `sizes`."""
    codecs = np.asarray([t.codec is not None for t in index.templates], bool)
    wanted = codecs[np.asarray(index.template, np.int64)] & (size > 0)
    if set(np.flatnonzero(wanted).tolist()) != index.sizes.keys():
        raise ValueError("the index lacks the sizes of compressed chunks")
    for leaf, sizes in index.sizes.items():
        if len(sizes) != index.templates[index.template[leaf]].chunk_count:
            raise ValueError("the index has impossible sizes of chunks")
        full = index.templates[index.template[leaf]].full
        if max(sizes) > _template.most_encoded(full) or min(
            sizes
        ) < _template.least_encoded(full):
            raise ValueError("the index has impossible sizes of chunks")


def _check_pair(row: list, count: int, item: type) -> None:
    if not (
        len(row) == 2
        and type(row[0]) is int
        and 0 <= row[0] < count
        and type(row[1]) is item
    ):
        raise ValueError("the index has a malformed row")


def is_save_id(text: str) -> bool:
    return len(text) == 16 and all(c in "0123456789abcdef" for c in text)
