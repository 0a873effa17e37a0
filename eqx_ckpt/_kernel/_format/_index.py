"""The index of a checkpoint: its leaves, their names and where they lie. See FORMAT.md.

Every field is checked before it is used: see `_leaves`.
"""

import dataclasses
import functools as ft
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xxhash

from ..._version import __version__
from .. import _rooms
from .._errors import DamagedError
from . import _extents, _files, _json, _layouts, _leaves, _placement
from ._extents import Extents
from ._leaves import Leaves
from ._placement import Placement
from ._record import TreeRecord
from ._schema import DIGEST, fields, ID, NUMBER


FORMAT = "eqx_ckpt"
# The versions that are read, and the first release that reads each.
READERS = {1: "0.1.0"}
# Whether a text can be the id of a save.
is_save_id = ID.fullmatch


class SaveFacts(NamedTuple):
    """Facts about a save: when it was, in seconds since 1970; by how many processes;
    and the leaves that were spread over devices, counted by how they were."""

    time: int
    processes: int
    shardings: dict[str, int]


class BaseFacts(NamedTuple):
    """The checkpoint that another one was made on, such as that of an adapter: its path
    as it was given, the id of its save, and the digest of its index."""

    path: str
    save_id: str
    digest: str


class OwnState(NamedTuple):
    """The size and the digest of the file of a process's own state."""

    nbytes: int
    digest: str


class StoredFunction(NamedTuple):
    """One function: its `file`, by number; the leaves that it takes, by their indices,
    and by the `names` that it has for them; the nests of its arguments, a tuple, and of
    its result. `order` is how often it can be differentiated. `baked` are the digests
    of leaves whose values are part of it.
    """

    file: int
    digest: str
    nbytes: int
    leaves: list[int]
    names: list[str]
    args: Any
    result: Any
    platforms: list[str]
    order: int
    baked: dict[str, str]
    versions: dict[str, str]


class IndexSections(NamedTuple):
    """The bytes of an index in three: those before and after the columns change with
    each save, the columns with the structure of the tree alone."""

    head: bytes
    columns: bytes
    tail: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """A parsed index: what the tree is, and where it lies.

    - `digests`: one for each page of the file of digests, one after the other. A packed
        layout has a page for each data file, another layout has one page.
    - `others`: the digests of the files that other readers use, at the root
        (`_files.OTHERS`) and in `d/<save id>`.
    - `own`: the own states of the processes, in their order.
    - `shift`: how much further on all of a data file lies, if it is a member of a zip.
    - `seal`, `columns`: the digest of all but `others`, and the JSON of the columns;
        empty if they are not known.
    """

    save: str
    layout: str
    metadata: Any
    leaves: Leaves
    files: list[str]
    placement: Placement | Extents
    digests: str = ""
    others: dict[str, str] = dataclasses.field(default_factory=dict)
    writer: dict[str, str] = dataclasses.field(default_factory=dict)
    saved: SaveFacts | None = None
    functions: dict[str, StoredFunction] = dataclasses.field(default_factory=dict)
    own: list[OwnState] = dataclasses.field(default_factory=list)
    shift: Sequence[int] = ()
    base: BaseFacts | None = None
    seal: str = ""
    columns: bytes = b""

    @ft.cached_property
    def extents(self) -> Extents:
        """Where the chunks lie in the files. **Raises:** `DamagedError`."""
        placement = self.placement
        if isinstance(placement, Extents):
            extents = placement
        elif self.layout not in _layouts.PACKED:
            nowhere = [0] * len(self.leaves.names)
            extents = _extents.in_one_run(self.leaves, 1, nowhere, nowhere)
        else:
            try:
                extents = _placement.lay(placement, len(self.files), self.leaves)
            except ValueError as e:
                raise DamagedError(str(e)) from e
        return extents.shifted(self.shift) if self.shift else extents

    def check_leaves(self) -> None:
        """**Raises:** `ValueError` unless all leaves can be read, as far as the columns
        tell, and those that functions use are arrays."""
        self.leaves.check_templates()
        _ = self.leaves.tree
        for function in self.functions.values():
            for record in map(self.leaves.record, function.leaves):
                if record.template.kind not in ("jax", "key"):
                    raise ValueError(
                        f"a function uses {record.name!r}, no array of JAX"
                    )


