"""What is at a path; and an index made of what a reader has found in it."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..._errors import MissingError
from ..._format import _files, _grid, _json, _names, _template, _text
from ..._format._index import Index, Placement
from ..._format._leaves import Leaves, Unreadable
from ..._format._ocdbt import Database
from ..._format._template import Template
from ..._runtime import _threads
from ..._storage import _store
from ..._storage._backend import Backend
from ..._tree import _leaf
from .._source import Foreign, Source


# So much of a file is enough to tell its format.
_HEAD = 512
# Of all names of a checkpoint. Each is an object here, and a node of its tree.
MAX_COMPONENTS = 2**21


class Candidate(NamedTuple):
    """A file, by its key in a directory and with its first bytes, which stays open if
    it is local; or a directory (`key` is None) and the names of what is in it."""

    root: Backend
    directory: Backend
    key: str | None
    head: bytes
    names: frozenset[str]

    def has_suffix(self, suffix: str) -> bool:
        # The file that a link leads to may have any name.
        return self.root.url.endswith(suffix)


def look(root: Backend) -> Candidate | None:
    """What is at a path; None if there is nothing."""
    directory, key = root.split()
    if key and root.entry() in (None, "file"):
        into = np.empty(_HEAD, np.uint8)
        try:
            directory = directory.pinned(key)
            size = directory.read_into(key, 0, into)
            head = into[:size].tobytes()
            return Candidate(root, directory, key, head, frozenset())
        except (FileNotFoundError, IsADirectoryError):
            pass
    names = names_in(root)
    return Candidate(root, root, None, b"", names) if names else None


# What tells a format in an object store. There a list would be of all below a path, and
# not all servers give one.
_TELLING = (
    "model.safetensors model.safetensors.index.json _METADATA _CHECKPOINT_METADATA "
    "manifest.ocdbt _strings.json array_metadatas/process_0 orbax.checkpoint "
    f"{_files.DIGESTS} default/_METADATA state/_METADATA pytree/_METADATA "
    "metadata.json tensorstore_index.json pytorch_model.bin "
    "pytorch_model.bin.index.json".split()
)


def names_in(root: Backend) -> frozenset[str]:
    """The names in a directory; in an object store those that tell its format."""
    if not root.is_far:
        try:
            return frozenset(root.list_top() or ())
        except NotADirectoryError:
            return frozenset()
    jobs = [ft.partial(has, root, key) for key in _TELLING]
    there = zip(_TELLING, _threads.gather(jobs, len(jobs), waiting=True))
    return frozenset(key.partition("/")[0] for key, is_there in there if is_there)


def has(root: Backend, key: str) -> bool:
    """Whether there is a file."""
    try:
        root.read_into(key, 0, np.empty(1, np.uint8))
        return True
    except FileNotFoundError:
        return False


def is_directory(found: Candidate, name: str) -> bool:
    """Whether a name in a directory may be that of a directory."""
    return found.directory.is_far or found.directory.is_directory(name)


def read_json(directory: Backend, key: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a file of JSON, and the object in it.

    **Raises:** `ValueError` if there is none.
    """
    value = directory.read(key, limit=_json.MAX_INDEX)
    if value is None:
        raise ValueError(f"`{key}` is missing")
    parsed = _json.parse(value.data, f"`{key}`")
    if type(parsed) is not dict:
        raise ValueError(f"`{key}` is not a JSON object")
    return value.data, parsed


def each(
    directory: Backend, call: Callable[[Backend, Any], Any], keys: Iterable[Any]
) -> Any:
    """`call(directory, key)` for each key."""
    return _store.gather(directory, [ft.partial(call, directory, key) for key in keys])


def read(directory: Backend, key: str, start: int, stop: int) -> bytes:
    """A range of the bytes of a file, which are known to be few.

    **Raises:** `ValueError` if the file ends before.
    """
    into = np.empty(stop - start, np.uint8)
    if directory.read_into(key, start, into) < into.nbytes:
        raise MissingError(f"the end of `{key}` is missing")
    return into.tobytes()


class Located(NamedTuple):
    """A leaf that is one run of bytes of the file of this number; or, with `strides`,
    elements of it that lie so many elements apart along each axis."""

    name: str
    template: Template
    file: int
    offset: int
    strides: tuple[int, ...] | None = None

    @property
    def stop(self) -> int:
        t = self.template
        if self.strides is None:
            return self.offset + t.nbytes
        return self.offset + _grid.span(t.shape, self.strides) * t.itemsize


