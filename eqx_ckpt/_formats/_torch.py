"""PyTorch's files: a zip of a pickle, which says what there is, and of the storages of
the tensors; or several such files with an index in JSON, as on Hugging Face.

The pickle is interpreted: see `_pickle` and `_torch_globals`. PyTorch is not needed.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._format import _json, _names
from .._format._leaves import Unreadable
from .._load._source import Source
from .._storage import _store
from .._storage._backend import Backend
from .._zips import _zip
from .._zips._probe import Probe
from .._zips._zip import Zip
from . import _foreign_index, _magic, _pickle, _torch_globals
from ._foreign_index import ForeignLeaf, name_budget, names_of_paths
from ._pickle import Global
from ._torch_globals import Storage, Tensor


_FILE, _INDEX = "pytorch_model.bin", ".bin.index.json"
_PICKLE = "data.pkl"
_MAX_PICKLES = 4 * _json.MAX_INDEX  # Of several files.
# So many items may be met again, in containers that are in more than one place: these,
# and one for each byte of the pickle.
_REPEATED = 2**14
# Tensors that share storages may have more bytes than these: in all so many, and so
# many for each byte that is stored.
_MADE, _MADE_OF_ONE = 2**24, 16
_file = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


def read(probe: Probe, like: Any) -> Source | None:
    """The source of an index, or of a directory with a file or an index in it."""
    if probe.key is not None:
        return _sharded(probe, probe.key) if probe.has_suffix(_INDEX) else None
    if "pytorch_model" + _INDEX in probe.names:
        return _sharded(probe, "pytorch_model" + _INDEX)
    if _FILE not in probe.names:
        return None
    return _source(probe, [_FILE], [_read_file(probe.directory, _FILE)])


def read_zip(probe: Probe, archive: Zip) -> Source | None:
    """The source of a zip with a pickle in it."""
    contents = _read_archive(archive)
    return None if contents is None else _source(probe, [archive.key], [contents])


class _File(NamedTuple):
    """The value of the pickle of a file, its bytes, and where the storages lie."""

    value: Any
    data: bytes
    places: dict[str, tuple[int, int]]


def _read_file(directory: Backend, key: str) -> _File:
    head = np.empty(4, np.uint8)
    size = directory.read_into(key, 0, head)
    contents = None
    if _zip.begins(head[:size].tobytes()):
        contents = _read_archive(_zip.read_list(directory, key))
    if contents is None:
        raise ValueError(
            f"`{key}` is no zip of PyTorch's. It may be {_magic.OLD_TORCH}"
        )
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
    stored: dict[str, Storage] = {}

    def persistent(pid: Any) -> Storage | Unreadable:
        made = _torch_globals.storage(pid)
        if isinstance(made, Unreadable):
            return made
        # Tensors may give it other dtypes, and so another length, but not another size.
        if stored.setdefault(made.key, made).nbytes != made.nbytes:
            raise ValueError(f"its storage {made.key!r:.40} has two sizes")
        return made

    value = _pickle.load(data, _torch_globals.NAMES, persistent)
    files = [f"{prefix}data/{key}" for key in stored]
    places = dict(zip(stored, _zip.places(archive, files)))
    for key, (start, stop) in places.items():
        if stop - start != stored[key].nbytes:
            raise ValueError(f"its storage {key!r:.40} is not of the size that it says")
    return _File(value, data, places)


def _member(archive: Zip, name: str, default: bytes | None = None) -> bytes:
    """The bytes of a small file in a zip."""
    if default is not None and name not in archive.members:
        return default
    start, stop = _zip.place(archive, name)
    if stop - start > _json.MAX_INDEX:
        raise ValueError(f"`{name}` in it has {stop - start} bytes")
    return _store.read_bytes(archive.directory, archive.key, start, stop)


def _sharded(probe: Probe, key: str) -> Source:
    def read(files: list[str]) -> list[_File]:
        contents: list[_File] = []
        for file in files:
            contents.append(_read_file(probe.directory, file))
            if sum(len(one.data) for one in contents) > _MAX_PICKLES:
                raise ValueError("the pickles of its files are longer than is read")
        return contents

    names = lambda one: one.value if isinstance(one.value, dict) else ()
    return _source(probe, *_foreign_index.weight_map(probe, key, _file, read, names))


# ---- From a value to leaves.


def _source(probe: Probe, files: list[str], contents: Sequence[_File]) -> Source:
    paths: list[list[str]] = []
    items: list[tuple[int, Any]] = []
    for number, one in enumerate(contents):
        for path, item in _leaves(one.value, len(one.data)):
            paths.append(path)
            items.append((number, item))
    leaves: list[ForeignLeaf] = []
    for (name, keys), (number, item) in zip(names_of_paths(paths), items):
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
    _check_sizes(contents, items)
    head = b"".join(one.data for one in contents)
    return _foreign_index.source(probe, "torch", files, leaves, head, shared=True)


def _check_sizes(contents: Sequence[_File], items: list[tuple[int, Any]]) -> None:
    """**Raises:** `ValueError` where tensors would be much larger than the file, as one
    that repeats an element is."""
    there = sum(b - a for one in contents for a, b in one.places.values())
    tensors = {item for item in items if isinstance(item[1], Tensor)}
    made = sum(tensor.nbytes for _, tensor in tensors)
    if made > _MADE + _MADE_OF_ONE * there:
        raise ValueError(
            f"its tensors have {made} bytes, and are views of {there} bytes that are "
            "stored: save copies (`x.clone()`) of those that repeat elements"
        )


def _leaves(value: Any, size: int) -> Iterator[tuple[list[str], Any]]:
    """The values at the ends of the containers of a pickle of `size` bytes; None is no
    leaf. A container may be in many places, so the items that are met again are
    counted."""
    spend, repeated = name_budget(), _REPEATED + size
    seen: set[int] = set()

    def walk(path: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
        nonlocal repeated
        if len(path) > _names.MAX_DEPTH:
            raise ValueError(f"it is nested more than {_names.MAX_DEPTH} deep")
        items: Iterable[tuple[list[str], Any]]
        if type(value) in (dict, OrderedDict) and None not in value:
            names = [str(key) for key in value]
            if len(set(names)) < len(names):
                raise ValueError("it has a dict with one key as a number and as a text")
            parts = (name.split(".", _names.MAX_DEPTH) for name in names)
            items = zip(parts, value.values())
        elif type(value) in (list, tuple):
            items = (([str(number)], item) for number, item in enumerate(value))
        else:
            if value is not None:
                spend(path, size)
                # A dict with the key None is not read: under that it has the reason.
                yield path, _leaf(value[None] if isinstance(value, dict) else value)
            return
        repeated -= len(value) * (id(value) in seen)
        seen.add(id(value))
        if repeated < 0:
            raise ValueError("its containers are many times in each other")
        for below, item in items:
            yield from walk([*path, *below], item)

    return walk([], value)


def _leaf(value: Any) -> Any:
    if isinstance(value, Global) and value.kind == "dtype":
        return f"torch.{value.name}"
    if isinstance(value, (Storage, Global)):
        is_class = isinstance(value, Storage) or value.kind != "function"
        what = "storage" if is_class else "function"
        return Unreadable(what, "it is a storage or a function, and no tensor")
    return value