# What each field is where it is not given; an index lacks those of `OPTIONAL` then.
_DEFAULTS = {
    field.name: factory()
    if callable(factory := field.default_factory)
    else field.default
    for field in dataclasses.fields(Index)
}


digest: Callable[[Any], str] = xxhash.xxh3_128_hexdigest
_tail = b',"digest":"'
# The bytes that end an index: `_tail`, a digest and `"}`.
_TAIL_SIZE = len(_tail) + 32 + 2


def sealed(text: bytes) -> bytes:
    """An object of JSON, given without its end, and the digest of all of it, which ends
    it. (The `seal` of an `Index` leaves out `others`, and is not in the file.)

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
        # To read the metadata of a package takes longer than to ask it.
        known = getattr(sys.modules.get(package), "__version__", None)
        try:
            out[package] = known or importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "unknown"
    return out


def encode(index: Index) -> bytes:
    """The bytes of `eqx_ckpt.json`. A save publishes what `_publish.encoded` makes of
    the sections: it needs them for `check`."""
    return sealed(b",".join(encode_sections(index)))


def encode_sections(index: Index) -> IndexSections:
    leaves, files, placement = index.leaves, index.files, index.placement
    version = max(READERS)
    head = {
        "format": FORMAT,
        "save": index.save,
        "version": version,
        "reader": READERS[version],
        "writer": index.writer,
        "layout": index.layout,
        "metadata": index.metadata,
    }
    tail: dict[str, Any] = {"digests": index.digests}
    optional = {
        "saved": index.saved and index.saved._asdict(),
        "functions": index.functions and encode_functions(index.functions),
        "own": index.own,
        "base": index.base,
    }
    is_given = lambda name: getattr(index, name) != _DEFAULTS[name]
    tail |= {name: optional[name] for name in filter(is_given, optional)}
    tail["others"] = index.others  # The last, so that all before them has a `seal`.
    columns = index.columns or encode_columns(leaves, files, placement)
    return IndexSections(b"{" + _fields_of(head), columns, _fields_of(tail))


# Begins the last field before the digest.
_OTHERS = b',"others":'


def with_others(data: bytes, others: dict[str, str]) -> bytes:
    """The bytes of an index, with the digests of other files of the same save.

    **Raises:** `ValueError` as `decode`.
    """
    rest = data.rpartition(_OTHERS)[0]
    data = sealed(rest + b"," + _fields_of({"others": others}))
    if decode(data).others != others:
        raise ValueError("the index ends in something else than its other files")
    return data


def others_in(data: bytes) -> list[str]:
    """The files for other readers at the root that are of the save of an index, which
    is not parsed."""
    rest = data.rpartition(_OTHERS)[2]
    return [key for key in _files.OTHERS if f'"{key}":'.encode() in rest]


def encode_functions(functions: dict[str, StoredFunction]) -> dict[str, Any]:
    return {name: function._asdict() for name, function in functions.items()}


def encode_columns(
    leaves: Leaves, files: list[str], placement: Placement | Extents
) -> bytes:
    """The fields with an entry for each leaf, template, data file or node."""
    tree = leaves.recorded
    if isinstance(tree, TreeRecord):
        tree = tree.encoded
    assert isinstance(placement, Placement)
    return _fields_of(
        {
            "templates": leaves.templates,
            "names": leaves.names,
            "template": leaves.template_of,
            "files": files,
            **_placement.encode(placement),
            "aliases": sorted(leaves.aliases.items()),
            **(_leaves.encode_local_shards(leaves.parts) if leaves.parts else {}),
            **({} if tree is None else {"tree": tree}),
        }
    )


def _fields_of(body: dict[str, Any]) -> bytes:
    """Fields of an object of JSON, without its brackets."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return text[1:-1].encode()