def template(
    kind: str, dtype: str, shape: Sequence[int], keys: str, weak: bool = False
) -> Template:
    """The template of an array that is one run of bytes.

    **Raises:** `ValueError` if there is no such array.
    """
    stored = dtype if dtype in _template.STORED else "uint8"
    chunk = tuple(max(1, n) for n in shape)
    made = Template(keys, kind, dtype, tuple(shape), stored, chunk, weak)
    _template.check_template(made)
    return made


def scalar(value: Any, keys: str) -> tuple[np.ndarray | Unreadable, Template]:
    """A number or a text of Python's, as it would be stored, and its template; or one
    of what cannot be read, which has no bytes."""
    if isinstance(value, Unreadable):
        shape, chunk = (0,), (1,)
        if value.is_array:
            return value, Template(keys, "numpy", "uint8", shape, "uint8", chunk)
        return value, Template(keys, "bytes", "bytes", shape, "uint8", chunk)
    if isinstance(value, (str, bytes)):
        kind = type(value).__name__
        data = value.encode() if isinstance(value, str) else value
        array = np.frombuffer(data, np.uint8)
        chunk = (max(1, array.size),)
        return array, Template(keys, kind, kind, array.shape, "uint8", chunk)
    kind = type(value).__name__
    dtype = _template.SCALAR_KINDS[kind]
    if kind == "int" and 2**63 <= value < 2**64:
        kind, dtype = "generic", "uint64"
    elif kind == "int" and not -(2**63) <= value < 2**63:
        array = np.frombuffer(_leaf.int_bytes(value), np.uint8)
        return array, Template(keys, kind, "int", array.shape, "uint8", array.shape)
    return np.array(value, dtype), Template(keys, kind, dtype, (), dtype, ())


def unreadable(what: str, why: str, is_array: bool = False) -> Unreadable:
    """A leaf that cannot be read: it is listed, and all else of the file is read."""
    return Unreadable(_text.bounded(what, 100), _text.bounded(why, 1000), is_array)


def too_many_axes(what: str, count: int) -> Unreadable:
    why = f"it has {count} axes, and at most {_template.MAX_RANK} are read"
    return unreadable(what, why, True)


def add(
    leaves: list[Located], stored: dict[int, Any], name: str, keys: str, value: Any
) -> None:
    """Adds a leaf that lies nowhere: a number or a text of Python's, or one that cannot
    be read."""
    stored[len(leaves)], t = scalar(value, keys)
    leaves.append(Located(name, t, 0, 0))


class Contents(NamedTuple):
    """What a reader has found: leaves, and the files that they lie in.

    `head` is what the files say of them. Leaves whose places `stored` has do not lie
    there: see `Foreign`; those that cannot be read are among them. `markers` has the
    labels of the entries of States. With `shared`, leaves may have bytes in common, and
    those of the same ones are aliases.
    """

    format: str
    files: list[str]
    leaves: Sequence[Located] = ()
    head: bytes = b""
    metadata: Any = None
    markers: Mapping[int, str] = {}
    stored: Mapping[int, Any] = {}
    database: Database | None = None
    shared: bool = False


def source(found: Candidate, contents: Contents) -> Source:
    """A source of what a reader has found.

    **Raises:** `ValueError` unless the files have these bytes, each for one leaf if
    they are not shared; and if none of its leaves can be read.
    """
    directory, files, leaves = found.directory, contents.files, contents.leaves
    stored = dict(contents.stored)
    parts = {i: x for i, x in stored.items() if isinstance(x, Unreadable)}
    if parts and len(parts) == len(leaves):
        raise ValueError(next(iter(parts.values())).why)
    stored |= dict.fromkeys(parts, np.empty(0, np.uint8))
    runs = [leaf for place, leaf in enumerate(leaves) if place not in stored]
    _check_places(directory, files, runs, contents.shared)

    head = contents.head

    def stamp(directory: Backend) -> str:
        parts = each(directory, lambda directory, key: directory.stamp(key), files)
        return xxhash.xxh3_64_hexdigest("/".join(parts).encode() + head)

    numbers: dict[Template, int] = {}
    template = [numbers.setdefault(x.template, len(numbers)) for x in leaves]
    saved = Leaves(
        [leaf.name for leaf in leaves],
        list(numbers),
        template,
        aliases=_aliases(leaves, stored) if contents.shared else {},
        markers=dict(contents.markers),
        parts=parts,
    )
    saved.places  # Two leaves of one name are an error.
    stamped = stamp(directory)
    index = Index(
        save=stamped,
        layout=contents.format,
        metadata=contents.metadata,
        leaves=saved,
        placement=Placement(
            files, [leaf.file for leaf in leaves], [leaf.offset for leaf in leaves]
        ),
    )
    database = contents.database
    strides = {i: x.strides for i, x in enumerate(leaves) if x.strides is not None}
    foreign = Foreign(directory, files, stamp, stamped, stored, None, database, strides)
    return Source(found.root, index, foreign)


