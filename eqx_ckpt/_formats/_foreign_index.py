"""An index made of what a reader has found in the files of another format."""

import functools as ft
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np

from .._kernel._format import _extents, _json, _names, _template, _text
from .._kernel._format._index import Index
from .._kernel._format._leaves import Leaves, Unreadable
from .._kernel._format._record import Attributes
from .._kernel._format._state_labels import Label
from .._kernel._format._template import Template
from .._kernel._load import _published
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend
from .._kernel._tree import _host_copy, _leaf
from .._zips._probe import Probe
from . import _foreign_source, _pieces
from ._database import Database
from ._foreign_source import ForeignSource


T = TypeVar("T")

# Of all names of a checkpoint. Each is an object here, and a node of its tree.
MAX_COMPONENTS = 2**21
# Of the names in nested containers: so many leaves, and so many letters; and so many
# letters for each byte of the file.
_LEAVES, _LETTERS, _LETTERS_OF_ONE = 2**20, 2**22, 64


class ForeignLeaf(NamedTuple):
    """A leaf that is one run of bytes of the file of this number. With `strides` its
    elements lie so many elements apart along each axis. With a `value` it is that: an
    array, a function that opens one, or the reason why it cannot be read."""

    name: str
    template: Template
    file: int = 0
    offset: int = 0
    strides: tuple[int, ...] | None = None
    value: Any = None

    @property
    def stop(self) -> int:
        t = self.template
        if self.strides is None:
            return self.offset + t.nbytes
        return self.offset + _pieces.span(t.shape, self.strides) * t.itemsize


@ft.lru_cache(maxsize=4096)
def template(kind: str, dtype: str, shape: tuple[int, ...], keys: str) -> Template:
    """The template of an array that is one run of bytes.

    **Raises:** `ValueError` if there is no such array.
    """
    stored = dtype if dtype in _template.STORED else "uint8"
    chunk = tuple(max(1, n) for n in shape)
    made = Template(keys, kind, dtype, shape, stored, chunk)
    _template.check_template(made)
    return made


def leaf_of(name: str, keys: str, value: Any) -> ForeignLeaf:
    """A leaf that lies nowhere: a number or a text of Python's; or one that cannot be
    read, which is listed without bytes, so that all else of the file is read."""
    if isinstance(value, Unreadable):
        what, why, is_array = value
        value = Unreadable(_text.bounded(what, 100), _text.bounded(why), is_array)
        kind, dtype = ("numpy", "uint8") if is_array else ("bytes", "bytes")
        t = Template(keys, kind, dtype, (0,), "uint8", (1,))
        return ForeignLeaf(name, t, value=value)
    if type(value) is int and 2**63 <= value < 2**64:
        value = np.uint64(value)
    t = _leaf.template_of(value)
    array = _host_copy.to_host(value, t)
    chunk = tuple(max(1, n) for n in t.shape)
    return ForeignLeaf(name, t._replace(keys=keys, chunk=chunk), value=array)


def array_leaf(
    name: str,
    keys: str,
    dtype: str,
    shape: Sequence[int],
    said: str = "",
    kind: str = "",
    file: int = 0,
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
) -> ForeignLeaf:
    """A leaf that is an array of a file; or one that cannot be read, of another dtype
    or of too many axes. `said`: the dtype as the file has it."""
    said, shape = said or dtype, tuple(shape)
    rank, lengths = len(shape), ",".join(map(str, shape))
    try:
        _template.dtype_of(dtype)
    except ValueError:
        why = f"it has the dtype {said!r:.60}, which is not read here"
        value = Unreadable(f"{said}[{lengths}]", why, said != "object")
        return leaf_of(name, keys, value)
    if rank > _template.MAX_RANK:
        why = f"it has {rank} axes, and at most {_template.MAX_RANK} are read"
        return leaf_of(name, keys, Unreadable(f"{said}[...]", why, True))
    t = template(kind or kind_of(dtype), dtype, shape, keys)
    return ForeignLeaf(name, t, file, offset, strides)