# The first fields, which say that a format is too new to be read. If the layout is
# packed, they go on to the metadata.
_packed = "|".join(sorted(_layouts.PACKED))
_head = re.compile(
    rb'\{"format":"eqx_ckpt","save":"(?P<save>[0-9a-f]{16}(?="))?[^"]*",'
    rb'"version":(?P<version>[0-9]{1,9}),"reader":"(?P<reader>[^"\\]*)"'
    rb'(?P<packed>,"writer":\{[^{}]*\},"layout":"(?:%b)","metadata":)?'
    % _packed.encode()
)


def head_of(save: str) -> bytes:
    """The first bytes of the index of a save, which no other save has."""
    return f'{{"format":"{FORMAT}","save":"{save}"'.encode()


def is_of_same_save(one: bytes, other: bytes) -> bool:
    """Whether two indices are of one save: `write_orbax` adds files to it."""
    head = match_head(one)
    save = head and head["save"]
    return bool(save) and other.startswith(head_of(save.decode()))


def match_head(data: bytes) -> re.Match[bytes] | None:
    """The first fields of an index: its "save"; and "packed", which ends where the
    metadata begin.

    **Raises:** `Newer`.
    """
    head = _head.match(data)
    if head is not None and int(head["version"]) > max(READERS):
        raise _newer(int(head["version"]), head["reader"].decode("ascii", "replace"))
    return head


def decode(data: bytes) -> Index:
    """The inverse of `encode`. Only the head, with the version, is parsed before the
    digest has been checked.

    **Raises:** `ValueError` when `data` is not an index that this release reads.
    """
    match_head(data)
    if not data.startswith(f'{{"format":"{FORMAT}"'.encode()):
        raise ValueError("the index is not one of eqx_ckpt")
    check_digest(data)
    value = _json.parse(data, encoding="ascii")
    return _index_of_json(value, digest(data.rpartition(_OTHERS)[0]))


def check(sections: IndexSections, data: bytes, tree: TreeRecord | None) -> None:
    """Decodes an index that is about to be published: `data`, which is of these
    `sections`. Columns that have been decoded before are not decoded again, and neither
    is the record of the tree where it is `tree`, which was checked.

    **Raises:** `ValueError` if it cannot be read.
    """
    check_digest(data)
    head, columns, tail = sections
    # Each of the three is an object of JSON, and so all are one, with the fields of
    # each.
    value = _json.parse(head + b"}", encoding="ascii")
    value |= _json.parse(b"{" + tail + b"}", encoding="ascii")
    index = _index_of_json(value, known=_checked(columns, value["layout"], tree))
    if index.functions:
        index.check_leaves()


@ft.lru_cache(maxsize=4)
def _checked(columns: bytes, layout: str, tree: TreeRecord | None) -> Index:
    """An index that has these columns, and nothing else."""
    value = _json.parse(b"{" + columns + b"}", encoding="ascii")
    leaves, files, placement = _table_of(value)
    if tree is not None and leaves.is_recorded_as(tree):
        leaves = dataclasses.replace(leaves, recorded=tree)
    index = Index("", layout, None, leaves, files, placement)
    _ = index.extents
    index.check_leaves()
    return index


def leaf_entries(data: bytes) -> Sequence[str]:
    """The names that the files or directories of leaves have at the root of a save. A
    packed layout has none: of its index only the digest is checked.

    **Raises:** as `decode`.
    """
    head = match_head(data)
    if head is None or not head["packed"]:
        index = decode(data)
        entry = _layouts.LAYOUTS[index.layout].entry
        return () if entry is None else list(map(entry, index.leaves.names))
    check_digest(data)
    return ()