def kind_of(dtype: str) -> str:
    """How an array comes back of which nobody says whose it was: as a jax.Array, and
    numbers of 64 bits, which JAX narrows unless it is told not to, as NumPy's."""
    return "numpy" if dtype in ("float64", "int64", "uint64", "complex128") else "jax"


def _aliases(leaves: Sequence[Located], stored: Mapping[int, Any]) -> dict[int, int]:
    """Leaves that are the same bytes as an earlier one, and which one that is."""
    first: dict[Any, int] = {}
    aliases = {}
    for place, leaf in enumerate(leaves):
        if place in stored or not leaf.template.nbytes:
            continue
        origin = first.setdefault((*leaf[2:], leaf.template[1:]), place)
        if origin != place:
            aliases[place] = origin
    return aliases


def _check_places(
    directory: Backend, files: list[str], leaves: Sequence[Located], shared: bool
) -> None:
    ends = [0] * len(files)
    order = sorted(leaves, key=lambda leaf: (leaf.file, leaf.offset))
    for leaf in order:
        if leaf.offset < ends[leaf.file] and leaf.template.nbytes and not shared:
            raise ValueError(f"the leaf `{leaf.name}` lies where another one does")
        ends[leaf.file] = max(ends[leaf.file], leaf.stop)
    check = lambda directory, number: directory.check_range(files[number], ends[number])
    each(directory, check, range(len(files)))


def names_of(flat: Iterable[str], separator: str = ".") -> list[tuple[str, str]]:
    """Joined names as dotted names of ours, with the kinds of their keys.

    **Raises:** `ValueError` for names that are too long or too many.
    """
    return names_of_paths([_split(name, separator) for name in flat], separator)


def names_of_paths(
    paths: list[list[str]], separator: str = "."
) -> list[tuple[str, str]]:
    """Paths of string keys as dotted names of ours, with the kinds of their keys.

    A node whose children are 0, 1, 2, ... is a sequence. Where a path goes on after one
    that is a leaf, as `weight.absmax` beside `weight`, the rest of it is one key.

    **Raises:** `ValueError` for paths that are too many.
    """
    if sum(map(len, paths)) > MAX_COMPONENTS:
        raise ValueError("its names have more components than are read")
    top, ends = _trie(paths)
    if any(ends.values()):
        paths = [_glued(path, separator, top, ends) for path in paths]
        top, _ = _trie(paths)
    known: dict[int, bool] = {}
    out = []
    for path in paths:
        node, keys = top, ""
        for component in path:
            is_sequence = known.get(id(node))
            if is_sequence is None:
                is_sequence = all(str(i) in node for i in range(len(node)))
                known[id(node)] = is_sequence
            keys += "s" if is_sequence else "k"
            node = node[component]
        out.append((_names.join("", list(map(_names.quote, path))), keys))
    return out


def _split(name: str, separator: str) -> list[str]:
    parts = name.split(separator, _names.MAX_DEPTH)
    if len(parts) > _names.MAX_DEPTH:
        raise ValueError(
            f"the name {_names.shorten(name)} has more than {_names.MAX_DEPTH} parts"
        )
    if 3 * len(name) > _names.MAX_NAME:
        raise ValueError(f"the name {_names.shorten(name)} is too long")
    return parts


def _trie(paths: list[list[str]]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """All paths as nested dicts; and those dicts that a path ends at, by their id."""
    top: dict[str, Any] = {}
    ends: dict[int, dict[str, Any]] = {}
    for path in paths:
        node = top
        for component in path:
            below = node.get(component)
            if below is None:
                below = node[component] = {}
            node = below
        ends[id(node)] = node
    return top, ends


def _glued(
    path: list[str], separator: str, top: dict[str, Any], ends: dict[int, Any]
) -> list[str]:
    node = top
    for count, component in enumerate(path, 1):
        node = node[component]
        if id(node) in ends:
            return [*path[: count - 1], separator.join(path[count - 1 :])]
    return path


def flat_name(name: str, separator: str = ".") -> str:
    """The inverse of `names_of`."""
    return separator.join(map(_names.unquote, name.split(".")))