def source(
    probe: Probe,
    format: str,
    files: list[str],
    leaves: Sequence[ForeignLeaf],
    headers: bytes = b"",
    metadata: object = None,
    labels: Mapping[int, Label] = {},
    attributes: Attributes = {},
    database: Database | None = None,
    shared: bool = False,
) -> ForeignSource:
    """A source of leaves, and of the files that they lie in.

    `headers` are what the files say of them. `labels` has those of leaves of entries
    of States, and `attributes` those of children without keys. With `shared`, leaves
    may have bytes in common, and those of the same ones are aliases.

    **Raises:** `ValueError` unless the files have these bytes, each for one leaf if
    they are not shared; and if none of its leaves can be read.
    """
    directory = probe.directory
    stored = {i: x.value for i, x in enumerate(leaves) if x.value is not None}
    parts = {i: x for i, x in stored.items() if isinstance(x, Unreadable)}
    if parts and len(parts) == len(leaves):
        raise ValueError(next(iter(parts.values())).why)
    stored |= dict.fromkeys(parts, np.empty(0, np.uint8))
    runs = [leaf for leaf_index, leaf in enumerate(leaves) if leaf_index not in stored]
    _check_places(directory, files, runs, shared)

    numbers: dict[Template, int] = {}
    template = [numbers.setdefault(x.template, len(numbers)) for x in leaves]
    saved = Leaves(
        [leaf.name for leaf in leaves],
        list(numbers),
        template,
        aliases=_aliases(leaves) if shared else {},
        parts=parts,
        given_labels=dict(labels),
        attributes=attributes,
    )
    saved.leaf_indices  # Two leaves of one name are an error.
    places = [x.file for x in leaves], [x.offset for x in leaves]
    index = Index(
        save=_foreign_source.save_id_of(directory, files, headers),
        layout=format,
        metadata=metadata,
        leaves=saved,
        files=files,
        placement=_extents.in_one_run(saved, len(files), *places),
    )
    strides = {i: x.strides for i, x in enumerate(leaves) if x.strides is not None}
    what = headers, stored, database, strides
    return ForeignSource(probe.root, index, directory, files, *what)


def weight_map(
    probe: Probe,
    key: str,
    file: re.Pattern[str],
    read: Callable[[list[str]], list[T]],
    names: Callable[[T], Collection[str]],
    beside: Collection[str] = (),
) -> dict[str, T]:
    """Reads the files that an index in JSON leads to, which names the file of each
    tensor. `read` gives the content of each file, and `names` the tensors in that.

    **Raises:** `ValueError` unless they are beside it, with names of this pattern, and
    have what it says; and if others are `beside` it, which may be another model.
    """
    _, index = _published.read_json(probe.directory, key)
    of = index.get("weight_map")
    if not is_texts(of):
        raise ValueError(f"`{key}` has no `weight_map` of names to files")
    files = sorted(set(of.values()))
    bad = [name for name in files if not file.fullmatch(name)]
    if bad:
        raise ValueError(f"`{key}` names {bad[0]!r}, which is no file beside it")
    if others := sorted(set(beside).difference(files)):
        raise several(others[0], key)
    try:
        contents = read(files)
    except FileNotFoundError as e:
        raise ValueError(f"a file that `{key}` names is missing: {e}") from e
    held: dict[str, str] = {}
    for where, one in zip(files, contents):
        for name in names(one):
            if other := held.get(name):
                raise ValueError(
                    f"`{other}` and `{where}`, which `{key}` names, both have "
                    f"{name!r:.100}"
                )
            held[name] = where
    if held != of:
        name = min((name for name, _ in held.items() ^ of.items()), key=str)
        here, there = (
            f"in `{x[name]}`" if name in x else "nowhere" for x in (of, held)
        )
        raise ValueError(
            f"`{key}` and the files beside it do not agree on where {name!r:.100} is: "
            f"it says {here}, and it is {there}"
        )
    return dict(zip(files, contents))


def several(one: str, other: str) -> ValueError:
    """The error of a directory with more than one model in it."""
    return ValueError(
        f"there are several models in it, such as `{one}` and `{other}`: give the path "
        "of one of them"
    )