def check_digest(data: bytes, what: str = "the index") -> None:
    """**Raises:** `ValueError` for what is too long to be parsed, or is damaged."""
    _json.check_length(data)
    body, tail = memoryview(data)[:-_TAIL_SIZE], data[-_TAIL_SIZE:]
    if tail != _tail + digest(body).encode() + b'"}':
        raise DamagedError(f"{what} is damaged: its digest is not that of its bytes")


class Newer(ValueError):
    """An index of a format that a later release reads."""


def _newer(version: int, reader: Any) -> Newer:
    # People copy this text into a command, so only a version number may be in it.
    good = isinstance(reader, str) and re.fullmatch(r"[0-9][0-9a-z.]{0,30}", reader)
    return Newer(
        f"it is written in format {version}, and this release, "
        f"{versions()['eqx_ckpt']}, reads formats up to {max(READERS)}. Install what "
        f"reads it: `pip install 'eqx_ckpt>={reader if good else '?'}'`"
    )


def _index_of_json(
    value: dict[str, Any], seal: str = "", known: Index | None = None
) -> Index:
    """The index that parsed JSON says. `known`: one with the same columns, whose
    leaves, files and placement are taken."""
    version = value.get("version")
    if type(version) is not int or version < min(READERS):
        raise ValueError("the index has no format version")
    if version > max(READERS):
        raise _newer(version, value.get("reader"))
    layout, digests, save, others, writer = fields(value, _FIELDS)
    _json.check_json(value.get("metadata"))
    if layout not in _layouts.LAYOUTS:
        raise ValueError(f"the index has the unknown layout {layout!r}")
    if known is None:
        leaves, files, placement = _table_of(value)
    else:
        leaves, files, placement = known.leaves, known.files, known.placement
    pages = len(files) if layout in _layouts.PACKED else 1
    if len(digests) != 32 * pages:
        raise ValueError("the index lacks the digests of pages")
    if not is_save_id(save):
        raise ValueError("the index has a malformed save id")
    nodes = {f"d/{save}/tree", f"d/{save}/manifest.ocdbt"}
    if not others.keys() <= _files.OTHERS | nodes:
        raise ValueError("the index names files that are not of this format")
    optional: dict[str, Any] = {}
    for name, (kind, make) in OPTIONAL.items():
        if name in value:
            (field,) = fields(value, {name: kind})
            optional[name] = make(field, len(leaves.names))
    # The fields of an `Index` from `metadata` to `writer`.
    rest = value.get("metadata"), leaves, files, placement, digests, others, writer
    return Index(save, layout, *rest, seal=seal, **optional)


def _table_of(
    value: dict[str, Any],
) -> tuple[Leaves, list[str], Placement | Extents]:
    """The leaves, the data files and where the leaves lie in them."""
    (files,) = fields(value, {"files": [str]})
    if files != [str(number) for number in range(len(files))]:
        raise ValueError("the index names files that are not of this format")
    return _leaves.parse(value), files, _placement.parse(value, len(files))


# What every index has, but for its columns.
_FIELDS = {
    "layout": str,
    "digests": re.compile(f"({DIGEST.pattern})*"),
    "save": str,
    "others": {...: DIGEST},
    "writer": {...: str},
}


# Later times are no dates.
_TIME = range(2**37)
_SAVED = {"time": _TIME, "processes": _TIME, "shardings": {...: NUMBER}}
# The fields that an index may lack: the kind of each, and what is made of it and of the
# number of leaves.
OPTIONAL: dict[str, tuple[Any, Callable[[Any, int], Any]]] = {
    "saved": (dict, lambda facts, _: SaveFacts(*fields(facts, _SAVED))),
    "own": ([(NUMBER, DIGEST)], lambda rows, _: [OwnState(*row) for row in rows]),
    "base": ((str, ID, DIGEST), lambda row, _: BaseFacts(*row)),
    "functions": ({...: dict}, _rooms.parse_functions),
}
