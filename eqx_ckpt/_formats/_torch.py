"""PyTorch's files: a zip of a pickle, which says what there is, and of the storages of
the tensors; before version 1.6 pickles, and the storages after them; or several such
files with an index in JSON, as on Hugging Face.

The pickle is interpreted: see `_pickle` and `_torch_globals`. PyTorch is not needed.
"""

import collections
import itertools as it
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._kernel._format import _json, _names
from .._kernel._format._leaves import Unreadable
from .._kernel._load._source import Source
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend
from .._zips import _probe, _zip
from .._zips._probe import Probe
from .._zips._zip import Zip
from . import _foreign_index, _pickle, _torch_globals
from ._foreign_index import ForeignLeaf, name_budget, names_of_paths
from ._pickle import Global, Key
from ._torch_globals import Storage, Tensor


_INDEX = ".bin.index.json"
# The file of a model, or one of several: as transformers, PEFT and diffusers call it.
_model = re.compile(r"(diffusion_)?(pytorch|adapter)_model.*\.bin")
_shard = re.compile(r"-[0-9]+-of-[0-9]+\.bin$")
_PICKLE = "data.pkl"
_MAX_PICKLES = 4 * _json.MAX_INDEX  # Of several files.
# So many items may be met again, in containers that are in more than one place: these,
# and one for each byte of the pickle.
_REPEATED = 2**14
# Tensors that share storages may have more bytes than these: in all so many, and so
# many for each byte that is stored.
_MADE, _MADE_OF_ONE = 2**24, 16
_file = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
# The number that files of before version 1.6 begin with, as a pickle.
_old = re.compile(rb"\x80[\x02-\x05](\x95(?s:.{8}))?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.")
_OLD_PROTOCOL = 1001
# So many bytes of such a file are read, and more if its pickles are longer.
_WINDOW = 2**16


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of an old file, of an index, or of a directory with a file or an index
    in it."""
    if probe.key is not None and _old.match(probe.head):
        return _source(probe, [probe.key], [_read_old(probe.directory, probe.key)])
    if probe.key is not None:
        return _sharded(probe, probe.key) if probe.has_suffix(_INDEX) else None
    files = sorted(filter(_model.fullmatch, probe.names))
    for index in sorted(x for x in probe.names if x.endswith(_INDEX)):
        return _sharded(probe, index, files)
    if not files or any(map(_shard.search, files)):
        return None
    if len(files) > 1:
        raise _foreign_index.several(files[0], files[1])
    return _source(probe, files, [_read_file(probe.directory, files[0])])


def open_zip(probe: Probe, archive: Zip) -> Source | None:
    """The source of a zip with a pickle in it."""
    contents = _read_archive(archive)
    return None if contents is None else _source(probe, [archive.key], [contents])


class _File(NamedTuple):
    """The value of the pickle of a file, its bytes, and where the storages lie."""

    value: Any
    data: bytes
    places: dict[str, tuple[int, int]]


def _read_file(directory: Backend, key: str) -> _File:
    head = _probe.first_bytes(directory, key, 32)
    contents = None
    if _old.match(head):
        contents = _read_old(directory, key)
    elif _zip.begins(head):
        contents = _read_archive(_zip.read_list(directory, key))
    if contents is None:
        raise ValueError(f"`{key}` is no file of PyTorch's")
    return contents


def _read_archive(archive: Zip) -> _File | None:
    above = [n for n in archive.members if n.partition("/")[2] == _PICKLE]
    if len(above) != 1:
        return None
    prefix = above[0].removesuffix(_PICKLE)
    if f"{prefix}constants.pkl" in archive.members:
        raise ValueError(
            "it is a program of TorchScript. Save its tensors alone in PyTorch: "
            "`torch.save(torch.jit.load(path).state_dict(), path)`"
        )
    order = _member(archive, f"{prefix}byteorder", b"little")
    if order != b"little":
        raise ValueError(f"its bytes are in the order {order!r:.20}")
    data = _member(archive, above[0])
    value, stored, _ = _unpickled(data)
    files = [f"{prefix}data/{key}" for key in stored]
    places = dict(zip(stored, _zip.places(archive, files)))
    for key, (start, stop) in places.items():
        if stop - start != stored[key].nbytes:
            raise ValueError(f"its storage {key!r:.40} is not of the size that it says")
    return _File(value, data, places)


class _Unpickled(NamedTuple):
    """The value of a pickle, the storages that it names, and where it ends."""

    value: Any
    storages: dict[str, Storage]
    stop: int


def _unpickled(data: bytes, at: int = 0) -> _Unpickled:
    stored: dict[str, Storage] = {}

    def persistent(pid: object) -> Any:
        made = _torch_globals.storage(pid)
        if not isinstance(made, Storage):
            return made
        # Tensors may give it other dtypes, and so another length, but not another size.
        if stored.setdefault(made.key, made).nbytes != made.nbytes:
            raise ValueError(f"its storage {made.key!r:.40} has two sizes")
        return made

    value, stop = _pickle.load(data, _torch_globals.find, persistent, at)
    return _Unpickled(value, stored, stop)


def _read_old(directory: Backend, key: str) -> _File:
    """A file of before version 1.6: five pickles, the last of which lists the storages
    that follow, each after its length in eight bytes."""
    size = _WINDOW
    while True:
        data = _probe.first_bytes(directory, key, size)
        try:
            return _old_file(directory, key, data)
        except _pickle.Ended:
            if len(data) < size or size >= _json.MAX_INDEX:
                raise
        size = min(8 * size, _json.MAX_INDEX)


def _old_file(directory: Backend, key: str, data: bytes) -> _File:
    _, _, at = _unpickled(data)
    protocol, _, at = _unpickled(data, at)
    system, _, at = _unpickled(data, at)
    if protocol != _OLD_PROTOCOL or type(system) is not dict:
        raise ValueError(f"its protocol is not {_OLD_PROTOCOL}")
    if system.get("little_endian") is not True:
        raise ValueError("its bytes are in the order of other machines")
    value, stored, at = _unpickled(data, at)
    keys, _, at = _unpickled(data, at)
    names = keys if type(keys) is list else []
    if set(map(type, names)) - {str} or sorted(names) != sorted(stored):
        raise ValueError("its storages are not those that its tensors name")
    places, stop = {}, at
    for name in names:
        start = stop + 8
        stop = start + stored[name].nbytes
        places[name] = start, stop
    if (there := directory.check_range(key, stop)) not in (None, stop):
        raise ValueError(f"it has {there} bytes, and {stop} by what its pickles say")
    return _File(value, data[:at], places)


def _member(archive: Zip, name: str, default: bytes | None = None) -> bytes:
    """The bytes of a small file in a zip."""
    if default is not None and name not in archive.members:
        return default
    start, stop = _zip.place(archive, name)
    if stop - start > _json.MAX_INDEX:
        raise ValueError(f"`{name}` in it has {stop - start} bytes")
    return _store.read_bytes(archive.directory, archive.key, start, stop)


def _sharded(probe: Probe, key: str, beside: Sequence[str] = ()) -> Source:
    def read_pickles(files: list[str]) -> list[_File]:
        contents: list[_File] = []
        for file in files:
            contents.append(_read_file(probe.directory, file))
            if sum(len(one.data) for one in contents) > _MAX_PICKLES:
                raise ValueError("the pickles of its files are longer than is read")
        return contents

    names = lambda one: one.value if isinstance(one.value, dict) else ()
    found = _foreign_index.weight_map(probe, key, _file, read_pickles, names, beside)
    return _source(probe, list(found), list(found.values()))


# ---- From a value to leaves.


def _source(probe: Probe, files: list[str], contents: Sequence[_File]) -> Source:
    places: list[_Place] = []
    items: list[tuple[int, Any]] = []
    for number, one in enumerate(contents):
        for place, item in _leaves(one.value, len(one.data)):
            places.append(place)
            items.append((number, item))
    repeated = _repeated(contents, items)
    leaves: list[ForeignLeaf] = []
    for (name, keys), (number, item) in zip(_named(places), items):
        if (number, item) in repeated if isinstance(item, Tensor) else False:
            item = Unreadable(f"{item.dtype} tensor", _REPEATS, True)
        if not isinstance(item, Tensor):
            leaves.append(_foreign_index.leaf_of(name, keys, item))
            continue
        start = contents[number].places[item.storage.key][0]
        leaf = _foreign_index.array_leaf(
            name,
            keys,
            item.dtype,
            item.shape,
            file=number,
            offset=start + item.offset * item.itemsize,
            strides=item.strides,
        )
        leaves.append(leaf)
    head = b"".join(one.data for one in contents)
    return _foreign_index.source(probe, "torch", files, leaves, head, shared=True)


_REPEATS = (
    "it has many more bytes than are stored, as it repeats elements of a small "
    "storage: save a copy (`x.clone()`) in PyTorch"
)


def _repeated(
    contents: Sequence[_File], items: list[tuple[int, Any]]
) -> set[tuple[int, Any]]:
    """The tensors, and their files, that would be much larger than the files, as one
    that repeats an element is. The smaller ones are read."""
    there = sum(b - a for one in contents for a, b in one.places.values())
    left = _MADE + _MADE_OF_ONE * there
    tensors = dict.fromkeys(item for item in items if isinstance(item[1], Tensor))
    order = sorted(tensors, key=lambda item: item[1].nbytes)
    total = it.accumulate(item[1].nbytes for item in order)
    return {item for item, size in zip(order, total) if size > left}


# The keys on the way to a leaf: each is the parts of its text between dots.
_Place = list[list[str]]


def _named(places: list[_Place]) -> list[tuple[str, str]]:
    """Dotted names of ours, with the kinds of their keys. Where a text with dots gives
    a leaf the name of another one, it is one key."""
    paths = [[part for parts in place for part in parts] for place in places]
    whole = [[".".join(parts) for parts in place] for place in places]
    counts = collections.Counter(map(tuple, paths))
    if len(counts) < len(paths):
        zipped = zip(paths, whole)
        paths = [one if counts[tuple(x)] > 1 else x for x, one in zipped]
    named = names_of_paths(paths)
    are_same = len({name for name, _ in named}) < len(named)
    return names_of_paths(whole) if are_same else named


def _leaves(value: Any, size: int) -> Iterator[tuple[_Place, Any]]:
    """The values at the ends of the containers of a pickle of `size` bytes; None is no
    leaf. A container may be in many places, so the items that are met again are
    counted."""
    spend, repeated = name_budget(), _REPEATED + size
    seen: set[int] = set()
    above: set[int] = set()

    def walk(place: _Place, depth: int, value: Any) -> Iterator[tuple[_Place, Any]]:
        nonlocal repeated
        items: Iterable[tuple[list[str], Any]] = ()
        what, leaf = type(value).__name__, None
        if type(value) in (dict, OrderedDict):
            items = zip(_parts(value), value.values())
        elif type(value) in (list, tuple):
            items = (([str(number)], item) for number, item in enumerate(value))
        else:
            leaf = _leaf(value)
        if id(value) in above:
            leaf = Unreadable(what, f"it is a {what} that is in itself")
        elif leaf is None and value and depth >= _names.MAX_DEPTH:
            why = f"it is nested more than {_names.MAX_DEPTH} deep"
            leaf = Unreadable(what, why)
        if leaf is not None:
            spend([part for parts in place for part in parts], size)
            yield place, leaf
        if leaf is not None or not value:
            return
        repeated -= len(value) * (id(value) in seen)
        if repeated < 0:
            raise ValueError("its containers are many times in each other")
        seen.add(id(value))
        above.add(id(value))
        for parts, item in items:
            if depth + len(parts) > _names.MAX_DEPTH:
                parts = [".".join(parts)]
            yield from walk([*place, parts], depth + len(parts), item)
        above.remove(id(value))

    return walk([], 0, value)


# The letters of a key. Of a longer one its name has the first ones.
_MAX_KEY = 2**10


def _parts(value: dict) -> list[list[str]]:
    """Names the keys of a dict, each differently, in parts between dots.

    A text that is also a number gets quotes; keys that are shown alike get numbers."""
    texts = [key.text if isinstance(key, Key) else str(key) for key in value]
    texts = [text if len(text) <= _MAX_KEY else text[:60] + "…" for text in texts]
    counts = collections.Counter(texts)
    if len(counts) < len(texts):
        for number, key in enumerate(value):
            text = texts[number]
            if counts[text] > 1 and type(key) is not int:
                is_whole = type(key) is str and len(key) <= _MAX_KEY
                text = f"'{text}'" if is_whole else f"{text} {number}"
                while text in counts:
                    text += "'"
                counts[text] += 1
                texts[number] = text
    whole = (isinstance(key, Key) for key in value)
    return [[x] if one else x.split(".") for x, one in zip(texts, whole)]


def _leaf(value: object) -> Any:
    if isinstance(value, Global) and value.kind == "dtype":
        return f"torch.{value.name}"
    if isinstance(value, (Storage, Global)):
        is_class = isinstance(value, Storage) or value.kind != "function"
        what = "storage" if is_class else "function"
        return Unreadable(what, "it is a storage or a function, and no tensor")
    return value