def is_texts(value: object) -> TypeGuard[dict[str, str]]:
    """Whether a value is a dict of strings that can be written as UTF-8."""
    return type(value) is dict and are_texts(value.items())


def are_texts(pairs: Iterable[tuple[Any, Any]]) -> bool:
    texts = [x for pair in pairs for x in pair]
    return all(type(x) is str and _json.is_unicode(x) for x in texts)


def kind_of(dtype: str) -> str:
    """The kind of an array of which nobody says whose it was: JAX's, or NumPy's for
    numbers of 64 bits, which JAX narrows unless it is told not to."""
    return "numpy" if dtype in ("float64", "int64", "uint64", "complex128") else "jax"


def _aliases(leaves: Sequence[ForeignLeaf]) -> dict[int, int]:
    """Leaves that are the same bytes as an earlier one, and which one that is."""
    first: dict[Any, int] = {}
    aliases = {}
    for leaf_index, leaf in enumerate(leaves):
        if leaf.value is not None or not leaf.template.nbytes:
            continue
        # All of a template but `keys`, which say where in the tree a leaf is.
        key = leaf.file, leaf.offset, leaf.strides, leaf.template[1:]
        origin = first.setdefault(key, leaf_index)
        if origin != leaf_index:
            aliases[leaf_index] = origin
    return aliases


def _check_places(
    directory: Backend, files: list[str], leaves: Sequence[ForeignLeaf], shared: bool
) -> None:
    ends = [0] * len(files)
    order = sorted(leaves, key=lambda leaf: (leaf.file, leaf.offset))
    for leaf in order:
        if leaf.offset < ends[leaf.file] and leaf.template.nbytes and not shared:
            raise ValueError(f"the leaf `{leaf.name}` lies where another one does")
        ends[leaf.file] = max(ends[leaf.file], leaf.stop)
    _store.each(directory, directory.check_range, files, ends)


def name_budget() -> Callable[[list[str], int], None]:
    """A function that is called with the path of each leaf in nested containers, and
    with the size of what all of them are made of. Each path repeats those of the nodes
    above it. It raises `ValueError` for names that are too long, too many, or much
    longer than that."""
    letters = parts = leaves = 0

    def spend(path: list[str], size: int) -> None:
        nonlocal letters, parts, leaves
        own = sum(map(len, path))
        if 3 * own > _names.MAX_NAME:
            raise ValueError(f"the name {_names.shorten('.'.join(path))} is too long")
        letters, parts, leaves = letters + own, parts + len(path), leaves + 1
        if leaves > _LEAVES:
            raise ValueError(f"it has more than {_LEAVES} leaves")
        if parts > MAX_COMPONENTS:
            raise ValueError("its names have more components than are read")
        if letters > _LETTERS + _LETTERS_OF_ONE * size:
            raise ValueError("its names are much longer than the file")

    return spend


def names_of(flat: Iterable[str], separator: str = ".") -> list[tuple[str, str]]:
    """Joined names as dotted names of ours, with the kinds of their keys.

    **Raises:** `ValueError` for names that are too long or too many.
    """
    return names_of_paths([split_name(name, separator) for name in flat], separator)


def names_of_paths(
    paths: list[list[str]], separator: str = "."
) -> list[tuple[str, str]]:
    """Paths of string keys as dotted names of ours, with the kinds of their keys.

    A node whose children are 0, 1, 2, ... is a sequence. Where a path goes on after one
    that is a leaf, as `weight.absmax` beside `weight`, one key is the last part of that
    leaf and the rest.

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
        out.append((_names.name_of_texts(path), keys))
    return out


_digits = re.compile(r"([0-9]+)")


def natural_order(name: str) -> list[str]:
    """A key that sorts `layers.9` before `layers.10`."""
    return [x.zfill(20) if x.isdigit() else x for x in _digits.split(name)]


def split_name(name: str, separator: str) -> list[str]:
    """The parts of a name. **Raises:** `ValueError` if they are too many, or long."""
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


def flat_name(name: str) -> str:
    """The joined name, with dots, that `names_of` would make a name of ours of. Several
    names of ours may have the same."""
    if "%" not in name:
        return name
    return ".".join(map(_names.unquote, name.split(".")))
